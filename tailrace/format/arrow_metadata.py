"""Walks Arrow's flatbuffer metadata (Schema and RecordBatch messages) without an Arrow library.

The broker must know whether a batch is safe to hand to a reader (a wild offset inside one crashes it) but may not import pyarrow: 80 MB
and 150 ms a process. So this module reads the two messages it needs, by the layout of Arrow's `Message.fbs` and `Schema.fbs`. Schemas, which are read once for
each topic, go through `tailrace.formats.flatbuffer`, which checks what Arrow's own readers check; record batches, which are read on every
append, do only what the check of their structure needs: bounds are checked by `struct` itself, where every read past the end raises, and is
turned into `ArrowMetadataError`.

Invariants: nothing here allocates by a length found in the bytes before that length is checked against the bytes at hand.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from weakref import WeakValueDictionary

from tailrace.formats import flatbuffer
from tailrace.formats.checksum import Readable
from tailrace.formats.flatbuffer import FlatbufferError, Table

NESTING_MAX = 16
FIELDS_MAX = 4096
"""Columns of a schema, children included."""
NAME_MAX = 1_000
"""Bytes of a column's name."""
METADATA_MAX = 256
"""Entries of metadata in a schema and its columns; each key and value may have METADATA_BYTES_MAX."""
METADATA_BYTES_MAX = 64 << 10
FIXED_BYTES_MAX = 64 << 20
LIST_SIZE_MAX = 1 << 24
"""Of fixed-size binary and lists; no batch is larger."""
MESSAGE_SCHEMA = 1
MESSAGE_RECORD_BATCH = 3

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


class ArrowMetadataError(ValueError):
    """The bytes are not the Arrow metadata they should be."""


class BufferKind(IntEnum):
    """What a buffer holds, which tells how long it must be for a node of a given length."""

    VALIDITY = 0
    FIXED = 1
    OFFSETS_32 = 2
    DATA = 3


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer of a node: what it holds, and for FIXED how wide a value is."""

    kind: BufferKind
    bit_width: int = 0
    """Bits per value where kind is FIXED."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One field node (depth first): its buffers, and whether it is a top-level column, whose length is the row count."""

    name: str
    top_level: bool
    buffers: tuple[BufferSpec, ...]
    parent_index: int = -1
    """The node this one is a child of, where their lengths are tied (struct, fixed-size list)."""
    list_size: int = 1
    """How many values of this node one value of the parent has, where tied."""
    kind: tuple[int | str, ...] = ()
    """The type's number and what else tells it from others that lie alike."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SchemaLayout:
    """What a batch of this schema must look like: its nodes depth first, and how many buffers they have in all."""

    nodes: tuple[NodeSpec, ...]
    buffer_count: int


@dataclass(slots=True)
class RecordBatchMetadata:
    """The numbers of one RecordBatch message: rows, (length, nulls) a node, (offset, length) a buffer, each flattened."""

    row_count: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    compressed: bool
    body_length: int


def _table_field(data: Readable, table: int, index: int) -> int:
    """The position of field `index` of the table at `table`, or 0 where it is absent."""
    vtable = table - _I32.unpack_from(data, table)[0]
    if vtable < 0:
        raise ArrowMetadataError("a vtable before the start")
    slot = 4 + 2 * index
    if slot + 2 > _U16.unpack_from(data, vtable)[0]:
        return 0
    relative = _U16.unpack_from(data, vtable + slot)[0]
    return table + relative if relative else 0


def _follow(data: Readable, position: int) -> int:
    return position + int(_U32.unpack_from(data, position)[0])


def _message(data: Readable, start: int, expected_type: int) -> tuple[int, int]:
    """The position of the message's header table, and its body length."""
    root = _follow(data, start)
    type_at = _table_field(data, root, 1)
    header_at = _table_field(data, root, 2)
    length_at = _table_field(data, root, 3)
    if not type_at or not header_at or data[type_at] != expected_type:
        raise ArrowMetadataError("another kind of Arrow message")
    return _follow(data, header_at), int(_I64.unpack_from(data, length_at)[0]) if length_at else 0


