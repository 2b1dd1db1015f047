"""Segment files: names, framing, and the walk that verifies their batches.

Layout: an Arrow schema message (the topic's, or with one more column that of a cleaned segment:
`tailrace.format.record_batch.sparse_layout`), then batches (see
`tailrace.format.record_batch.batch_header`), and in a sealed segment Arrow's end-of-stream mark. So
a segment is an ordinary Arrow IPC stream, with the suffix that Arrow registers for streams. Beside
`<base offset, 20 digits>.arrows` there is a `.index` (see
`tailrace.format.segments.segment_index`), and a `.producers` with the producer state at the
segment's start.

Owner: the flusher of the data directory. Readers never write.

Invariants:
- The first batch's base offset is the file's.
- Each batch begins at the end of the previous one, in bytes and in offsets. A cleaned segment is no
  exception: the range of offsets of a sparse batch has those of removed rows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tailrace.format.record_batch.batch_header import (
    BATCH_MAGIC,
    END_OF_STREAM,
    HEADER_BYTES,
    METADATA_MAX_BYTES,
    PREFIX_BYTES,
    BatchFormatError,
    BatchHeader,
    compute_header_crc,
    header_at,
    metadata_size_of,
    read_header,
    verify_batch,
)

SEGMENT_SUFFIX = ".arrows"
OLD_SEGMENT_SUFFIX = ".arrow"
"""Suffix in directories of a format before 4. The flusher renames these segments
(`workers.segment.migrate_suffix`).
"""
_BASE_MAX = (1 << 63) - 1
INDEX_SUFFIX = ".index"
PRODUCERS_SUFFIX = ".producers"
READ_CHUNK_BYTES = 4 << 20
CONTINUATION_BYTES = b"\xff\xff\xff\xff"

ReadAt = Callable[[int, int], bytes]
"""(length, position) -> at most that many bytes."""


def file_name(base_offset: int, suffix: str = SEGMENT_SUFFIX) -> str:
    return f"{base_offset:020d}{suffix}"


def segment_bases(names: list[str], suffix: str = SEGMENT_SUFFIX) -> list[int]:
    """Base offsets of the segments among a directory's names, ascending."""
    stems = (name[: -len(suffix)] for name in names if name.endswith(suffix))
    bases = (int(stem) for stem in stems if len(stem) == 20 and stem.isascii() and stem.isdigit())
    return sorted(base for base in bases if base <= _BASE_MAX)


class Ending(Enum):
    """The end of a walk over a segment."""

    SEALED = "the end-of-stream mark"
    CLEAN = "the end of the file, behind a whole batch"
    TORN = "bytes that are not an intact batch"


@dataclass(slots=True)
class Walk:
    """The progress of a walk over a segment."""

    position: int
    next_offset: int
    ending: Ending = Ending.CLEAN
    reason: str = ""


def schema_message_length(read_at: ReadAt) -> int:
    """The length of a segment's schema message, 0 if it is not whole."""
    head = read_at(PREFIX_BYTES, 0)
    if len(head) < PREFIX_BYTES or head[:4] != b"\xff\xff\xff\xff":
        return 0
    size = int.from_bytes(head[4:8], "little", signed=True)
    return PREFIX_BYTES + size if 0 < size <= 16 << 20 and size % 8 == 0 else 0


