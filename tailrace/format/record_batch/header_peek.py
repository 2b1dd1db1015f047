"""Peeks into a batch's header without decoding it, for code that forwards or walks batches."""

from __future__ import annotations

import struct

from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_SPARSE,
    BATCH_MAGIC,
    BATCH_VERSION,
    HEADER_BYTES,
    NEWEST_BATCH_VERSION,
    OFFSET_ATTRIBUTES,
    OFFSET_LEADER_EPOCH,
    OFFSET_RECORD_COUNT,
    OFFSET_SCHEMA_ID,
    PREFIX_BYTES,
    TAIL,
    BatchFormatError,
    compute_header_crc,
    header_position,
    metadata_size_of,
    read_header,
)

_LENGTH = struct.Struct("<IqI")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")


def frame_at(data: Readable, start: int, end: int) -> tuple[int, int, int] | None:
    """(batch_length, base_offset, next_offset) of the batch at `start`, None if its metadata passes
    `end`.

    A quick check of form for code that forwards batches. An end-of-stream mark has length 0. Raises
    BatchFormatError.
    """
    if end - start < PREFIX_BYTES:
        return None
    metadata_size = metadata_size_of(data, start)
    if metadata_size == 0:
        return 0, 0, 0
    position = start + PREFIX_BYTES + metadata_size - HEADER_BYTES
    if position + HEADER_BYTES > end:
        return None
    header_length, version, magic = TAIL.unpack_from(data, position + HEADER_BYTES - TAIL.size)
    if (
        magic != BATCH_MAGIC
        or header_length != HEADER_BYTES
        or not BATCH_VERSION <= version <= NEWEST_BATCH_VERSION
    ):
        raise BatchFormatError("the bytes are not a batch header of this version")
    batch_length, base_offset, last_offset_delta = _LENGTH.unpack_from(data, position + 12)
    if batch_length < PREFIX_BYTES + metadata_size:
        raise BatchFormatError(
            f"batch length {batch_length} contradicts a metadata size of {metadata_size}"
        )
    return batch_length, base_offset, base_offset + last_offset_delta + 1


def leader_epoch_at(data: Readable, start: int) -> int:
    """The leader epoch of the batch at `start`, whose form `frame_at` has checked."""
    return int(_I32.unpack_from(data, header_position(data, start) + OFFSET_LEADER_EPOCH)[0])


def schema_id_at(data: Readable, start: int) -> int:
    """The schema id of the batch at `start`, whose form `frame_at` has checked."""
    return int(_U32.unpack_from(data, header_position(data, start) + OFFSET_SCHEMA_ID)[0])


def has_no_rows_at(batch: memoryview, seed: int) -> bool:
    """True for a batch without rows, a control batch or a sparse one, whose header matches its
    checksum. `frame_at` has checked its form.
    """
    position = header_position(batch)
    attributes = _U32.unpack_from(batch, position + OFFSET_ATTRIBUTES)[0]
    if not attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_SPARSE):
        return False
    record_count = _U32.unpack_from(batch, position + OFFSET_RECORD_COUNT)[0]
    return record_count == 0 and header_is_intact(batch, seed)


def header_is_intact(batch: memoryview, seed: int) -> bool:
    """True if the header of `batch` matches its checksum, so that its offsets can be trusted."""
    try:
        header = read_header(batch)
    except BatchFormatError:
        return False
    return (
        compute_header_crc(batch, header_position(batch), header.extension_length, seed)
        == header.header_crc32c
    )
