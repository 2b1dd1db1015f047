"""Is this batch safe to hand to a reader? A right checksum does not say so: the one that made the batch also made the checksum.

An Arrow reader follows the offsets it finds in a batch's metadata, and allocates what the batch claims to unpack to: wild offsets crash the process
that reads (tried), and 28 KB that unpack to a GiB, or 232 bytes of a hundred million null rows, cost it gigabytes (tried too). So before a batch is
appended, its flatbuffer is walked once (about 3 us) and held against the topic's schema: kind of message, row count, body length, number of
nodes and buffers, every buffer inside the body and long enough, once unpacked, for its node. What lies inside buffers (string offsets) is the
reader's to validate: the broker does not touch records.

Owner: pure; called by the worker for every batch, by the scheduler and by consumers before they decode one, by `log verify` for stored ones.
Invariants, of a batch that passes, where `max` is the topic's max.message.bytes:
    unpacked_bytes <= unpacked_max(max) = max(16 x max, 1 MiB), at most 64 MiB
    rows <= max(1 Mi, max / 8) and rows <= 64 Ki + 8 x unpacked_bytes
    values of all columns, nested ones included <= max(unpacked_max(max), 8 x the body's bytes)
    in a delay log: metadata + unpacked_bytes <= max, so each of its rows can be delivered uncompressed
The bounds grow with `max`, so a reader that does not know the setting (or knows one lowered since) checks with the largest there can be.

Why these: logs and JSON compress 5 to 20 times, and the SDK cuts batches by their unpacked size, so none of its own comes near 16 x max.message.bytes;
a row that is not compressed has a bit at least, and narrower rows than a byte do not fill a batch of the default size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from weakref import WeakValueDictionary

from tailrace.formats.arrow_metadata import ArrowMetadataError, BufferKind, RecordBatchMetadata, SchemaLayout, read_record_batch
from tailrace.formats.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_SPARSE,
    ATTRIBUTE_TRANSACTIONAL,
    PREFIX_BYTES,
    BatchFormatError,
    BatchHeader,
    metadata_size_of,
)
from tailrace.formats.checksum import Readable
from tailrace.kernel import BatchShape

MESSAGE_MAX_BYTES = 64 << 20
"""The largest max.message.bytes there can be."""
UNPACKED_FACTOR = 16
UNPACKED_MIN_BYTES = 1 << 20
UNPACKED_MAX_BYTES = 64 << 20
ROWS_MIN = 1 << 20
"""So many rows a batch may have whatever max.message.bytes is, if its bytes pay for them."""
ROWS_FREE = 1 << 16
"""So many rows need no bytes: a column of nulls has none."""

_I64 = struct.Struct("<q")
_UNSET = (-1, 0)
_shapes: WeakValueDictionary[SchemaLayout, BatchShape] = WeakValueDictionary()
"""For as long as it is used: a topic's partitions share one, as they share its layout."""


class UnsafeBatchError(ValueError):
    """The batch would mislead or crash a reader; the sentence says how."""


class UnpackedTooLargeError(UnsafeBatchError):
    """The batch is sound, but too large once it is unpacked."""


def shape_of(layout: SchemaLayout) -> BatchShape:
    """What the kernel needs of a layout to check batches by it."""
    shape = _shapes.get(layout)
    if shape is None:
        shape = _shapes[layout] = BatchShape(layout)
    return shape


def unpacked_max(max_message_bytes: int) -> int:
    """How many bytes a batch of a topic with this max.message.bytes may unpack to."""
    return min(max(UNPACKED_FACTOR * max_message_bytes, UNPACKED_MIN_BYTES), UNPACKED_MAX_BYTES)


