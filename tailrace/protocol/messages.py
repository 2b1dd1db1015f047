"""Bodies of requests and responses: produce and fetch in fixed binary, everything else in JSON.

Each pair is `encode_x` / `decode_x` and a NamedTuple between them. Decoders raise WireError, and allocate no more than the bytes at hand do.

Layout (little endian; topic ids are 16 raw bytes):

    PRODUCE  request   topic_id 16s | partition i32 | acks i32 (0, 1, -1 = all) | timeout_ms u32 | slot_map_version u32 (0: none),
                       then one frame: the batch
             response  base_offset i64 | append_time_us i64 | leader_epoch i32 | flags u32 (1: this was a duplicate)
    PRODUCE  request   acks i32 (0, 1, -1 = all) | timeout_ms u32 | count u32 | reserved u32, then `count` x
    version 2          { topic_id 16s | partition i32 | slot_map_version u32 (0: none) | length u32 | reserved u32 },
                       then 1 to PRODUCE_FRAMES_MAX frames with the batches in the order of the entries, each frame with one or more whole ones
             response  count u32 | reserved u32, then, in the order of the request, `count` x
                       { error u16 | flags u16 (1: this was a duplicate) | leader_epoch i32 | base_offset i64 | append_time_us i64 }
    FETCH    request   max_wait_ms u32 | min_bytes u32 | max_bytes u32 | count u32 | received_bytes u64, then `count` x
                       { topic_id 16s | partition i32 | leader_epoch i32 | offset i64 | max_bytes u32 | reserved u32 }
             response  count u32 | reserved u32, then `count` x
                       { topic_id 16s | partition i32 | error u16 | flags u16 | leader_epoch i32 | data_length u32 |
                         high_watermark i64 | log_start_offset i64 | resume_offset i64 },
                       then one frame with the batches of all of them, one after the other
    CREDIT   request   wanted_bytes u64
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from tailrace.formats.checksum import Readable
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import API_VERSIONS, JSON_MAX_BYTES, PRODUCE_FRAMES_MAX, Api, WireError

ACKS_ALL = -1
JSON_DEPTH_MAX = 32
JSON_VALUES_MAX = 65_536
"""In one request: what takes longer to read than the loop of a front may be held."""
HANDSHAKE_MAX_BYTES = 16 << 10
CLIENT_ID_MAX = 100
TOPICS_AT_ONCE_MAX = 4_096
OFFSETS_AT_ONCE_MAX = 4_096
MESSAGE_MAX = 1_000
OFFSETS_BY_OFFSET = ("behind", "time_of")
"""Ways to ask for an offset that begin with one: {"behind": offset}."""
FETCH_PARTITIONS_MAX = 4096
PRODUCE_BATCHES_MAX = 4096
SHARE_RUNS_MAX = 500
"""Runs of offsets that one SHARE_ACQUIRE or SHARE_ACKNOWLEDGE acknowledges."""

_PRODUCE = struct.Struct("<16siiII")
_PRODUCED = struct.Struct("<qqiI")
_PRODUCE_MANY = struct.Struct("<iIII")
_PRODUCE_ENTRY = struct.Struct("<16siII4x")
_PRODUCE_ONE = struct.Struct("<iIII16siII4x")
"""_PRODUCE_MANY and one _PRODUCE_ENTRY."""
_PRODUCED_MANY = struct.Struct("<II")
_PRODUCED_ENTRY = struct.Struct("<HHiqq")
_PRODUCED_ONE = struct.Struct("<IIHHiqq")
assert _PRODUCE_ONE.size == _PRODUCE_MANY.size + _PRODUCE_ENTRY.size
assert _PRODUCED_ONE.size == _PRODUCED_MANY.size + _PRODUCED_ENTRY.size
_FETCH = struct.Struct("<IIIIQ")
_FETCH_ENTRY = struct.Struct("<16siiqII")
_FETCHED = struct.Struct("<II")
_FETCHED_ENTRY = struct.Struct("<16siHHiIqqq")
_CREDIT = struct.Struct("<Q")
_INT64_MAX = (1 << 63) - 1
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
PRODUCED_DUPLICATE = 1
_FIRST_ANSWER, _ANSWER_BYTES, _TIMED_OUT = _PRODUCED_MANY.size, _PRODUCED_ENTRY.size, int(ErrorCode.TIMED_OUT)
_UNANSWERED = _PRODUCED_ENTRY.pack(ErrorCode.TIMED_OUT, 0, -1, -1, -1)


class ProduceRequest(NamedTuple):
    """What stands before the batch of a PRODUCE request. `acks`: 0, 1 or ACKS_ALL."""

    topic_id: bytes
    partition: int
    acks: int
    timeout_ms: int
    slot_map_version: int = 0
    """Of the map by which the batch was routed; 0: by none. Only topics with hash slots look at it."""


class ProduceResponse(NamedTuple):
    """Where a batch went: its first record's offset, and when it was appended. `flags`: PRODUCED_DUPLICATE when it was there already."""

    base_offset: int
    append_time_us: int
    leader_epoch: int
    flags: int


