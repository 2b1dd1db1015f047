"""ConsumerGroupHeartbeat, ConsumerGroupDescribe: Kafka's newer group protocol (KIP-848), which is
ours too.

A heartbeat becomes GROUP_HEARTBEAT. The differences: topics by id are bytes, the assignor `uniform`
is our `sticky`, session timeout and heartbeat interval are the server's, and a pattern of topic
names is matched here (`topic_patterns`).
"""

from __future__ import annotations

import uuid
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.cluster.group_settings import session_timeout_ms, setting_of
from netfront.kafka.apis.groups.classic_groups import ALL_GROUP_OPERATIONS, check_group_name
from netfront.kafka.apis.groups.topic_patterns import (
    forget_pattern,
    kept_text,
    matched_topics,
    restore,
)
from netfront.kafka.apis.pause import give_way
from netfront.kafka.apis.shared_state import classic_groups
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from shm.rights.acl import READ, TOPIC
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

JOIN_EPOCH = 0
ASSIGNORS = {"uniform": "sticky", "range": "range"}
ASSIGNOR_NAMES = {"sticky": "uniform"}
STATES = {
    "EMPTY": "Empty", "ASSIGNING": "Assigning", "RECONCILING": "Reconciling", "STABLE": "Stable",
    "DEAD": "Dead",
}  # fmt: skip
CONSUMER_MEMBER = 1
"""Type of a member in ConsumerGroupDescribe: of the newer protocol."""
GONE = (
    ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_GROUP,
    ErrorCode.NOT_AUTHORIZED,
)  # fmt: skip
"""Errors of a member that has to join again, and sends its pattern then, or that is another
user's.
"""


def heartbeat(call: Call) -> Steps:
    """Join, stay in or leave a group."""
    request = call.request
    name, epoch = request["group_id"], request["member_epoch"]
    check_group_name(name)
    if classic_groups(call.services).get(name) is not None and epoch == JOIN_EPOCH:
        raise RefusedError(
            KafkaError.GROUP_ID_NOT_FOUND,
            f"the group {name} has members of the classic protocol: stop them, or use that",
        )
    member_id = request["member_id"]
    if not member_id and epoch == JOIN_EPOCH:
        member_id = str(uuid.uuid4())
    asked: dict[str, Any] = {
        "group": name, "kind": "consumer", "member_id": member_id, "member_epoch": epoch,
        "instance_id": request["instance_id"],
    }  # fmt: skip
    if epoch >= JOIN_EPOCH:
        asked |= _changes(call, member_id)
    else:
        forget_pattern(call, member_id)
    answer = yield call.ask(Api.GROUP_HEARTBEAT, asked)
    if answer.code is not ErrorCode.OK:
        if answer.code is ErrorCode.NOT_AUTHORIZED and _has_denied_topic(call, asked):
            raise RefusedError(KafkaError.TOPIC_AUTHORIZATION_FAILED, answer.sentence)
        if answer.code in GONE:
            forget_pattern(call, member_id)
        raise RefusedError(_error_of(answer.code), answer.sentence)
    found = answer.json()
    if epoch >= JOIN_EPOCH and "pattern" in found:
        restore(call, member_id, found["pattern"])
    response = {
        "error_code": KafkaError.NONE,
        "member_id": found["member_id"],
        "member_epoch": found["member_epoch"],
        "heartbeat_interval_ms": setting_of(call.services, name, "consumer.heartbeat.interval.ms"),
        "assignment": None,
    }
    assignment = found.get("assignment")
    if assignment is not None:
        response["assignment"] = {
            "topic_partitions": [
                {"topic_id": bytes.fromhex(topic_id), "partitions": partitions}
                for topic_id, partitions in assignment.items()
            ]
        }
    return response


def _error_of(code: ErrorCode) -> KafkaError:
    if code is ErrorCode.INVALID_GROUP:
        return KafkaError.GROUP_ID_NOT_FOUND
    if code is ErrorCode.NOT_AUTHORIZED:  # of the member, which is another user's; see its sentence
        return KafkaError.GROUP_AUTHORIZATION_FAILED
    return coordinator_error(code)


def _has_denied_topic(call: Call, asked: dict[str, Any]) -> bool:
    """True if the client's user may not read all topics of the member: the right was withdrawn."""
    names = asked.get("topics")
    if names is None and asked["member_epoch"] < JOIN_EPOCH:
        return False
    if names is None:
        front = call.services.front
        names = front.topics_of_member(call.user, asked["group"], asked["member_id"])
    return not all(call.may(READ, TOPIC, name) for name in names)