def walk_batches(
    read_at: ReadAt, size: int, walk: Walk, seed: int
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (file position, header) of each intact batch from `walk.position` on.

    Form, both checksums and the order of offsets are verified. Stops at the first bytes that are
    not an intact batch, and stores the position and reason in `walk`.
    """
    chunk = memoryview(b"")
    chunk_start = walk.position
    while walk.position < size:
        at = walk.position - chunk_start
        needed = _needed(chunk, at)
        if at + needed > len(chunk):
            chunk_start = walk.position
            chunk = memoryview(read_at(max(READ_CHUNK_BYTES, needed), chunk_start))
            at = 0
            needed = _needed(chunk, 0)
            if needed > len(chunk):
                chunk = memoryview(read_at(min(needed, size - chunk_start), chunk_start))
                needed = _needed(chunk, 0)
            if needed > len(chunk):
                if needed <= size - chunk_start:  # the header has just given the length
                    chunk = memoryview(read_at(needed, chunk_start))
                if needed > len(chunk):
                    walk.ending, walk.reason = Ending.TORN, "the file ends inside a batch"
                    return
        try:
            if metadata_size_of(chunk, at) == 0:
                walk.ending = Ending.SEALED
                return
            length = read_header(chunk, at).batch_length
            header = verify_batch(chunk[at : at + length], seed)
        except BatchFormatError as error:
            walk.ending, walk.reason = Ending.TORN, error.reason
            return
        if header.base_offset != walk.next_offset:
            walk.ending, walk.reason = (
                Ending.TORN,
                f"the batch has offset {header.base_offset}; expected {walk.next_offset}",
            )
            return
        yield walk.position, header
        walk.position += length
        walk.next_offset = header.next_offset
    walk.ending = Ending.CLEAN


def _needed(chunk: memoryview, at: int) -> int:
    """The number of bytes from `at` on that the next check needs:
    prefix, metadata, or whole batch.
    """
    available = len(chunk) - at
    if available < PREFIX_BYTES:
        return PREFIX_BYTES
    try:
        metadata_size = metadata_size_of(chunk, at)
        if metadata_size == 0:
            return PREFIX_BYTES
        if available < PREFIX_BYTES + metadata_size:
            return PREFIX_BYTES + metadata_size
        return read_header(chunk, at).batch_length
    except BatchFormatError:
        return PREFIX_BYTES  # the caller finds and reports the fault


def first_batch_position(read_at: ReadAt, size: int, seed: int, base: int) -> int | None:
    """The position of the intact batch with the segment's base offset, regardless of the bytes
    before it; None: there is none.
    """
    found = find_behind(read_at, size, 0, seed, base - 1)
    return found.position if found is not None and found.offset == base else None


class Behind(NamedTuple):
    """The place, in bytes and offsets, where the log continues after a damaged batch."""

    position: int
    offset: int
    proves_durable: bool
    """True if an intact header after the damage says that the damaged bytes were durable: they are
    corrupt, not a torn tail.
    """


def find_behind(
    read_at: ReadAt, size: int, position: int, seed: int, bad_offset: int
) -> Behind | None:
    """Search for batches of this partition after `position`, where the batch of `bad_offset` should
    be.

    The log continues at the first intact batch, or at the end of the file if only headers are
    intact. None if there is no trace of a batch.
    """
    magic = BATCH_MAGIC.to_bytes(4, "little")
    intact: tuple[int, int] | None = None
    proven_end = 0
    start = position
    while start < size and not (intact and proven_end):
        chunk = read_at(READ_CHUNK_BYTES + HEADER_BYTES, start)
        view = memoryview(chunk)
        found = chunk.find(magic)
        while found >= 0:
            head = found + 4 - HEADER_BYTES
            header = _intact_header(view, head, seed) if head >= 0 else None
            if header is not None and header.base_offset > bad_offset:
                batch_start = (
                    _start_of(read_at, start + head, header.batch_length, position)
                    if intact is None
                    else None
                )
                if batch_start is not None and _is_intact(read_at, batch_start, header, seed):
                    intact = batch_start, header.base_offset
                if header.durable_offset > bad_offset:
                    proven_end = header.next_offset
            found = chunk.find(magic, found + 1)
        if len(chunk) <= HEADER_BYTES:
            break
        start += len(chunk) - HEADER_BYTES
    if intact is not None:
        return Behind(*intact, bool(proven_end))
    return Behind(size, proven_end, True) if proven_end else None


def _intact_header(view: memoryview, head: int, seed: int) -> BatchHeader | None:
    try:
        header = header_at(view, head, HEADER_BYTES)
    except BatchFormatError:
        return None
    good = (
        header.extension_length == 0
        and compute_header_crc(view, head, 0, seed) == header.header_crc32c
    )
    return header if good else None


def _start_of(read_at: ReadAt, header_start: int, batch_length: int, not_before: int) -> int | None:
    """The start of the batch whose header is at `header_start`: the
    prefix that leads exactly there.
    """
    header_end = header_start + HEADER_BYTES
    low = max(not_before, header_end - PREFIX_BYTES - METADATA_MAX_BYTES, header_end - batch_length)
    data = read_at(header_start - low, low)
    at = data.rfind(CONTINUATION_BYTES)
    while at >= 0:
        if (
            at + PREFIX_BYTES <= len(data)
            and low + at + PREFIX_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
            == header_end
        ):
            return low + at
        at = data.rfind(CONTINUATION_BYTES, 0, at + 3)
    return None


def _is_intact(read_at: ReadAt, position: int, header: BatchHeader, seed: int) -> bool:
    data = read_at(header.batch_length, position)
    if len(data) != header.batch_length:
        return False
    try:
        verify_batch(memoryview(data), seed)
    except BatchFormatError:
        return False
    return True


def is_sealed(read_at: ReadAt, size: int) -> bool:
    return (
        size >= len(END_OF_STREAM)
        and read_at(len(END_OF_STREAM), size - len(END_OF_STREAM)) == END_OF_STREAM
    )
