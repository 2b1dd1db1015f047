"""Python reference of the kernel's conversion between Kafka's records and Arrow batches.

A record of Kafka's record batches of magic 2, all numbers as zigzag varints but the attributes:

    length | attributes i8 | timestamp delta | offset delta | key length | key
    | value length | value | header count | headers, each: name length | name | length | value

A length of -1 is a null. Offset deltas count the rows from 0. Timestamps are milliseconds.

Owner: pure.

Invariants:
- Every length is compared with the bytes that are left before it is followed, and every count with
  the bytes that so many items take at least.
- Both kernels find the same fault in the same record.
- Timestamps in milliseconds become microseconds without loss, and microseconds are rounded down.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum, unique

from tailrace.core.records import TIMESTAMP_MAX_MS
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import SEQUENCE_MODULUS
from tailrace.kernel.reference import RecordBuffer
from tailrace.kernel.reference_codec import BatchShape, encoded_batch, stamp_batch

RECORD_MIN_BYTES = 7
"""The bytes of the shortest record."""
HEADER_COST_BYTES = 8
"""The bytes that a header takes at least in a batch."""
RECORDS_MAX_BYTES = 1 << 30
NO_TIMESTAMP = -1
"""The timestamp, ms, of a record without one."""
COLUMN_BUFFERS = 17
"""The buffers of a batch of the default schema."""
_OFFSETS = struct.Struct("<ii")
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")


@unique
class Fault(IntEnum):
    """Reasons why records cannot be converted. The numbers are shared with the compiled kernel."""

    CUT_OFF = 1
    VARINT_TOO_LONG = 2
    NEGATIVE_LENGTH = 3
    BYTES_LEFT = 4
    OFFSET_DELTA = 5
    TIMESTAMP = 6
    HEADER_COUNT = 7
    HEADER_NAME_NULL = 8
    HEADER_NAME_NOT_UTF8 = 9
    KEY_MISSING = 10
    RECORD_TOO_LARGE = 11
    RECORDS_LEFT = 12
    COLUMNS = 13


class RecordFault(ValueError):
    """Records that cannot be converted. `row` is the record's index in its batch."""

    def __init__(self, fault: int, row: int) -> None:
        super().__init__(fault, row)
        self.fault = Fault(fault)
        self.row = row