def rows_max(max_message_bytes: int) -> int:
    """How many rows a batch of a topic with this max.message.bytes may have."""
    return max(ROWS_MIN, max_message_bytes // 8)


def unpacked_bytes(batch: Readable, header: BatchHeader) -> int:
    """What the body of a batch (form proven) claims to unpack to, in bytes: what a reader allocates. Raises UnsafeBatchError."""
    try:
        metadata = read_record_batch(batch, PREFIX_BYTES)
    except ArrowMetadataError as error:
        raise UnsafeBatchError(str(error)) from None
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    _check_ranges(metadata.buffers, header.batch_length - body_start)
    if not metadata.compressed:
        return sum(metadata.buffers[1::2])
    return sum(_unpacked_sizes(batch, body_start, metadata.buffers))


def is_too_large_unpacked(batch: Readable, *, max_message_bytes: int, is_delay_log: bool = False) -> bool:
    """Whether a sound batch would be refused for what it unpacks to: its producer then makes two of it."""
    metadata = read_record_batch(batch, PREFIX_BYTES)
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    sizes = _unpacked_sizes(batch, body_start, metadata.buffers) if metadata.compressed else metadata.buffers[1::2]
    return _size_fault(metadata, sizes, body_start, max_message_bytes, is_delay_log) is not None


def _size_fault(
    metadata: RecordBatchMetadata, sizes: Sequence[int], body_start: int, max_message_bytes: int, is_delay_log: bool
) -> str | None:
    """Which bound of the module's docstring is broken."""
    limit, unpacked = unpacked_max(max_message_bytes), metadata.body_length
    if metadata.compressed:
        unpacked = sum(sizes)
        if unpacked > limit:
            return f"unpacks to more than {limit} bytes ({unpacked}), the most for max.message.bytes={max_message_bytes}"
        if is_delay_log and body_start + unpacked + 8 * len(sizes) > max_message_bytes:
            return (
                f"unpacks to more ({unpacked} bytes) than one batch of max.message.bytes={max_message_bytes} carries: "
                "its records may be delivered uncompressed"
            )
    if metadata.row_count > min(rows_max(max_message_bytes), ROWS_FREE + 8 * unpacked):
        return f"{metadata.row_count} rows in {unpacked} unpacked bytes; at most {rows_max(max_message_bytes)} and 8 a byte are taken"
    values = sum(metadata.nodes[::2])
    if values > max(limit, 8 * metadata.body_length):
        return f"{values} values in its columns, for {metadata.body_length} bytes"
    return None


def check_structure(
    batch: Readable,
    header: BatchHeader,
    layout: SchemaLayout,
    *,
    max_message_bytes: int = MESSAGE_MAX_BYTES,
    is_ours: bool = False,
    is_delay_log: bool = False,
) -> None:
    """Raise UnsafeBatchError unless `batch` (form and checksums already proven) can be read safely with the schema of `layout`;
    UnpackedTooLargeError when only its size speaks against it; BatchFormatError for what this version has not. `is_ours`: it was made by the
    appliance (the scheduler), or is read from a log, where such batches are.
    """
    if header.attributes & ATTRIBUTE_SPARSE:
        raise BatchFormatError("a sparse batch: this version writes none and takes none")
    if not is_ours:
        _check_from_outside(header)
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
    _check_ranges(buffers, body_length)
    sizes = _unpacked_sizes(batch, body_start, buffers) if metadata.compressed else buffers[1::2]
    if fault := _size_fault(metadata, sizes, body_start, max_message_bytes, is_delay_log):
        raise UnpackedTooLargeError(fault)
    _check_nodes(nodes, sizes, layout, metadata.row_count)


def _check_from_outside(header: BatchHeader) -> None:
    """Refuse what only the appliance may say, and what is reserved for later versions. Fields that the worker stamps over may say anything."""
    if header.attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED | ATTRIBUTE_LOG_APPEND_TIME):
        raise UnsafeBatchError("control batches, delivered ones and those stamped with their append time are written by the appliance only")
    if header.attributes & ATTRIBUTE_TRANSACTIONAL:
        raise BatchFormatError("a transactional batch: this version has no transactions")
    if header.due_us not in _UNSET or header.delay_position not in _UNSET or header.min_tick not in _UNSET or header.previous_position:
        raise UnsafeBatchError(
            f"delay fields are the appliance's, a client's batch has -1 or 0 there: due_us={header.due_us} delay_position={header.delay_position} "
            f"min_tick={header.min_tick} previous_position={header.previous_position}"
        )
    if header.control_type or header.reserved_b:
        raise BatchFormatError("the type of a control record, or a reserved field, is not 0")


def _check_ranges(buffers: tuple[int, ...], body_length: int) -> None:
    """Buffers lie in order and do not overlap, as every Arrow writer lays them out."""
    end = 0
    for index in range(0, len(buffers), 2):
        offset, length = buffers[index], buffers[index + 1]
        if length < 0 or offset < end or offset + length > body_length or offset % 8:
            raise UnsafeBatchError(f"buffer {index // 2} at {offset}+{length} lies outside the body of {body_length} bytes or over another")
        end = offset + length


def _unpacked_sizes(batch: Readable, body_start: int, buffers: tuple[int, ...]) -> list[int]:
    """Of each compressed buffer: it begins with its unpacked size (-1: the rest is stored as it is)."""
    sizes = []
    for index in range(0, len(buffers), 2):
        length = buffers[index + 1]
        unpacked = 0
        if length:
            if length < 8:
                raise UnsafeBatchError(f"compressed buffer {index // 2} is shorter than its size field")
            unpacked = _I64.unpack_from(batch, body_start + buffers[index])[0]
            if unpacked == -1:
                unpacked = length - 8
            elif unpacked < 0:
                raise UnsafeBatchError(f"compressed buffer {index // 2} claims {unpacked} bytes")
        sizes.append(unpacked)
    return sizes


def _check_nodes(nodes: tuple[int, ...], sizes: Sequence[int], layout: SchemaLayout, row_count: int) -> None:
    """Each column's length against the rows, its parent's, and its buffers, whose unpacked sizes are given."""
    position = 0
    for index, spec in enumerate(layout.nodes):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length < 0 or not 0 <= null_count <= length or (spec.top_level and length != row_count):
            raise UnsafeBatchError(f"column {spec.name!r} claims {length} values and {null_count} nulls in {row_count} rows")
        if spec.parent_index >= 0 and length < nodes[2 * spec.parent_index] * spec.list_size:
            raise UnsafeBatchError(f"column {spec.name!r} has fewer values than its parent")
        for buffer in spec.buffers:
            size = sizes[position]
            position += 1
            if size == 0 and length == 0:
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