def _changes(call: Call, member_id: str) -> dict[str, Any]:
    """The fields of our heartbeat that this one sets. Raises RefusedError."""
    request = call.request
    found: dict[str, Any] = {}
    topics = request["subscribed_topic_names"]
    matched = matched_topics(call, member_id, topics)
    if topics is not None or matched is not None:
        found["topics"] = sorted({*(topics or ()), *(matched or ())})
    pattern = kept_text(call, member_id)
    if pattern is not None:
        found["pattern"] = pattern
    owned = request["topic_partitions"]
    if owned is not None:
        found["owned"] = {
            bytes(topic["topic_id"]).hex(): topic["partitions"] for topic in owned
        }  # fmt: skip
    if request["member_epoch"] != JOIN_EPOCH:
        return found
    services, group = call.services, request["group_id"]
    found |= {
        "session_timeout_ms": session_timeout_ms(services, group, "consumer.session.timeout.ms"),
        "heartbeat_interval_ms": setting_of(services, group, "consumer.heartbeat.interval.ms"),
        "client_id": call.client_id, "follows_catalog": False,
    }  # fmt: skip
    found.setdefault("owned", {})
    found.setdefault("topics", [])
    if request["rebalance_timeout_ms"] > 0:
        found["rebalance_timeout_ms"] = request["rebalance_timeout_ms"]
    assignor = request["server_assignor"]
    if assignor is not None:
        if assignor not in ASSIGNORS:
            raise RefusedError(
                KafkaError.UNSUPPORTED_ASSIGNOR,
                f"there is no assignor {assignor}; use {' or '.join(ASSIGNORS)}",
            )
        found["assignor"] = ASSIGNORS[assignor]
    return found


def describe(call: Call) -> Steps:
    """Describe groups of this protocol."""
    groups = []
    for number, name in enumerate(dict.fromkeys(call.request["group_ids"])):
        yield from give_way(call.services, number)
        entry = yield from _described(call, name)
        if call.request["include_authorized_operations"]:
            entry["authorized_operations"] = ALL_GROUP_OPERATIONS
        groups.append(entry)
    return {"groups": groups}


def _described(call: Call, name: str) -> Steps:
    entry: dict[str, Any] = {
        "group_id": name, "group_state": "Dead", "error_code": KafkaError.NONE, "members": [],
    }  # fmt: skip
    if classic_groups(call.services).get(name) is not None:
        entry["error_code"] = KafkaError.GROUP_ID_NOT_FOUND
        return entry
    after = None
    while True:
        asked = {"group": name, "part": "members", "after": after}
        answer = yield call.ask(Api.DESCRIBE_GROUP, asked)
        if answer.code is not ErrorCode.OK:
            entry.update(error_code=_error_of(answer.code), error_message=answer.sentence)
            return entry
        page = answer.json()
        group = page["group"]
        if group["kind"] != "consumer":
            entry["error_code"] = KafkaError.GROUP_ID_NOT_FOUND
            return entry
        entry.update(
            group_state=STATES.get(group["state"], "Dead"),
            group_epoch=group["epoch"],
            assignment_epoch=group["epoch"],
            assignor_name=ASSIGNOR_NAMES.get(group["assignor"], group["assignor"]),
        )
        entry["members"] += [_member(call, member) for member in page["members"]]
        after = page["next"]
        if after is None:
            return entry


def _member(call: Call, member: dict[str, Any]) -> dict[str, Any]:
    return {
        "member_id": member["member_id"],
        "instance_id": member["instance_id"],
        "member_epoch": member["epoch"],
        "client_id": member["client_id"] or "",
        "client_host": "",
        "subscribed_topic_names": member.get("topics", []),
        "assignment": _assignment(call, member.get("owned", {})),
        "target_assignment": _assignment(call, member.get("target", {})),
        "member_type": CONSUMER_MEMBER,
    }


def _assignment(call: Call, partitions: dict[str, list[int]]) -> dict[str, Any]:
    found = []
    for name, numbers in partitions.items():
        route = call.services.routes.find_by_name(name, 0)
        if route is not None:
            found.append({"topic_id": route.topic_id, "topic_name": name, "partitions": numbers})
    return {"topic_partitions": found}
