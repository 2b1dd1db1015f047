"""Reader of untrusted flatbuffers. Each access is within bounds, aligned and of its type, or
raises.

The layout is that of https://flatbuffers.dev/internals/. A table begins with a signed offset to its
vtable, which lists the position of each field in the table. Texts, vectors and tables are
referenced by unsigned offsets. The checks are those of the library's Verifier, which Arrow's
readers run, so they accept everything that is read here without an error.

Owner: pure.

Invariants:
- A length from the bytes is checked against the bytes at hand before anything of that size is
  allocated.
"""

from __future__ import annotations

import struct

from tailrace.format.crc32c import Readable

OFFSET_MAX = 2**31 - 1
_U8 = struct.Struct("<B")
_I16 = struct.Struct("<h")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


class FlatbufferError(ValueError):
    """The bytes are not the expected flatbuffer."""


def _number(data: Readable, kind: struct.Struct, position: int) -> int:
    if position % kind.size or not 0 <= position <= len(data) - kind.size:
        raise FlatbufferError("offsets lead outside the metadata")
    return int(kind.unpack_from(data, position)[0])


def _follow(data: Readable, position: int) -> int:
    offset = _number(data, _U32, position)
    if not 0 < offset <= OFFSET_MAX or position + offset >= len(data):
        raise FlatbufferError("offsets lead outside the metadata")
    return position + offset


class Table:
    """A table. Fields are identified by number; an absent field has its default."""

    __slots__ = ("_data", "_position", "_vtable", "_vtable_bytes")

    def __init__(self, data: Readable, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - _number(data, _I32, position)
        self._vtable_bytes = _number(data, _U16, self._vtable)
        if (
            self._vtable_bytes % 2
            or self._vtable_bytes < 4
            or self._vtable + self._vtable_bytes > len(data)
        ):
            raise FlatbufferError("the vtable lies outside the metadata")

    def _at(self, field: int) -> int:
        """The position of a field, 0 if it is absent."""
        slot = 4 + 2 * field
        relative = (
            _number(self._data, _U16, self._vtable + slot) if slot + 2 <= self._vtable_bytes else 0
        )
        return self._position + relative if relative else 0

    def _value(self, kind: struct.Struct, field: int, default: int) -> int:
        at = self._at(field)
        return _number(self._data, kind, at) if at else default

    def byte(self, field: int) -> int:
        """An unsigned 8-bit number, 0 if it is absent. Raises FlatbufferError."""
        return self._value(_U8, field, 0)

    def short(self, field: int, default: int = 0) -> int:
        """A signed 16-bit number. Raises FlatbufferError."""
        return self._value(_I16, field, default)

    def integer(self, field: int, default: int = 0) -> int:
        """A signed 32-bit number. Raises FlatbufferError."""
        return self._value(_I32, field, default)

    def long(self, field: int) -> int:
        """A signed 64-bit number, 0 if it is absent. Raises FlatbufferError."""
        return self._value(_I64, field, 0)

    def has(self, field: int) -> bool:
        """True if the field is present. Raises FlatbufferError."""
        return bool(self._at(field))

    def table(self, field: int) -> Table | None:
        """A child table, None if it is absent. Raises FlatbufferError."""
        at = self._at(field)
        return Table(self._data, _follow(self._data, at)) if at else None

    def text(self, field: int, bytes_max: int) -> str | None:
        """A text, None if it is absent. Raises FlatbufferError if it is not UTF-8 or exceeds
        `bytes_max`.

        The limit holds per field, since many fields may reference one text.
        """
        at = self._at(field)
        if not at:
            return None
        start, length = self._vector(at, 1)
        if length > bytes_max:
            raise FlatbufferError(f"a text has {length} bytes; {bytes_max} are allowed")
        if start + length >= len(self._data) or self._data[start + length]:
            raise FlatbufferError("a text does not end with a zero byte")
        try:
            return bytes(self._data[start : start + length]).decode()
        except UnicodeDecodeError:
            raise FlatbufferError("a text is not UTF-8") from None

    def tables(self, field: int) -> range:
        """The positions of a vector's offsets to tables, for `table_at`."""
        at = self._at(field)
        if not at:
            return range(0)
        start, length = self._vector(at, 4)
        return range(start, start + 4 * length, 4)

    def table_at(self, position: int) -> Table:
        """The table referenced at `position`. Raises FlatbufferError."""
        return Table(self._data, _follow(self._data, position))

    def check_longs(self, field: int) -> None:
        """Check the bounds of a vector of 64-bit numbers, which is not read."""
        at = self._at(field)
        if at:
            self._vector(at, 8)

    def _vector(self, at: int, item_bytes: int) -> tuple[int, int]:
        """The start of a vector's items, and their number."""
        position = _follow(self._data, at)
        length = _number(self._data, _U32, position)
        start = position + 4
        if start % item_bytes or length * item_bytes > len(self._data) - start:
            raise FlatbufferError("a vector lies outside the metadata")
        return start, length


def root(data: Readable) -> Table:
    """The root table of a flatbuffer. Raises FlatbufferError."""
    return Table(data, _follow(data, 0))
