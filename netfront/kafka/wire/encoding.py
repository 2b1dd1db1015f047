"""Encoding of Kafka's messages: a definition becomes an encoder for each version.

Owner: pure.

Invariants: an encoder writes the fields of its version. A missing field has its default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from netfront.kafka.wire.definitions import (
    FIXED,
    INT16,
    INT32,
    ZERO_UUID,
    Message,
    default_of,
    definitions,
)

Write = Callable[[bytearray, Any], None]


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
            out += INT32.pack(len(values))
        for value in values:
            write(out, value)

    return write_array


def _value_writer(kind: str, flexible: bool, nullable: bool) -> Write:
    if kind in FIXED:
        pack = FIXED[kind].pack

        def write_fixed(out: bytearray, value: Any) -> None:
            out += pack(value)

        return write_fixed
    if kind == "uuid":

        def write_uuid(out: bytearray, value: Any) -> None:
            out += value or ZERO_UUID

        return write_uuid
    layout = INT16 if kind == "string" else INT32
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
