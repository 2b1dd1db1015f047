"""Parser of Arrow's flatbuffer metadata (Schema and RecordBatch messages) without an Arrow library.

The broker must know whether a batch is safe for readers, since a wrong offset inside one can crash
them. It cannot import pyarrow, which costs 80 MB and 150 ms per process. So this module parses the
two messages by the layout of Arrow's `Message.fbs` and `Schema.fbs`. Schemas are read once per
topic, through `tailrace.format.record_batch.flatbuffer`, which checks everything that Arrow's own
readers check. Record batches are read on every append and get only the checks that their validation
needs. There `struct` checks all bounds; a read past the end becomes `ArrowMetadataError`.

Invariants:
- A length from the bytes is checked against the bytes at hand before anything of that size is
  allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import NamedTuple
from weakref import WeakValueDictionary

from tailrace.format.crc32c import Readable
from tailrace.format.record_batch import flatbuffer
from tailrace.format.record_batch.flatbuffer import FlatbufferError, Table

NESTING_MAX = 16
FIELDS_MAX = 4096
"""Most columns of a schema, children included."""
NAME_MAX = 1_000
"""Most bytes in a column's name."""
METADATA_MAX = 256
"""Most metadata entries of a schema and its columns. Each key and
value may have METADATA_BYTES_MAX.
"""
METADATA_BYTES_MAX = 64 << 10
FIXED_BYTES_MAX = 64 << 20
LIST_SIZE_MAX = 1 << 24
"""Largest size of fixed-size binary and of fixed-size lists; no batch is larger."""
MESSAGE_SCHEMA = 1
MESSAGE_RECORD_BATCH = 3

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


class ArrowMetadataError(ValueError):
    """The bytes are not the expected Arrow metadata."""


@unique
class BufferKind(IntEnum):
    """The content of a buffer, which determines its minimum length for a node's length."""

    VALIDITY = 0
    FIXED = 1
    OFFSETS_32 = 2
    DATA = 3


class BufferSpec(NamedTuple):
    """One buffer of a node."""

    kind: BufferKind
    bit_width: int = 0
    """Bits per value if `kind` is FIXED."""


class NodeSpec(NamedTuple):
    """One field node (depth first) and its buffers. A top-level node's length is the row count."""

    name: str
    top_level: bool
    buffers: tuple[BufferSpec, ...]
    parent_index: int = -1
    """The index of the parent node if their lengths are tied (struct, fixed-size list), else -1."""
    list_size: int = 1
    """Values of this node per value of the parent, if tied."""
    kind: tuple[int | str, ...] = ()
    """The type's number, and the details that distinguish types of the same layout."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SchemaLayout:
    """The nodes (depth first) and buffer count of every batch of a schema."""

    nodes: tuple[NodeSpec, ...]
    buffer_count: int


@dataclass(slots=True)
class RecordBatchMetadata:
    """The numbers of one RecordBatch message: rows, (length, nulls) a node, (offset, length) a
    buffer, each flattened.
    """

    row_count: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    compressed: bool
    body_length: int


def _table_field(data: Readable, table: int, index: int) -> int:
    """The position of field `index` of the table at `table`, 0 if it is absent."""
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
        raise ArrowMetadataError("not an Arrow message of the expected kind")
    return _follow(data, header_at), int(_I64.unpack_from(data, length_at)[0]) if length_at else 0


def read_record_batch(data: Readable, start: int = 8) -> RecordBatchMetadata:
    """Parse the RecordBatch message whose flatbuffer starts at `start`, 8 bytes into the message.

    Raises ArrowMetadataError.
    """
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
        return RecordBatchMetadata(
            rows,
            _pairs(data, nodes_at),
            _pairs(data, buffers_at),
            bool(compression_at),
            body_length,
        )
    except (struct.error, IndexError) as error:
        raise ArrowMetadataError(f"offsets lead outside the metadata ({error})") from None


def codec_of(data: Readable, start: int = 8) -> str:
    """The compression of a RecordBatch message that `read_record_batch` takes: "none", "lz4" or
    "zstd".
    """
    table, _ = _message(data, start, MESSAGE_RECORD_BATCH)
    compression_at = _table_field(data, table, 3)
    if not compression_at:
        return "none"
    codec_at = _table_field(data, _follow(data, compression_at), 0)
    return "zstd" if codec_at and data[codec_at] else "lz4"


def record_batch_positions(message: Readable) -> tuple[int, int, int, int]:
    """Positions of row count, nodes, buffers and body length in a
    RecordBatch message of pyarrow.
    """
    root = _follow(message, 8)
    table, _ = _message(message, 8, MESSAGE_RECORD_BATCH)
    nodes, buffers = (_follow(message, _table_field(message, table, index)) + 4 for index in (1, 2))
    return _table_field(message, table, 0), nodes, buffers, _table_field(message, root, 3)


def _pairs(data: Readable, position: int) -> tuple[int, ...]:
    """Read a vector of structs of two int64 each (FieldNode, Buffer), flattened."""
    if not position:
        return ()
    vector = _follow(data, position)
    count = _U32.unpack_from(data, vector)[0]
    if count > FIELDS_MAX * 4:
        raise ArrowMetadataError(f"a vector has {count} entries; at most {FIELDS_MAX * 4} are read")
    return struct.unpack_from(f"<{2 * count}q", data, vector + 4)


# ---- schemas -------------------------------------------------------------------------------------


_shared: WeakValueDictionary[bytes, SchemaLayout] = WeakValueDictionary()
"""Schema message -> its layout while it is in use, shared by a topic's partitions."""