class ProduceEntry(NamedTuple):
    """A batch of a PRODUCE request of version 2: where it goes, and its length in bytes. `slot_map_version`: see ProduceRequest."""

    topic_id: bytes
    partition: int
    slot_map_version: int
    length: int


class ProduceBatches(NamedTuple):
    """What stands before the batches of a PRODUCE request of version 2. `acks`: 0, 1 or ACKS_ALL. `entries`: each with the fields of a ProduceEntry."""

    acks: int
    timeout_ms: int
    entries: Sequence[tuple[bytes, int, int, int]]


class ProducedEntry(NamedTuple):
    """What became of a batch; the other fields say something where `error` is OK (0). `flags`: PRODUCED_DUPLICATE when it was there already."""

    error: int
    flags: int
    leader_epoch: int
    base_offset: int
    append_time_us: int


class FetchEntry(NamedTuple):
    """A partition of a FETCH request, and from which offset."""

    topic_id: bytes
    partition: int
    leader_epoch: int
    """The epoch of the last batch read, -1 when unknown."""
    offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    """A FETCH request: answered once `min_bytes` are there, or after `max_wait_ms`."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    received_bytes: int
    """How many bytes of batches this connection has taken in so far: what the front may have under way is bounded by it."""
    entries: list[FetchEntry]


class FetchedEntry(NamedTuple):
    """A partition of a FETCH response; its batches take `data_length` bytes of the data frame."""

    topic_id: bytes
    partition: int
    error: int
    leader_epoch: int
    data_length: int
    high_watermark: int
    log_start_offset: int
    resume_offset: int
    """With CORRUPT_BATCH where a reader that gives up what is damaged goes on, with LOG_TRUNCATED where its past and the log part; else -1."""


def _malformed(detail: str) -> WireError:
    return WireError(ErrorCode.MALFORMED_REQUEST, detail)


def encode_produce(request: ProduceRequest) -> bytes:
    """The frame before the batch."""
    return _PRODUCE.pack(*request)


def decode_produce(frame: Readable) -> ProduceRequest:
    """The frame before a batch. Raises WireError."""
    if len(frame) != _PRODUCE.size:
        raise _malformed(f"a produce request has {_PRODUCE.size} bytes before its batch, this one {len(frame)}")
    request = ProduceRequest(*_PRODUCE.unpack(frame))
    if request.acks not in (0, 1, ACKS_ALL):
        raise _malformed(f"acks is {request.acks}; allowed are 0, 1 and -1 (all)")
    return request


def encode_produced(response: ProduceResponse) -> bytes:
    """The body of a PRODUCE response."""
    return _PRODUCED.pack(*response)


def decode_produced(frame: Readable) -> ProduceResponse:
    """The body of a PRODUCE response. Raises WireError."""
    if len(frame) != _PRODUCED.size:
        raise _malformed(f"a produce response has {_PRODUCED.size} bytes, this one {len(frame)}")
    return ProduceResponse(*_PRODUCED.unpack(frame))


def encode_produce_batches(request: ProduceBatches) -> bytes:
    """The frame before the batches."""
    if len(request.entries) == 1:
        return _PRODUCE_ONE.pack(request.acks, request.timeout_ms, 1, 0, *request.entries[0])
    head = _PRODUCE_MANY.pack(request.acks, request.timeout_ms, len(request.entries), 0)
    return head + b"".join([_PRODUCE_ENTRY.pack(*entry) for entry in request.entries])


def decode_produce_batches(frame: Readable) -> ProduceBatches:
    """The frame before the batches, of which there are 1 to PRODUCE_BATCHES_MAX. Raises WireError."""
    if len(frame) < _PRODUCE_MANY.size:
        raise _malformed("a produce request is cut off")
    acks, timeout_ms, count, _ = _PRODUCE_MANY.unpack_from(frame, 0)
    if acks not in (0, 1, ACKS_ALL):
        raise _malformed(f"acks is {acks}; allowed are 0, 1 and -1 (all)")
    if not 1 <= count <= PRODUCE_BATCHES_MAX:
        raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{count} batches in one request; 1 to {PRODUCE_BATCHES_MAX} are allowed")
    size = _PRODUCE_MANY.size + count * _PRODUCE_ENTRY.size
    if len(frame) != size:
        raise _malformed(f"a produce request of {count} batches has {size} bytes before them, this one {len(frame)}")
    return ProduceBatches(acks, timeout_ms, list(_PRODUCE_ENTRY.iter_unpack(memoryview(frame)[_PRODUCE_MANY.size :])))


def cut_batches(entries: Sequence[tuple[bytes, int, int, int]], frames: Sequence[Readable]) -> list[Readable]:
    """The batches of a PRODUCE request of version 2, which fill its frames, none across two of them. A frame with one batch is that batch, what is part of
    a frame is a view of it. Raises WireError.
    """
    if not 1 <= len(frames) <= PRODUCE_FRAMES_MAX:
        raise _malformed(f"{len(frames)} frames with batches; 1 to {PRODUCE_FRAMES_MAX} are allowed")
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
            raise _malformed(f"batch {len(batches)} has {length} bytes, and {size - at} are left in frame {number + 1} of the batches")
        batches.append(frames[number] if length == size else view[at:end])
        at = end
    if at != size or any(map(len, frames[number + 1 :])):
        raise _malformed("the frames with batches hold more bytes than their entries say")
    return batches


def unanswered_batches(count: int) -> bytearray:
    """The body of a PRODUCE response of version 2 in which nothing is known yet: TIMED_OUT for each batch."""
    return bytearray(_PRODUCED_MANY.pack(count, 0) + _UNANSWERED * count)


def answer_batch(body: bytearray, index: int, error: int, flags: int, leader_epoch: int, base_offset: int, append_time_us: int) -> bool:
    """Put into a body from `unanswered_batches` what became of one batch; False: that is known already, and stays as it is."""
    at = _FIRST_ANSWER + index * _ANSWER_BYTES
    if body[at] != _TIMED_OUT:
        return False
    _PRODUCED_ENTRY.pack_into(body, at, error, flags, leader_epoch, base_offset, append_time_us)
    return True


def is_answered(body: bytearray, index: int) -> bool:
    """Whether `answer_batch` has been called for this batch."""
    return body[_PRODUCED_MANY.size + index * _PRODUCED_ENTRY.size] != ErrorCode.TIMED_OUT


def encode_produced_batches(entries: Sequence[ProducedEntry]) -> bytes:
    """The body of a PRODUCE response of version 2."""
    return _PRODUCED_MANY.pack(len(entries), 0) + b"".join([_PRODUCED_ENTRY.pack(*entry) for entry in entries])


def decode_produced_batches(frame: Readable) -> list[ProducedEntry]:
    """The body of a PRODUCE response of version 2. Raises WireError."""
    if len(frame) == _PRODUCED_ONE.size and (fields := _PRODUCED_ONE.unpack(frame))[0] == 1:
        return [ProducedEntry(*fields[2:])]
    if (
        len(frame) < _PRODUCED_MANY.size
        or len(frame) != _PRODUCED_MANY.size + _PRODUCED_MANY.unpack_from(frame, 0)[0] * _PRODUCED_ENTRY.size
    ):
        raise _malformed(f"a produce response has {len(frame)} bytes, and says otherwise")
    return [ProducedEntry(*fields) for fields in _PRODUCED_ENTRY.iter_unpack(memoryview(frame)[_PRODUCED_MANY.size :])]


def encode_fetch(request: FetchRequest) -> bytes:
    """The body of a FETCH request."""
    entries = request.entries
    head = _FETCH.pack(request.max_wait_ms, request.min_bytes, request.max_bytes, len(entries), request.received_bytes)
    return head + b"".join(_FETCH_ENTRY.pack(*entry, 0) for entry in entries)


def decode_fetch(frame: Readable) -> FetchRequest:
    """The body of a FETCH request; 1 to FETCH_PARTITIONS_MAX partitions, each once. Raises WireError."""
    if len(frame) < _FETCH.size:
        raise _malformed("a fetch request is cut off")
    max_wait_ms, min_bytes, max_bytes, count, received_bytes = _FETCH.unpack_from(frame, 0)
    if not 1 <= count <= FETCH_PARTITIONS_MAX:
        raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{count} partitions in one fetch; 1 to {FETCH_PARTITIONS_MAX} are allowed")
    if len(frame) != _FETCH.size + count * _FETCH_ENTRY.size:
        raise _malformed(f"a fetch of {count} partitions has {_FETCH.size + count * _FETCH_ENTRY.size} bytes, this one {len(frame)}")
    entries = [FetchEntry(*fields[:5]) for fields in _FETCH_ENTRY.iter_unpack(memoryview(frame)[_FETCH.size :])]
    if count > 1 and len({entry[:2] for entry in entries}) != count:
        raise WireError(ErrorCode.INVALID_REQUEST, "a fetch names a partition twice; name each once")
    return FetchRequest(max_wait_ms, min_bytes, max_bytes, received_bytes, entries)


def encode_fetched(entries: Sequence[FetchedEntry]) -> bytes:
    """The first frame of a FETCH response; the batches follow in another."""
    return _FETCHED.pack(len(entries), 0) + b"".join(
        _FETCHED_ENTRY.pack(
            e.topic_id, e.partition, e.error, 0, e.leader_epoch, e.data_length, e.high_watermark, e.log_start_offset, e.resume_offset
        )
        for e in entries
    )


def decode_fetched(body: Sequence[Readable]) -> list[tuple[FetchedEntry, memoryview]]:
    """The entries of a fetch response, each with its batches."""
    if not body or len(body[0]) < _FETCHED.size:
        raise _malformed("a fetch response is cut off")
    count, _ = _FETCHED.unpack_from(body[0], 0)
    if count > FETCH_PARTITIONS_MAX or len(body[0]) != _FETCHED.size + count * _FETCHED_ENTRY.size:
        raise _malformed("a fetch response whose length contradicts its count")
    data = memoryview(body[1]) if len(body) > 1 else memoryview(b"")
    result = []
    position = 0
    for topic_id, partition, error, _, epoch, length, watermark, start, resume in _FETCHED_ENTRY.iter_unpack(
        memoryview(body[0])[_FETCHED.size :]
    ):
        if position + length > len(data):
            raise _malformed("a fetch response that claims more bytes than came")
        result.append(
            (FetchedEntry(topic_id, partition, error, epoch, length, watermark, start, resume), data[position : position + length])
        )
        position += length
    if position != len(data):
        raise _malformed("a fetch response with bytes that belong to no partition")
    return result


def encode_credit(wanted_bytes: int) -> bytes:
    """The body of a CREDIT request."""
    return _CREDIT.pack(wanted_bytes)


def decode_credit(frame: Readable) -> int:
    """How many bytes a CREDIT request wants to send. Raises WireError."""
    if len(frame) != _CREDIT.size:
        raise _malformed("a credit request has 8 bytes")
    return int(_CREDIT.unpack(frame)[0])


def encode_json(value: Any) -> bytes:
    """A JSON body."""
    return orjson.dumps(value)


def encode_error(detail: str) -> bytes:
    """The body of a refusal. What a peer has sent and is quoted to it is cut at MESSAGE_MAX characters."""
    cut = detail if len(detail) <= MESSAGE_MAX else f"{detail[:MESSAGE_MAX]}..."
    return orjson.dumps({"message": cut.encode("utf-8", "replace").decode()})


def encode_reply(code: ErrorCode, value: dict[str, Any], limit: int) -> tuple[ErrorCode, bytes]:
    """The code and the body of an answer in JSON that takes at most `limit` bytes: one that would take more is refused instead."""
    body = encode_error(str(value["message"])) if code is not ErrorCode.OK and "message" in value else orjson.dumps(value)
    if len(body) <= limit:
        return code, body
    return ErrorCode.REQUEST_TOO_LARGE, encode_error(f"the answer would take {len(body)} bytes; {limit} are allowed: ask for less at once")


def decode_json(frame: Readable, limit: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes, nested no deeper than JSON_DEPTH_MAX."""
    if len(frame) > limit:
        raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"{len(frame)} bytes of JSON; {limit} are allowed")
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
    """The JSON of a request: as `decode_json`, and of at most JSON_VALUES_MAX values. They are counted, a few too many, before they are made."""
    data = bytes(frame)
    if len(data) <= limit and data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX:
        raise WireError(ErrorCode.REQUEST_TOO_LARGE, f"the JSON holds more than {JSON_VALUES_MAX} values; ask for less at once")
    return decode_json(data, limit)


