"""Bodies of PRODUCE: the entries before the batches of a request, and the results of each.

Decoders raise WireError, and allocate no more than the bytes at hand.

Layout (little endian; topic ids are 16 raw bytes):

    version 1
      request   topic_id 16s | partition i32 | acks i32 (0, 1, -1 = all) | timeout_ms u32 |
                slot_map_version u32 (0: none), then one frame: the batch
      response  base_offset i64 | append_time_us i64 | leader_epoch i32 |
                flags u32 (1: a duplicate)
    version 2
      request   acks i32 (0, 1, -1 = all) | timeout_ms u32 | count u32 | reserved u32,
                then `count` x { topic_id 16s | partition i32 | slot_map_version u32 (0: none) |
                length u32 | reserved u32 }, then 1 to PRODUCE_FRAMES_MAX frames with the batches
                in the order of the entries, each frame with one or more whole ones.
                Version 3: the entries may be followed by trace_id 16s, of a trace that a record
                belongs to
      response  count u32 | reserved u32, then in the order of the request `count` x
                { error u16 | flags u16 (1: a duplicate) | leader_epoch i32 | base_offset i64 |
                append_time_us i64 }
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, WireError, malformed

ACKS_ALL = -1
PRODUCE_BATCHES_MAX = 4096
TRACED_PRODUCE_VERSION = 3
"""The first version of PRODUCE that may have a trace id."""
POSITIONED_PRODUCE_VERSION = 4
"""The first version of PRODUCE whose batches may require the end of their log."""
TRACE_ID_BYTES = 16
_PRODUCE = struct.Struct("<16siiII")
_PRODUCED = struct.Struct("<qqiI")
_PRODUCE_MANY = struct.Struct("<iIII")
_PRODUCE_ENTRY = struct.Struct("<16siII4x")
_PRODUCE_ONE = struct.Struct("<iIII16siII4x")
"""_PRODUCE_MANY followed by one _PRODUCE_ENTRY."""
_PRODUCED_MANY = struct.Struct("<II")
_PRODUCED_ENTRY = struct.Struct("<HHiqq")
_PRODUCED_ONE = struct.Struct("<IIHHiqq")
assert _PRODUCE_ONE.size == _PRODUCE_MANY.size + _PRODUCE_ENTRY.size
assert _PRODUCED_ONE.size == _PRODUCED_MANY.size + _PRODUCED_ENTRY.size
PRODUCED_DUPLICATE = 1
_FIRST_ANSWER, _ANSWER_BYTES, _TIMED_OUT = (
    _PRODUCED_MANY.size,
    _PRODUCED_ENTRY.size,
    int(ErrorCode.TIMED_OUT),
)
_UNANSWERED = _PRODUCED_ENTRY.pack(ErrorCode.TIMED_OUT, 0, -1, -1, -1)


class ProduceRequest(NamedTuple):
    """The header of a PRODUCE request of version 1. `acks` is 0, 1 or ACKS_ALL."""

    topic_id: bytes
    partition: int
    acks: int
    timeout_ms: int
    slot_map_version: int = 0
    """The version of the slot map that routed the batch, 0 for none. Used only in topics with hash
    slots.
    """


class ProduceResponse(NamedTuple):
    """The result of an append: the batch's first offset and its append time.

    `flags` is PRODUCED_DUPLICATE for a batch that was already stored.
    """

    base_offset: int
    append_time_us: int
    leader_epoch: int
    flags: int


class ProduceEntry(NamedTuple):
    """The target and the length in bytes of a batch in a PRODUCE request of version 2 or 3.

    `slot_map_version` is as in ProduceRequest.
    """

    topic_id: bytes
    partition: int
    slot_map_version: int
    length: int


class ProduceBatches(NamedTuple):
    """The header of a PRODUCE request of version 2 or 3. `acks` is 0, 1 or ACKS_ALL.

    Each of `entries` has the fields of a ProduceEntry.
    """

    acks: int
    timeout_ms: int
    entries: Sequence[tuple[bytes, int, int, int]]
    trace_id: bytes = b""
    """Version 3: the 16 bytes of a trace that a record belongs to, or none."""


class ProducedEntry(NamedTuple):
    """The result of one batch. The other fields are valid if `error` is OK (0).

    `flags` is PRODUCED_DUPLICATE for a batch that was already stored; also with UNKNOWN_SEQUENCE,
    if it was certainly stored at an offset that is forgotten. `base_offset` is the end of the log
    then.
    """

    error: int
    flags: int
    leader_epoch: int
    base_offset: int
    append_time_us: int


def encode_produce(request: ProduceRequest) -> bytes:
    """Encode the frame before the batch."""
    return _PRODUCE.pack(*request)


def decode_produce(frame: Readable) -> ProduceRequest:
    """Decode the frame before the batch. Raises WireError."""
    if len(frame) != _PRODUCE.size:
        raise malformed(
            f"a produce request has {_PRODUCE.size} bytes before its batch; this one has "
            f"{len(frame)}"
        )
    request = ProduceRequest(*_PRODUCE.unpack(frame))
    if request.acks not in (0, 1, ACKS_ALL):
        raise malformed(f"acks is {request.acks}; use 0, 1 or -1 (all)")
    return request


def encode_produced(response: ProduceResponse) -> bytes:
    """Encode the body of a PRODUCE response."""
    return _PRODUCED.pack(*response)


def decode_produced(frame: Readable) -> ProduceResponse:
    """Decode the body of a PRODUCE response. Raises WireError."""
    if len(frame) != _PRODUCED.size:
        raise malformed(f"a produce response has {_PRODUCED.size} bytes; this one has {len(frame)}")
    return ProduceResponse(*_PRODUCED.unpack(frame))


def encode_produce_batches(request: ProduceBatches) -> bytes:
    """Encode the frame before the batches."""
    if len(request.entries) == 1:
        one = _PRODUCE_ONE.pack(request.acks, request.timeout_ms, 1, 0, *request.entries[0])
        return one + request.trace_id if request.trace_id else one
    head = _PRODUCE_MANY.pack(request.acks, request.timeout_ms, len(request.entries), 0)
    packed = [_PRODUCE_ENTRY.pack(*entry) for entry in request.entries]
    return b"".join([head, *packed, request.trace_id])


def decode_produce_batches(frame: Readable, version: int = 2) -> ProduceBatches:
    """Decode the frame before 1 to PRODUCE_BATCHES_MAX batches. Raises WireError."""
    if len(frame) < _PRODUCE_MANY.size:
        raise malformed("the produce request is cut off")
    acks, timeout_ms, count, _ = _PRODUCE_MANY.unpack_from(frame, 0)
    if acks not in (0, 1, ACKS_ALL):
        raise malformed(f"acks is {acks}; use 0, 1 or -1 (all)")
    if not 1 <= count <= PRODUCE_BATCHES_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {count} batches; 1 to {PRODUCE_BATCHES_MAX} are allowed",
        )
    size = _PRODUCE_MANY.size + count * _PRODUCE_ENTRY.size
    with_trace = version >= TRACED_PRODUCE_VERSION and len(frame) == size + TRACE_ID_BYTES
    if len(frame) != size and not with_trace:
        raise malformed(
            f"a produce request of {count} batches has {size} bytes before them; this one has "
            f"{len(frame)}"
        )
    view = memoryview(frame)
    return ProduceBatches(
        acks,
        timeout_ms,
        list(_PRODUCE_ENTRY.iter_unpack(view[_PRODUCE_MANY.size : size])),
        bytes(view[size:]),
    )


def cut_batches(
    entries: Sequence[tuple[bytes, int, int, int]], frames: Sequence[Readable]
) -> list[Readable]:
    """Split the frames of a PRODUCE request of version 2 or 3 into its batches.

    No batch spans two frames. A frame with one batch is returned as it is, a part of a frame as a
    view. Raises WireError.
    """
    if not 1 <= len(frames) <= PRODUCE_FRAMES_MAX:
        raise malformed(
            f"the request has {len(frames)} frames with batches; 1 to {PRODUCE_FRAMES_MAX} are "
            "allowed"
        )
    batches: list[Readable] = []
    number = at = 0
    view = memoryview(frames[0])
    size = len(view)
    for entry in entries:
        length = entry[3]
        while at == size and length and number + 1 < len(frames):
            number += 1
            view = memoryview(frames[number])
            at, size = 0, len(view)
        end = at + length
        if end > size:
            raise malformed(
                f"batch {len(batches)} has {length} bytes; frame {number + 1} of the batches has "
                f"{size - at} left"
            )
        batches.append(frames[number] if length == size else view[at:end])
        at = end
    if at != size or any(map(len, frames[number + 1 :])):
        raise malformed("the frames with batches have more bytes than their entries say")
    return batches


def unanswered_batches(count: int) -> bytearray:
    """The body of a PRODUCE response of version 2 or 3 before any result, TIMED_OUT for each."""
    return bytearray(_PRODUCED_MANY.pack(count, 0) + _UNANSWERED * count)


def answer_batch(
    body: bytearray,
    index: int,
    error: int,
    flags: int,
    leader_epoch: int,
    base_offset: int,
    append_time_us: int,
) -> bool:
    """Set the result of one batch in a body from `unanswered_batches`.

    Returns False, without a change, if it is already set.
    """
    at = _FIRST_ANSWER + index * _ANSWER_BYTES
    if body[at] != _TIMED_OUT:
        return False
    _PRODUCED_ENTRY.pack_into(body, at, error, flags, leader_epoch, base_offset, append_time_us)
    return True


def is_answered(body: bytearray, index: int) -> bool:
    """True if `answer_batch` has set the result of this batch."""
    return body[_PRODUCED_MANY.size + index * _PRODUCED_ENTRY.size] != ErrorCode.TIMED_OUT


def encode_produced_batches(entries: Sequence[ProducedEntry]) -> bytes:
    """Encode the body of a PRODUCE response of version 2 or 3."""
    return _PRODUCED_MANY.pack(len(entries), 0) + b"".join(
        [_PRODUCED_ENTRY.pack(*entry) for entry in entries]
    )


def decode_produced_batches(frame: Readable) -> list[ProducedEntry]:
    """Decode the body of a PRODUCE response of version 2 or 3. Raises WireError."""
    if len(frame) == _PRODUCED_ONE.size and (fields := _PRODUCED_ONE.unpack(frame))[0] == 1:
        return [ProducedEntry(*fields[2:])]
    if (
        len(frame) < _PRODUCED_MANY.size
        or len(frame)
        != _PRODUCED_MANY.size + _PRODUCED_MANY.unpack_from(frame, 0)[0] * _PRODUCED_ENTRY.size
    ):
        raise malformed(f"the produce response has {len(frame)} bytes, which contradicts its count")
    return [
        ProducedEntry(*fields)
        for fields in _PRODUCED_ENTRY.iter_unpack(memoryview(frame)[_PRODUCED_MANY.size :])
    ]
