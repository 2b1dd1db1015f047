"""`tailrace log`: shows and verifies segment files, without an appliance."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import click
import orjson

from appliance.cli.options.shared import json_option
from appliance.cli.output import (
    BYTES,
    counted,
    echo,
    human_bytes,
    print_json,
    print_table,
    progress,
)
from appliance.config.settings_sources import load_settings
from appliance.observe.checks import log_verifier
from appliance.observe.checks.findings import Finding, Severity
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_DELAYED,
    CONTROL_ABORT,
    CONTROL_COMMIT,
    NO_PRODUCER,
    BatchHeader,
)
from tailrace.format.segments.segment import (
    Ending,
    ReadAt,
    Walk,
    schema_message_length,
    walk_batches,
)

EXIT_REPAIRABLE = 4


@click.group()
def command() -> None:
    """Show and verify segment files, offline.

    \b
    Example:
      tailrace log dump /var/lib/tailrace/orders-0/00000000000000000000.arrows
    """


@command.command()
@click.argument("directories", nargs=-1, type=click.Path(exists=True, file_okay=False))
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help="The data directories of this configuration, instead of DIRECTORIES.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context, directories: tuple[str, ...], config: str | None, as_json: bool
) -> None:
    """Check everything in data directories, or in one partition's: every checksum and index entry,
    offsets, timestamps, producer sequences.

    Exit status 0: intact; 1: damaged; 4: only what the next start repairs without a loss (an index,
    a torn tail).

    \b
    Example:
      tailrace log verify /var/lib/tailrace
    """
    partitions = _partitions(directories, config)
    started = time.monotonic()
    with progress("verifying", log_verifier.data_bytes(partitions), unit=BYTES) as bar:
        totals = log_verifier.check(partitions, bar.advance)
    seconds = time.monotonic() - started
    if as_json:
        print_json(
            {
                "partitions": totals.partitions, "segments": totals.segments,
                "batches": totals.batches, "records": totals.records,
                "pending_records": totals.pending_records, "bytes": totals.data_bytes,
                "seconds": round(seconds, 3),
                "findings": [
                    {"severity": f.severity.value, "path": f.path, "finding": f.text,
                    "first_offset": f.first_offset, "last_offset": f.last_offset}
                    for f in totals.findings
                ],
            }
        )  # fmt: skip
    else:
        if totals.findings:
            print_table(
                ["SEVERITY", "OFFSETS", "FINDING", "PATH"],
                [[f.severity.value, _offsets(f), f.text, f.path] for f in totals.findings],
                wrap=["FINDING", "PATH"],
            )
        rate = totals.data_bytes / seconds if seconds else 0
        pending = (
            f"{counted(totals.pending_records, 'pending record')}, "
            if totals.pending_records
            else ""
        )
        echo(
            f"{counted(totals.partitions, 'partition')}, {counted(totals.segments, 'segment')}, "
            f"{totals.batches:,} batch{'' if totals.batches == 1 else 'es'}, "
            f"{counted(totals.records, 'record')}, {pending}"
            f"{human_bytes(totals.data_bytes)} in {seconds:.2f} s ({human_bytes(int(rate))}/s): "
            f"{_summary(totals.worst)}"
        )
    ctx.exit(
        {Severity.DAMAGE: 1, Severity.REPAIRABLE: EXIT_REPAIRABLE}.get(
            totals.worst,  # type: ignore[arg-type]
            0,
        )
    )


def _partitions(directories: tuple[str, ...], config: str | None) -> list[str]:
    """The directories of all partitions to check. A configuration's may have none yet."""
    if bool(directories) == (config is not None):
        raise click.UsageError("give data directories, or --config FILE")
    if config is None:
        found = [_partitions_in(directory) for directory in directories]
    else:
        settings = load_settings(config, os.environ, [])
        missing = [path for path in settings.data_dirs if not os.path.isdir(path)]
        if missing:
            raise click.ClickException(
                f"{missing[0]}, a data directory of {config}, does not exist: start the appliance "
                "once, or mount the disk"
            )
        found = [log_verifier.partition_directories(path) for path in settings.data_dirs]
    return [path for paths in found for path in paths]


def _partitions_in(directory: str) -> list[str]:
    found = log_verifier.partition_directories(directory)
    if not found:
        raise click.ClickException(
            f"{directory} holds no partitions: give a data directory, or a partition directory "
            "such as data/orders-0"
        )
    return found


def _offsets(finding: Finding) -> str:
    if finding.first_offset < 0:
        return ""
    return (
        f"{finding.first_offset}-{finding.last_offset}"
        if finding.last_offset >= 0
        else f"{finding.first_offset}-"
    )