class MetadataRequest(NamedTuple):
    """A METADATA request."""

    topics: list[str] | None
    """Each once; None: all."""
    names_only: bool
    after: str | None
    """With `names_only` of all: the last name of the page before, "" for the first page; None: all on one page."""


def decode_metadata(frame: Readable) -> MetadataRequest:
    """A METADATA request. Raises WireError."""
    request = decode_request(frame)
    names, names_only, after = request.get("topics"), request.get("names_only", False), request.get("after")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _malformed("`topics` must be a list of names, or null for all")
    if names is not None and len(names) > TOPICS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE, f"{len(names)} topics in one request; {TOPICS_AT_ONCE_MAX} are allowed: ask for fewer at once"
        )
    if names_only is not None and not isinstance(names_only, bool):
        raise _malformed("`names_only` must be true or false")
    if after is not None and not isinstance(after, str):
        raise _malformed("`after` must be a name, or null")
    return MetadataRequest(None if names is None else list(dict.fromkeys(names)), bool(names_only), after)


class WantedOffset(NamedTuple):
    """An entry of a LIST_OFFSETS request."""

    topic: str
    partition: int
    at: str | int
    """`earliest`, `latest`, `behind`, `time_of`, or a time in microseconds."""
    offset: int
    """Of `behind` and `time_of`."""
    code: ErrorCode
    """INVALID_REQUEST: this entry makes no sense."""


