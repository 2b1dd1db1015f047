"""Rules of groups: classic, newer and share groups, and their offsets."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.rights.checks import (
    DENIED,
    AnsweredError,
    Entry,
    Merge,
    Rule,
    denied_topics,
    failed,
    is_allowed,
    require,
    sentence,
    separated,
    show_group_operations,
)
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.rights.acl import DELETE, DESCRIBE, GROUP, READ, TOPIC, TRANSACTIONAL_ID

_CODE = KafkaError.GROUP_AUTHORIZATION_FAILED
_codes = failed("partition_index")


def member(call: Call) -> None:
    """Read of the group."""
    require(call, READ, GROUP, call.request["group_id"])


def subscriber(call: Call) -> None:
    """Read of the group, describe and read of all topics of the subscription."""
    member(call)
    for name in call.request["subscribed_topic_names"] or ():
        for operation in (DESCRIBE, READ):
            require(call, operation, TOPIC, name)


# ---- FindCoordinator -----------------------------------------------------------------------------

GROUP_KEY, TRANSACTION_KEY = 0, 1


def find_coordinator(call: Call) -> Merge | None:
    """Describe of the group or transactional id. Coordinators of other things are for brokers."""
    request = call.request
    kind = {GROUP_KEY: GROUP, TRANSACTION_KEY: TRANSACTIONAL_ID}.get(request.get("key_type", 0))

    def error(key: str) -> KafkaError:
        if kind is None:
            return KafkaError.CLUSTER_AUTHORIZATION_FAILED
        return KafkaError.NONE if is_allowed(call, DESCRIBE, kind, key) else DENIED[kind]

    def reason(key: str) -> str:
        if kind is None:
            return "the appliance has coordinators of groups and transactional ids alone"
        return sentence(call, DESCRIBE, kind, key)

    if call.version < 4:
        code = error(request["key"])
        if code is not KafkaError.NONE:
            raise RefusedError(code, reason(request["key"]))
        return None
    denied = {key: code for key in request["coordinator_keys"] if (code := error(key))}
    request["coordinator_keys"] = [key for key in request["coordinator_keys"] if key not in denied]

    def merge(response: Entry) -> None:
        response["coordinators"] += [
            {
                "key": key, "error_code": code, "error_message": reason(key), "node_id": -1,
                "host": "", "port": -1,
            }
            for key, code in denied.items()
        ]  # fmt: skip

    return merge if denied else None


# ---- offsets -------------------------------------------------------------------------------------


def offset_commit(call: Call) -> Merge | None:
    """Read of the group and of the topics."""
    request = call.request
    if not is_allowed(call, READ, GROUP, request["group_id"]):
        raise AnsweredError({"topics": [_topic(t, _codes(t, _CODE)) for t in request["topics"]]})
    denied = denied_topics(call, request, "topics", READ)

    def merge(response: Entry) -> None:
        response["topics"] += [_topic(topic, _codes(topic, error)) for topic, error in denied]

    return merge if denied else None


def _topic(topic: Entry, partitions: list[Entry]) -> Entry:
    return {
        "name": topic.get("name", ""), "topic_id": topic.get("topic_id", ZERO_UUID),
        "partitions": partitions,
    }  # fmt: skip


def offset_fetch(call: Call) -> Steps:
    """Describe of the groups and of the topics."""
    request = call.request
    if call.version < 8:
        return _fetch_of_one(call)
    request["groups"], refused = yield from separated(
        call, request["groups"], lambda group: is_allowed(call, DESCRIBE, GROUP, group["group_id"])
    )
    hidden = [denied_topics(call, group, "topics", DESCRIBE) for group in request["groups"]]

    def merge(response: Entry) -> None:
        for group, denied in zip(response["groups"], hidden, strict=True):
            group["topics"] = _visible(call, group["topics"])
            group["topics"] += [_topic(topic, _unfetched(topic, error)) for topic, error in denied]
        response["groups"] += [
            {"group_id": group["group_id"], "topics": [], "error_code": _CODE} for group in refused
        ]

    return merge


def _fetch_of_one(call: Call) -> Merge:
    request = call.request
    topics = request["topics"]
    if not is_allowed(call, DESCRIBE, GROUP, request["group_id"]):
        found: list[Any] = []
        if call.version < 2:  # it has an error for each partition alone
            found = [_topic(topic, _unfetched(topic, _CODE)) for topic in topics or ()]
        raise AnsweredError({"topics": found, "error_code": _CODE})
    denied = denied_topics(call, request, "topics", DESCRIBE) if topics else []

    def merge(response: Entry) -> None:
        response["topics"] = _visible(call, response["topics"])
        response["topics"] += [_topic(topic, _unfetched(topic, error)) for topic, error in denied]

    return merge


def _visible(call: Call, topics: list[Entry]) -> list[Entry]:
    """The topics that the user may describe, of those that the group has offsets of."""
    return [
        topic for topic in topics if not topic["name"] or call.may(DESCRIBE, TOPIC, topic["name"])
    ]


def _unfetched(topic: Entry, error: KafkaError) -> list[Entry]:
    return [
        {"partition_index": partition, "committed_offset": -1, "committed_leader_epoch": -1,
         "metadata": "", "error_code": error}
        for partition in topic["partition_indexes"]
    ]  # fmt: skip


def offset_delete(call: Call) -> Merge | None:
    """Delete and read of the group, read of the topics."""
    for operation in (DELETE, READ):
        require(call, operation, GROUP, call.request["group_id"])
    denied = denied_topics(call, call.request, "topics", READ)

    def merge(response: Entry) -> None:
        response["topics"] += [
            {"name": topic["name"], "partitions": _codes(topic, error)} for topic, error in denied
        ]

    return merge if denied else None


# ---- administration ------------------------------------------------------------------------------


def described(asked: str) -> Rule:
    """Describe of each group of a list. `asked`: its name in the request."""

    def rule(call: Call) -> Steps:
        call.request[asked], denied = yield from separated(
            call, call.request[asked], lambda name: is_allowed(call, DESCRIBE, GROUP, name)
        )

        def merge(response: Entry) -> None:
            show_group_operations(call, response["groups"])
            response["groups"] += [
                {
                    "group_id": name, "error_code": _CODE, "group_state": "", "members": [],
                    "error_message": sentence(call, DESCRIBE, GROUP, name), "protocol_type": "",
                    "protocol_data": "", "group_epoch": -1, "assignment_epoch": -1,
                    "assignor_name": "",
                }
                for name in denied
            ]  # fmt: skip

        return merge

    return rule


def list_groups(call: Call) -> Merge:
    """Nothing; groups that the user may describe are listed."""

    def merge(response: Entry) -> None:
        response["groups"] = [
            row for row in response["groups"] if call.may(DESCRIBE, GROUP, row["group_id"])
        ]

    return merge


def delete_groups(call: Call) -> Steps:
    """Delete of each group."""
    call.request["groups_names"], denied = yield from separated(
        call, call.request["groups_names"], lambda name: is_allowed(call, DELETE, GROUP, name)
    )

    def merge(response: Entry) -> None:
        response["results"] += [{"group_id": name, "error_code": _CODE} for name in denied]

    return merge if denied else None


def share_offsets(call: Call) -> Steps:
    """Describe of each group and topic."""
    request = call.request
    request["groups"], refused = yield from separated(
        call, request["groups"], lambda group: is_allowed(call, DESCRIBE, GROUP, group["group_id"])
    )
    hidden = [
        denied_topics(call, group, "topics", DESCRIBE, field="topic_name")
        for group in request["groups"]
    ]

    def merge(response: Entry) -> None:
        for group, denied in zip(response["groups"], hidden, strict=True):
            group["topics"] += [
                {
                    "topic_name": topic["topic_name"], "topic_id": ZERO_UUID,
                    "partitions": [
                        {"partition_index": index, "error_code": error, "start_offset": -1,
                         "leader_epoch": -1, "lag": -1}
                        for index in topic["partitions"]
                    ],
                }
                for topic, error in denied
            ]  # fmt: skip
        response["groups"] += [
            {"group_id": group["group_id"], "topics": [], "error_code": _CODE} for group in refused
        ]

    return merge


def alter_share_offsets(call: Call) -> Merge | None:
    """Read of the group and of the topics."""
    require(call, READ, GROUP, call.request["group_id"])
    denied = denied_topics(call, call.request, "topics", READ, field="topic_name")

    def merge(response: Entry) -> None:
        response["responses"] += [
            {"topic_name": topic["topic_name"], "topic_id": ZERO_UUID,
             "partitions": _codes(topic, error)}
            for topic, error in denied
        ]  # fmt: skip

    return merge if denied else None


def delete_share_offsets(call: Call) -> Merge | None:
    """Delete and read of the group, read of the topics."""
    for operation in (DELETE, READ):
        require(call, operation, GROUP, call.request["group_id"])
    denied = denied_topics(call, call.request, "topics", READ, field="topic_name")

    def merge(response: Entry) -> None:
        response["responses"] += [
            {"topic_name": topic["topic_name"], "topic_id": ZERO_UUID, "error_code": error}
            for topic, error in denied
        ]

    return merge if denied else None


# ---- share groups --------------------------------------------------------------------------------


def share_records(call: Call) -> Merge | None:
    """Read of the group and of the topics."""
    require(call, READ, GROUP, call.request["group_id"] or "")
    denied = denied_topics(call, call.request, "topics", READ)

    def merge(response: Entry) -> None:
        response["responses"] += [
            {
                "topic_id": topic["topic_id"],
                "partitions": [
                    {"partition_index": each["partition_index"], "error_code": error,
                     "records": b"", "acknowledge_error_code": error, "acquired_records": []}
                    for each in topic["partitions"]
                ],
            }
            for topic, error in denied
        ]  # fmt: skip

    return merge if denied else None