def read_record_batch(data: Readable, start: int = 8) -> RecordBatchMetadata:
    """The RecordBatch message whose flatbuffer starts at `start` (8 bytes behind the message's first). Raises ArrowMetadataError."""
    try:
        table, body_length = _message(data, start, MESSAGE_RECORD_BATCH)
        length_at = _table_field(data, table, 0)
        nodes_at = _table_field(data, table, 1)
        buffers_at = _table_field(data, table, 2)
        compression_at = _table_field(data, table, 3)
        if _table_field(data, table, 4):
            variadic = _follow(data, _table_field(data, table, 4))
            if _U32.unpack_from(data, variadic)[0]:
                raise ArrowMetadataError("view columns have no fixed number of buffers")
        rows = _I64.unpack_from(data, length_at)[0] if length_at else 0
        return RecordBatchMetadata(rows, _pairs(data, nodes_at), _pairs(data, buffers_at), bool(compression_at), body_length)
    except (struct.error, IndexError) as error:
        raise ArrowMetadataError(f"offsets lead outside the metadata ({error})") from None


def record_batch_positions(message: Readable) -> tuple[int, int, int, int]:
    """Where in an encapsulated RecordBatch message its row count, its nodes, its buffers and its body length stand. Of one that pyarrow has made."""
    root = _follow(message, 8)
    table, _ = _message(message, 8, MESSAGE_RECORD_BATCH)
    nodes, buffers = (_follow(message, _table_field(message, table, index)) + 4 for index in (1, 2))
    return _table_field(message, table, 0), nodes, buffers, _table_field(message, root, 3)


def _pairs(data: Readable, position: int) -> tuple[int, ...]:
    """A vector of structs of two int64 each (FieldNode, Buffer), flattened."""
    if not position:
        return ()
    vector = _follow(data, position)
    count = _U32.unpack_from(data, vector)[0]
    if count > FIELDS_MAX * 4:
        raise ArrowMetadataError(f"{count} entries")
    return struct.unpack_from(f"<{2 * count}q", data, vector + 4)


# ---- schemas ---------------------------------------------------------------------------------------------------------------------------


_shared: WeakValueDictionary[bytes, SchemaLayout] = WeakValueDictionary()
"""Schema message -> its layout, for as long as it is used: a topic's partitions share one."""


def read_schema(message: Readable) -> SchemaLayout:
    """The layout that batches of the schema in this encapsulated Schema message have. Raises ArrowMetadataError, whatever the bytes are, also for types
    that are not canonical. What is accepted, Arrow's own readers open.
    """
    whole = message if isinstance(message, bytes) else bytes(message)
    layout = _shared.get(whole)
    if layout is None:
        layout = _shared[whole] = _read_schema(whole)
    return layout


def _read_schema(message: bytes) -> SchemaLayout:
    if len(message) < 16 or _U32.unpack_from(message, 0)[0] != 0xFFFFFFFF or _U32.unpack_from(message, 4)[0] != len(message) - 8:
        raise ArrowMetadataError("not one encapsulated Arrow schema message")
    if len(message) % 8:
        raise ArrowMetadataError("an encapsulated Arrow message has a multiple of 8 bytes")
    reader = _SchemaReader()
    try:
        reader.read(flatbuffer.root(memoryview(message)[8:]))
    except FlatbufferError as error:
        raise ArrowMetadataError(str(error)) from None
    nodes = reader.nodes
    if not nodes:
        raise ArrowMetadataError("a schema without columns")
    return SchemaLayout(tuple(nodes), sum(len(node.buffers) for node in nodes))


def nodes_of(message: Readable) -> Iterator[NodeSpec]:
    """The nodes of a Schema message that `read_schema` has taken, depth first, each read when it is asked for: who looks for one column stops there.
    Parents are not named. Raises FlatbufferError, ArrowMetadataError.
    """
    schema = flatbuffer.root(memoryview(message)[8:]).table(2)
    if schema is None:
        raise ArrowMetadataError("another kind of Arrow message")
    for position in schema.tables(1):
        yield from _nodes_from(schema.table_at(position), 0)


def _nodes_from(field: Table, depth: int) -> Iterator[NodeSpec]:
    if depth > NESTING_MAX:
        raise ArrowMetadataError(f"columns are nested deeper than {NESTING_MAX}")
    name = field.text(0, NAME_MAX) or ""
    shape = _shape_of(field, name)
    yield NodeSpec(name, depth == 0, shape.buffers, kind=(field.byte(2), *shape.details))
    for position in field.tables(5):
        yield from _nodes_from(field.table_at(position), depth + 1)