def read_schema(message: Readable) -> SchemaLayout:
    """Parse an encapsulated Schema message into the layout of its batches.

    Raises ArrowMetadataError for any invalid bytes and for types that are not canonical. Arrow's
    own readers can open every schema that is accepted.
    """
    whole = message if isinstance(message, bytes) else bytes(message)
    layout = _shared.get(whole)
    if layout is None:
        layout = _shared[whole] = _read_schema(whole)
    return layout


def _read_schema(message: bytes) -> SchemaLayout:
    if (
        len(message) < 16
        or _U32.unpack_from(message, 0)[0] != 0xFFFFFFFF
        or _U32.unpack_from(message, 4)[0] != len(message) - 8
    ):
        raise ArrowMetadataError("the schema is not one encapsulated Arrow schema message")
    if len(message) % 8:
        raise ArrowMetadataError("the length of the Arrow message is not a multiple of 8")
    reader = _SchemaReader()
    try:
        reader.read(flatbuffer.root(memoryview(message)[8:]))
    except FlatbufferError as error:
        raise ArrowMetadataError(str(error)) from None
    nodes = reader.nodes
    if not nodes:
        raise ArrowMetadataError("the schema has no columns")
    return SchemaLayout(tuple(nodes), sum(len(node.buffers) for node in nodes))


