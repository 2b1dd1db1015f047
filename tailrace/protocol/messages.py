"""Bodies of requests and responses: PRODUCE, FETCH and CREDIT in binary, all others in JSON.

Each message has an `encode_x`, a `decode_x` and a NamedTuple. Decoders raise WireError, and
allocate no more than the bytes at hand.

Layout (little endian; topic ids are 16 raw bytes):

    PRODUCE version 1
      request   topic_id 16s | partition i32 | acks i32 (0, 1, -1 = all) | timeout_ms u32 |
                slot_map_version u32 (0: none), then one frame: the batch
      response  base_offset i64 | append_time_us i64 | leader_epoch i32 |
                flags u32 (1: a duplicate)
    PRODUCE version 2
      request   acks i32 (0, 1, -1 = all) | timeout_ms u32 | count u32 | reserved u32,
                then `count` x { topic_id 16s | partition i32 | slot_map_version u32 (0: none) |
                length u32 | reserved u32 }, then 1 to PRODUCE_FRAMES_MAX frames with the batches
                in the order of the entries, each frame with one or more whole ones.
                Version 3: the entries may be followed by trace_id 16s, of a trace that a record
                belongs to
      response  count u32 | reserved u32, then in the order of the request `count` x
                { error u16 | flags u16 (1: a duplicate) | leader_epoch i32 | base_offset i64 |
                append_time_us i64 }
    FETCH
      request   max_wait_ms u32 | min_bytes u32 | max_bytes u32 | count u32 | received_bytes u64,
                then `count` x { topic_id 16s | partition i32 | leader_epoch i32 | offset i64 |
                max_bytes u32 | flags u32 (1: read uncommitted) }
      response  count u32 | reserved u32, then `count` x { topic_id 16s | partition i32 |
                error u16 | flags u16 (1: the batches have gaps) | leader_epoch i32 |
                data_length u32 | high_watermark i64 | log_start_offset i64 | resume_offset i64 |
                last_stable_offset i64 }, then one frame with the batches of all entries, one after
                the other
      Version 2 has no flags, and no `last_stable_offset` in its response. It reads committed
      records, and none of a transaction. Versions 2 and 3 read no topic whose schema was altered.
    CREDIT
      request   requested_bytes u64
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import API_VERSIONS, JSON_MAX_BYTES, PRODUCE_FRAMES_MAX, Api, WireError

ACKS_ALL = -1
JSON_DEPTH_MAX = 32
JSON_VALUES_MAX = 65_536
"""Most values in the JSON of one request, which bounds the time that
parsing blocks the front's loop.
"""
HANDSHAKE_MAX_BYTES = 16 << 10
CLIENT_ID_MAX = 100
TOPICS_AT_ONCE_MAX = 4_096
OFFSETS_AT_ONCE_MAX = 4_096
MESSAGE_MAX = 1_000
OFFSETS_BY_OFFSET = ("behind", "time_of")
"""Kinds of offset lookup that take an offset, as in {"behind": offset}."""
FETCH_PARTITIONS_MAX = 4096
PRODUCE_BATCHES_MAX = 4096
TRACED_PRODUCE_VERSION = 3
"""The first version of PRODUCE that may have a trace id."""
POSITIONED_PRODUCE_VERSION = 4
"""The first version of PRODUCE whose batches may require the end of their log."""
TRACE_ID_BYTES = 16
SHARE_RUNS_MAX = 500
"""Most offset ranges that one SHARE_ACQUIRE or SHARE_ACKNOWLEDGE acknowledges."""

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
_FETCH = struct.Struct("<IIIIQ")
_FETCH_ENTRY = struct.Struct("<16siiqII")
_FETCHED = struct.Struct("<II")
_FETCHED_ENTRY = struct.Struct("<16siHHiIqqqq")
_FETCHED_ENTRY_2 = struct.Struct("<16siHHiIqqq")
_CREDIT = struct.Struct("<Q")
_INT64_MAX = (1 << 63) - 1
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
PRODUCED_DUPLICATE = 1
FETCH_UNCOMMITTED = 1
"""Flag of an entry of FETCH: read up to the high watermark, also what is open or aborted."""
_FLAGS_OF = itemgetter(5)
FETCHED_GAPS = 1
"""Flag of an entry in the response: aborted records before or between its batches were left out."""
READ_COMMITTED, READ_UNCOMMITTED = "read_committed", "read_uncommitted"
ISOLATION_LEVELS = (READ_COMMITTED, READ_UNCOMMITTED)
"""Kafka's names."""
FETCH_VERSION = API_VERSIONS[Api.FETCH][1]
FLAGGED_FETCH_VERSION = 3
"""The first version of FETCH with flags, and with the last stable offset in its response."""
SCHEMAS_FETCH_VERSION = 4
"""The first version of FETCH whose clients know that the batches of a topic may have several
schemas.
"""
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