class RecordReader:
    """Reads the fields of one record after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0
        self.end = len(data)
        self.row = 0

    def varint(self, bytes_max: int, end: int) -> int:
        """The next zigzag varint, at most `bytes_max` bytes before `end`."""
        data, at, number, shift = self.data, self.at, 0, 0
        while True:
            if at >= end:
                raise RecordFault(Fault.CUT_OFF, self.row)
            byte = data[at]
            at += 1
            # The last byte of 32 bits has 4 of them, that of 64 bits 1.
            if shift == 7 * (bytes_max - 1) and byte > (15 if bytes_max == 5 else 1):
                raise RecordFault(Fault.VARINT_TOO_LONG, self.row)
            number |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return (number >> 1) ^ -(number & 1)
            shift += 7

    def cell(self, end: int) -> bytes | None:
        """The next length and its bytes, None for -1."""
        length = self.varint(5, end)
        if length < -1:
            raise RecordFault(Fault.NEGATIVE_LENGTH, self.row)
        if length > end - self.at:
            raise RecordFault(Fault.CUT_OFF, self.row)
        if length < 0:
            return None
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def headers(self, end: int, count_max: int) -> list[tuple[str, bytes | None]]:
        """The headers of a record."""
        count = self.varint(5, end)
        if count < 0 or count > (end - self.at) // 2:
            raise RecordFault(Fault.HEADER_COUNT, self.row)
        if count > count_max:
            raise RecordFault(Fault.RECORD_TOO_LARGE, self.row)
        found = []
        for _ in range(count):
            name = self.cell(end)
            if name is None:
                raise RecordFault(Fault.HEADER_NAME_NULL, self.row)
            try:
                text = name.decode()
            except UnicodeDecodeError:
                raise RecordFault(Fault.HEADER_NAME_NOT_UTF8, self.row) from None
            found.append((text, self.cell(end)))
        return found


KafkaRow = tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]
"""(key, value, time in us, headers)."""


def read_rows(
    records: Readable,
    count: int,
    base_ms: int,
    missing_us: int,
    requires_key: bool,
    headers_max: int,
) -> Iterator[KafkaRow]:
    """The rows of `count` records of at most `headers_max` headers each. Raises RecordFault."""
    reader = RecordReader(memoryview(records).cast("B"))
    if count < 1 or count > reader.end // RECORD_MIN_BYTES or reader.end > RECORDS_MAX_BYTES:
        raise RecordFault(Fault.CUT_OFF, 0)
    for reader.row in range(count):
        length = reader.varint(5, reader.end)
        if length < 0:
            raise RecordFault(Fault.NEGATIVE_LENGTH, reader.row)
        if length > reader.end - reader.at or length < 1:
            raise RecordFault(Fault.CUT_OFF, reader.row)
        end = reader.at + length
        reader.at += 1
        time_ms = base_ms + reader.varint(10, end)
        if not -TIMESTAMP_MAX_MS <= time_ms <= TIMESTAMP_MAX_MS:
            raise RecordFault(Fault.TIMESTAMP, reader.row)
        if reader.varint(5, end) != reader.row:
            raise RecordFault(Fault.OFFSET_DELTA, reader.row)
        key = reader.cell(end)
        if key is None and requires_key:
            raise RecordFault(Fault.KEY_MISSING, reader.row)
        value = reader.cell(end)
        headers = reader.headers(end, headers_max)
        if reader.at != end:
            raise RecordFault(Fault.BYTES_LEFT, reader.row)
        yield key, value, missing_us if time_ms == NO_TIMESTAMP else time_ms * 1000, headers
    if reader.at != reader.end:
        raise RecordFault(Fault.RECORDS_LEFT, count)


def batches_from_kafka(
    records: Readable,
    count: int,
    base_ms: int,
    missing_us: int,
    schema_id: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    seed: int,
    bytes_max: int,
    requires_key: bool,
) -> list[bytearray]:
    """Encode `count` records, the unpacked `records` of one of Kafka's batches, as one batch of the
    default schema, or as several of at most `bytes_max` bytes each.

    A batch that is too large is halved, as are its halves. The first half of an odd number of rows
    is the smaller one. Their sequences are consecutive from `base_sequence` on, -1: they have none.
    So the same records become the same batches. `missing_us` is the time of a record without a
    timestamp. With `requires_key`, a null key is a fault.

    Raises RecordFault. Nothing is left of a call that raises.
    """
    buffer = RecordBuffer()
    for row in read_rows(
        records, count, base_ms, missing_us, requires_key, bytes_max // HEADER_COST_BYTES
    ):
        buffer.add(*row)
    made: list[bytearray] = []
    parts = [(0, count)]
    while parts:
        first, end = parts.pop()
        whole = first == 0 and end == count
        part = buffer if whole else buffer.picked(range(first, end))
        batch = encoded_batch(part, schema_id, seed)
        if len(batch) > bytes_max:
            if end - first == 1:
                raise RecordFault(Fault.RECORD_TOO_LARGE, first)
            middle = (first + end) // 2
            parts += [(middle, end), (first, middle)]
            continue
        if producer_id >= 0:
            sequence = (base_sequence + first) % SEQUENCE_MODULUS
            stamp_batch(batch, producer_id, producer_epoch, sequence, seed)
        made.append(batch)
    return made


class _Cells:
    """A column of bytes: validity, offsets and data, checked cell by cell."""

    def __init__(self, buffers: Sequence[memoryview], count: int, nulls: int) -> None:
        self._valid, self._offsets, self._data = buffers
        self._has_nulls = nulls != 0
        self._read_to = 0
        _check(count, self._valid if nulls else None, 1)
        if count and len(self._offsets) < 4 * (count + 1):
            raise RecordFault(Fault.COLUMNS, 0)

    def bounds(self, row: int) -> tuple[int, int]:
        """The first byte of a row's cell, and the one behind it."""
        start, end = _OFFSETS.unpack_from(self._offsets, 4 * row)
        if not 0 <= start <= end <= len(self._data):
            raise RecordFault(Fault.COLUMNS, row)
        return start, end

    def go_on(self, first: int, end: int) -> None:
        """Check that the cells from `first` to `end` begin behind those of the last call. Cells
        between them are not read, and their offsets can be wrong.
        """
        (start,) = _I32.unpack_from(self._offsets, 4 * first)
        if start < self._read_to:
            raise RecordFault(Fault.COLUMNS, first)
        (self._read_to,) = _I32.unpack_from(self._offsets, 4 * end)

    def cell(self, row: int) -> bytes | None:
        """The bytes of a row, None for a null."""
        start, end = self.bounds(row)
        if self._has_nulls and not _bit(self._valid, row):
            return None
        return bytes(self._data[start:end])


def _bit(bits: memoryview, row: int) -> int:
    return bits[row >> 3] >> (row & 7) & 1


def _check(count: int, bits: memoryview | None, width_bits: int) -> None:
    if bits is not None and len(bits) < (count * width_bits + 7) // 8:
        raise RecordFault(Fault.COLUMNS, 0)


def put_zigzag(out: bytearray, number: int) -> None:
    number = number << 1 if number >= 0 else (-number << 1) - 1
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def put_cell(out: bytearray, cell: bytes | None) -> None:
    if cell is None:
        out.append(1)
        return
    put_zigzag(out, len(cell))
    out += cell


