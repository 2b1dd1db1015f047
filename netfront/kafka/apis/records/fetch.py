"""Fetch: batches of the log become batches of Kafka.

The front reads, waits and keeps the limits as for our consumers. With `read_committed` it leaves
out what was aborted, so the response lists no aborted transactions. Offsets that were left out at
the end become a control batch, behind which the client goes on.

There are no fetch sessions: each request names all its partitions.

A client that goes on in a topic that was deleted and created again gets OFFSET_OUT_OF_RANGE, once:
its offset is of the deleted one, and `auto.offset.reset` says where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.cluster.leader_epochs import epoch_error, to_kafka
from netfront.kafka.apis.records.conversion import convert_outgoing, skipped_range
from netfront.kafka.apis.records.producer_codecs import fetch_codec_of, is_unknown_codec
from netfront.kafka.apis.records.tail_cache import tail_cache
from netfront.kafka.apis.shared_state import read_positions
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.records.errors import KafkaRecordsError
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import (
    FETCH_PARTITIONS_MAX,
    FETCH_UNCOMMITTED,
    FetchedEntry,
    FetchEntry,
    FetchRequest,
)
from tailrace.protocol.frame import Api

RESPONSE_MAX_BYTES = 4 << 20
"""Bytes of our batches in a response, which are converted in one go."""
OUT_MAX_BYTES = 16 << 20
"""Bytes of Kafka's batches in a response, one batch more. Ours may be compressed."""
WAIT_MAX_MS = 60_000
WHOLE = (-1, 0)
"""Session epochs of requests that name all their partitions: they end a session, or begin one."""
_UINT32_MAX = (1 << 32) - 1


class PartitionRead(NamedTuple):
    """A partition of a request that is read."""

    route: Assignment
    entry: dict[str, Any]
    """Its entry in the response."""
    offset: int


def fetch(call: Call) -> Steps:
    """Read records, waiting for more if the client wishes."""
    request = call.request
    if request.get("session_id", 0) and request["session_epoch"] not in WHOLE:
        raise RefusedError(KafkaError.FETCH_SESSION_ID_NOT_FOUND)
    topics, reads, entries = _read_request(call)
    has_errors = any(entry["error_code"] for topic in topics for entry in topic["partitions"])
    if entries:
        waits_ms = 0 if has_errors else max(0, min(request["max_wait_ms"], WAIT_MAX_MS))
        bytes_max = max(1, min(request.get("max_bytes", RESPONSE_MAX_BYTES), RESPONSE_MAX_BYTES))
        asked = FetchRequest(
            waits_ms, max(0, request["min_bytes"]), bytes_max, call.peer.received_bytes, entries
        )
        answer = yield call.peer.ask(Api.FETCH, [fetch_messages.encode_fetch(asked)])
        if answer.code is not ErrorCode.OK:
            raise RefusedError(kafka_error(answer.code), answer.sentence)
        room = OUT_MAX_BYTES
        fetched = fetch_messages.decode_fetched(answer.body)
        for read, (found, batches) in zip(reads, fetched, strict=True):
            if room > 0 or not len(batches):
                _fill(call, read, found, batches, room)
                room -= len(read.entry["records"])
    return {"responses": topics, "session_id": 0}


def _read_request(
    call: Call,
) -> tuple[list[dict[str, Any]], list[PartitionRead], list[FetchEntry]]:
    """The response's entries, and the partitions to read."""
    routes, by_id, positions = (
        call.services.routes, call.version >= 13, read_positions(call.services),
    )  # fmt: skip
    flags = 0 if call.request["isolation_level"] == 1 else FETCH_UNCOMMITTED
    topics: list[dict[str, Any]] = []
    reads: list[PartitionRead] = []
    entries: list[FetchEntry] = []
    seen: set[tuple[bytes, int]] = set()
    for topic, partition, made in _partitions(call, topics, by_id):
        index = partition["partition"]
        route = (
            routes.find(topic["topic_id"], index)
            if by_id
            else routes.find_by_name(topic["topic"], index)
        )
        if route is None or route.delay_of:
            missing = by_id and not routes.knows(topic["topic_id"])
            made["error_code"] = (
                KafkaError.UNKNOWN_TOPIC_ID if missing else KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            )
            continue
        current = call.services.front.log_bounds.leader_epoch(route)
        error = epoch_error(route, current, partition.get("current_leader_epoch", -1))
        key = (route.topic_id, index)
        if key in seen or len(entries) >= FETCH_PARTITIONS_MAX:
            error = KafkaError.INVALID_REQUEST
        if error is KafkaError.NONE and is_unknown_codec(route, call.version):
            error = KafkaError.UNSUPPORTED_COMPRESSION_TYPE
        offset = partition["fetch_offset"]
        if error is KafkaError.NONE and (
            offset < 0
            or not positions.fetch(
                call.connection, call.client, (route.topic, index), route.topic_id, offset
            )
        ):
            error = KafkaError.OFFSET_OUT_OF_RANGE
        if error is not KafkaError.NONE:
            made["error_code"] = error
            continue
        seen.add(key)
        room = max(0, min(partition["partition_max_bytes"], _UINT32_MAX))
        reads.append(PartitionRead(route, made, offset))
        entries.append(FetchEntry(route.topic_id, index, -1, offset, room, flags))
    return topics, reads, entries


def _partitions(
    call: Call, topics: list[dict[str, Any]], by_id: bool
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(topic, partition, entry of the response) of each partition; `topics` gets the entries."""
    name = "topic_id" if by_id else "topic"
    for topic in call.request["topics"]:
        made: list[dict[str, Any]] = []
        topics.append({name: topic[name], "partitions": made})
        for partition in topic["partitions"]:
            entry: dict[str, Any] = {
                "partition_index": partition["partition"], "error_code": KafkaError.NONE,
                "high_watermark": -1, "last_stable_offset": -1, "log_start_offset": -1,
                "aborted_transactions": [], "preferred_read_replica": -1, "records": b"",
            }  # fmt: skip
            made.append(entry)
            yield topic, partition, entry


def _fill(
    call: Call, read: PartitionRead, found: FetchedEntry, batches: memoryview, room: int
) -> None:
    entry = read.entry
    entry.update(
        high_watermark=found.high_watermark,
        last_stable_offset=found.last_stable_offset,
        log_start_offset=found.log_start_offset,
    )
    if found.error:
        entry["error_code"] = kafka_error(found.error)
        return
    records: bytes | bytearray = b""
    following = read.offset
    if len(batches):
        try:
            codec = fetch_codec_of(call.services, read.route, call.version)
            converted = convert_outgoing(
                read.route, batches, room, codec, tail_cache(call.services)
            )
        except KafkaRecordsError as error:
            entry["error_code"] = error.code
            return
        records, following = converted.records, converted.next_offset
        if converted.is_cut:
            _note_end(call, read, following)
            entry["records"] = records
            return
    _note_end(call, read, max(following, found.resume_offset))
    if found.resume_offset > following:
        epoch = to_kafka(read.route, found.leader_epoch)
        records = records + skipped_range(following, found.resume_offset, epoch)
    entry["records"] = records


def _note_end(call: Call, read: PartitionRead, end: int) -> None:
    """Note where the client goes on."""
    place = read.route.topic, read.route.partition
    read_positions(call.services).fetched(call.connection, place, end)
