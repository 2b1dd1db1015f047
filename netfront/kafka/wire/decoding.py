"""Decoding of Kafka's messages: a definition becomes a decoder for each version. A message is a
dict by field name, in `snake_case`.

Owner: pure.

Invariants:
- Decoding takes memory for bytes that are there. A length or count is checked against the bytes
  that are left before anything is made for it.
- A message has at most VALUES_MAX elements of arrays, and a request those of its API
  (`entries_max`): one request takes tens of MiB at most, and a part of a second.
- Any bytes give a message or MalformedError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from netfront.kafka.wire.definitions import (
    FIXED,
    INT16,
    INT32,
    Message,
    default_of,
    definitions,
)

VALUES_MAX = 262_144
PARTITION_ENTRIES_MAX = 65_536
ENTRIES_MAX = 32_768
OF_PARTITIONS = frozenset((0, 1, 2, 8, 9, 23, 24, 28, 68, 78, 79))
"""APIs of programs, whose requests name partitions. Requests of all others are smaller."""
_DEPTH_OF_VARINT = 5


class MalformedError(ValueError):
    """Bytes that are no message of their API and version."""


class Reader:
    """A cursor in the bytes of one message."""

    __slots__ = ("data", "end", "left", "limit", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position
        self.end = len(data)
        self.left = self.limit = VALUES_MAX
        """`left`: elements of arrays that may still come."""

    def take(self, length: int) -> int:
        """Advance by `length` bytes; return where they begin. Raises MalformedError."""
        start = self.position
        if length < 0 or length > self.end - start:
            raise MalformedError(
                f"a length of {length} exceeds the {self.end - start} bytes that are left"
            )
        self.position = start + length
        return start

    def varint(self) -> int:
        """Read an unsigned variable-length integer of at most 32 bits. Raises MalformedError."""
        value = shift = 0
        data, position = self.data, self.position
        for _ in range(_DEPTH_OF_VARINT):
            if position >= self.end:
                raise MalformedError("the message ends within a variable-length integer")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.position = position
                return value
            shift += 7
        raise MalformedError("a variable-length integer has more than 5 bytes")

    def count(self, count: int) -> int:
        """Check the count of an array, whose elements have at least one byte. Raises
        MalformedError.
        """
        if count > self.end - self.position:
            raise MalformedError(
                f"an array of {count} elements exceeds the {self.end - self.position} bytes that "
                "are left"
            )
        self.left -= count
        if self.left < 0:
            raise MalformedError(
                f"the message has more than {self.limit} elements of arrays: ask for fewer at once"
            )
        return count


Read = Callable[[Reader], Any]


def entries_max(api: int) -> int:
    """The most elements of arrays in a request of an API."""
    return PARTITION_ENTRIES_MAX if api in OF_PARTITIONS else ENTRIES_MAX


@cache
def request_reader(api: int, version: int) -> Read:
    """The decoder of a request's body."""
    found = definitions()[str(api)]
    read_body = _struct_reader(found["request"], version, version >= found["flexible"])
    limit = entries_max(api)

    def read(reader: Reader) -> Message:
        reader.left = reader.limit = min(reader.left, limit)
        message: Message = read_body(reader)
        return message

    return read


@cache
def response_reader(api: int, version: int) -> Read:
    """The decoder of a response's body, for tests."""
    found = definitions()[str(api)]
    return _struct_reader(found["response"], version, version >= found["flexible"])


def decode(read: Read, reader: Reader) -> Message:
    """Run a decoder over the rest of a message. Raises MalformedError."""
    try:
        found: Message = read(reader)
    except (struct.error, IndexError):
        raise MalformedError("the message ends within a field") from None
    except UnicodeDecodeError:
        raise MalformedError("a text is not UTF-8") from None
    return found


def _struct_reader(fields: list[dict[str, Any]], version: int, flexible: bool) -> Read:
    plain: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    defaults: Message = {}
    for field in fields:
        if not field["low"] <= version <= field["high"]:
            continue
        read = _field_reader(field, version, flexible)
        if "tag" in field and version >= field["tag_low"]:
            tagged[field["tag"]] = field["name"], read
            defaults[field["name"]] = default_of(field)
        else:
            plain.append((field["name"], read))

    def read_plain(reader: Reader) -> Message:
        return {name: read(reader) for name, read in plain}

    def read_flexible(reader: Reader) -> Message:
        found = {name: read(reader) for name, read in plain}
        if defaults:
            found.update(defaults)
        if reader.data[reader.position] == 0:  # no tagged fields
            reader.position += 1
            return found
        for _ in range(reader.count(reader.varint())):
            tag, size = reader.varint(), reader.varint()
            start = reader.take(size)
            if tag in tagged:
                name, read = tagged[tag]
                within = Reader(reader.data, start)
                within.end, within.left, within.limit = start + size, reader.left, reader.limit
                found[name] = read(within)
                reader.left = within.left
                if within.position > start + size:
                    raise MalformedError(f"tagged field {tag} exceeds its length")
        return found

    return read_flexible if flexible else read_plain


def _field_reader(field: dict[str, Any], version: int, flexible: bool) -> Read:
    kind: str = field["type"]
    nullable = version >= field.get("null", version + 1)
    element = kind.removeprefix("[]")
    if element == "struct":
        read = _struct_reader(field["fields"], version, flexible)
    else:
        read = _value_reader(element, flexible, nullable and element == kind)
    if element != kind:
        return _array_reader(read, flexible, nullable)
    if kind == "struct" and nullable:
        return _nullable_struct_reader(read)
    return read


def _nullable_struct_reader(read: Read) -> Read:
    def read_or_null(reader: Reader) -> Any:
        start = reader.take(1)
        return None if reader.data[start] == 0xFF else read(reader)

    return read_or_null


def _array_reader(read: Read, flexible: bool, nullable: bool) -> Read:
    def read_array(reader: Reader) -> Any:
        if flexible:
            count = reader.varint() - 1
        else:
            count = INT32.unpack_from(reader.data, reader.take(4))[0]
        if count < 0:
            if nullable:
                return None
            raise MalformedError("an array is null that may not be")
        return [read(reader) for _ in range(reader.count(count))]

    return read_array


def _value_reader(kind: str, flexible: bool, nullable: bool) -> Read:
    if kind in FIXED:
        unpack, size = FIXED[kind].unpack_from, FIXED[kind].size

        def read_fixed(reader: Reader) -> Any:
            position = reader.position
            reader.position = position + size
            if reader.position > reader.end:
                raise MalformedError("the message ends within a field")
            return unpack(reader.data, position)[0]

        return read_fixed
    if kind == "uuid":

        def read_uuid(reader: Reader) -> bytes:
            start = reader.take(16)
            return reader.data[start : start + 16]

        return read_uuid
    length_of = _length_reader(kind, flexible)
    is_text = kind == "string"
    nullable = nullable or kind == "records"

    def read_bytes(reader: Reader) -> Any:
        length = length_of(reader)
        if length < 0:
            if nullable:
                return None
            raise MalformedError("a text or bytes are null that may not be")
        start = reader.take(length)
        if is_text:
            return reader.data[start : start + length].decode()
        return memoryview(reader.data)[start : start + length]

    return read_bytes


def _length_reader(kind: str, flexible: bool) -> Callable[[Reader], int]:
    if flexible:
        return lambda reader: reader.varint() - 1
    layout = INT16 if kind == "string" else INT32
    return lambda reader: int(layout.unpack_from(reader.data, reader.take(layout.size))[0])
