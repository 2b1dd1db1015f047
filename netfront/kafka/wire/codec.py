"""Codec of Kafka's messages: a table of definitions becomes decoders and encoders by version.

`definitions.json` has Apache Kafka's message definitions (Apache License 2.0), distilled by
`tools/kafka_definitions.py`. A message is a dict by field name, in `snake_case`.

Owner: pure, but for the file, which is read once.

Invariants:
- Decoding takes memory for bytes that are there. A length or count is checked against the bytes
  that are left before anything is made for it.
- A message has at most VALUES_MAX elements of arrays, and a request those of its API
  (`entries_max`): one request takes tens of MiB at most, and a part of a second.
- Any bytes give a message or MalformedError.
- An encoder writes the fields of its version. A missing field has its default.
"""

from __future__ import annotations

import os.path
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson

VALUES_MAX = 262_144
PARTITION_ENTRIES_MAX = 65_536
ENTRIES_MAX = 32_768
OF_PARTITIONS = frozenset((0, 1, 2, 8, 9, 23, 24, 28, 68, 78, 79))
"""APIs of programs, whose requests name partitions. Requests of all others are smaller."""
ZERO_UUID = bytes(16)
NULL_UUID = ZERO_UUID
Readable = bytes | memoryview
Message = dict[str, Any]

_DEPTH_OF_VARINT = 5
_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_FIXED = {
    "int8": struct.Struct(">b"), "int16": _INT16, "int32": _INT32, "int64": _INT64,
    "uint16": struct.Struct(">H"), "uint32": struct.Struct(">I"), "float64": struct.Struct(">d"),
    "bool": struct.Struct(">?"),
}  # fmt: skip
_ZERO: dict[str, Any] = {
    **dict.fromkeys(_FIXED, 0), "bool": False, "float64": 0.0, "string": "", "bytes": b"",
    "records": None, "uuid": ZERO_UUID,
}  # fmt: skip


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
Write = Callable[[bytearray, Any], None]


# ---- definitions ---------------------------------------------------------------------------------


@cache
def definitions() -> dict[str, Any]:
    """All definitions: of APIs by their number, of structures by their name."""
    path = os.path.join(os.path.dirname(__file__), "definitions.json")
    with open(path, "rb") as file:
        found: dict[str, Any] = orjson.loads(file.read())
    return found


def definition(api: int) -> dict[str, Any] | None:
    """The definition of an API; None: there is none."""
    found: dict[str, Any] | None = definitions().get(str(api))
    return found


def is_flexible(api: int, version: int) -> bool:
    """True if this version of the API has tagged fields and compact lengths."""
    found = definition(api)
    return found is not None and version >= found["flexible"]


# ---- decoding ------------------------------------------------------------------------------------


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


@cache
def structure_reader(name: str, version: int) -> Read:
    """The decoder of a structure that clients embed, such as ConsumerProtocolSubscription."""
    return _struct_reader(definitions()[name]["fields"], version, False)


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


def default_of(field: dict[str, Any]) -> Any:
    """The value of a field that is missing."""
    if "default" in field:
        return field["default"]
    kind: str = field["type"]
    if kind.startswith("[]"):
        return []
    if kind == "struct":
        return {inner["name"]: default_of(inner) for inner in field["fields"]}
    return _ZERO[kind]


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
            count = _INT32.unpack_from(reader.data, reader.take(4))[0]
        if count < 0:
            if nullable:
                return None
            raise MalformedError("an array is null that may not be")
        return [read(reader) for _ in range(reader.count(count))]

    return read_array


def _value_reader(kind: str, flexible: bool, nullable: bool) -> Read:
    if kind in _FIXED:
        unpack, size = _FIXED[kind].unpack_from, _FIXED[kind].size

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
    layout = _INT16 if kind == "string" else _INT32
    return lambda reader: int(layout.unpack_from(reader.data, reader.take(layout.size))[0])


# ---- encoding ------------------------------------------------------------------------------------


@cache
def response_writer(api: int, version: int) -> Write:
    """The encoder of a response's body."""
    found = definitions()[str(api)]
    return _struct_writer(found["response"], version, version >= found["flexible"])


@cache
def request_writer(api: int, version: int) -> Write:
    """The encoder of a request's body, for tests."""
    found = definitions()[str(api)]
    return _struct_writer(found["request"], version, version >= found["flexible"])


@cache
def structure_writer(name: str, version: int) -> Write:
    """The encoder of a structure that clients embed."""
    return _struct_writer(definitions()[name]["fields"], version, False)


def write_varint(out: bytearray, value: int) -> None:
    """Append an unsigned variable-length integer."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _struct_writer(fields: list[dict[str, Any]], version: int, flexible: bool) -> Write:
    plain: list[tuple[str, Any, Write]] = []
    tagged: list[tuple[int, str, Any, Write]] = []
    for field in fields:
        if not field["low"] <= version <= field["high"]:
            continue
        write = _field_writer(field, version, flexible)
        if "tag" in field and version >= field["tag_low"]:
            tagged.append((field["tag"], field["name"], default_of(field), write))
        else:
            plain.append((field["name"], default_of(field), write))
    tagged.sort(key=lambda item: item[0])

    def write_struct(out: bytearray, message: Message) -> None:
        get = message.get
        for name, default, write in plain:
            write(out, get(name, default))
        if not flexible:
            return
        present = [
            (tag, write, message[name])
            for tag, name, default, write in tagged
            if name in message and message[name] != default
        ]
        write_varint(out, len(present))
        for tag, write, value in present:
            inner = bytearray()
            write(inner, value)
            write_varint(out, tag)
            write_varint(out, len(inner))
            out += inner

    return write_struct


def _field_writer(field: dict[str, Any], version: int, flexible: bool) -> Write:
    kind: str = field["type"]
    nullable = version >= field.get("null", version + 1)
    element = kind.removeprefix("[]")
    if element == "struct":
        write = _struct_writer(field["fields"], version, flexible)
    else:
        write = _value_writer(element, flexible, nullable and element == kind)
    if element != kind:
        return _array_writer(write, flexible, nullable)
    if kind == "struct" and nullable:
        return _nullable_struct_writer(write)
    return write


def _nullable_struct_writer(write: Write) -> Write:
    def write_or_null(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0xFF)
            return
        out.append(1)
        write(out, value)

    return write_or_null


def _array_writer(write: Write, flexible: bool, nullable: bool) -> Write:
    def write_array(out: bytearray, values: Any) -> None:
        if values is None:
            if nullable:
                out += b"\0" if flexible else b"\xff\xff\xff\xff"
                return
            values = ()
        if flexible:
            write_varint(out, len(values) + 1)
        else:
            out += _INT32.pack(len(values))
        for value in values:
            write(out, value)

    return write_array


def _value_writer(kind: str, flexible: bool, nullable: bool) -> Write:
    if kind in _FIXED:
        pack = _FIXED[kind].pack

        def write_fixed(out: bytearray, value: Any) -> None:
            out += pack(value)

        return write_fixed
    if kind == "uuid":

        def write_uuid(out: bytearray, value: Any) -> None:
            out += value or ZERO_UUID

        return write_uuid
    layout = _INT16 if kind == "string" else _INT32
    nullable = nullable or kind == "records"

    def write_bytes(out: bytearray, value: Any) -> None:
        if value is None:
            if nullable:
                out += b"\0" if flexible else layout.pack(-1)
                return
            value = b""
        elif isinstance(value, str):
            value = value.encode()
        if flexible:
            write_varint(out, len(value) + 1)
        else:
            out += layout.pack(len(value))
        out += value

    return write_bytes
