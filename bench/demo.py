"""The main job, end to end, on real data: what `make demo` runs.

Starts an appliance on a temporary data directory, streams the flights through two topics, reads
them back and compares every record with the source, lets Spark answer a question from the topic and
compares that with pandas on the source file. Leaves nothing behind, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import orjson
import psutil
import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import tailrace
from bench.flights import flights_csv, flights_frame
from tailrace.client.records.partitioners import partition_for_key
from tailrace.embedded_appliance import start_embedded
from tailrace.format.directory.data_dir import read_identity

PARTITIONS = 3
EXIT_READER_GONE = 128 + signal.SIGPIPE


class _ReaderGone(Exception):
    """The reader of the report has closed the pipe: `make demo | head`."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The rest is written to nobody, and the demo ends in order."""
        self.quiet = True
        with open(os.devnull, "wb") as nobody:
            os.dup2(nobody.fileno(), self.file.fileno())
        raise _ReaderGone


console = _Console(highlight=False, soft_wrap=True)


class Mismatch(Exception):
    """The records that came back differ from those that went in."""


def main() -> int:
    """Run the demo; returns the exit code."""
    # Both end through every `finally`, also where whoever started us ignores SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    scratch = tempfile.mkdtemp(prefix="tailrace-demo-")
    try:
        _run(scratch)
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything is cleaned up")
        return 130
    except _ReaderGone:
        return EXIT_READER_GONE
    except (Mismatch, tailrace.TailraceError, RuntimeError) as error:
        console.print(
            "[red]demo failed:[/red]",
            escape("\n".join([str(error), *getattr(error, "__notes__", ())])),
        )
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _run(scratch: str) -> None:
    started = time.monotonic()
    console.print(
        "[bold]Tailrace demo[/bold]: 336,776 flights through a message broker and into Spark\n"
    )
    with _stage("unpack the flights") as stage:
        csv = flights_csv()
        frame = flights_frame(csv)
        table = pa.Table.from_pandas(frame, preserve_index=False)
        hours = table.schema.get_field_index("time_hour")
        rows = table.set_column(
            hours, "time_hour", table.column(hours).cast(pa.string())
        ).to_pylist()
        stage.done(len(rows), len(csv))
    with _stage("start the appliance") as stage:
        appliance = start_embedded(data_dir=os.path.join(scratch, "data"), auto_create_topics=False)
        stage.note(f"{appliance.address}, supervisor pid {appliance.pid}")
    try:
        processes = [psutil.Process(appliance.pid), *psutil.Process(appliance.pid).children()]
        _pipeline(appliance.address, frame, rows)
    finally:
        code = appliance.stop()
    _check_nothing_left(code, scratch, processes)
    console.print(
        "\nstopped cleanly: no process, no shared memory, no file left. "
        f"{time.monotonic() - started:.1f} s in all."
    )


def _check_nothing_left(code: int, scratch: str, processes: list[psutil.Process]) -> None:
    if code:
        raise Mismatch(f"the appliance ended with exit code {code}")
    identity = read_identity(os.path.join(scratch, "data"))
    leftovers = [
        name
        for name in os.listdir("/dev/shm")
        if identity is None or name.startswith(identity.prefix[1:])
    ]
    alive = [process.pid for process in processes if process.is_running()]
    java = [child.pid for child in psutil.Process().children(recursive=True)]
    if leftovers or alive or java:
        raise Mismatch(f"left behind: shared memory {leftovers}, processes {alive + java}")
    shutil.rmtree(scratch)


def _pipeline(address: str, frame: Any, rows: list[dict[str, Any]]) -> None:
    with tailrace.Admin(address) as admin:
        admin.create_topics(
            [
                tailrace.NewTopic("flights-json", partitions=PARTITIONS),
                tailrace.NewTopic("flights", partitions=PARTITIONS, schema=frame),
            ]
        )
    console.print(
        "created topics flights-json (3 partitions, records) and flights (3 partitions, typed: 19 "
        "columns)\n"
    )
    values = [(str(row["origin"]).encode(), orjson.dumps(row)) for row in rows]
    _produce_records(address, values)
    _produce_frame(address, frame)
    _check_records(address, values)
    _check_frame(address, frame)
    _spark(address, frame)