class _SchemaReader:
    """Reads one schema. What it does is bounded by counts, not by the bytes at hand: many offsets may lead to one place."""

    def __init__(self) -> None:
        self.nodes: list[NodeSpec] = []
        self._metadata_count = 0

    def read(self, root: Table) -> None:
        """Raises FlatbufferError."""
        schema = root.table(2)
        if schema is None or root.byte(1) != MESSAGE_SCHEMA:
            raise ArrowMetadataError("another kind of Arrow message")
        if root.short(0) not in _METADATA_VERSIONS or root.long(3) or schema.short(0):
            raise ArrowMetadataError("the schema is of another Arrow version, has a body, or is of another byte order")
        schema.check_longs(3)
        self._check_metadata(root, 4, "the schema")
        self._check_metadata(schema, 2, "the schema")
        for position in schema.tables(1):
            self._read_field(schema.table_at(position), -1, 1, 0)

    def _read_field(self, field: Table, parent: int, list_size: int, depth: int) -> None:
        if len(self.nodes) >= FIELDS_MAX or depth > NESTING_MAX:
            raise ArrowMetadataError(f"more than {FIELDS_MAX} columns, or nested deeper than {NESTING_MAX}")
        name = field.text(0, NAME_MAX) or ""
        field.byte(1)
        if field.has(4):
            raise ArrowMetadataError(f"column {name!r} is dictionary encoded; write its values")
        self._check_metadata(field, 6, f"column {name!r}")
        shape = _shape_of(field, name)
        positions = field.tables(5)
        if shape.children is not None and len(positions) != shape.children:
            raise ArrowMetadataError(f"column {name!r} has {len(positions)} children; its type has {shape.children}")
        self.nodes.append(NodeSpec(name, depth == 0, shape.buffers, parent, list_size, (field.byte(2), *shape.details)))
        own = len(self.nodes) - 1
        for position in positions:
            self._read_field(field.table_at(position), own if shape.is_tied else -1, shape.list_size, depth + 1)
        if shape.is_map:
            _check_map(field.table_at(positions[0]), name)

    def _check_metadata(self, table: Table, field: int, where: str) -> None:
        positions = table.tables(field)
        self._metadata_count += len(positions)
        if self._metadata_count > METADATA_MAX:
            raise ArrowMetadataError(f"more than {METADATA_MAX} entries of metadata")
        for position in positions:
            entry = table.table_at(position)
            key = entry.text(0, METADATA_BYTES_MAX)
            if key is None or entry.text(1, METADATA_BYTES_MAX) is None:
                raise ArrowMetadataError(f"{where} has metadata without a key or a value")
            if key.startswith("ARROW:extension"):
                raise ArrowMetadataError(f"{where} is of an extension type; cast it to its storage")


def _shape_of(field: Table, name: str) -> _Shape:
    number = field.byte(2)
    shape = _TYPES.get(number)
    if shape is None:
        shown = _REFUSED_TYPES.get(number, f"type {number}")
        raise ArrowMetadataError(f"column {name!r} is of type {shown}, which a topic's schema may not have; cast it to its plain form")
    table = field.table(3)
    if table is None:
        raise ArrowMetadataError(f"column {name!r} has no type")
    return shape(table, name)


def _check_map(entries: Table, name: str) -> None:
    """A map's one child is a struct of key and value, and neither it nor the keys may be null."""
    keys = [entries.table_at(position) for position in entries.tables(5)]
    if entries.byte(2) != _STRUCT or len(keys) != 2 or entries.byte(1) or keys[0].byte(1):
        raise ArrowMetadataError(f"column {name!r} is a map without entries of a key and a value that are never null")


class _Shape(NamedTuple):
    """How values of a type lie in buffers."""

    buffers: tuple[BufferSpec, ...]
    children: int | None = 0
    """How many the type has; None: any number."""
    list_size: int = 1
    """How many child values one value has."""
    is_tied: bool = False
    """Whether the children's length follows from this node's."""
    is_map: bool = False
    details: tuple[int | str, ...] = ()


_VALIDITY = BufferSpec(BufferKind.VALIDITY)
_OFFSETS = BufferSpec(BufferKind.OFFSETS_32)
_BYTES = _Shape((_VALIDITY, _OFFSETS, BufferSpec(BufferKind.DATA)))
_STRUCT = 13


