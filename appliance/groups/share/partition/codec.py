"""The encoding of a share partition's state, for the table `share_partitions`.

Owner: pure.
Invariants: `decode(encode(spans))` equals `spans` except for the expiry of locks, which a start
    sets again. Damaged bytes raise StateFormatError.
Layout (little endian; v: an unsigned LEB128 number):

    0 version u8 (1) | 1 reserved u8 | 2 reserved u16 | 4 crc32c u32 of the rest
    8 start offset v | members v | spans v
      each member: length v | UTF-8
      each span:   count v | kind u8
                   AVAILABLE, ACQUIRED: delivery count v | ACQUIRED: index of its member v
"""

from __future__ import annotations

import struct

from appliance.groups.share.partition.offset_ranges import Kind, OffsetRanges, State
from tailrace.format.crc32c import crc32c

VERSION = 1
OFFSET_MAX = (1 << 63) - 1
_HEAD = struct.Struct("<BBHI")


class StateFormatError(ValueError):
    """The bytes are not the state of a share partition."""


def encode(spans: OffsetRanges) -> bytes:
    """Encode the state."""
    members: dict[str, int] = {}
    body = bytearray()
    count = 0
    for span in spans:
        count += 1
        state = span.state
        _append(body, span.size)
        body.append(state.kind)
        if state.kind in (Kind.AVAILABLE, Kind.ACQUIRED):
            _append(body, state.delivery_count)
        if state.kind is Kind.ACQUIRED:
            _append(body, members.setdefault(state.member, len(members)))
    head = bytearray()
    for number in (spans.start, len(members), count):
        _append(head, number)
    for member in members:
        name = member.encode()
        _append(head, len(name))
        head += name
    head += body
    return _HEAD.pack(VERSION, 0, 0, crc32c(head)) + head


def decode(data: bytes) -> OffsetRanges:
    """Decode a state; its locks expire at 0. Raises StateFormatError."""
    if len(data) < _HEAD.size:
        raise StateFormatError(f"{len(data)} bytes; a state has at least {_HEAD.size}")
    version, _, _, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise StateFormatError(f"version {version}; this program reads version {VERSION}")
    if crc32c(memoryview(data)[_HEAD.size :]) != checksum:
        raise StateFormatError("the checksum does not match")
    try:
        return _decode(data)
    except (IndexError, ValueError, UnicodeDecodeError, AssertionError) as error:
        raise StateFormatError(f"{type(error).__name__}: {error}") from None


def _decode(data: bytes) -> OffsetRanges:
    start, at = _number(data, _HEAD.size)
    member_count, at = _number(data, at)
    span_count, at = _number(data, at)
    members = []
    for _ in range(member_count):
        length, at = _number(data, at)
        if at + length > len(data):
            raise IndexError("a member is cut off")
        members.append(data[at : at + length].decode())
        at += length
    spans = OffsetRanges(start)
    for _ in range(span_count):
        count, at = _number(data, at)
        kind, delivery_count, member = Kind(data[at]), 0, ""
        at += 1
        if kind in (Kind.AVAILABLE, Kind.ACQUIRED):
            delivery_count, at = _number(data, at)
        if kind is Kind.ACQUIRED:
            number, at = _number(data, at)
            member = members[number]
        if (
            not count
            or spans.next + count > OFFSET_MAX
            or (not len(spans) and kind not in (Kind.AVAILABLE, Kind.ACQUIRED))
        ):
            raise ValueError(f"an invalid span of {count} offsets of kind {kind.name}")
        spans.append(count, State(kind, delivery_count, member))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes behind the state")
    return spans


def _append(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise ValueError("a number that is too long")
    if number > OFFSET_MAX:
        raise ValueError("a number that is too large")
    return number, at