def _checked_views(
    buffers: Sequence[Readable],
    nodes: Sequence[int],
    first: int,
    count: int,
    offsets: Readable | None,
) -> list[memoryview]:
    """The columns' buffers, if they are as long as `nodes` says. Raises RecordFault."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    rows = nodes[0]
    if (
        len(views) != COLUMN_BUFFERS or len(nodes) != 14 or first < 0 or count < 1
        or first + count > rows
        or any(length < 0 for length in nodes)
        or not rows == nodes[2] == nodes[4] == nodes[6]
        or nodes[10] < nodes[8] or nodes[12] < nodes[8]
        or len(views[1]) < 8 * rows or len(views[9]) < 4 * (rows + 1)
    ):  # fmt: skip
        raise RecordFault(Fault.COLUMNS, 0)
    _check(rows, views[0] if nodes[1] else None, 1)
    _check(rows, views[8] if nodes[7] else None, 1)
    _check(nodes[8], views[10] if nodes[9] else None, 1)
    if offsets is not None and len(memoryview(offsets).cast("B")) < 8 * rows:
        raise RecordFault(Fault.COLUMNS, 0)
    return views


def _put_headers(
    record: bytearray,
    views: Sequence[memoryview],
    nodes: Sequence[int],
    names: _Cells,
    contents: _Cells,
    row: int,
) -> None:
    """Encode the headers of a row. Raises RecordFault."""
    start, end = _OFFSETS.unpack_from(views[9], 4 * row)
    if not 0 <= start <= end <= nodes[8]:
        raise RecordFault(Fault.COLUMNS, row)
    if nodes[7] and not _bit(views[8], row):
        end = start
    if start < end:
        names.go_on(start, end)
        contents.go_on(start, end)
    put_zigzag(record, end - start)
    for header in range(start, end):
        name, content = names.cell(header), contents.cell(header)
        if nodes[9] and not _bit(views[10], header):
            name = content = None
        put_cell(record, name or b"")
        put_cell(record, content)


def records_to_kafka(
    buffers: Sequence[Readable],
    nodes: Sequence[int],
    first: int,
    count: int,
    time_us: int,
    has_one_time: bool,
    offsets: Readable | None,
    base_offset: int,
    room: int,
) -> tuple[bytearray, int, int]:
    """Encode rows of the default schema as Kafka's records.

    `buffers` are those of its 7 columns, and `nodes` the length and the number of nulls of each, as
    the metadata of an uncompressed batch has them. Their contents need not be valid. The rows are
    `count` from `first` on, at least one. `time_us` is the time of a row that has none, and with
    `has_one_time` of each row. `offsets` has the int64 offset of each row of a sparse batch; None:
    they are consecutive. Offset deltas count from `base_offset`, or from 0.

    Returns (`room` zeros and the records, the time in ms of the first row, the largest time).
    Raises RecordFault for columns that contradict themselves.
    """
    views = _checked_views(buffers, nodes, first, count, offsets)
    rows = nodes[0]
    keys = _Cells(views[2:5], rows, nodes[3])
    values = _Cells(views[5:8], rows, nodes[5])
    names = _Cells(views[11:14], nodes[10], nodes[11])
    contents = _Cells(views[14:17], nodes[12], nodes[13])
    out, record = bytearray(room), bytearray()
    base_ms = max_ms = 0
    for row in range(first, first + count):
        stamp_us = time_us
        if not has_one_time and not (nodes[1] and not _bit(views[0], row)):
            (stamp_us,) = _I64.unpack_from(views[1], 8 * row)
        stamp_ms = stamp_us // 1000
        if row == first:
            base_ms = max_ms = stamp_ms
        max_ms = max(max_ms, stamp_ms)
        delta = row - first
        if offsets is not None:
            delta = _I64.unpack_from(offsets, 8 * row)[0] - base_offset
            if not 0 <= delta < SEQUENCE_MODULUS:
                raise RecordFault(Fault.COLUMNS, row)
        record.clear()
        record.append(0)
        put_zigzag(record, stamp_ms - base_ms)
        put_zigzag(record, delta)
        put_cell(record, keys.cell(row))
        put_cell(record, values.cell(row))
        _put_headers(record, views, nodes, names, contents, row)
        put_zigzag(out, len(record))
        out += record
        if len(out) > RECORDS_MAX_BYTES:
            raise RecordFault(Fault.RECORD_TOO_LARGE, row)
    return out, base_ms, max_ms


PlainKafka = tuple[bytearray, int, int, int, int, int, int, int, int, int, int]
"""(records as of `records_to_kafka`, the time in ms of the first row, the largest time, then of the
header: base offset, last offset delta, record count, leader epoch, producer id, producer epoch,
base sequence, attributes).
"""


def plain_batch_to_kafka(
    batch: Readable, seed: int, shape: BatchShape, room: int
) -> PlainKafka | None:
    """Verify and encode a whole uncompressed batch of the default schema in one step.

    None: the batch needs the general way, which also has the errors. The reference always does.
    Raises RecordFault for columns that contradict themselves.
    """
    return None
