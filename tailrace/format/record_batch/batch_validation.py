"""Validation of a batch before it is appended or decoded: it must be safe for readers.

Checksums do not show this, since the batch's producer also computes them. An Arrow reader follows
the offsets in a batch's metadata and allocates the claimed unpacked size. Wrong offsets crash the
reader, and a small batch can claim gigabytes. So the flatbuffer of each batch is walked once (about
3 us) and compared with the topic's schema: kind of message, row count, body length, number of nodes
and buffers. Each buffer must be inside the body, and long enough for its node after decompression.
The contents of buffers (string offsets) are validated by readers; the broker does not touch
records.

Owner: pure. The worker calls it for every batch, the scheduler and consumers before they decode
one, `log verify` for stored ones.

Invariants of a valid batch, where `max` is the topic's max.message.bytes:
- unpacked_bytes <= unpacked_max(max) = max(16 x max, 1 MiB), at most 64 MiB
- rows <= max(1 Mi, max / 8) and rows <= 64 Ki + 8 x unpacked_bytes
- values of all columns, nested ones included <= max(unpacked_max(max), 8 x the body's bytes)
- in a delay log: metadata + unpacked_bytes <= max, so each row can be delivered uncompressed

The bounds grow with `max`. A reader that does not know the setting, or knows a value lowered since,
checks with the largest value.

Reasons: logs and JSON compress 5 to 20 times, and the SDK limits batches by unpacked size, so its
batches stay far below 16 x max.message.bytes. An uncompressed row takes at least a bit, and rows
narrower than a byte do not fill a batch of the default size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    BufferKind,
    RecordBatchMetadata,
    SchemaLayout,
    read_record_batch,
)
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_SPARSE,
    ATTRIBUTE_TRANSACTIONAL,
    PREFIX_BYTES,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchFormatError,
    BatchHeader,
    metadata_size_of,
)

MESSAGE_MAX_BYTES = 64 << 20
"""The largest max.message.bytes."""
UNPACKED_FACTOR = 16
UNPACKED_MIN_BYTES = 1 << 20
UNPACKED_MAX_BYTES = 64 << 20
ROWS_MIN = 1 << 20
"""Rows that a batch may have with any max.message.bytes, if its bytes allow them."""
ROWS_FREE = 1 << 16
"""Rows that need no bytes: a column of nulls has none."""

_I64 = struct.Struct("<q")
_UNSET = (-1, 0)


class UnsafeBatchError(ValueError):
    """The batch would mislead or crash a reader."""


class UnpackedTooLargeError(UnsafeBatchError):
    """The batch is valid but too large after decompression."""


def unpacked_max(max_message_bytes: int) -> int:
    """The most unpacked bytes of a batch in a topic with this max.message.bytes."""
    return min(max(UNPACKED_FACTOR * max_message_bytes, UNPACKED_MIN_BYTES), UNPACKED_MAX_BYTES)


def rows_max(max_message_bytes: int) -> int:
    """The most rows of a batch in a topic with this max.message.bytes."""
    return max(ROWS_MIN, max_message_bytes // 8)


def unpacked_bytes(batch: Readable, header: BatchHeader) -> int:
    """The claimed unpacked size of a batch's body, in bytes. A reader allocates this much.

    The batch's form must be verified. Raises UnsafeBatchError.
    """
    try:
        metadata = read_record_batch(batch, PREFIX_BYTES)
    except ArrowMetadataError as error:
        raise UnsafeBatchError(str(error)) from None
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    _check_ranges(metadata.buffers, header.batch_length - body_start)
    if not metadata.compressed:
        return sum(metadata.buffers[1::2])
    return sum(_unpacked_sizes(batch, body_start, metadata.buffers))


def is_too_large_unpacked(
    batch: Readable, *, max_message_bytes: int, is_delay_log: bool = False
) -> bool:
    """True if a valid batch would be rejected for its unpacked
    size. Its producer then splits it.
    """
    metadata = read_record_batch(batch, PREFIX_BYTES)
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    sizes = (
        _unpacked_sizes(batch, body_start, metadata.buffers)
        if metadata.compressed
        else metadata.buffers[1::2]
    )
    return _size_fault(metadata, sizes, body_start, max_message_bytes, is_delay_log) is not None


def _size_fault(
    metadata: RecordBatchMetadata,
    sizes: Sequence[int],
    body_start: int,
    max_message_bytes: int,
    is_delay_log: bool,
) -> str | None:
    """The first bound of the module's docstring that is exceeded, as a message."""
    limit, unpacked = unpacked_max(max_message_bytes), metadata.body_length
    if metadata.compressed:
        unpacked = sum(sizes)
        if unpacked > limit:
            return (
                f"the batch unpacks to {unpacked} bytes; the limit for "
                f"max.message.bytes={max_message_bytes} is {limit}"
            )
        if is_delay_log and body_start + unpacked + 8 * len(sizes) > max_message_bytes:
            return (
                f"the batch unpacks to {unpacked} bytes, more than one uncompressed batch of "
                f"max.message.bytes={max_message_bytes} can deliver"
            )
    if metadata.row_count > min(rows_max(max_message_bytes), ROWS_FREE + 8 * unpacked):
        return (
            f"the batch has {metadata.row_count} rows in {unpacked} unpacked bytes; the limit is "
            f"{rows_max(max_message_bytes)} rows and 8 per byte"
        )
    values = sum(metadata.nodes[::2])
    if values > max(limit, 8 * metadata.body_length):
        return (
            f"the batch has {values} values in its columns, too many for "
            f"{metadata.body_length} bytes"
        )
    return None