def nodes_of(message: Readable) -> Iterator[NodeSpec]:
    """Yield the nodes of a Schema message that `read_schema` accepted, depth first, without
    parents.

    Each is parsed on demand, so a search for one column stops there. Raises FlatbufferError,
    ArrowMetadataError.
    """
    schema = flatbuffer.root(memoryview(message)[8:]).table(2)
    if schema is None:
        raise ArrowMetadataError("not an Arrow schema message")
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
    """Parser of one schema. Counts bound its work, since many offsets may lead to one place."""

    def __init__(self) -> None:
        self.nodes: list[NodeSpec] = []
        self._metadata_count = 0

    def read(self, root: Table) -> None:
        """Parse the message. Raises FlatbufferError."""
        schema = root.table(2)
        if schema is None or root.byte(1) != MESSAGE_SCHEMA:
            raise ArrowMetadataError("not an Arrow schema message")
        if root.short(0) not in _METADATA_VERSIONS or root.long(3) or schema.short(0):
            raise ArrowMetadataError(
                "the schema has an unsupported Arrow version, a body, or another byte order"
            )
        schema.check_longs(3)
        self._check_metadata(root, 4, "the schema")
        self._check_metadata(schema, 2, "the schema")
        for position in schema.tables(1):
            self._read_field(schema.table_at(position), -1, 1, 0)

    def _read_field(self, field: Table, parent: int, list_size: int, depth: int) -> None:
        if len(self.nodes) >= FIELDS_MAX or depth > NESTING_MAX:
            raise ArrowMetadataError(
                f"the schema has more than {FIELDS_MAX} columns, or nesting deeper than "
                f"{NESTING_MAX}"
            )
        name = field.text(0, NAME_MAX) or ""
        field.byte(1)
        if field.has(4):
            raise ArrowMetadataError(
                f"column {name!r} is dictionary encoded; cast it to its value type"
            )
        self._check_metadata(field, 6, f"column {name!r}")
        shape = _shape_of(field, name)
        positions = field.tables(5)
        if shape.children is not None and len(positions) != shape.children:
            raise ArrowMetadataError(
                f"column {name!r} has {len(positions)} children; its type has {shape.children}"
            )
        self.nodes.append(
            NodeSpec(
                name, depth == 0, shape.buffers, parent, list_size, (field.byte(2), *shape.details)
            )
        )
        own = len(self.nodes) - 1
        for position in positions:
            self._read_field(
                field.table_at(position), own if shape.is_tied else -1, shape.list_size, depth + 1
            )
        if shape.is_map:
            _check_map(field.table_at(positions[0]), name)

    def _check_metadata(self, table: Table, field: int, where: str) -> None:
        positions = table.tables(field)
        self._metadata_count += len(positions)
        if self._metadata_count > METADATA_MAX:
            raise ArrowMetadataError(f"the schema has more than {METADATA_MAX} metadata entries")
        for position in positions:
            entry = table.table_at(position)
            key = entry.text(0, METADATA_BYTES_MAX)
            if key is None or entry.text(1, METADATA_BYTES_MAX) is None:
                raise ArrowMetadataError(f"{where} has metadata without a key or a value")
            if key.startswith("ARROW:extension"):
                raise ArrowMetadataError(
                    f"{where} has an extension type; cast it to its storage type"
                )


def _shape_of(field: Table, name: str) -> _Shape:
    number = field.byte(2)
    shape = _TYPES.get(number)
    if shape is None:
        shown = _REFUSED_TYPES.get(number, f"type {number}")
        raise ArrowMetadataError(
            f"column {name!r} has type {shown}, which a topic's schema cannot have; cast it to "
            "its plain form"
        )
    table = field.table(3)
    if table is None:
        raise ArrowMetadataError(f"column {name!r} has no type")
    return shape(table, name)


def _check_map(entries: Table, name: str) -> None:
    """Check a map: its child is a struct of key and value; child and keys are not nullable."""
    keys = [entries.table_at(position) for position in entries.tables(5)]
    if entries.byte(2) != _STRUCT or len(keys) != 2 or entries.byte(1) or keys[0].byte(1):
        raise ArrowMetadataError(
            f"column {name!r} is a map whose entries are not a non-null struct of a non-null key "
            "and a value"
        )


class _Shape(NamedTuple):
    """The buffers and children of a type."""

    buffers: tuple[BufferSpec, ...]
    children: int | None = 0
    """Number of children; None: any number."""
    list_size: int = 1
    """Child values per value."""
    is_tied: bool = False
    """True if the children's length follows from this node's."""
    is_map: bool = False
    details: tuple[int | str, ...] = ()


_VALIDITY = BufferSpec(BufferKind.VALIDITY)
_OFFSETS = BufferSpec(BufferKind.OFFSETS_32)
_BYTES = _Shape((_VALIDITY, _OFFSETS, BufferSpec(BufferKind.DATA)))
_STRUCT = 13


def _fixed(bits: int, *details: int | str) -> _Shape:
    return _Shape((_VALIDITY, BufferSpec(BufferKind.FIXED, bits)), details=details)


def _one_of(name: str, label: str, value: int, allowed: Container[int]) -> int:
    if value not in allowed:
        raise ArrowMetadataError(
            f"column {name!r} has {label} {value}, which a topic's schema cannot have"
        )
    return value


