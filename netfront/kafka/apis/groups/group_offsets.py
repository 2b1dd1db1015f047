"""OffsetCommit, OffsetFetch, OffsetDelete: the offsets of groups, which the process of groups has.

The offsets are the same for consumers of Kafka's protocol and of ours.

Invariants:
- A commit of a classic group is accepted from a member of the current generation alone, or from
  outside while the group has no members.
- A client's offset in a deleted topic is not committed in the one that has its name now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.cluster.leader_epochs import OF_DELETED, from_kafka, to_kafka
from netfront.kafka.apis.groups.classic_groups import check_group_name, commit_error, has_members
from netfront.kafka.apis.groups.left_offsets import learn_left_offsets
from netfront.kafka.apis.shared_state import classic_groups, producers_of, read_positions
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError, coordinator_error, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

OFFSETS_AT_ONCE = 4_000
METADATA_MAX = 4_096
NO_OFFSET = -1
_Entry = tuple[dict[str, Any], str | None, dict[str, Any]]


def topic_name(call: Call, topic: dict[str, Any]) -> str | None:
    """The name of a topic that a request names by name or, since version 10, by id."""
    if call.version < 10:
        return str(topic["name"])
    route = call.services.routes.find(topic.get("topic_id", ZERO_UUID), 0)
    return None if route is None else route.topic


def _id_of(call: Call, topic: dict[str, Any]) -> tuple[str, ...]:
    """The topic's id, if the request names topics by id. Its name may be that of another one when
    the process of groups gets the request.
    """
    return () if call.version < 10 else (topic["topic_id"].hex(),)


def offset_commit(call: Call) -> Steps:
    """Commit offsets of a group."""
    request, services = call.request, call.services
    name = request["group_id"]
    error = _commit_error(call, name)
    topics = request["topics"]
    codes: dict[tuple[str, int], KafkaError] = {}
    entries = []
    names = [topic_name(call, topic) for topic in topics]
    for topic, found in zip(topics, names, strict=True):
        if found is None or error is not KafkaError.NONE:
            continue
        for each in topic["partitions"]:
            metadata = each["committed_metadata"] or ""
            at = found, each["partition_index"]
            if len(metadata.encode("utf-8", "replace")) > METADATA_MAX:
                codes[at] = KafkaError.OFFSET_METADATA_TOO_LARGE
                continue
            if not services.routes.partition_count(found):
                codes[at] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                continue
            epoch = our_epoch(call, at, each)
            if epoch == OF_DELETED or is_of_deleted_topic(call, at, request["member_id"]):
                codes[at] = _stale_error(call)
            else:
                entry = [*at, each["committed_offset"], epoch, metadata, *_id_of(call, topic)]
                entries.append(entry)
    for start in range(0, len(entries), OFFSETS_AT_ONCE):
        part = entries[start : start + OFFSETS_AT_ONCE]
        body: dict[str, Any] = {"group": name, "kind": "classic", "offsets": part}
        if is_of_our_protocol(call):
            body |= {
                "member_id": request["member_id"],
                "member_epoch": request["generation_id_or_member_epoch"],
            }
        answer = yield call.ask(Api.COMMIT_OFFSETS, body)
        if answer.code is not ErrorCode.OK:
            failed = coordinator_error(answer.code)
            codes |= {(entry[0], entry[1]): failed for entry in part}
            continue
        for refused in answer.json()["refused"]:
            codes[refused[0], refused[1]] = coordinator_error(refused[2])
    return {
        "topics": [
            {
                "name": topic.get("name", ""), "topic_id": topic.get("topic_id", ZERO_UUID),
                "partitions": [
                    {
                        "partition_index": each["partition_index"],
                        "error_code": _code_of(error, found, each["partition_index"], codes),
                    }
                    for each in topic["partitions"]
                ],
            }
            for topic, found in zip(topics, names, strict=True)
        ]
    }  # fmt: skip


def our_epoch(call: Call, place: tuple[str, int], partition: dict[str, Any]) -> int:
    """The leader epoch of a partition's offset in a request; -1: it is not known; OF_DELETED.

    One that has not begun is another cluster's. A client that got it back would be told that its
    offset is lost.
    """
    route = call.services.routes.find_by_name(*place)
    if route is None:
        return -1
    epoch = from_kafka(route, partition.get("committed_leader_epoch", -1))
    if epoch <= 0:
        return epoch
    current = call.services.front.log_bounds.leader_epoch(route)
    return -1 if 0 <= current < epoch else epoch


def is_of_deleted_topic(call: Call, place: tuple[str, int], member_id: str) -> bool:
    """True if the member of a classic group, else the client that asks, has read a topic that was
    deleted, and not the one that has its name now.
    """
    services = call.services
    route = services.routes.find_by_name(*place)
    if route is None:
        return False
    group = classic_groups(services).get(call.request["group_id"])
    member = None if group is None else group.members.get(member_id)
    client = call.client if member is None else (member.client_id, member.host[1:], member.user)
    return read_positions(services).is_stale(client, place, route.topic_id)


def _stale_error(call: Call) -> KafkaError:
    """The error of an offset in a deleted topic. A member of a classic group joins again, and asks
    where to begin. UNKNOWN_TOPIC_OR_PARTITION would be tried again for ever.
    """
    is_member = has_members(call.services, call.request["group_id"])
    return KafkaError.ILLEGAL_GENERATION if is_member else KafkaError.UNKNOWN_TOPIC_ID


def _code_of(
    error: KafkaError, name: str | None, partition: int, codes: dict[tuple[str, int], KafkaError]
) -> KafkaError:
    if error is not KafkaError.NONE:
        return error
    if name is None:
        return KafkaError.UNKNOWN_TOPIC_ID
    return codes.get((name, partition), KafkaError.NONE)


def is_of_our_protocol(call: Call) -> bool:
    """True if a commit is of a member of the new protocol (KIP-848), which is ours, or of a classic
    group that has lost it.
    """
    request = call.request
    return (
        bool(request["member_id"])
        and request["generation_id_or_member_epoch"] >= 0
        and not has_members(call.services, request["group_id"])
    )


def _commit_error(call: Call, name: str) -> KafkaError:
    """The error of the whole commit: its member is not one of the group, or NONE."""
    try:
        check_group_name(name)
    except RefusedError as refused:
        return refused.code
    request = call.request
    return commit_error(
        call,
        name,
        request["member_id"],
        request.get("group_instance_id"),
        request["generation_id_or_member_epoch"],
    )


def offset_fetch(call: Call) -> Steps:
    """The committed offsets of one group, or since version 8 of several ones."""
    request = call.request
    if call.version < 8:
        name, topics = request["group_id"], request["topics"]
        if call.version < 2:
            topics = topics or []
        found, error = yield from _fetch(call, name, topics)
        if error is not KafkaError.NONE and call.version < 2:
            found = [_all_failed(topic, error) for topic in topics or []]
        return {"topics": found, "error_code": error}
    groups = []
    for each in request["groups"]:
        found, error = yield from _fetch(call, each["group_id"], each["topics"])
        groups.append({"group_id": each["group_id"], "topics": found, "error_code": error})
    return {"groups": groups}


def _all_failed(topic: dict[str, Any], error: KafkaError) -> dict[str, Any]:
    return {**topic, "partitions": [_missing(each, error) for each in topic["partition_indexes"]]}


def _missing(partition: int, error: KafkaError = KafkaError.NONE) -> dict[str, Any]:
    return {"partition_index": partition, "committed_offset": NO_OFFSET,
            "committed_leader_epoch": -1, "metadata": "", "error_code": error}  # fmt: skip


def _fetch(call: Call, name: str, topics: list[dict[str, Any]] | None) -> Steps:
    """(topics of the response, error of the group)."""
    try:
        check_group_name(name)
    except RefusedError as refused:
        return [], refused.code
    found: dict[str, dict[int, dict[str, Any]]] = {}
    asked: list[list[Any] | None] = [None]
    names: list[str | None] = []
    if topics is not None:
        names = [topic_name(call, topic) for topic in topics]
        partitions = [
            [topic_found, partition, *_id_of(call, topic)]
            for topic, topic_found in zip(topics, names, strict=True)
            if topic_found is not None and call.services.routes.partition_count(topic_found)
            for partition in topic["partition_indexes"]
        ]
        asked = [
            partitions[start : start + OFFSETS_AT_ONCE]
            for start in range(0, len(partitions), OFFSETS_AT_ONCE)
        ]
    for part in asked:
        after = None
        while True:
            body: dict[str, Any] = {"group": name, "partitions": part}
            if after is not None:
                body["after"] = after
            answer = yield call.ask(Api.FETCH_OFFSETS, body)
            if answer.code is ErrorCode.UNKNOWN_GROUP:
                break
            if answer.code is not ErrorCode.OK:
                return [], coordinator_error(answer.code)
            value = answer.json()
            _note(call, found, value["offsets"])
            after = value.get("next")
            if after is None:
                break
    if call.request.get("require_stable"):
        error = yield from learn_left_offsets(call)
        if error is not KafkaError.NONE:
            return [], error
        pending = producers_of(call.services).pending_offsets(name, call.services.now_ns)
        for pending_topic, partition in pending:
            unstable = _missing(partition, KafkaError.UNSTABLE_OFFSET_COMMIT)
            found.setdefault(pending_topic, {})[partition] = unstable
    if topics is None:
        return [_topic(call, each, None, rows.values()) for each, rows in found.items()], (
            KafkaError.NONE
        )
    answered = []
    for topic, topic_found in zip(topics, names, strict=True):
        rows = found.get(topic_found or "", {})
        error = KafkaError.UNKNOWN_TOPIC_ID if topic_found is None else KafkaError.NONE
        answered.append(
            _topic(
                call, topic_found, topic,
                [rows.get(each, _missing(each, error)) for each in topic["partition_indexes"]],
            )
        )  # fmt: skip
    return answered, KafkaError.NONE


def _note(
    call: Call, found: dict[str, dict[int, dict[str, Any]]], offsets: list[list[Any]]
) -> None:
    """Note rows of FETCH_OFFSETS. One that is not committed is where a client begins that would
    otherwise begin at the end, and miss records: Kafka's clients begin at what is committed.
    """
    for topic, partition, offset, leader_epoch, metadata, *_ in offsets:
        row = _missing(partition)
        if offset >= 0:
            route = call.services.routes.find_by_name(topic, partition)
            row |= {
                "committed_offset": offset,
                "committed_leader_epoch": -1 if route is None else to_kafka(route, leader_epoch),
                "metadata": metadata,
            }
        elif offset < 0:
            row["committed_offset"] = NO_OFFSET
        found.setdefault(topic, {})[partition] = row


def _topic(
    call: Call,
    name: str | None,
    asked: dict[str, Any] | None,
    partitions: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    topic_id = (asked or {}).get("topic_id", ZERO_UUID)
    if asked is None and name is not None and call.version >= 10:
        route = call.services.routes.find_by_name(name, 0)
        topic_id = ZERO_UUID if route is None else route.topic_id
    return {"name": name or "", "topic_id": topic_id, "partitions": list(partitions)}


def offset_delete(call: Call) -> Steps:
    """Forget committed offsets of a group that reads none of their topics."""
    request = call.request
    name, topics = request["group_id"], request["topics"]
    check_group_name(name)
    group = classic_groups(call.services).get(name)
    if group is not None and group.members and group.protocol_type != "consumer":
        raise RefusedError(KafkaError.NON_EMPTY_GROUP, "the group has members")
    entries = [
        [topic["name"], each["partition_index"], None, ""]
        for topic in topics
        for each in topic["partitions"]
    ]
    codes: dict[tuple[str, int], KafkaError] = {}
    if group is not None and group.members:
        codes = dict.fromkeys(
            ((entry[0], entry[1]) for entry in entries), KafkaError.GROUP_SUBSCRIBED_TO_TOPIC
        )
        entries = []
    for start in range(0, len(entries), OFFSETS_AT_ONCE):
        part = entries[start : start + OFFSETS_AT_ONCE]
        answer = yield call.ask(Api.ALTER_GROUP_OFFSETS, {"group": name, "offsets": part})
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        for refused in answer.json()["refused"]:
            codes[refused[0], refused[1]] = kafka_error(refused[2])
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {
                        "partition_index": each["partition_index"],
                        "error_code": codes.get(
                            (topic["name"], each["partition_index"]), KafkaError.NONE
                        ),
                    }
                    for each in topic["partitions"]
                ],
            }
            for topic in topics
        ]
    }