def validate_batch(
    batch: Readable,
    header: BatchHeader,
    layout: SchemaLayout,
    *,
    max_message_bytes: int = MESSAGE_MAX_BYTES,
    is_ours: bool = False,
    is_delay_log: bool = False,
    has_owner: bool = False,
) -> None:
    """Check that a batch can be read safely with the schema of `layout`.

    Its form and checksums must be verified. `is_ours` is for batches that the appliance (the
    scheduler) made or that are read from a log, `has_owner` for those in which the front has
    named an owner of delayed records. Raises UnsafeBatchError, UnpackedTooLargeError if
    only its size is wrong, and BatchFormatError for features that this version lacks.
    """
    if not is_ours:
        _check_from_outside(header, has_owner)
    if header.is_sparse:
        if is_delay_log:
            raise BatchFormatError("a delay log has a sparse batch; it is never cleaned")
        from tailrace.format.record_batch.sparse_layout import sparse_layout

        layout = sparse_layout(layout)
    try:
        metadata = read_record_batch(batch, PREFIX_BYTES)
    except ArrowMetadataError as error:
        raise UnsafeBatchError(str(error)) from None
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    body_length = header.batch_length - body_start
    if metadata.body_length != body_length:
        raise UnsafeBatchError(
            f"metadata claims a body of {metadata.body_length} bytes; it has {body_length}"
        )
    if metadata.row_count != header.record_count:
        raise UnsafeBatchError(
            f"metadata claims {metadata.row_count} rows; the header has {header.record_count}"
        )
    if metadata.compressed != bool(header.attributes & ATTRIBUTE_COMPRESSED):
        raise UnsafeBatchError("header and metadata disagree on compression")
    nodes, buffers = metadata.nodes, metadata.buffers
    if len(nodes) != 2 * len(layout.nodes) or len(buffers) != 2 * layout.buffer_count:
        raise UnsafeBatchError(
            f"the batch has {len(nodes) // 2} columns and {len(buffers) // 2} buffers; the topic's "
            f"schema has {len(layout.nodes)} and {layout.buffer_count}"
        )
    _check_ranges(buffers, body_length)
    sizes = _unpacked_sizes(batch, body_start, buffers) if metadata.compressed else buffers[1::2]
    if fault := _size_fault(metadata, sizes, body_start, max_message_bytes, is_delay_log):
        raise UnpackedTooLargeError(fault)
    _check_nodes(nodes, sizes, layout, metadata.row_count)


