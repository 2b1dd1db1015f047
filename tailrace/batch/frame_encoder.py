"""Encodes rows of a frame as Arrow buffers, and copies them once into a batch's message.

pyarrow copies into a message of its own, into which our header would be inserted by another copy,
and it traverses each array twice. For plain columns (numbers, times, bytes, text; not nested) the
message is the metadata, which differs between batches of a schema only in its numbers, followed by
the buffers, as in `tailrace.kernel.small_batch`.

Owner: pure. For rows that are not plain, or inconsistent, functions return None; pyarrow then
serialises or rejects them.

Invariants:
- The message is pyarrow's, byte for byte. For a slice of longer columns it omits the neighbouring
  bytes that pyarrow sends as padding.
- Rows are copied when the message is made. The frame is never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa

from tailrace import kernel
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.arrow_metadata import record_batch_positions
from tailrace.format.schema import DEFAULT_SCHEMA, from_message
from tailrace.kernel import small_batch
from tailrace.kernel.reference_frames import Piece

VARIABLE_WIDTH = 0
NOT_PLAIN = -1
PREFIX_BYTES = 8


class Plan:
    """The common properties of all batches of a schema."""

    __slots__ = ("template", "widths")

    def __init__(self, template: small_batch.Template, widths: tuple[int, ...]) -> None:
        self.template = template
        self.widths = widths
        """Bytes per value of each column. VARIABLE_WIDTH stands for bytes or text."""


@lru_cache(maxsize=64)
def plan_of(schema_message: bytes) -> Plan | None:
    """The plan of a schema, None if it has columns that are not plain."""
    schema = from_message(schema_message)
    if schema.equals(DEFAULT_SCHEMA):
        return None  # see `default_rows`
    widths = tuple(_width(field.type) for field in schema)
    if not widths or NOT_PLAIN in widths:
        return None
    message = (
        pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
        .serialize()
        .to_pybytes()
    )
    metadata = message[: PREFIX_BYTES + int.from_bytes(message[4:8], "little")]
    return Plan(small_batch.Template(metadata, *record_batch_positions(message)), widths)


def _width(kind: pa.DataType) -> int:
    types = pa.types
    if types.is_binary(kind) or types.is_string(kind):
        return VARIABLE_WIDTH
    is_fixed = (
        types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind)
    ) and not types.is_boolean(kind)
    return (
        kind.bit_width // 8
        if is_fixed and kind.bit_width and kind.bit_width % 8 == 0
        else NOT_PLAIN
    )


def typed_rows(batch: pa.RecordBatch, schema_message: bytes) -> EncodedRows | None:
    """The rows of a non-empty batch of the topic's schema, None if they are not plain."""
    plan = plan_of(schema_message)
    if plan is None or len(plan.widths) != batch.num_columns:
        return None
    nodes: list[int] = []
    pieces: list[Piece] = []
    for column, width in zip(batch.columns, plan.widths, strict=True):
        if not _lay(column, width, nodes, pieces):
            return None
    return EncodedRows(plan.template, batch.num_rows, nodes, pieces, lambda: batch)


def default_rows(
    frame: pa.RecordBatch, given: list[str], stamp_us: int, make_batch: Callable[[], pa.RecordBatch]
) -> EncodedRows | None:
    """Rows (one or more) for a topic of the default schema, None if they are not plain.

    `given` are the frame's columns, each of its type in the default schema. A missing timestamp is
    filled with the time, a missing key with nulls. Headers are left to pyarrow.
    """
    if "headers" in given:
        return None
    count = frame.num_rows
    nodes: list[int] = []
    pieces: list[Piece] = []
    bitmap, offsets = (count + 7) // 8, 4 * (count + 1)
    if "timestamp" not in given:
        _lay_stamps(count, stamp_us, nodes, pieces)
    elif not _lay(frame.column(given.index("timestamp")), 8, nodes, pieces):
        return None
    if "key" not in given:
        nodes += (count, count)
        pieces += (bitmap, offsets, 0)
    elif not _lay(frame.column(given.index("key")), VARIABLE_WIDTH, nodes, pieces):
        return None
    if not _lay(frame.column(given.index("value")), VARIABLE_WIDTH, nodes, pieces):
        return None
    nodes += (count, count, 0, 0, 0, 0, 0, 0)
    pieces += (bitmap, offsets, 0, 0, 4, 0, 0, 4, 0)
    return EncodedRows(small_batch.template(), count, nodes, pieces, make_batch)


def gathered_rows(
    keys: kernel.GatheredCells | None,
    values: kernel.GatheredCells,
    stamp_us: int,
    make_batch: Callable[[], pa.RecordBatch],
) -> EncodedRows:
    """Rows (one or more) for a topic of the default schema, whose cells are gathered into the
    message.
    """
    count = len(values.offsets) // 4 - 1
    nodes: list[int] = []
    pieces: list[Piece] = []
    bitmap, offsets = (count + 7) // 8, 4 * (count + 1)
    _lay_stamps(count, stamp_us, nodes, pieces)
    if keys is None:
        nodes += (count, count)
        pieces += (bitmap, offsets, 0)
    for cells in (values,) if keys is None else (keys, values):
        nodes += (count, cells.null_count)
        pieces += (0 if cells.valid is None else cells.valid, cells.offsets, cells)
    nodes += (count, count, 0, 0, 0, 0, 0, 0)
    pieces += (bitmap, offsets, 0, 0, 4, 0, 0, 4, 0)
    return EncodedRows(small_batch.template(), count, nodes, pieces, make_batch)


def _lay_stamps(count: int, stamp_us: int, nodes: list[int], pieces: list[Piece]) -> None:
    nodes += (count, 0)
    stamps = np.empty(count, np.int64)
    stamps.fill(stamp_us)
    pieces += (0, stamps.data.cast("B"))


def _lay(column: pa.Array, width: int, nodes: list[int], pieces: list[Piece]) -> bool:
    """Append a column's buffers as pyarrow writes them. False if it is not plain."""
    count, start, nulls = len(column), column.offset, column.null_count
    buffers = column.buffers()
    validity: Readable | int = 0
    if nulls:
        if start or buffers[0] is None:
            return False
        validity = _bits(memoryview(buffers[0]), count)
    if buffers[1] is None:
        return False
    first = memoryview(buffers[1])
    if width:
        if len(first) < (start + count) * width:
            return False
        pieces += (validity, first[start * width : (start + count) * width])
    else:
        if len(first) < 4 * (start + count + 1):
            return False
        offsets = first[4 * start : 4 * (start + count + 1)]
        numbers = offsets.cast("i")
        begin, end = numbers[0], numbers[count]
        data = memoryview(b"") if buffers[2] is None else memoryview(buffers[2])
        if not 0 <= begin <= end <= len(data):
            return False
        if begin:
            offsets = (np.frombuffer(offsets, np.int32) - np.int32(begin)).data.cast("B")
        pieces += (validity, offsets, data[begin:end])
    nodes += (count, nulls)
    return True


def _bits(bitmap: memoryview, count: int) -> Readable:
    """The first `count` bits of a bitmap, with 0 in the rest of the last byte."""
    size = (count + 7) // 8
    if len(bitmap) == size or not count & 7:
        return bitmap[:size]
    copied = bytearray(bitmap[:size])
    copied[-1] &= (1 << (count & 7)) - 1
    return copied
