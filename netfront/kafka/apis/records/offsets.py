"""ListOffsets, with Kafka's special times, and OffsetForLeaderEpoch."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.cluster.leader_epochs import (
    OF_DELETED,
    epoch_error,
    from_kafka,
    to_kafka,
)
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.fetch_messages import READ_COMMITTED, READ_UNCOMMITTED
from tailrace.protocol.frame import Api
from tailrace.protocol.lookup_messages import OFFSETS_AT_ONCE_MAX

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = range(-1, -7, -1)
TIME_MAX_MS = (1 << 62) // 1000


def list_offsets(call: Call) -> Steps:
    """Find offsets by position and time."""
    topics: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    latest: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for topic in call.request["topics"]:
        made: list[dict[str, Any]] = []
        topics.append({"name": topic["name"], "partitions": made})
        for partition in topic["partitions"]:
            entry = {
                "partition_index": partition["partition_index"], "error_code": KafkaError.NONE,
                "timestamp": -1, "offset": -1, "leader_epoch": -1,
            }  # fmt: skip
            made.append(entry)
            place = _place(partition["timestamp"])
            if place is None:
                entry["error_code"] = KafkaError.UNSUPPORTED_VERSION
                continue
            entry["error_code"] = _known_epoch_error(call, topic["name"], partition)
            if entry["error_code"] != KafkaError.NONE:
                continue
            question = {
                "topic": topic["name"], "partition": partition["partition_index"], "at": place,
            }  # fmt: skip
            if partition["timestamp"] == MAX_TIMESTAMP:
                latest.append((question, entry))
            entries.append(entry)
            asked.append(question)
            if partition["timestamp"] in (LATEST_TIERED, EARLIEST_PENDING):
                entry["is_without_offset"] = True
    isolation = READ_COMMITTED if call.request.get("isolation_level") == 1 else READ_UNCOMMITTED
    found = yield from ask_offsets(call, asked, isolation)
    for question, entry, offset in zip(asked, entries, found, strict=True):
        _fill(call, question, entry, offset)
    yield from _find_latest_times(call, latest, found, entries, isolation)
    return {"topics": topics}


def _known_epoch_error(call: Call, name: str, partition: dict[str, Any]) -> KafkaError:
    """The error for the leader epoch that the client knows, if it names one."""
    known = partition.get("current_leader_epoch", -1)
    route = call.services.routes.find_by_name(name, partition["partition_index"])
    if route is None or known < 0:
        return KafkaError.NONE
    return epoch_error(route, call.services.front.log_bounds.leader_epoch(route), known)


def _place(timestamp: int) -> str | int | None:
    if timestamp in (LATEST, MAX_TIMESTAMP, LATEST_TIERED, EARLIEST_PENDING):
        return "latest"
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return "earliest"
    return min(timestamp, TIME_MAX_MS) * 1000 if timestamp >= 0 else None


def ask_offsets(call: Call, asked: list[dict[str, Any]], isolation: str) -> Steps:
    """LIST_OFFSETS of partitions: its rows, in their order."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(asked), OFFSETS_AT_ONCE_MAX):
        some = asked[start : start + OFFSETS_AT_ONCE_MAX]
        answer = yield call.ask(Api.LIST_OFFSETS, {"partitions": some, "isolation": isolation})
        found += (
            answer.json()["offsets"]
            if answer.code is ErrorCode.OK
            else [{"code": int(answer.code)}] * len(some)
        )
    return found


def _fill(
    call: Call, question: dict[str, Any], entry: dict[str, Any], found: dict[str, Any]
) -> None:
    if found["code"]:
        entry["error_code"] = kafka_error(found["code"])
        return
    route = call.services.routes.find_by_name(question["topic"], question["partition"])
    if route is not None:
        entry["leader_epoch"] = to_kafka(route, found["leader_epoch"])
    if not entry.pop("is_without_offset", False):
        entry["offset"] = found["offset"]
    if found.get("timestamp_us", -1) >= 0:
        entry["timestamp"] = found["timestamp_us"] // 1000


def _find_latest_times(
    call: Call,
    latest: list[tuple[dict[str, Any], dict[str, Any]]],
    found: list[dict[str, Any]],
    entries: list[dict[str, Any]],
    isolation: str,
) -> Steps:
    """For MAX_TIMESTAMP: the first record with the partition's largest time."""
    by_entry = {id(entry): offset for entry, offset in zip(entries, found, strict=True)}
    questions, targets = [], []
    for question, entry in latest:
        entry["offset"] = -1
        time_us = by_entry[id(entry)].get("max_timestamp_us", -1)
        if entry["error_code"] == KafkaError.NONE and time_us >= 0:
            questions.append({**question, "at": time_us})
            targets.append(entry)
    if questions:
        times = yield from ask_offsets(call, questions, isolation)
        for question, entry, offset in zip(questions, targets, times, strict=True):
            _fill(call, question, entry, offset)


def offset_for_leader_epoch(call: Call) -> Steps:
    """Say where leader epochs end."""
    yield from ()
    services = call.services
    topics = []
    for topic in call.request["topics"]:
        entries = []
        for partition in topic["partitions"]:
            route = services.routes.find_by_name(topic["topic"], partition["partition"])
            entry = {
                "partition": partition["partition"], "error_code": KafkaError.NONE,
                "leader_epoch": -1, "end_offset": -1,
            }  # fmt: skip
            entries.append(entry)
            if route is None:
                entry["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                continue
            current = services.front.log_bounds.leader_epoch(route)
            asked = from_kafka(route, partition["leader_epoch"])
            if current < 0:  # an unknown end would mean a log that was cut
                entry["error_code"] = kafka_error(ErrorCode.NOT_READY)
                continue
            entry["error_code"] = epoch_error(
                route, current, partition.get("current_leader_epoch", -1)
            )
            if entry["error_code"] != KafkaError.NONE:
                continue
            epoch, end = services.front.log_bounds.end_of_epoch(route, asked)
            if asked == OF_DELETED:  # as Kafka says of an epoch before the first one
                epoch, end = 0, services.front.log_bounds.shown_offsets(route)[0]
            if epoch >= 0:
                entry.update(leader_epoch=partition["leader_epoch"], end_offset=end)
        topics.append({"topic": topic["topic"], "partitions": entries})
    return {"topics": topics}
