"""Cleaned segments made by hand: a sealed segment of a stopped appliance is replaced by one with
sparse batches, as compaction makes it.
"""

from __future__ import annotations

import base64
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    END_OF_STREAM,
    BatchHeader,
    read_header,
)
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.record_batch.sparse_batch import cleaned_schema_message, encode_sparse_batch
from tailrace.format.schema import from_message
from tailrace.format.segments.segment import SEGMENT_SUFFIX, file_name, segment_bases
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    decode_transaction_index,
)
from workers.clean.merging_pass import MergingPass
from workers.segment.checkpoint import CHECKPOINT_FILES
from workers.segment.cleaning_job import CleaningJob, JobSegment
from workers.segment.files import DiskFiles
from workers.segment.segment_index_files import rebuild_index
from workers.segment.segment_swap import CLEANED_SUFFIX, remove_cleaned


def sealed_bases(directory: pathlib.Path) -> list[int]:
    """The base offsets of a partition's sealed segments."""
    return [
        base
        for base in segment_bases([path.name for path in directory.iterdir()])
        if (directory / file_name(base)).read_bytes().endswith(END_OF_STREAM)
    ]


def stored_batches(data: bytes) -> Iterator[memoryview]:
    """The batches of a segment's bytes."""
    view = memoryview(data)
    at = 8 + int.from_bytes(data[4:8], "little")
    while (frame := frame_at(view, at, len(view))) is not None and frame[0]:
        yield view[at : at + frame[0]]
        at += frame[0]


def is_merged(path: pathlib.Path) -> bool:
    """True if the small batches of a segment were merged."""
    first = next(stored_batches(path.read_bytes()), None)
    return first is not None and read_header(first).merged_count > 0


def clean_segment(
    directory: pathlib.Path,
    base: int,
    is_kept: Callable[[int], bool],
    *,
    united: int = 3,
    compression: str = "none",
    with_index: bool = True,
    typed: bool = False,
) -> list[int]:
    """Replace a segment by its cleaned version and return the offsets that are left.

    `united` batches become one. Aborted batches and markers go. Without `with_index` the segment
    has none. Rows of typed topics need their times in a column, or one time.
    """
    known = PartitionMetadata.decode((directory / "partition.json").read_bytes())
    assert known is not None
    schema = from_message(next(iter(known.schemas.values())))
    aborted = AbortedBatches([])
    index_path = directory / file_name(base, TRANSACTION_INDEX_SUFFIX)
    if index_path.exists():
        aborted = AbortedBatches(decode_transaction_index(index_path.read_bytes(), base))
    path = directory / file_name(base)
    parts: list[tuple[BatchHeader, pa.RecordBatch]] = []
    made: list[bytes] = []
    kept: list[int] = []

    def unite() -> None:
        tables, offsets = [], []
        for header, rows in parts:
            chosen = [row for row in range(rows.num_rows) if is_kept(header.base_offset + row)]
            if header.is_control or (
                header.is_transactional
                and aborted.has(header.producer_id, header.producer_epoch, header.base_offset)
            ):
                chosen = []
            offsets += [header.base_offset + row for row in chosen]
            tables.append(_with_times(header, rows, typed).take(pa.array(chosen, pa.int64())))
        first, last = parts[0][0], parts[-1][0]
        kept.extend(offsets)
        batch = pa.Table.from_batches(tables).combine_chunks().to_batches()
        encoded = encode_sparse_batch(
            batch[0] if batch else tables[0], offsets,
            base_offset=first.base_offset, next_offset=last.next_offset, seed=known.seed,
            schema_id=first.schema_id, compression=compression,
            max_timestamp_us=max(header.max_timestamp_us for header, _ in parts),
            append_time_us=last.append_time_us, leader_epoch=last.leader_epoch,
            attributes=first.attributes & ATTRIBUTE_LOG_APPEND_TIME,
        )  # fmt: skip
        made.append(bytes(encoded))
        parts.clear()

    for data in stored_batches(path.read_bytes()):
        parts.append(arrow_codec.decode(data, schema, known.seed))
        if len(parts) == united:
            unite()
    if parts:
        unite()
    path.write_bytes(b"".join((cleaned_schema_message(schema), *made, END_OF_STREAM)))
    for name in CHECKPOINT_FILES:
        (directory / name).unlink(missing_ok=True)
    index_path.unlink(missing_ok=True)
    path.with_suffix(".index").unlink(missing_ok=True)
    if with_index:
        rebuild_index(DiskFiles(), str(directory), known, base)
    return kept


def _with_times(header: BatchHeader, rows: pa.RecordBatch, typed: bool) -> Any:
    """Rows of the default schema with the time of each in its column."""
    if typed:
        return rows
    stamp = header.append_time_us if header.attributes & ATTRIBUTE_LOG_APPEND_TIME else None
    times = (
        rows.column(0).cast(pa.int64()).fill_null(header.max_timestamp_us)
        if stamp is None
        else pa.array([stamp] * rows.num_rows, pa.int64())
    )
    return rows.set_column(0, rows.schema.field(0), times.view(rows.schema.field(0).type))


def clean_partition(
    directory: pathlib.Path, is_kept: Callable[[int], bool], **how: Any
) -> tuple[dict[int, list[int]], int]:
    """Clean all sealed segments: (base -> offsets that are left, the offset behind the last of
    these segments).
    """
    bases = segment_bases([path.name for path in directory.glob(f"*{SEGMENT_SUFFIX}")])
    sealed = [base for base in sealed_bases(directory) if base != bases[-1]]
    left = {base: clean_segment(directory, base, is_kept, **how) for base in sealed}
    return left, bases[len(sealed)] if sealed else 0


def merge_segment(directory: pathlib.Path, base: int) -> None:
    """Replace the bytes of a sealed segment by those of its merge."""
    known = PartitionMetadata.decode((directory / "partition.json").read_bytes())
    assert known is not None
    bases = segment_bases([path.name for path in directory.glob(f"*{SEGMENT_SUFFIX}")])
    path = directory / file_name(base)
    end = bases[bases.index(base) + 1]
    schema_id, message = next(iter(known.schemas.items()))
    job = CleaningJob(
        number=1, directory=str(directory), topic="", topic_id=known.topic_id.hex(),
        partition=known.partition, schemas={str(schema_id): base64.b64encode(message).decode()},
        schema_id=schema_id, typed=False, key_column="key", compression="none",
        max_message_bytes=1 << 20, delete_retention_ms=0,
        runs=[[JobSegment(base, end, path.stat().st_size, False, False, schema_id)]], jumps=[],
        dedupe_bytes=0, bytes_per_second=0, is_merge=True,
    )  # fmt: skip
    for _ in MergingPass(DiskFiles(), job, lambda _: None).steps():
        pass
    path.write_bytes((directory / file_name(base, CLEANED_SUFFIX)).read_bytes())
    remove_cleaned(DiskFiles(), str(directory))
    for name in CHECKPOINT_FILES:
        (directory / name).unlink(missing_ok=True)
    path.with_suffix(".index").unlink(missing_ok=True)
    rebuild_index(DiskFiles(), str(directory), known, base)
