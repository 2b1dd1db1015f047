"""`tailrace consume`: a topic's records on standard output.

Exit status 4 (EXIT_SKIPPED): everything that can be read was printed, and damaged records were skipped, as --skip-damaged asks.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import click
import orjson
import pyarrow as pa

from appliance.cli.main import CONNECT_TIMEOUT_MS
from appliance.cli.options import bootstrap_option
from appliance.cli.output import complain
from tailrace.admin import Admin
from tailrace.consumer import Consumer
from tailrace.errors import CorruptBatchError, NotSupportedError
from tailrace.records import Record, TopicPartition
from tailrace.settings import GROUPS_LATER

POLL_MS = 500
EXIT_SKIPPED = 4


@click.command()
@click.argument("topic")
@click.option("--partition", type=int, help="Only this partition.")
@click.option("--group", help="Consumer group (not in this version).")
@click.option("--from-beginning", is_flag=True, help="Begin with the first record and end at the end (unless --follow).")
@click.option("--offset", type=click.IntRange(0), help="Begin at this offset and end at the end (unless --follow).")
@click.option("--max", "maximum", type=click.IntRange(1), help="End after this many records.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["value", "json", "arrow", "parquet"]),
    default="value",
    show_default=True,
    help="arrow and parquet write one file to standard output.",
)
@click.option("--follow", is_flag=True, help="Wait for new records.")
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Go on behind records that are damaged on the disk, saying which, instead of ending there; the exit status is 4 if there were any.",
)
@bootstrap_option
def command(
    topic: str,
    partition: int | None,
    group: str | None,
    from_beginning: bool,
    offset: int | None,
    maximum: int | None,
    form: str,
    follow: bool,
    skip_damaged: bool,
    bootstrap: str,
) -> int:
    """Print a topic's records. Without --from-beginning or --offset it waits for new ones, like `tail -f`.

    \b
    Example:
      tailrace consume orders --from-beginning --format json
      tailrace consume flights --from-beginning --format parquet > flights.parquet
    """
    if group is not None:
        raise NotSupportedError(GROUPS_LATER)
    if from_beginning and offset is not None:
        raise click.UsageError("--from-beginning and --offset exclude each other")
    with Admin(bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS) as admin:
        info = admin.topic_info([topic])[topic]
    with Consumer(bootstrap=bootstrap, auto_offset_reset="earliest" if from_beginning else "latest") as consumer:
        keys = [TopicPartition(topic, p) for p in ([partition] if partition is not None else range(len(info.partitions)))]
        consumer.assign(keys)
        ends = None if follow or not (from_beginning or offset is not None) else consumer.end_offsets(keys)
        if offset is not None:
            for key in keys:
                consumer.seek(key, offset)
        reader = Reader(consumer, ends, maximum, skip_damaged)
        if form == "arrow":
            _write_arrow(reader, info.schema)
        elif form == "parquet":
            _write_parquet(reader, info.schema)
        else:
            _write_lines(reader, form)
    if reader.skipped_offsets:
        complain(f"skipped {reader.skipped_offsets} damaged offsets in {reader.skipped_ranges} places; `tailrace log verify` tells more")
        return EXIT_SKIPPED
    return 0


class Reader:
    """Polls until the ends that were there at the start are reached, or enough came, or for ever."""

    def __init__(self, consumer: Consumer, ends: dict[TopicPartition, int] | None, maximum: int | None, skip_damaged: bool) -> None:
        self._consumer = consumer
        self._skip_damaged = skip_damaged
        self._ends = ends
        self._left = maximum
        self.skipped_offsets = 0
        self.skipped_ranges = 0

    def is_finished(self) -> bool:
        if self._left is not None and self._left <= 0:
            return True
        return self._ends is not None and all(self._consumer.position(key) >= end for key, end in self._ends.items())

    def _skip(self, error: CorruptBatchError) -> None:
        """Behind the damage, if that is wanted. Raises `error`."""
        if not self._skip_damaged or error.key is None or error.next_offset is None:
            raise error
        complain(f"skipped: {error.detail}")
        self.skipped_offsets += error.next_offset - (error.next_offset if error.first_offset is None else error.first_offset)
        self.skipped_ranges += 1
        self._consumer.seek(error.key, error.next_offset)

    def records(self) -> list[Record]:
        limit = 5000 if self._left is None else min(5000, self._left)
        try:
            records = self._consumer.poll(POLL_MS, limit)
        except CorruptBatchError as error:
            self._skip(error)
            return []
        if self._ends is not None:
            records = [r for r in records if r.offset < self._ends[TopicPartition(r.topic, r.partition)]]
        if self._left is not None:
            self._left -= len(records)
        return records

    def batches(self) -> list[pa.RecordBatch]:
        result: list[pa.RecordBatch] = []
        try:
            polled = self._consumer.poll_arrow(POLL_MS)
        except CorruptBatchError as error:
            self._skip(error)
            return result
        for taken in polled:
            batch = taken.batch
            if self._ends is not None:
                batch = batch.slice(0, max(0, self._ends[TopicPartition(taken.topic, taken.partition)] - taken.base_offset))
            if self._left is not None:
                batch = batch.slice(0, max(0, self._left))
                self._left -= batch.num_rows
            if batch.num_rows:
                result.append(batch)
        return result


def _text(value: Any) -> Any:
    """Bytes as text where they are text, else as {"base64": ...}."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    return value


def _default(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else str(value)


def to_json(record: Record) -> bytes:
    """A record as one line of JSON."""
    return orjson.dumps(
        {
            "topic": record.topic, "partition": record.partition, "offset": record.offset, "timestamp": record.timestamp, "key": _text(record.key),
            "value": _text(record.value), "headers": [[name, _text(value)] for name, value in record.headers],
        },
        default=_default,
    )  # fmt: skip


def _write_lines(reader: Reader, form: str) -> None:
    out = sys.stdout.buffer
    while not reader.is_finished():
        for record in reader.records():
            if form == "json":
                line = to_json(record)
            else:
                line = orjson.dumps(record.value, default=_default) if isinstance(record.value, dict) else record.value or b""
            out.write(line + b"\n")
        out.flush()


def _write_arrow(reader: Reader, schema: pa.Schema) -> None:
    with pa.ipc.new_stream(sys.stdout.buffer, schema) as writer:
        while not reader.is_finished():
            for batch in reader.batches():
                writer.write_batch(batch)


def _write_parquet(reader: Reader, schema: pa.Schema) -> None:
    import pyarrow.parquet as parquet

    with parquet.ParquetWriter(sys.stdout.buffer, schema) as writer:
        while not reader.is_finished():
            for batch in reader.batches():
                writer.write_batch(batch)