def _summary(worst: Severity | None) -> str:
    return {
        Severity.DAMAGE: "DAMAGED; consumers get an error for these offsets and can "
        "seek behind them",
        Severity.REPAIRABLE: "the next start repairs this without a loss",
    }.get(worst, "intact")  # type: ignore[arg-type]


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--records", is_flag=True, help="Print the records too, one JSON object a line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def dump(file: str, records: bool, as_json: bool) -> None:
    """Print every batch of a segment file and check its form and checksums. Exit status 1 when
    something in it is damaged.

    \b
    Example:
      tailrace log dump --records data/orders-0/00000000000000000000.arrows
    """
    seed = _seed_of(file)
    base = os.path.basename(file)[:20]
    if not (base.isascii() and base.isdigit()):
        raise click.UsageError(f"{file} is not named like a segment: 20 digits and .arrows")
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
                    "KIND",
                ],
                rows,
            )
    _finish(file, walk, size)


def _finish(file: str, walk: Walk, size: int) -> None:
    if not walk.position:
        raise click.ClickException(
            f"{file} does not begin with an Arrow schema: it is not a segment, or its first "
            "bytes are damaged"
        )
    if walk.ending is Ending.TORN:
        raise click.ClickException(
            f"{file} is intact up to offset {walk.next_offset - 1}; at byte {walk.position} of "
            f"{size}: {walk.reason}"
        )
    ending = "sealed" if walk.ending is Ending.SEALED else "not sealed"
    click.echo(f"intact, {ending}, next offset {walk.next_offset}, {size} bytes", err=True)


def _row(position: int, header: BatchHeader) -> dict[str, Any]:
    idempotent = header.producer_id != NO_PRODUCER
    return {
        "offsets": f"{header.base_offset}-{header.last_offset}", "records": header.record_count,
        "position": position, "bytes": header.batch_length,
        "append_time_us": header.append_time_us, "max_timestamp_us": header.max_timestamp_us,
        "producer_id": header.producer_id if idempotent else None,
        "producer_epoch": header.producer_epoch if idempotent else None,
        "base_sequence": header.base_sequence if idempotent else None,
        "compressed": bool(header.attributes & ATTRIBUTE_COMPRESSED), "kind": _kind(header),
    }  # fmt: skip


def _kind(header: BatchHeader) -> str:
    """The kind of a batch: records, in a transaction or not, what compaction has left (sparse), a
    cancel or reschedule in a delay log, or a control batch.
    """
    if header.is_marker:
        return {CONTROL_COMMIT: "commit", CONTROL_ABORT: "abort"}.get(
            header.control_type, f"control {header.control_type}"
        )
    if header.is_control:
        return "delivery mark" if header.is_delay_mark else f"control {header.control_type}"
    if header.is_sparse:
        return "sparse"
    is_change = header.due_us > 0 and not header.attributes & ATTRIBUTE_DELAYED
    kind = "change of delays" if is_change else "records"
    if header.is_transactional:
        return "transactional" if kind == "records" else f"transactional {kind}"
    return kind


def _seed_of(file: str) -> int:
    """The checksum seed of the partition, from the identity beside the segment."""
    path = os.path.join(os.path.dirname(os.path.abspath(file)), PARTITION_FILE)
    known = None
    if os.path.exists(path):
        with open(path, "rb") as source:
            known = PartitionMetadata.decode(source.read())
    if known is None:
        raise click.ClickException(
            f"{path} is missing or damaged: a segment is checked against its partition's "
            "identity. Copy both files together."
        )
    return known.seed


def _records(read_at: ReadAt, position: int, header: BatchHeader, seed: int) -> Iterator[bytes]:
    import pyarrow as pa

    from tailrace.batch import arrow_codec

    schema = pa.ipc.read_schema(pa.BufferReader(read_at(schema_message_length(read_at), 0)))
    if header.is_sparse:
        schema = pa.schema(list(schema)[:-1])
    _, batch, offsets = arrow_codec.decode_with_offsets(
        memoryview(read_at(header.batch_length, position)), schema, seed
    )
    numbers = (
        range(header.base_offset, header.next_offset)
        if offsets is None
        else arrow_codec.numbers_in(offsets)
    )
    for offset, row in zip(map(int, numbers), batch.to_pylist(), strict=False):
        yield orjson.dumps(
            {"offset": offset, **row},
            default=lambda value: (
                value.decode("utf-8", "backslashreplace")
                if isinstance(value, bytes)
                else str(value)
            ),
        )
