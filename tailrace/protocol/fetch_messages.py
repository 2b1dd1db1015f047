"""Bodies of FETCH: the partitions of a request, and the batches of each in the response.

Decoders raise WireError, and allocate no more than the bytes at hand.

Layout (little endian; topic ids are 16 raw bytes):

    request   max_wait_ms u32 | min_bytes u32 | max_bytes u32 | count u32 | received_bytes u64,
              then `count` x { topic_id 16s | partition i32 | leader_epoch i32 | offset i64 |
              max_bytes u32 | flags u32 (1: read uncommitted) }
    response  count u32 | reserved u32, then `count` x { topic_id 16s | partition i32 |
              error u16 | flags u16 (1: the batches have gaps) | leader_epoch i32 |
              data_length u32 | high_watermark i64 | log_start_offset i64 | resume_offset i64 |
              last_stable_offset i64 }, then one frame with the batches of all entries, one after
              the other

Version 2 has no flags, and no `last_stable_offset` in its response. It reads committed records, and
none of a transaction. Versions 2 and 3 read no topic whose schema was altered.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import API_VERSIONS, Api, WireError, malformed

FETCH_PARTITIONS_MAX = 4096
_FETCH = struct.Struct("<IIIIQ")
_FETCH_ENTRY = struct.Struct("<16siiqII")
_FETCHED = struct.Struct("<II")
_FETCHED_ENTRY = struct.Struct("<16siHHiIqqqq")
_FETCHED_ENTRY_2 = struct.Struct("<16siHHiIqqq")
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
        raise malformed("the fetch request is cut off")
    max_wait_ms, min_bytes, max_bytes, count, received_bytes = _FETCH.unpack_from(frame, 0)
    if not 1 <= count <= FETCH_PARTITIONS_MAX:
        raise WireError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"the fetch has {count} partitions; 1 to {FETCH_PARTITIONS_MAX} are allowed",
        )
    if len(frame) != _FETCH.size + count * _FETCH_ENTRY.size:
        raise malformed(
            f"a fetch of {count} partitions has {_FETCH.size + count * _FETCH_ENTRY.size} bytes; "
            f"this one has {len(frame)}"
        )
    listed = _FETCH_ENTRY.iter_unpack(memoryview(frame)[_FETCH.size :])
    if version >= FLAGGED_FETCH_VERSION:
        entries = [FetchEntry._make(fields) for fields in listed]
    else:
        entries = [FetchEntry(*fields[:5]) for fields in listed]
    if max(map(_FLAGS_OF, entries)) > FETCH_UNCOMMITTED:
        raise malformed("the fetch has unknown flags; 0 and 1 (read uncommitted) are known")
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
        raise malformed("the fetch response is cut off")
    count, _ = _FETCHED.unpack_from(body[0], 0)
    layout = _FETCHED_ENTRY if version >= FLAGGED_FETCH_VERSION else _FETCHED_ENTRY_2
    if count > FETCH_PARTITIONS_MAX or len(body[0]) != _FETCHED.size + count * layout.size:
        raise malformed("the length of the fetch response contradicts its count")
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
            raise malformed("the fetch response claims more bytes than arrived")
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
        raise malformed("the fetch response has bytes that belong to no partition")
    return result
