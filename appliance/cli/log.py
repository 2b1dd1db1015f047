"""`tailrace log`: what is in segment files, offline: works on the files alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click
import orjson

from appliance.cli.output import print_table
from tailrace.batch_header import ATTRIBUTE_COMPRESSED, NO_PRODUCER, BatchHeader
from tailrace.partition_file import PARTITION_FILE, PartitionFile
from tailrace.segment import Ending, ReadAt, Walk, schema_message_length, walk_batches


@click.group()
def command() -> None:
    """Look into segment files, offline.

    \b
    Example:
      tailrace log dump /var/lib/tailrace/orders-0/00000000000000000000.arrow
    """


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--records", is_flag=True, help="Print the records too, one JSON object a line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def dump(file: str, records: bool, as_json: bool) -> None:
    """Print every batch of a segment file, with form and checksums proven. Exit status 1 when something in it is damaged.

    \b
    Example:
      tailrace log dump --records data/orders-0/00000000000000000000.arrow
    """
    seed = _seed_of(file)
    base = os.path.basename(file)[:20]
    if not base.isdigit():
        raise click.UsageError(f"{file} is not named like a segment: 20 digits and .arrow")
    with open(file, "rb") as source:
        fd = source.fileno()
        size = os.fstat(fd).st_size

        def read_at(length: int, position: int) -> bytes:
            return os.pread(fd, length, position)

        walk = Walk(schema_message_length(read_at), int(base))
        rows: list[list[Any]] = []
        for position, header in walk_batches(read_at, size, walk, seed) if walk.position else ():
            row = _row(position, header)
            if as_json:
                click.echo(orjson.dumps(row))
            else:
                rows.append(list(row.values()))
            if records:
                for record in _records(read_at, position, header, seed):
                    click.echo(record)
        if rows and not records:
            print_table(
                [
                    "OFFSETS",
                    "RECORDS",
                    "POSITION",
                    "BYTES",
                    "APPENDED US",
                    "LARGEST TIMESTAMP US",
                    "PRODUCER",
                    "EPOCH",
                    "SEQUENCE",
                    "COMPRESSED",
                ],
                rows,
            )
    _finish(file, walk, size)


def _finish(file: str, walk: Walk, size: int) -> None:
    if not walk.position:
        raise click.ClickException(f"{file} does not begin with an Arrow schema: it is no segment, or its first bytes are damaged")
    if walk.ending is Ending.TORN:
        raise click.ClickException(
            f"{file} is intact up to offset {walk.next_offset - 1}; at byte {walk.position} of {size}: {walk.reason}"
        )
    ending = "sealed" if walk.ending is Ending.SEALED else "not sealed"
    click.echo(f"intact, {ending}, next offset {walk.next_offset}, {size} bytes", err=True)


def _row(position: int, header: BatchHeader) -> dict[str, Any]:
    idempotent = header.producer_id != NO_PRODUCER
    return {
        "offsets": f"{header.base_offset}-{header.last_offset}", "records": header.record_count, "position": position, "bytes": header.batch_length,
        "append_time_us": header.append_time_us, "max_timestamp_us": header.max_timestamp_us, "producer_id": header.producer_id if idempotent else None,
        "producer_epoch": header.producer_epoch if idempotent else None, "base_sequence": header.base_sequence if idempotent else None,
        "compressed": bool(header.attributes & ATTRIBUTE_COMPRESSED),
    }  # fmt: skip


def _seed_of(file: str) -> int:
    """The checksum seed of the partition, from the identity beside the segment."""
    path = os.path.join(os.path.dirname(os.path.abspath(file)), PARTITION_FILE)
    known = None
    if os.path.exists(path):
        with open(path, "rb") as source:
            known = PartitionFile.decode(source.read())
    if known is None:
        raise click.ClickException(
            f"{path} is missing or damaged: a segment is checked with its partition's identity. Keep the two together when copying."
        )
    return known.seed


def _records(read_at: ReadAt, position: int, header: BatchHeader, seed: int) -> Iterator[bytes]:
    import pyarrow as pa

    from tailrace import arrow_batch

    schema = pa.ipc.read_schema(pa.BufferReader(read_at(schema_message_length(read_at), 0)))
    _, batch = arrow_batch.decode(memoryview(read_at(header.batch_length, position)), schema, seed)
    for offset, row in zip(range(header.base_offset, header.next_offset), batch.to_pylist(), strict=False):
        yield orjson.dumps(
            {"offset": offset, **row},
            default=lambda value: value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value),
        )
