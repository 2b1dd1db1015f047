"""Rate of Spark's reads of a topic, beside Parquet files and Kafka:
`make bench-spark [ROWS=5000000]`. A table, goals and a results file.

ROWS records of 108 B (8 B key, 100 B value) in a topic of 2 partitions; the same rows in
uncompressed Parquet files; and in a topic of Apache Kafka, read by Spark's connector, where Maven
has them (bench/with_spark/spark_kafka.py). All warm; local[2], the settings of `spark_bridge.session`. Each
figure is taken REPETITIONS times, in turns with the others, after one turn that warms; what is
stated is the median with least and most. PER CPU s: M rows for a processor-second of all who take
part (the JVM, its Python processes, appliance or broker), which says something beside other work,
too.

PARTS="starts reads executors", or some of them:
    starts      the first query of STARTS new sessions: from the session being up to the count of a small topic, with and without `spark_bridge.prepare()`
    reads       the data source and `spark_bridge.scan` beside Parquet and Kafka
    executors   `spark_bridge.scan` over ZeroMQ, as executors on other hosts read, by 1, 2 and 4 tasks at once
"""  # noqa: E501

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import spark_bridge
import tailrace
from bench import doc_tables, write_docs
from bench.conditions import Conditions
from bench.measure import RESULTS
from bench.peers.goals import Values, outcome
from bench.peers.servers import Missing
from bench.with_spark import spark_goals as of
from bench.with_spark.spark_goals import GOALS
from bench.with_spark.spark_kafka import READ_OPTIONS, WORK, Connector
from bench.with_spark.spark_work import Took, aggregate, jvm, noop, timed
from spark_bridge.session import local_session
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.schema import HEADER_TYPE

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
STARTS = int(os.environ.get("STARTS", "3"))
ALL_PARTS = "starts reads executors"
PARTS = os.environ.get("PARTS", ALL_PARTS)
AT_ONCE = (1, 2, 4)
FRAME_ROWS = 20_000
PARTITIONS = 2
FILE_ROWS = 640_000
KEY = b"k" * 8
THREE = "key binary, value binary, offset bigint"
Calls = Mapping[tuple[str, str], Callable[[], Took]]
"""(what is done, who does it) -> one run."""