def _produce_records(address: str, values: list[tuple[bytes, bytes]]) -> None:
    size = sum(len(key) + len(value) for key, value in values)
    with (
        _stage("produce  flights-json  send() per record", len(values)) as stage,
        tailrace.Producer(address, acks="all") as producer,
    ):
        failures: list[Exception] = []

        def on_delivery(_metadata: Any, error: Exception | None) -> None:
            if error is not None:
                failures.append(error)

        for number, (key, value) in enumerate(values):
            producer.send(
                "flights-json", value, key, on_delivery=on_delivery if number % 1000 == 0 else None
            )
            if number % 10_000 == 0:
                stage.advance(10_000)
        producer.flush()
        if failures:
            raise Mismatch(
                f"{len(failures)} records were not acknowledged; the first: {failures[0]}"
            )
        stage.done(len(values), size)


def _produce_frame(address: str, frame: Any) -> None:
    with (
        _stage("produce  flights       send_arrow()", len(frame)) as stage,
        tailrace.Producer(address, acks="all") as producer,
    ):
        metadata = producer.send_arrow("flights", frame, key_column="origin").result(timeout=60)
        if sum(m.record_count for m in metadata) != len(frame):
            raise Mismatch(
                f"{sum(m.record_count for m in metadata)} rows were acknowledged, {len(frame)} sent"
            )
        stage.done(len(frame), producer.metrics()["bytes_sent"])


def _check_records(address: str, values: list[tuple[bytes, bytes]]) -> None:
    """Read everything back; per partition, keys and values must be those of the source, in its
    order.
    """
    expected: dict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
    for key, value in values:
        expected[partition_for_key(key, PARTITIONS)].append((key, value))
    found: dict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
    count = size = 0
    consumer = tailrace.Consumer(
        "flights-json", bootstrap=address, auto_offset_reset="earliest", max_poll_records=20_000
    )
    with _stage("consume  flights-json  as records", len(values)) as stage, consumer:
        while count < len(values):
            records = consumer.poll(timeout_ms=10_000)
            if not records:
                raise Mismatch(f"only {count} of {len(values)} records came back")
            for record in records:
                if record.offset != len(found[record.partition]):
                    raise Mismatch(
                        f"offset {record.offset} of partition {record.partition} where "
                        f"{len(found[record.partition])} belongs"
                    )
                found[record.partition].append((record.key or b"", record.value))
                size += len(record.key or b"") + len(record.value)
            count += len(records)
            stage.advance(len(records))
        stage.done(count, size)
    if found != expected:
        raise Mismatch("records differ from the source")
    console.print(
        f"[green]  = source[/green]: {count:,} of {len(values):,} records, order per key and "
        f"content equal, {len(found)} partitions used"
    )


def _check_frame(address: str, frame: Any) -> None:
    """Read the columns back; per partition, rows must be those of the source, in its order."""
    from tailrace.format.schema import conform, schema_of

    parts: dict[int, list[Any]] = defaultdict(list)
    count = size = 0
    with (
        _stage("consume  flights       as Arrow", len(frame)) as stage,
        tailrace.Consumer("flights", bootstrap=address, auto_offset_reset="earliest") as consumer,
    ):
        while count < len(frame):
            batches = consumer.poll_arrow(timeout_ms=10_000)
            if not batches:
                raise Mismatch(f"only {count} of {len(frame)} rows came back")
            for batch in batches:
                parts[batch.partition].append(batch.batch)
                count += len(batch)
                size += batch.batch.nbytes
                stage.advance(len(batch))
        stage.done(count, size)
    source = conform(pa.Table.from_pandas(frame, preserve_index=False), schema_of(frame))
    numbers = pa.array(
        [
            partition_for_key(str(origin).encode(), PARTITIONS)
            for origin in source.column("origin").to_pylist()
        ]
    )
    import pyarrow.compute as pc

    for partition, batches in parts.items():
        if not pa.Table.from_batches(batches).equals(source.filter(pc.equal(numbers, partition))):
            raise Mismatch(f"partition {partition} of flights differs from the source")
    console.print(
        f"[green]  = source[/green]: {count:,} of {len(frame):,} rows, order per partition and "
        "all 19 columns equal"
    )