def decode_list_offsets(frame: Readable) -> list[WantedOffset]:
    """What is wanted, in order. An entry that makes no sense is answered as such, the others are served."""
    wanted = decode_request(frame).get("partitions")
    if not isinstance(wanted, list) or not all(isinstance(item, dict) for item in wanted):
        raise _malformed("`partitions` must be a list of {topic, partition, at}")
    if len(wanted) > OFFSETS_AT_ONCE_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"{len(wanted)} partitions in one request; {OFFSETS_AT_ONCE_MAX} are allowed: ask for fewer at once",
        )
    return [_wanted_offset(item) for item in wanted]


def _wanted_offset(item: dict[str, Any]) -> WantedOffset:
    topic, partition = item.get("topic"), item.get("partition")
    at: Any = item.get("at")
    known_topic = topic if isinstance(topic, str) else None
    known_partition = partition if is_integer(partition, _INT32_MIN, _INT32_MAX) else None
    offset = -1
    way = next((way for way in OFFSETS_BY_OFFSET if way in at), None) if isinstance(at, dict) else None
    if way is not None and is_integer(at[way], 0, _INT64_MAX):
        at, offset = way, at[way]
    elif at not in ("earliest", "latest") and not is_integer(at, -_INT64_MAX, _INT64_MAX):
        known_topic = None
    if known_topic is None or known_partition is None:
        echo = topic if isinstance(topic, str) else ""
        return WantedOffset(echo, -1 if known_partition is None else known_partition, "", -1, ErrorCode.INVALID_REQUEST)
    return WantedOffset(known_topic, known_partition, at, offset, ErrorCode.OK)