def null_count_of(batch: Readable, node: int) -> int:
    """The number of nulls of a node of a valid batch."""
    return read_record_batch(batch, PREFIX_BYTES).nodes[2 * node + 1]


def _check_from_outside(header: BatchHeader, has_owner: bool) -> None:
    """Reject attributes and fields that only the appliance may set or that are reserved.

    Fields that the worker overwrites may have any value.
    """
    if header.attributes & ATTRIBUTE_SPARSE:
        raise BatchFormatError("the batch is sparse; only the appliance may make sparse batches")
    if header.attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED | ATTRIBUTE_LOG_APPEND_TIME):
        raise UnsafeBatchError(
            "the batch is marked as control, delivered or stamped with its append time; only the "
            "appliance may set these attributes"
        )
    if bool(header.attributes & ATTRIBUTE_TRANSACTIONAL) != (
        header.producer_id >= TRANSACTIONAL_PRODUCER_IDS
    ):
        raise UnsafeBatchError(
            f"the batch of producer {header.producer_id} has attributes 0x{header.attributes:x}: a "
            "batch is transactional if and only if its producer id is in the range of "
            f"transactional producers, from {TRANSACTIONAL_PRODUCER_IDS} on"
        )
    if (
        header.due_us not in _UNSET
        or (header.delay_position not in _UNSET and not has_owner)
        or header.min_tick not in _UNSET
        or header.previous_position
    ):
        raise UnsafeBatchError(
            "the batch sets delay fields, which only the appliance may set; use -1 or 0: "
            f"due_us={header.due_us} delay_position={header.delay_position} "
            f"min_tick={header.min_tick} previous_position={header.previous_position}"
        )
    if header.control_type or header.merged_count:
        raise BatchFormatError("the control type or a reserved field is not 0")


def _check_ranges(buffers: tuple[int, ...], body_length: int) -> None:
    """Check that buffers are in order and do not overlap, as every Arrow writer lays them out."""
    end = 0
    for index in range(0, len(buffers), 2):
        offset, length = buffers[index], buffers[index + 1]
        if length < 0 or offset < end or offset + length > body_length or offset % 8:
            raise UnsafeBatchError(
                f"buffer {index // 2} at {offset}+{length} lies outside the body of {body_length} "
                "bytes or overlaps another"
            )
        end = offset + length


def _unpacked_sizes(batch: Readable, body_start: int, buffers: tuple[int, ...]) -> list[int]:
    """The unpacked size of each compressed buffer, from its first 8
    bytes; -1: stored uncompressed.
    """
    sizes = []
    for index in range(0, len(buffers), 2):
        length = buffers[index + 1]
        unpacked = 0
        if length:
            if length < 8:
                raise UnsafeBatchError(
                    f"compressed buffer {index // 2} is shorter than its size field"
                )
            unpacked = _I64.unpack_from(batch, body_start + buffers[index])[0]
            if unpacked == -1:
                unpacked = length - 8
            elif unpacked < 0:
                raise UnsafeBatchError(f"compressed buffer {index // 2} claims {unpacked} bytes")
        sizes.append(unpacked)
    return sizes


def _check_nodes(
    nodes: tuple[int, ...], sizes: Sequence[int], layout: SchemaLayout, row_count: int
) -> None:
    """Check each column's length against the rows, its parent and its buffers' unpacked sizes."""
    position = 0
    for index, spec in enumerate(layout.nodes):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length < 0 or not 0 <= null_count <= length or (spec.top_level and length != row_count):
            raise UnsafeBatchError(
                f"column {spec.name!r} claims {length} values and {null_count} nulls in "
                f"{row_count} rows"
            )
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
                raise UnsafeBatchError(
                    f"a buffer of column {spec.name!r} has {size} bytes; {length} values need "
                    f"{needed}"
                )
