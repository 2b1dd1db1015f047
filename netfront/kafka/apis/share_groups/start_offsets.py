"""Start offsets of share groups: DescribeShareGroupOffsets, AlterShareGroupOffsets,
DeleteShareGroupOffsets.

Below the start offset of a partition every record is done.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError, coordinator_error, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

ENTRIES_AT_ONCE = 1_000
UNKNOWN_LAG = -1


def describe_offsets(call: Call) -> Steps:
    """Say where partitions of groups start, and how many records wait."""
    groups = []
    for asked in call.request["groups"]:
        entry: dict[str, Any] = {
            "group_id": asked["group_id"], "topics": [], "error_code": KafkaError.NONE,
            "error_message": None,
        }  # fmt: skip
        groups.append(entry)
        try:
            found = yield from _partitions_of(call, asked["group_id"])
        except RefusedError as error:
            entry.update(error_code=error.code, error_message=error.sentence)
            continue
        wished = asked["topics"]
        if wished is None:
            names: dict[str, list[int]] = {}
            for name, index in found:
                names.setdefault(name, []).append(index)
            wished = [{"topic_name": name, "partitions": some} for name, some in names.items()]
        entry["topics"] = [_described(call, topic, found) for topic in wished]
    return {"groups": groups}


def _partitions_of(call: Call, name: str) -> Steps:
    """The partitions of a share group, by (topic, partition). Raises RefusedError."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    after = None
    while True:
        asked = {"group": name, "part": "partitions", "after": after}
        answer = yield call.ask(Api.DESCRIBE_GROUP, asked)
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        page = answer.json()
        if page["group"]["kind"] != "share":
            raise RefusedError(KafkaError.GROUP_ID_NOT_FOUND, f"Group {name} is not a share group.")
        for each in page["partitions"]:
            found[each["topic"], each["partition"]] = each
        after = page["next"]
        if after is None:
            return found


def _described(
    call: Call, topic: dict[str, Any], found: dict[tuple[str, int], dict[str, Any]]
) -> dict[str, Any]:
    name, partitions = topic["topic_name"], []
    for index in topic["partitions"]:
        known = found.get((name, index))
        code = KafkaError.NONE
        if call.services.routes.find_by_name(name, index) is None:
            code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        lag = UNKNOWN_LAG if known is None or known["lag"] is None else known["lag"]
        partitions.append(
            {"partition_index": index, "error_code": code, "error_message": None,
             "leader_epoch": 0, "lag": lag,
             "start_offset": -1 if known is None else known["start_offset"]}
        )  # fmt: skip
    return {"topic_name": name, "topic_id": _topic_id(call, name), "partitions": partitions}


def _topic_id(call: Call, name: str) -> bytes:
    route = call.services.routes.find_by_name(name, 0)
    return ZERO_UUID if route is None else route.topic_id


def alter_offsets(call: Call) -> Steps:
    """Set where partitions of a group without members start."""
    topics = call.request["topics"]
    entries = [
        [topic["topic_name"], partition["partition_index"], partition["start_offset"]]
        for topic in topics
        for partition in topic["partitions"]
    ]
    refused = yield from _change(call, entries)
    responses = []
    for topic in topics:
        name, partitions = topic["topic_name"], []
        for partition in topic["partitions"]:
            index = partition["partition_index"]
            code, sentence = refused.get((name, index), (KafkaError.NONE, None))
            partitions.append(
                {"partition_index": index, "error_code": code, "error_message": sentence}
            )
        responses.append(
            {"topic_name": name, "topic_id": _topic_id(call, name), "partitions": partitions}
        )
    return {"error_code": KafkaError.NONE, "error_message": None, "responses": responses}


def delete_offsets(call: Call) -> Steps:
    """Forget topics of a group without members."""
    known = yield from _partitions_of(call, call.request["group_id"])
    names = [topic["topic_name"] for topic in call.request["topics"]]
    wished, of_group = set(names), {name for name, _ in known}
    entries = [[name, index, None] for name, index in known if name in wished]
    refused = {place[0]: why for place, why in (yield from _change(call, entries)).items()}
    responses = []
    for name in names:
        code, sentence = refused.get(name, (KafkaError.NONE, None))
        if name not in of_group:
            code, sentence = KafkaError.UNKNOWN_TOPIC_OR_PARTITION, "the group has no such topic"
        responses.append(
            {"topic_name": name, "topic_id": _topic_id(call, name), "error_code": code,
             "error_message": sentence}
        )  # fmt: skip
    return {"error_code": KafkaError.NONE, "error_message": None, "responses": responses}


def _change(call: Call, entries: list[list[Any]]) -> Steps:
    """Change start offsets. Returns the (KafkaError, sentence) of each partition that was refused.
    Raises RefusedError.
    """
    refused: dict[tuple[str, int], tuple[KafkaError, str]] = {}
    for start in range(0, len(entries), ENTRIES_AT_ONCE):
        some = entries[start : start + ENTRIES_AT_ONCE]
        answer = yield call.ask(
            Api.ALTER_GROUP_OFFSETS,
            {"group": call.request["group_id"], "kind": "share", "offsets": some},
        )
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        for name, index, code, sentence in answer.json()["refused"]:
            refused[name, index] = kafka_error(code), sentence
    return refused