def _spark(address: str, frame: Any) -> None:
    from spark_bridge.session import local_session

    with _stage("Spark    start a local session"):
        context = local_session()
        spark = context.__enter__()
    try:
        flights = (
            spark.read.format("tailrace")
            .option("bootstrap", address)
            .option("subscribe", "flights")
            .load()
        )
        answers = []
        for which, note in (("first", "it starts Spark's Python workers, too"), ("second", "")):
            with _stage(f"Spark    mean arrival delay, {which} query") as stage:
                rows = flights.groupBy("carrier").agg({"arr_delay": "avg", "*": "count"}).collect()
                stage.done(len(frame), 0)
                stage.note(note)
            answers.append(
                {row["carrier"]: (row["avg(arr_delay)"], row["count(1)"]) for row in rows}
            )
    finally:
        context.__exit__(None, None, None)
    from_spark, again = answers
    if from_spark != again:
        raise Mismatch("Spark's second answer differs from its first")
    grouped = frame.groupby("carrier")
    means, counts = grouped["arr_delay"].mean(), grouped.size()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (
        ("CARRIER", "left"),
        ("FLIGHTS", "right"),
        ("MEAN ARRIVAL DELAY, SPARK", "right"),
        ("PANDAS", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify="right" if side == "right" else "left")
    differs = []
    for carrier in sorted(counts.index, key=lambda c: -float(means[c])):
        mean, count = from_spark.get(carrier, (float("nan"), 0))
        equal = abs(mean - float(means[carrier])) < 1e-9 and count == int(counts[carrier])
        if not equal:
            differs.append(carrier)
        table.add_row(
            str(carrier),
            f"{count:,}",
            f"{mean:.3f}",
            f"{float(means[carrier]):.3f}",
            "=" if equal else "differs",
        )
    console.print()
    console.print(table)
    if differs or set(from_spark) != set(counts.index):
        raise Mismatch(
            f"Spark and pandas differ for {differs or set(from_spark) ^ set(counts.index)}"
        )
    console.print(
        f"[green]  = pandas on the source file[/green] for all {len(from_spark)} carriers"
    )


class _Stage:
    """One line of the demo's report."""

    def __init__(self, title: str, bar: Progress | None, task: Any) -> None:
        self._title = title
        self._bar = bar
        self._task = task
        self._started = time.monotonic()
        self._figures: tuple[int, int] | None = None
        self._note = ""
        self.seconds = 0.0

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def done(self, records: int, byte_count: int) -> None:
        self.seconds = time.monotonic() - self._started
        self._figures = (records, byte_count)

    def note(self, text: str) -> None:
        self._note = text

    def print(self) -> None:
        seconds = self.seconds or time.monotonic() - self._started
        line = f"{self._title:<42}{seconds:7.2f} s"
        if self._figures is not None:
            records, byte_count = self._figures
            line += f"{records / seconds:14,.0f} records/s"
            line += f"{byte_count / seconds / 1e6:9.1f} MB/s" if byte_count else ""
        console.print(
            line + (f"   {self._note}" if self._note else ""), highlight=False, markup=False
        )


@contextlib.contextmanager
def _stage(title: str, total: int | None = None) -> Iterator[_Stage]:
    """Shows progress while the block runs (on a terminal), prints its line when it ends well."""
    if not sys.stdout.isatty():
        stage = _Stage(title, None, None)
        yield stage
        stage.print()
        return
    counts = () if total is None else (MofNCompleteColumn(),)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *counts, console=console, transient=True
    ) as bar:
        stage = _Stage(title, bar, bar.add_task(title, total=total))
        yield stage
    stage.print()


if __name__ == "__main__":
    sys.exit(main())