def fill(running: EmbeddedAppliance) -> None:
    """ROWS records in `rows`, some in `small`."""
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("rows", PARTITIONS), NewTopic("small")])
    now_us = time.time_ns() // 1_000  # retention would remove older rows while this runs
    frame = pa.table(
        {
            "timestamp": pa.array(np.arange(FRAME_ROWS) + now_us, pa.timestamp("us", "UTC")),
            "key": pa.array([KEY] * FRAME_ROWS, pa.binary()),
            "value": pa.array([os.urandom(100) for _ in range(FRAME_ROWS)], pa.binary()),
            "headers": pa.nulls(FRAME_ROWS, HEADER_TYPE),
        }
    )  # fmt: skip
    with Producer(running.address) as producer:
        for number in range(-(-ROWS // FRAME_ROWS)):
            rows = frame.slice(0, min(FRAME_ROWS, ROWS - number * FRAME_ROWS))
            producer.send_arrow("rows", rows, partition=number % PARTITIONS)
        producer.send_arrow("small", frame)
        producer.flush(120)


def write_parquet(running: EmbeddedAppliance, directory: str) -> None:
    """The same rows and columns, as files that Spark divides among its tasks."""
    columns = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = tailrace.scan("rows", running.address, columns=columns)
    writer, written = None, 0
    for number, batch in enumerate(rows):
        if writer is None or written >= FILE_ROWS:
            if writer is not None:
                writer.close()
            writer = pq.ParquetWriter(
                f"{directory}/{number:05}.parquet",
                rows.schema,
                compression="none",
                use_dictionary=False,
            )
            written = 0
        writer.write_batch(batch)
        written += batch.num_rows
    assert writer is not None
    writer.close()


def our_calls(
    spark: Any, running: EmbeddedAppliance, parquet: str
) -> dict[tuple[str, str], Callable[[], Took]]:
    """Calls of the topic's readers and of Spark's own."""

    def topic(schema: str = "") -> Any:
        reader = spark.read.format("tailrace")
        return (
            (reader.schema(schema) if schema else reader)
            .option("bootstrap", running.address)
            .option("subscribe", "rows")
            .load()
        )

    def scan(columns: list[str] | None = None) -> Any:
        return spark_bridge.scan(spark, "rows", running.address, columns)

    def files() -> Any:
        return spark.read.parquet(parquet)

    work: dict[tuple[str, str], Callable[[], Any]] = {
        (of.NOOP, of.SOURCE): lambda: noop(topic()),
        (of.NOOP, of.SCAN): lambda: noop(scan()),
        (of.NOOP, of.PARQUET): lambda: noop(files()),
        (of.NOOP_TWO, of.SOURCE_NAMED): lambda: noop(topic("key binary, value binary")),
        (of.NOOP_TWO, of.SCAN_NAMED): lambda: noop(scan(["key", "value"])),
        (of.NOOP_TWO, of.PARQUET): lambda: noop(files().select("key", "value")),
        (of.AGGREGATE, of.SOURCE): lambda: aggregate(topic()),
        (of.AGGREGATE, of.SOURCE_NAMED): lambda: aggregate(topic(THREE)),
        (of.AGGREGATE, of.SCAN): lambda: aggregate(scan()),
        (of.AGGREGATE, of.SCAN_NAMED): lambda: aggregate(scan(["key", "value", "offset"])),
        (of.AGGREGATE, of.PARQUET): lambda: aggregate(files()),
        (of.COUNT, of.SOURCE): lambda: topic().count(),
        (of.COUNT, of.SOURCE_NAMED): lambda: topic("offset bigint").count(),
        (of.COUNT, of.PARQUET): lambda: files().count(),
    }
    roots = [jvm(spark), running.pid]
    return {key: partial(timed, call, roots) for key, call in work.items()}


class Measured:
    """The figures until now, as goals and the results file take them."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], list[float]] = {}
        self.figures: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def leave_out(self, contender: str, reason: Exception) -> None:
        self.left_out.append(f"{contender} is left out: {reason}")
        print(self.left_out[-1], flush=True)

    def take(self, calls: Calls) -> None:
        """REPETITIONS of everything, in turns; then their lines. A contender that fails in the
        middle is left out, and said.
        """
        todo, took = dict(calls), dict[tuple[str, str], list[Took]]()
        for repetition in range(REPETITIONS + 1):
            for key, call in list(todo.items()):
                try:
                    each = call()
                except Missing as reason:
                    self.leave_out(", ".join(key), reason)
                    del todo[key]
                    continue
                if repetition:
                    took.setdefault(key, []).append(each)
        for what, who in calls:
            if (what, who) in todo:
                self._note(what, who, took[what, who], took.get((what, of.PARQUET)))

    def _note(self, what: str, who: str, took: list[Took], parquet: list[Took] | None) -> None:
        rates = [ROWS / each.seconds / 1e6 for each in took]
        per_cpu = [ROWS / max(each.cpu_seconds, 0.01) / 1e6 for each in took]
        of_parquet = parquet and statistics.median(
            each.seconds for each in parquet
        ) / statistics.median(each.seconds for each in took)
        self.values[what, who, ""] = rates
        figure = {
            "name": what, "contender": who, "unit": "M rows/s", "median": statistics.median(rates),
            "min": min(rates), "max": max(rates), "values": rates,
            "of_parquet": of_parquet, "m_rows_per_cpu_second": per_cpu,
        }  # fmt: skip
        self.figures.append(figure)
        ratio = f"{of_parquet:.2f}" if of_parquet else ""
        spread = f"{figure['median']:>8.2f} {min(rates):>8.2f} {max(rates):>8.2f}"
        print(
            f"{what:<28} {who:<34} {spread} {ratio:>10} {statistics.median(per_cpu):>10.2f}",
            flush=True,
        )

    def note_first(self, who: str, seconds: list[float]) -> None:
        self.values[of.FIRST, who, ""] = seconds
        median = statistics.median(seconds)
        print(
            f"{of.FIRST:<28} {who:<34} {median:>8.2f} s, {min(seconds):.2f} to {max(seconds):.2f}",
            flush=True,
        )
        self.figures.append(
            {"name": of.FIRST, "contender": who, "unit": "s", "median": median, "values": seconds}
        )


def starts(measured: Measured, running: EmbeddedAppliance, directory: str) -> None:
    """Seconds from a new session to its first count."""
    for who in (of.NEW_SESSION, of.PREPARED):
        environment = {**os.environ, "XDG_CACHE_HOME": f"{directory}/cache-{who == of.PREPARED}"}
        if who == of.PREPARED:
            subprocess.run(
                [sys.executable, "-P", "-m", "bench.with_spark.spark_first_query", "--prepare"],
                env=environment,
                check=True,
            )
        seconds = []
        for _ in range(STARTS):
            command = [
                sys.executable,
                "-P",
                "-m",
                "bench.with_spark.spark_first_query",
                running.address,
            ]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            seconds.append(float(done.stdout.split()[1]))
        measured.note_first(who, seconds)


def reads(measured: Measured, running: EmbeddedAppliance, directory: str) -> None:
    """The data source, the scan, Parquet and Kafka in turns."""
    parquet = f"{directory}/parquet"
    os.mkdir(parquet)
    write_parquet(running, parquet)
    with ExitStack() as stack:
        kafka_calls: dict[tuple[str, str], Callable[[], Took]] = {}
        try:
            os.mkdir(f"{directory}/kafka")
            kafka = Connector(f"{directory}/kafka", parquet, ROWS, PARTITIONS)
            stack.callback(kafka.stop)
            kafka_calls = {
                (what, who): partial(kafka.run, what, who) for what in WORK for who in READ_OPTIONS
            }
        except Missing as reason:
            measured.leave_out("Spark's Kafka connector", reason)
        spark = stack.enter_context(local_session())
        calls = {**our_calls(spark, running, parquet), **kafka_calls}
        rows = list(dict.fromkeys(what for what, _ in calls))
        measured.take(dict(sorted(calls.items(), key=lambda item: rows.index(item[0][0]))))


def executors(measured: Measured, running: EmbeddedAppliance, _directory: str) -> None:
    """Over ZeroMQ, with so many tasks at once."""
    for at_once in AT_ONCE:
        with local_session(f"local[{at_once}]") as spark:

            def work(spark: Any = spark) -> None:
                noop(spark_bridge.scan(spark, "rows", running.address, from_files=False))

            measured.take(
                {
                    (of.EXECUTORS, f"{of.SCAN}, {at_once} at once"): partial(
                        timed, work, [jvm(spark), running.pid]
                    )
                }
            )


def show_goals(values: Values, parts: list[str]) -> list[dict[str, Any]]:
    """Each with what it came to; returned for the results file."""
    outcomes = [
        outcome(goal, values)
        for goal in GOALS
        if ("starts" if goal.row == of.FIRST else "reads") in parts
    ]
    for one in outcomes:
        print(one.line())
    return [one.for_file() for one in outcomes]


def main() -> int:
    parts = PARTS.split()
    if unknown := set(parts) - set(ALL_PARTS.split()):
        sys.exit(f"PARTS has {', '.join(sorted(unknown))}; there are {ALL_PARTS}")
    conditions = Conditions()
    where = conditions.report()
    print(
        f"Spark reads {ROWS:,} rows of 108 B on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}\n{conditions.sentence()}\n"
    )
    print(
        f"{'WHAT':<28} {'WHO':<34} {'M ROWS/s':>8} {'LEAST':>8} {'MOST':>8} {'OF PARQUET':>10} "
        f"{'PER CPU s':>10}"
    )
    measured, begun = Measured(), time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="tailrace-spark-", dir=os.environ.get("SCRATCH")
    ) as directory:
        running = start_embedded(data_dir=f"{directory}/data", settings={"ring_bytes": 64 << 20})
        try:
            fill(running)
            for part in (starts, reads, executors):
                if part.__name__ in parts:
                    part(measured, running, directory)
                    print(
                        f"  {part.__name__}: {time.monotonic() - begun:.0f} s until now", flush=True
                    )
        finally:
            running.stop()
    print("\nGoals")
    goals = show_goals(measured.values, parts)
    suffix = "" if parts == ALL_PARTS.split() else "-" + "-".join(parts)
    path = RESULTS / f"spark-{where['date']}-{where['commit']}{suffix}.json"
    command = (
        f"ROWS={ROWS} REPETITIONS={REPETITIONS} STARTS={STARTS} "
        f"{f'PARTS={PARTS!r} ' if suffix else ''}make bench-spark"
    )
    kept = {
        "command": command, "part": "spark", "machine": conditions.report(),
        "left_out": measured.left_out, "goals": goals, "figures": measured.figures,
    }  # fmt: skip
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    if os.environ.get("WRITE_DOCS") and not suffix:
        print(f"{', '.join(write_docs.write(doc_tables.tables_of(kept)))} written into docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