def _fixed(bits: int, *details: int | str) -> _Shape:
    return _Shape((_VALIDITY, BufferSpec(BufferKind.FIXED, bits)), details=details)


def _one_of(name: str, what: str, value: int, allowed: Container[int]) -> int:
    if value not in allowed:
        raise ArrowMetadataError(f"column {name!r}: its {what} is {value}, which is none that a topic may have")
    return value


def _int(table: Table, name: str) -> _Shape:
    is_signed = table.byte(1)
    return _fixed(_one_of(name, "width in bits", table.integer(0), (8, 16, 32, 64)), bool(is_signed))


def _float(table: Table, name: str) -> _Shape:
    return _fixed(16 << _one_of(name, "floating point precision", table.short(0), range(3)))


def _decimal(table: Table, name: str) -> _Shape:
    bits = _one_of(name, "width in bits", table.integer(2, 128), _DECIMAL_DIGITS)
    digits = _one_of(name, "precision", table.integer(0), range(1, _DECIMAL_DIGITS[bits] + 1))
    return _fixed(bits, digits, _one_of(name, "scale", table.integer(1), range(-digits, digits + 1)))


def _date(table: Table, name: str) -> _Shape:
    return _fixed(32 << _one_of(name, "unit", table.short(0, 1), range(2)))


def _time(table: Table, name: str) -> _Shape:
    unit = _one_of(name, "unit", table.short(0, 1), range(4))
    return _fixed(_one_of(name, "width in bits", table.integer(1, 32), (32,) if unit < 2 else (64,)), unit)


def _timestamp(table: Table, name: str) -> _Shape:
    unit = _one_of(name, "unit", table.short(0), range(4))
    zone = table.text(1, NAME_MAX)
    if zone and not _ZONE.fullmatch(zone):
        raise ArrowMetadataError(f"column {name!r}: {zone[:60]!r} is not a time zone; write UTC")
    return _fixed(64, unit, zone or "")


def _duration(table: Table, name: str) -> _Shape:
    return _fixed(64, _one_of(name, "unit", table.short(0, 1), range(4)))


def _interval(table: Table, name: str) -> _Shape:
    """Months, days and nanoseconds only: pyarrow has no arrays of the others."""
    return _fixed(32 << _one_of(name, "unit of intervals", table.short(0), (2,)))


def _fixed_size_binary(table: Table, name: str) -> _Shape:
    return _fixed(8 * _one_of(name, "width in bytes", table.integer(0), range(FIXED_BYTES_MAX + 1)))


def _fixed_size_list(table: Table, name: str) -> _Shape:
    return _Shape((_VALIDITY,), 1, _one_of(name, "size", table.integer(0), range(LIST_SIZE_MAX + 1)), is_tied=True)


def _map(table: Table, _name: str) -> _Shape:
    table.byte(0)
    return _Shape((_VALIDITY, _OFFSETS), 1, is_map=True)


_DECIMAL_DIGITS = {32: 9, 64: 18, 128: 38, 256: 76}
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]{0,63}|[+-][0-9]{2}:[0-9]{2}")
_METADATA_VERSIONS = (3, 4)
"""V4 and V5: of Arrow 0.8 and of 1.0; they differ in unions only."""

# Type union numbers of Schema.fbs, and how each lies in buffers. The rest is not canonical and refused at topic creation.
_TYPES: dict[int, Callable[[Table, str], _Shape]] = {
    1: lambda table, name: _Shape(()), 2: _int, 3: _float, 4: lambda table, name: _BYTES, 5: lambda table, name: _BYTES, 6: lambda table, name: _fixed(1),
    7: _decimal, 8: _date, 9: _time, 10: _timestamp, 11: _interval, 12: lambda table, name: _Shape((_VALIDITY, _OFFSETS), 1),
    _STRUCT: lambda table, name: _Shape((_VALIDITY,), None, is_tied=True), 15: _fixed_size_binary, 16: _fixed_size_list, 17: _map, 18: _duration,
}  # fmt: skip
_REFUSED_TYPES = {
    14: "union", 19: "large_binary", 20: "large_utf8", 21: "large_list", 22: "run_end_encoded", 23: "binary_view", 24: "utf8_view", 25: "list_view",
    26: "large_list_view",
}  # fmt: skip