class HandshakeRequest(NamedTuple):
    """A HANDSHAKE request, versions agreed."""

    versions: dict[int, int]
    """API number -> the version that both sides speak."""
    client_id: str


def decode_handshake(frame: Readable) -> HandshakeRequest:
    """A HANDSHAKE request: for each API the highest version that both sides speak. Raises WireError when there is none for HANDSHAKE itself."""
    request = decode_request(frame, HANDSHAKE_MAX_BYTES)
    offered, client_id = request.get("versions"), request.get("client_id")
    if not isinstance(offered, dict):
        raise _malformed("the handshake needs `versions`: API number -> [lowest, highest]")
    if client_id is not None and not isinstance(client_id, str):
        raise _malformed("`client_id` must be text")
    chosen: dict[int, int] = {}
    for api, (low, high) in API_VERSIONS.items():
        theirs = offered.get(str(int(api)))
        if isinstance(theirs, list) and len(theirs) == 2 and all(is_integer(v, 0, 0xFFFF) for v in theirs):
            common = min(high, theirs[1])
            if common >= max(low, theirs[0]):
                chosen[int(api)] = common
    if Api.HANDSHAKE not in chosen:
        raise WireError(
            ErrorCode.UNSUPPORTED_VERSION, f"no version in common; this front speaks {API_VERSIONS[Api.HANDSHAKE]} of HANDSHAKE"
        )
    return HandshakeRequest(chosen, (client_id or "")[:CLIENT_ID_MAX])


def is_integer(value: Any, lowest: int, highest: int) -> bool:
    """Whether a JSON value is a number without a fraction (true and false are none) within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _is_deeper(value: Any, limit: int) -> bool:
    """Level by level, not by recursion: what is nested deeply must not use up this process's stack."""
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
