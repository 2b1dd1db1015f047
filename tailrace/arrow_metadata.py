"""Walks Arrow's flatbuffer metadata (Schema and RecordBatch messages) without an Arrow library.

The broker must know whether a batch is safe to hand to a reader (a wild offset inside one crashes it) but may not import pyarrow: 80 MB
and 150 ms a process. So this module reads the two messages it needs, by the layout of Arrow's `Message.fbs` and `Schema.fbs` and the
flatbuffers encoding (a table is a signed offset to its vtable, which lists each field's offset in the table). Bounds are checked by
`struct`
itself: every read past the end raises, and is turned into `ArrowMetadataError`.

Invariants: nothing here allocates by a length found in the bytes before that length is checked against the bytes at hand.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from tailrace.checksum import Readable

NESTING_MAX = 16
FIELDS_MAX = 4096
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


@dataclass(frozen=True, slots=True)
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


# Type union numbers of Schema.fbs, and how each lies in buffers. What is not here is not canonical and refused at topic creation.
_TYPE_NAMES = {
    1: "null", 2: "int", 3: "float", 4: "binary", 5: "utf8", 6: "bool", 7: "decimal", 8: "date", 9: "time", 10: "timestamp", 11: "interval",
    12: "list", 13: "struct", 14: "union", 15: "fixed_size_binary", 16: "fixed_size_list", 17: "map", 18: "duration", 19: "large_binary",
    20: "large_utf8", 21: "large_list", 22: "run_end_encoded", 23: "binary_view", 24: "utf8_view", 25: "list_view", 26: "large_list_view",
}  # fmt: skip
_FLOAT_BITS = {0: 16, 1: 32, 2: 64}


def read_schema(message: Readable) -> SchemaLayout:
    """The layout that batches of the schema in this encapsulated Schema message have. Raises ArrowMetadataError, also for types that are
    not canonical.
    """
    if len(message) < 16 or _U32.unpack_from(message, 0)[0] != 0xFFFFFFFF:
        raise ArrowMetadataError("not an encapsulated Arrow schema message")
    try:
        table, _ = _message(message, 8, MESSAGE_SCHEMA)
        fields_at = _table_field(message, table, 1)
        if not fields_at:
            raise ArrowMetadataError("a schema without columns")
        nodes: list[NodeSpec] = []
        _read_fields(message, _follow(message, fields_at), nodes, -1, 1, 0)
    except (struct.error, IndexError) as error:
        raise ArrowMetadataError(f"offsets lead outside the schema ({error})") from None
    if not nodes:
        raise ArrowMetadataError("a schema without columns")
    return SchemaLayout(tuple(nodes), sum(len(node.buffers) for node in nodes))


def _read_fields(data: Readable, vector: int, nodes: list[NodeSpec], parent: int, list_size: int, depth: int) -> None:
    count = _U32.unpack_from(data, vector)[0]
    if count > FIELDS_MAX or depth > NESTING_MAX or len(nodes) > FIELDS_MAX:
        raise ArrowMetadataError("too many columns, or nested too deeply")
    for index in range(count):
        _read_field(data, _follow(data, vector + 4 + 4 * index), nodes, parent, list_size, depth)


def _read_field(data: Readable, field: int, nodes: list[NodeSpec], parent: int, list_size: int, depth: int) -> None:
    name_at = _table_field(data, field, 0)
    name = _string(data, _follow(data, name_at)) if name_at else ""
    type_at = _table_field(data, field, 2)
    number = data[type_at] if type_at else 0
    if _table_field(data, field, 4):
        raise ArrowMetadataError(f"column {name!r} is dictionary encoded; write its values")
    value_at = _table_field(data, field, 3)
    if not value_at:
        raise ArrowMetadataError(f"column {name!r} has no type")
    buffers, child_size, tied = _type_buffers(data, _follow(data, value_at), number, name)
    nodes.append(NodeSpec(name, depth == 0, buffers, parent, list_size))
    children_at = _table_field(data, field, 5)
    if children_at:
        _read_fields(data, _follow(data, children_at), nodes, len(nodes) - 1 if tied else -1, child_size, depth + 1)


def _type_buffers(data: Readable, table: int, number: int, name: str) -> tuple[tuple[BufferSpec, ...], int, bool]:
    """Buffers of a type; how many child values one value has; whether the children's length follows from this node's."""

    def integer(index: int, default: int) -> int:
        at = _table_field(data, table, index)
        return int(_I32.unpack_from(data, at)[0]) if at else default

    def short(index: int, default: int) -> int:
        at = _table_field(data, table, index)
        return int(_U16.unpack_from(data, at)[0]) if at else default

    validity = BufferSpec(BufferKind.VALIDITY)

    def fixed(bits: int) -> tuple[tuple[BufferSpec, ...], int, bool]:
        return (validity, BufferSpec(BufferKind.FIXED, bits)), 1, False

    kind = _TYPE_NAMES.get(number, f"type {number}")
    if kind == "null":
        return (), 1, False
    if kind == "int":
        return fixed(integer(0, 0))
    if kind == "float":
        return fixed(_FLOAT_BITS[short(0, 0)])
    if kind == "bool":
        return fixed(1)
    if kind == "decimal":
        return fixed(integer(2, 128))
    if kind == "date":
        return fixed(32 if short(0, 1) == 0 else 64)
    if kind == "time":
        return fixed(integer(1, 32))
    if kind in ("timestamp", "duration"):
        return fixed(64)
    if kind == "interval":
        return fixed({0: 32, 1: 64, 2: 128}[short(0, 0)])
    if kind == "fixed_size_binary":
        return fixed(8 * integer(0, 0))
    if kind in ("binary", "utf8"):
        return (validity, BufferSpec(BufferKind.OFFSETS_32), BufferSpec(BufferKind.DATA)), 1, False
    if kind in ("list", "map"):
        return (validity, BufferSpec(BufferKind.OFFSETS_32)), 1, False
    if kind == "struct":
        return (validity,), 1, True
    if kind == "fixed_size_list":
        return (validity,), integer(0, 0), True
    raise ArrowMetadataError(f"column {name!r} is of type {kind}, which a topic's schema may not have; cast it to its plain form")


def _string(data: Readable, position: int) -> str:
    length = _U32.unpack_from(data, position)[0]
    if length > 65536 or position + 4 + length > len(data):
        raise ArrowMetadataError("a name leads outside the schema")
    return bytes(data[position + 4 : position + 4 + length]).decode("utf-8", "replace")
