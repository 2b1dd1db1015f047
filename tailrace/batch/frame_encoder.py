"""Rows of a frame as the buffers that they lie in, laid into a batch's message by one copy.

pyarrow makes a message by a copy of its own, into fresh memory, and our header is put in by another; and it goes over each array once to measure and once to
write. Where columns are plain (numbers, times, bytes, text, without nested ones) the message is its metadata, which is the same for all batches of a schema but
for its numbers, and their buffers one after the other, as in `tailrace.few_rows`.

Owner: pure. What is not plain, or contradicts itself, is None here, and pyarrow's to serialise or refuse.
Invariants: the message is pyarrow's, byte for byte; where the rows are a part of longer columns, without the bytes of others that pyarrow sends along as
    padding. Rows are copied when the message is made, and nothing of the frame is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa

from tailrace import few_rows
from tailrace.formats.arrow_metadata import record_batch_positions
from tailrace.formats.checksum import Readable
from tailrace.plain_rows import PlainRows
from tailrace.schema import DEFAULT_SCHEMA, from_message

VARIABLE_WIDTH = 0
NOT_PLAIN = -1
PREFIX_BYTES = 8


class Plan:
    """What all batches of a schema have in common."""

    __slots__ = ("template", "widths")

    def __init__(self, template: few_rows.Template, widths: tuple[int, ...]) -> None:
        self.template = template
        self.widths = widths
        """Of each column's values, in bytes; VARIABLE_WIDTH: bytes or text."""


@lru_cache(maxsize=64)
def plan_of(schema_message: bytes) -> Plan | None:
    """None: the schema has columns that are not plain."""
    schema = from_message(schema_message)
    if schema.equals(DEFAULT_SCHEMA):
        return None  # see `default_rows`
    widths = tuple(_width(field.type) for field in schema)
    if not widths or NOT_PLAIN in widths:
        return None
    message = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema).serialize().to_pybytes()
    metadata = message[: PREFIX_BYTES + int.from_bytes(message[4:8], "little")]
    return Plan(few_rows.Template(metadata, *record_batch_positions(message)), widths)


def _width(kind: pa.DataType) -> int:
    types = pa.types
    if types.is_binary(kind) or types.is_string(kind):
        return VARIABLE_WIDTH
    is_fixed = (types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind)) and not types.is_boolean(kind)
    return kind.bit_width // 8 if is_fixed and kind.bit_width and kind.bit_width % 8 == 0 else NOT_PLAIN


def typed_rows(batch: pa.RecordBatch, schema_message: bytes) -> PlainRows | None:
    """The rows of a batch, at least one, that has the topic's schema."""
    plan = plan_of(schema_message)
    if plan is None or len(plan.widths) != batch.num_columns:
        return None
    nodes: list[int] = []
    pieces: list[Readable | int] = []
    for column, width in zip(batch.columns, plan.widths, strict=True):
        if not _lay(column, width, nodes, pieces):
            return None
    return PlainRows(plan.template, batch.num_rows, nodes, pieces, lambda: batch)


def default_rows(frame: pa.RecordBatch, given: list[str], stamp_us: int, make_batch: Callable[[], pa.RecordBatch]) -> PlainRows | None:
    """At least one row for a topic of the default schema. `given`: the frame's columns, each of the type that it has there. Timestamps and keys that it does
    not have are filled in: the time, nulls. Headers are pyarrow's to write.
    """
    if "headers" in given:
        return None
    count = frame.num_rows
    nodes: list[int] = []
    pieces: list[Readable | int] = []
    bitmap, offsets = (count + 7) // 8, 4 * (count + 1)
    if "timestamp" not in given:
        nodes += (count, 0)
        stamps = np.empty(count, np.int64)
        stamps.fill(stamp_us)
        pieces += (0, stamps.data.cast("B"))
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
    return PlainRows(few_rows.template(), count, nodes, pieces, make_batch)


def _lay(column: pa.Array, width: int, nodes: list[int], pieces: list[Readable | int]) -> bool:
    """The buffers of a column, as pyarrow writes them; False: it is not so plain."""
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
    """The first bits of a bitmap; of one that is longer, what follows in the last byte is 0."""
    size = (count + 7) // 8
    if len(bitmap) == size or not count & 7:
        return bitmap[:size]
    copied = bytearray(bitmap[:size])
    copied[-1] &= (1 << (count & 7)) - 1
    return copied