def _int(table: Table, name: str) -> _Shape:
    is_signed = table.byte(1)
    return _fixed(
        _one_of(name, "width in bits", table.integer(0), (8, 16, 32, 64)), bool(is_signed)
    )


def _float(table: Table, name: str) -> _Shape:
    return _fixed(16 << _one_of(name, "floating point precision", table.short(0), range(3)))


def _decimal(table: Table, name: str) -> _Shape:
    bits = _one_of(name, "width in bits", table.integer(2, 128), _DECIMAL_DIGITS)
    digits = _one_of(name, "precision", table.integer(0), range(1, _DECIMAL_DIGITS[bits] + 1))
    return _fixed(
        bits, digits, _one_of(name, "scale", table.integer(1), range(-digits, digits + 1))
    )


def _date(table: Table, name: str) -> _Shape:
    return _fixed(32 << _one_of(name, "unit", table.short(0, 1), range(2)))


def _time(table: Table, name: str) -> _Shape:
    unit = _one_of(name, "unit", table.short(0, 1), range(4))
    return _fixed(
        _one_of(name, "width in bits", table.integer(1, 32), (32,) if unit < 2 else (64,)), unit
    )


def _timestamp(table: Table, name: str) -> _Shape:
    unit = _one_of(name, "unit", table.short(0), range(4))
    zone = table.text(1, NAME_MAX)
    if zone and not _ZONE.fullmatch(zone):
        raise ArrowMetadataError(
            f"column {name!r} has time zone {zone[:60]!r}, which is invalid; use UTC"
        )
    return _fixed(64, unit, zone or "")


def _duration(table: Table, name: str) -> _Shape:
    return _fixed(64, _one_of(name, "unit", table.short(0, 1), range(4)))


def _interval(table: Table, name: str) -> _Shape:
    """Months, days and nanoseconds only: pyarrow has no arrays of other intervals."""
    return _fixed(32 << _one_of(name, "unit of intervals", table.short(0), (2,)))


def _fixed_size_binary(table: Table, name: str) -> _Shape:
    return _fixed(8 * _one_of(name, "width in bytes", table.integer(0), range(FIXED_BYTES_MAX + 1)))


def _fixed_size_list(table: Table, name: str) -> _Shape:
    return _Shape(
        (_VALIDITY,),
        1,
        _one_of(name, "size", table.integer(0), range(LIST_SIZE_MAX + 1)),
        is_tied=True,
    )


def _map(table: Table, _name: str) -> _Shape:
    table.byte(0)
    return _Shape((_VALIDITY, _OFFSETS), 1, is_map=True)


_DECIMAL_DIGITS = {32: 9, 64: 18, 128: 38, 256: 76}
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]{0,63}|[+-][0-9]{2}:[0-9]{2}")
_METADATA_VERSIONS = (3, 4)
"""V4 (Arrow 0.8) and V5 (Arrow 1.0), which differ only in unions."""

# Numbers of Schema.fbs's union Type, and the buffers of each type. Other types are not canonical
# and rejected when a topic is created.
_TYPES: dict[int, Callable[[Table, str], _Shape]] = {
    1: lambda table, name: _Shape(()),
    2: _int,
    3: _float,
    4: lambda table, name: _BYTES,
    5: lambda table, name: _BYTES,
    6: lambda table, name: _fixed(1),
    7: _decimal,
    8: _date,
    9: _time,
    10: _timestamp,
    11: _interval,
    12: lambda table, name: _Shape((_VALIDITY, _OFFSETS), 1),
    _STRUCT: lambda table, name: _Shape((_VALIDITY,), None, is_tied=True),
    15: _fixed_size_binary,
    16: _fixed_size_list,
    17: _map,
    18: _duration,
}  # fmt: skip
_REFUSED_TYPES = {
    14: "union", 19: "large_binary", 20: "large_utf8", 21: "large_list", 22: "run_end_encoded",
    23: "binary_view", 24: "utf8_view", 25: "list_view",
    26: "large_list_view",
}  # fmt: skip
