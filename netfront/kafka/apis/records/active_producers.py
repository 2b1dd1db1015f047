"""DescribeProducers: who writes a partition.

The log tells it: the headers of the batches from the last stable offset on, or without an open
transaction those of the latest RECENT_RECORDS records. Every transaction has a producer epoch of
its own, so a batch belongs to an open transaction if the coordinator has its producer id and epoch
as open.

Invariants:
- Who may read a partition sees which of its offsets an open transaction holds up, whatever the
  transactional id. The id itself is not in the response.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.records.offsets import ask_offsets
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import NO_PRODUCER, BatchHeader, read_header
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import (
    FETCH_UNCOMMITTED,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    FetchEntry,
    FetchRequest,
)
from tailrace.protocol.frame import Api

RECENT_RECORDS = 10_000
READ_AT_ONCE_BYTES = 4 << 20
READ_MAX_BYTES = 64 << 20
PRODUCERS_MAX = 10_000
_OPEN_STATES = ["ongoing", "prepared", "committing", "aborting"]
Identity = tuple[int, int]
"""Producer id and epoch."""


def describe_producers(call: Call) -> Steps:
    """List the producers of partitions."""
    opened: set[Identity] = set()
    error = KafkaError.NONE
    if call.request["topics"]:
        opened, error = yield from _open_transactions(call)
    topics = []
    for topic in call.request["topics"]:
        entries = []
        for index in topic["partition_indexes"]:
            entry: dict[str, Any] = {
                "partition_index": index, "error_code": KafkaError.NONE, "error_message": None,
                "active_producers": [],
            }  # fmt: skip
            entries.append(entry)
            route = call.services.routes.find_by_name(topic["name"], index)
            if route is None:
                entry["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            elif error is not KafkaError.NONE:
                entry.update(
                    error_code=error,
                    error_message="the open transactions are not known at the moment: ask again",
                )
            else:
                yield from _fill(call, route, opened, entry)
        topics.append({"name": topic["name"], "partitions": entries})
    return {"topics": topics}


def _open_transactions(call: Call) -> Steps:
    """Returns the (producer id, epoch)s of all open transactions, and a KafkaError."""
    found: set[Identity] = set()
    asker = call.services.own_peer or call.peer
    following: str | None = None
    for hanging in (False, True):
        while True:
            asked = {"hanging": True} if hanging else {"states": _OPEN_STATES, "next": following}
            answer = yield asker.ask_json(Api.LIST_TRANSACTIONS, asked)
            if answer.code is not ErrorCode.OK:
                return found, kafka_error(answer.code)
            page = answer.json()
            found |= {(one["producer_id"], one["producer_epoch"]) for one in page["transactions"]}
            following = page["next"]
            if following is None:
                break
    return found, KafkaError.NONE


def _fill(call: Call, route: Assignment, opened: set[Identity], entry: dict[str, Any]) -> Steps:
    place = {"topic": route.topic, "partition": route.partition}
    ends = []
    for at, isolation in (
        ("earliest", READ_UNCOMMITTED), ("latest", READ_COMMITTED), ("latest", READ_UNCOMMITTED),
    ):  # fmt: skip
        (found,) = yield from ask_offsets(call, [{**place, "at": at}], isolation)
        if found["code"]:
            entry["error_code"] = kafka_error(found["code"])
            return
        ends.append(found["offset"])
    start, stable, end = ends
    offset = stable if stable < end else max(start, end - RECENT_RECORDS)
    producers: dict[int, dict[str, Any]] = {}
    room = READ_MAX_BYTES
    while offset < end and room > 0:
        one = FetchEntry(
            route.topic_id, route.partition, -1, offset, READ_AT_ONCE_BYTES, FETCH_UNCOMMITTED
        )
        asked = FetchRequest(0, 1, READ_AT_ONCE_BYTES, call.peer.received_bytes, [one])
        answer = yield call.peer.ask(Api.FETCH, [fetch_messages.encode_fetch(asked)])
        if answer.code is not ErrorCode.OK:
            entry["error_code"] = kafka_error(answer.code)
            return
        ((found, batches),) = fetch_messages.decode_fetched(answer.body)
        if found.error:
            entry["error_code"] = kafka_error(found.error)
            return
        following = max(offset, _note_all(batches, opened, producers), found.resume_offset)
        if following == offset:
            break
        offset = following
        room -= len(batches)
    if len(producers) > PRODUCERS_MAX:
        entry.update(
            error_code=KafkaError.INVALID_REQUEST,
            error_message=f"more than {PRODUCERS_MAX} producers have written this partition lately",
        )
        return
    entry["active_producers"] = list(producers.values())


def _note_all(
    batches: memoryview, opened: set[Identity], producers: dict[int, dict[str, Any]]
) -> int:
    """Note the producers of batches. Returns the offset behind the last batch, or 0."""
    at, following = 0, 0
    while at < len(batches):
        header = read_header(batches, at)
        following = header.base_offset + header.last_offset_delta + 1
        if header.producer_id != NO_PRODUCER:
            _note(header, opened, producers)
        at += header.batch_length
    return following


def _note(header: BatchHeader, opened: set[Identity], producers: dict[int, dict[str, Any]]) -> None:
    known = producers.get(header.producer_id)
    begun = -1
    if header.is_transactional and (header.producer_id, header.producer_epoch) in opened:
        begun = header.base_offset
        if known is not None and known["producer_epoch"] == header.producer_epoch:
            begun = known["current_txn_start_offset"]
    producers[header.producer_id] = {
        "producer_id": header.producer_id, "producer_epoch": header.producer_epoch,
        "last_sequence": header.base_sequence + header.record_count - 1,
        "last_timestamp": header.max_timestamp_us // 1000, "coordinator_epoch": 0,
        "current_txn_start_offset": begun,
    }  # fmt: skip