class FetchEntry(NamedTuple):
    """A partition and an offset in a FETCH request."""

    topic_id: bytes
    partition: int
    leader_epoch: int
    """The epoch of the last batch read, -1 if unknown."""
    offset: int
    max_bytes: int
    flags: int = 0
    """FETCH_UNCOMMITTED, or 0."""


class FetchRequest(NamedTuple):
    """A FETCH request. The response comes with `min_bytes`, or after `max_wait_ms`."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    received_bytes: int
    """Total bytes of batches that this connection has received. The front limits its unsent bytes
    by it.
    """
    entries: list[FetchEntry]


class FetchedEntry(NamedTuple):
    """A partition in a FETCH response; its batches are `data_length` bytes of the data frame."""

    topic_id: bytes
    partition: int
    error: int
    leader_epoch: int
    data_length: int
    high_watermark: int
    log_start_offset: int
    resume_offset: int
    """The offset after the damage with CORRUPT_BATCH. With LOG_TRUNCATED the offset where the
    reader's history and the log diverge. Without an error the offset after the batches and the
    aborted records behind them, if there are any. Else -1.
    """
    last_stable_offset: int = -1
    """End of the committed records. -1: unknown."""
    flags: int = 0
    """FETCHED_GAPS, or 0."""


def _malformed(detail: str) -> WireError:
    return WireError(ErrorCode.MALFORMED_REQUEST, detail)


def encode_produce(request: ProduceRequest) -> bytes:
    """Encode the frame before the batch."""
    return _PRODUCE.pack(*request)


def decode_produce(frame: Readable) -> ProduceRequest:
    """Decode the frame before the batch. Raises WireError."""
    if len(frame) != _PRODUCE.size:
        raise _malformed(
            f"a produce request has {_PRODUCE.size} bytes before its batch; this one has "
            f"{len(frame)}"
        )
    request = ProduceRequest(*_PRODUCE.unpack(frame))
    if request.acks not in (0, 1, ACKS_ALL):
        raise _malformed(f"acks is {request.acks}; use 0, 1 or -1 (all)")
    return request


def encode_produced(response: ProduceResponse) -> bytes:
    """Encode the body of a PRODUCE response."""
    return _PRODUCED.pack(*response)


def decode_produced(frame: Readable) -> ProduceResponse:
    """Decode the body of a PRODUCE response. Raises WireError."""
    if len(frame) != _PRODUCED.size:
        raise _malformed(
            f"a produce response has {_PRODUCED.size} bytes; this one has {len(frame)}"
        )
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
        raise _malformed("the produce request is cut off")
    acks, timeout_ms, count, _ = _PRODUCE_MANY.unpack_from(frame, 0)
    if acks not in (0, 1, ACKS_ALL):
        raise _malformed(f"acks is {acks}; use 0, 1 or -1 (all)")
    if not 1 <= count <= PRODUCE_BATCHES_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {count} batches; 1 to {PRODUCE_BATCHES_MAX} are allowed",
        )
    size = _PRODUCE_MANY.size + count * _PRODUCE_ENTRY.size
    with_trace = version >= TRACED_PRODUCE_VERSION and len(frame) == size + TRACE_ID_BYTES
    if len(frame) != size and not with_trace:
        raise _malformed(
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
        raise _malformed(
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
            raise _malformed(
                f"batch {len(batches)} has {length} bytes; frame {number + 1} of the batches has "
                f"{size - at} left"
            )
        batches.append(frames[number] if length == size else view[at:end])
        at = end
    if at != size or any(map(len, frames[number + 1 :])):
        raise _malformed("the frames with batches have more bytes than their entries say")
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
        raise _malformed(
            f"the produce response has {len(frame)} bytes, which contradicts its count"
        )
    return [
        ProducedEntry(*fields)
        for fields in _PRODUCED_ENTRY.iter_unpack(memoryview(frame)[_PRODUCED_MANY.size :])
    ]


def encode_fetch(request: FetchRequest) -> bytes:
    """Encode the body of a FETCH request."""
    entries = request.entries
    head = _FETCH.pack(
        request.max_wait_ms,
        request.min_bytes,
        request.max_bytes,
        len(entries),
        request.received_bytes,
    )
    return head + b"".join(_FETCH_ENTRY.pack(*entry) for entry in entries)


def decode_fetch(frame: Readable, version: int = FETCH_VERSION) -> FetchRequest:
    """Decode a FETCH request of 1 to FETCH_PARTITIONS_MAX distinct partitions. Raises WireError."""
    if len(frame) < _FETCH.size:
        raise _malformed("the fetch request is cut off")
    max_wait_ms, min_bytes, max_bytes, count, received_bytes = _FETCH.unpack_from(frame, 0)
    if not 1 <= count <= FETCH_PARTITIONS_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the fetch has {count} partitions; 1 to {FETCH_PARTITIONS_MAX} are allowed",
        )
    if len(frame) != _FETCH.size + count * _FETCH_ENTRY.size:
        raise _malformed(
            f"a fetch of {count} partitions has {_FETCH.size + count * _FETCH_ENTRY.size} bytes; "
            f"this one has {len(frame)}"
        )
    listed = _FETCH_ENTRY.iter_unpack(memoryview(frame)[_FETCH.size :])
    if version >= FLAGGED_FETCH_VERSION:
        entries = [FetchEntry._make(fields) for fields in listed]
    else:
        entries = [FetchEntry(*fields[:5]) for fields in listed]
    if max(map(_FLAGS_OF, entries)) > FETCH_UNCOMMITTED:
        raise _malformed("the fetch has unknown flags; 0 and 1 (read uncommitted) are known")
    if count > 1 and len({entry[:2] for entry in entries}) != count:
        raise WireError(
            ErrorCode.INVALID_REQUEST, "the fetch names a partition twice; name each once"
        )
    return FetchRequest(max_wait_ms, min_bytes, max_bytes, received_bytes, entries)


def encode_fetched(entries: Sequence[FetchedEntry], version: int = FETCH_VERSION) -> bytes:
    """Encode the first frame of a FETCH response; the batches follow in another."""
    if version < FLAGGED_FETCH_VERSION:
        return _FETCHED.pack(len(entries), 0) + b"".join(
            _FETCHED_ENTRY_2.pack(
                e.topic_id,
                e.partition,
                e.error,
                0,
                e.leader_epoch,
                e.data_length,
                e.high_watermark,
                e.log_start_offset,
                e.resume_offset if e.error else -1,
            )
            for e in entries
        )
    return _FETCHED.pack(len(entries), 0) + b"".join(
        _FETCHED_ENTRY.pack(
            e.topic_id,
            e.partition,
            e.error,
            e.flags,
            e.leader_epoch,
            e.data_length,
            e.high_watermark,
            e.log_start_offset,
            e.resume_offset,
            e.last_stable_offset,
        )
        for e in entries
    )


def decode_fetched(
    body: Sequence[Readable], version: int = FETCH_VERSION
) -> list[tuple[FetchedEntry, memoryview]]:
    """Decode a FETCH response: its entries, each with its batches. Raises WireError."""
    if not body or len(body[0]) < _FETCHED.size:
        raise _malformed("the fetch response is cut off")
    count, _ = _FETCHED.unpack_from(body[0], 0)
    layout = _FETCHED_ENTRY if version >= FLAGGED_FETCH_VERSION else _FETCHED_ENTRY_2
    if count > FETCH_PARTITIONS_MAX or len(body[0]) != _FETCHED.size + count * layout.size:
        raise _malformed("the length of the fetch response contradicts its count")
    data = memoryview(body[1]) if len(body) > 1 else memoryview(b"")
    result = []
    position = 0
    for (
        topic_id,
        partition,
        error,
        flags,
        epoch,
        length,
        watermark,
        start,
        resume,
        *stable,
    ) in layout.iter_unpack(memoryview(body[0])[_FETCHED.size :]):
        if position + length > len(data):
            raise _malformed("the fetch response claims more bytes than arrived")
        result.append(
            (
                FetchedEntry(
                    topic_id,
                    partition,
                    error,
                    epoch,
                    length,
                    watermark,
                    start,
                    resume,
                    stable[0] if stable else -1,
                    flags if stable else 0,
                ),
                data[position : position + length],
            )
        )
        position += length
    if position != len(data):
        raise _malformed("the fetch response has bytes that belong to no partition")
    return result


def encode_credit(requested_bytes: int) -> bytes:
    """Encode the body of a CREDIT request."""
    return _CREDIT.pack(requested_bytes)


def decode_credit(frame: Readable) -> int:
    """The bytes that a CREDIT request asks to send. Raises WireError."""
    if len(frame) != _CREDIT.size:
        raise _malformed(f"a credit request has {_CREDIT.size} bytes; this one has {len(frame)}")
    return int(_CREDIT.unpack(frame)[0])


def encode_json(value: Any) -> bytes:
    """Encode a JSON body."""
    return orjson.dumps(value)


def encode_error(detail: str) -> bytes:
    """Encode the body of an error response, cut to MESSAGE_MAX
    characters, as it may quote the peer.
    """
    cut = detail if len(detail) <= MESSAGE_MAX else f"{detail[:MESSAGE_MAX]}..."
    return orjson.dumps({"message": cut.encode("utf-8", "replace").decode()})


def encode_reply(code: ErrorCode, value: dict[str, Any], limit: int) -> tuple[ErrorCode, bytes]:
    """Encode a JSON response: (code, body). An error replaces a body of more than `limit` bytes."""
    body = (
        encode_error(str(value["message"]))
        if code is not ErrorCode.OK and "message" in value
        else orjson.dumps(value)
    )
    if len(body) <= limit:
        return code, body
    return ErrorCode.REQUEST_TOO_LARGE, encode_error(
        f"the response would have {len(body)} bytes; the limit is {limit}: ask for less at once"
    )


def throttled_ms(body: Sequence[Readable]) -> int:
    """The wait for a quota that a CREDIT push reports, 0 if it has none."""
    try:
        waited = decode_json(body[0]).get("ms", 0)
    except WireError:
        return 0
    return waited if type(waited) is int and waited > 0 else 0


def decode_json(frame: Readable, limit: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """Decode a JSON object of at most `limit` bytes, nested at most JSON_DEPTH_MAX deep.

    Raises WireError.
    """
    if len(frame) > limit:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the JSON has {len(frame)} bytes; the limit is {limit}: ask for less at once",
        )
    try:
        value = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _malformed("the body is not a JSON object")
    if _is_deeper(value, JSON_DEPTH_MAX):
        raise _malformed(f"the body is nested deeper than {JSON_DEPTH_MAX} levels")
    return value


def decode_request(frame: Readable, limit: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """Decode the JSON of a request, with at most JSON_VALUES_MAX values. Raises WireError.

    Values are counted before they are parsed; the count is slightly too high.
    """
    data = bytes(frame)
    if (
        len(data) <= limit
        and data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX
    ):
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the JSON has more than {JSON_VALUES_MAX} values; ask for less at once",
        )
    return decode_json(data, limit)


class MetadataRequest(NamedTuple):
    """A METADATA request."""

    topics: list[str] | None
    """Distinct names; None: all topics."""
    names_only: bool
    after: str | None
    """With `names_only`, the last name of the previous page, "" for the first page.
    None: no pages.
    """


def decode_metadata(frame: Readable) -> MetadataRequest:
    """Decode a METADATA request. Raises WireError."""
    request = decode_request(frame)
    names, names_only, after = (
        request.get("topics"),
        request.get("names_only", False),
        request.get("after"),
    )
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise _malformed("`topics` must be a list of names, or null for all")
    if names is not None and len(names) > TOPICS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {len(names)} topics; the limit is {TOPICS_AT_ONCE_MAX}: ask for "
            "fewer at once",
        )
    if names_only is not None and not isinstance(names_only, bool):
        raise _malformed("`names_only` must be true or false")
    if after is not None and not isinstance(after, str):
        raise _malformed("`after` must be a name, or null")
    return MetadataRequest(
        None if names is None else list(dict.fromkeys(names)), bool(names_only), after
    )


class ListOffsetsEntry(NamedTuple):
    """An entry of a LIST_OFFSETS request."""

    topic: str
    partition: int
    at: str | int
    """`earliest`, `latest`, `behind`, `time_of`, or a time in microseconds."""
    offset: int
    """The offset of `behind` and `time_of`."""
    code: ErrorCode
    """INVALID_REQUEST for an invalid entry."""
    is_uncommitted: bool = False
    """True if what is open or aborted counts too."""


def decode_list_offsets(frame: Readable) -> list[ListOffsetsEntry]:
    """Decode a LIST_OFFSETS request. An invalid entry is marked, and the others are served.

    Raises WireError.
    """
    request = decode_request(frame)
    requested, isolation = request.get("partitions"), request.get("isolation", READ_COMMITTED)
    if isolation not in ISOLATION_LEVELS:
        raise _malformed(f"`isolation` must be {' or '.join(ISOLATION_LEVELS)}")
    if not isinstance(requested, list) or not all(isinstance(item, dict) for item in requested):
        raise _malformed("`partitions` must be a list of {topic, partition, at}")
    if len(requested) > OFFSETS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the request has {len(requested)} partitions; the limit is {OFFSETS_AT_ONCE_MAX}: "
            "ask for fewer at once",
        )
    is_uncommitted = isolation == READ_UNCOMMITTED
    return [_list_offsets_entry(item, is_uncommitted) for item in requested]


def _list_offsets_entry(item: dict[str, Any], is_uncommitted: bool) -> ListOffsetsEntry:
    topic, partition = item.get("topic"), item.get("partition")
    at: Any = item.get("at")
    known_topic = topic if isinstance(topic, str) else None
    known_partition = partition if is_integer(partition, _INT32_MIN, _INT32_MAX) else None
    offset = -1
    way = (
        next((way for way in OFFSETS_BY_OFFSET if way in at), None)
        if isinstance(at, dict)
        else None
    )
    if way is not None and is_integer(at[way], 0, _INT64_MAX):
        at, offset = way, at[way]
    elif at not in ("earliest", "latest") and not is_integer(at, -_INT64_MAX, _INT64_MAX):
        known_topic = None
    if known_topic is None or known_partition is None:
        echo = topic if isinstance(topic, str) else ""
        return ListOffsetsEntry(
            echo,
            -1 if known_partition is None else known_partition,
            "",
            -1,
            ErrorCode.INVALID_REQUEST,
        )
    return ListOffsetsEntry(known_topic, known_partition, at, offset, ErrorCode.OK, is_uncommitted)


class HandshakeRequest(NamedTuple):
    """A HANDSHAKE request with the negotiated versions."""

    versions: dict[int, int]
    """API number -> the highest version in common."""
    client_id: str


def decode_handshake(frame: Readable) -> HandshakeRequest:
    """Decode a HANDSHAKE request and choose the highest version in common of each API.

    Raises WireError if there is none for HANDSHAKE itself.
    """
    request = decode_request(frame, HANDSHAKE_MAX_BYTES)
    offered, client_id = request.get("versions"), request.get("client_id")
    if not isinstance(offered, dict):
        raise _malformed("the handshake needs `versions`: API number -> [lowest, highest]")
    if client_id is not None and not isinstance(client_id, str):
        raise _malformed("`client_id` must be text")
    chosen: dict[int, int] = {}
    for api, (low, high) in API_VERSIONS.items():
        theirs = offered.get(str(int(api)))
        if (
            isinstance(theirs, list)
            and len(theirs) == 2
            and all(is_integer(v, 0, 0xFFFF) for v in theirs)
        ):
            common = min(high, theirs[1])
            if common >= max(low, theirs[0]):
                chosen[int(api)] = common
    if Api.HANDSHAKE not in chosen:
        raise WireError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"no version in common; this front supports {API_VERSIONS[Api.HANDSHAKE]} of HANDSHAKE",
        )
    return HandshakeRequest(chosen, (client_id or "")[:CLIENT_ID_MAX])


def is_integer(value: Any, lowest: int, highest: int) -> bool:
    """True if a JSON value is an integer (not a boolean) within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _is_deeper(value: Any, limit: int) -> bool:
    """True if a JSON value is nested deeper than `limit`. Iterative, so deep nesting cannot
    overflow the stack.
    """
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
