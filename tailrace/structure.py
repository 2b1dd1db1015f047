"""Is this batch safe to hand to a reader? A right checksum does not say so: whoever made the batch also made the checksum.

An Arrow reader follows the offsets it finds in a batch's metadata; wild ones crash the process that reads (tried). So before a batch is
appended, its flatbuffer is walked once (about 3 us) and held against the topic's schema: kind of message, row count, body length, number of
nodes and buffers, every buffer inside the body and, where the body is not compressed, long enough for its node. What lies inside buffers
(string offsets) is the reader's to validate: the broker does not touch records.

Owner: pure; called by the worker for every batch, by consumers before they decode one, by `log verify` for stored ones.
"""

from __future__ import annotations

import struct

from tailrace.arrow_metadata import ArrowMetadataError, BufferKind, SchemaLayout, read_record_batch
from tailrace.batch_header import ATTRIBUTE_COMPRESSED, ATTRIBUTE_CONTROL, ATTRIBUTE_DELAYED, PREFIX_BYTES, BatchHeader, metadata_size_of
from tailrace.checksum import Readable

UNCOMPRESSED_MAX_BYTES = 1 << 30
"""A compressed body may not claim to unpack to more than this: readers allocate what it claims."""

_I64 = struct.Struct("<q")


class UnsafeBatchError(ValueError):
    """The batch would mislead or crash a reader; the sentence says how."""


def check_structure(batch: Readable, header: BatchHeader, layout: SchemaLayout, *, is_ours: bool = False) -> None:
    """Raise UnsafeBatchError unless `batch` (form and checksums already proven) can be read safely with the schema of `layout`. `is_ours`: it was
    made by the appliance (the scheduler).
    """
    if header.attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED) and not is_ours:
        raise UnsafeBatchError("control batches and delivered ones are written by the appliance only")
    try:
        metadata = read_record_batch(batch, PREFIX_BYTES)
    except ArrowMetadataError as error:
        raise UnsafeBatchError(str(error)) from None
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    body_length = header.batch_length - body_start
    if metadata.body_length != body_length:
        raise UnsafeBatchError(f"metadata claims a body of {metadata.body_length} bytes, {body_length} are there")
    if metadata.row_count != header.record_count:
        raise UnsafeBatchError(f"metadata claims {metadata.row_count} rows, the header {header.record_count}")
    if metadata.compressed != bool(header.attributes & ATTRIBUTE_COMPRESSED):
        raise UnsafeBatchError("header and metadata disagree on compression")
    nodes, buffers = metadata.nodes, metadata.buffers
    if len(nodes) != 2 * len(layout.nodes) or len(buffers) != 2 * layout.buffer_count:
        raise UnsafeBatchError(
            f"{len(nodes) // 2} columns and {len(buffers) // 2} buffers, the topic's schema has {len(layout.nodes)} and {layout.buffer_count}"
        )
    end = 0
    for index in range(0, len(buffers), 2):
        offset, length = buffers[index], buffers[index + 1]
        # Buffers lie in order and do not overlap, as every Arrow writer lays them out.
        if length < 0 or offset < end or offset + length > body_length or offset % 8:
            raise UnsafeBatchError(f"buffer {index // 2} at {offset}+{length} lies outside the body of {body_length} bytes or over another")
        end = offset + length
    if metadata.compressed:
        _check_unpacked_size(batch, body_start, buffers)
    _check_nodes(nodes, buffers, layout, metadata.row_count, metadata.compressed)


def _check_unpacked_size(batch: Readable, body_start: int, buffers: tuple[int, ...]) -> None:
    """Each compressed buffer begins with its unpacked size (-1: stored as it is)."""
    total = 0
    for index in range(0, len(buffers), 2):
        length = buffers[index + 1]
        if not length:
            continue
        if length < 8:
            raise UnsafeBatchError(f"compressed buffer {index // 2} is shorter than its size field")
        unpacked = _I64.unpack_from(batch, body_start + buffers[index])[0]
        if unpacked < -1:
            raise UnsafeBatchError(f"compressed buffer {index // 2} claims {unpacked} bytes")
        total += length if unpacked == -1 else unpacked
        if total > UNCOMPRESSED_MAX_BYTES:
            raise UnsafeBatchError(f"unpacks to more than {UNCOMPRESSED_MAX_BYTES} bytes")


def _check_nodes(nodes: tuple[int, ...], buffers: tuple[int, ...], layout: SchemaLayout, row_count: int, compressed: bool) -> None:
    position = 1
    for index, spec in enumerate(layout.nodes):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length < 0 or not 0 <= null_count <= length or (spec.top_level and length != row_count):
            raise UnsafeBatchError(f"column {spec.name!r} claims {length} values and {null_count} nulls in {row_count} rows")
        if spec.parent_index >= 0 and length < nodes[2 * spec.parent_index] * spec.list_size:
            raise UnsafeBatchError(f"column {spec.name!r} has fewer values than its parent")
        for buffer in spec.buffers:
            size = buffers[position]
            position += 2
            if compressed or (size == 0 and length == 0):
                continue
            if buffer.kind is BufferKind.VALIDITY:
                needed = (length + 7) // 8 if null_count else 0
            elif buffer.kind is BufferKind.FIXED:
                needed = (length * buffer.bit_width + 7) // 8
            elif buffer.kind is BufferKind.OFFSETS_32:
                needed = 4 * (length + 1)
            else:
                needed = 0
            if size < needed:
                raise UnsafeBatchError(f"a buffer of column {spec.name!r} has {size} bytes, {length} values need {needed}")
