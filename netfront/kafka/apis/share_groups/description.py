"""ShareGroupDescribe: members of share groups."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.groups.classic_groups import ALL_GROUP_OPERATIONS
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

STATES = {"EMPTY": "Empty", "STABLE": "Stable"}


def describe(call: Call) -> Steps:
    """Describe share groups."""
    groups = []
    for name in dict.fromkeys(call.request["group_ids"]):
        entry = yield from _described(call, name)
        if call.request["include_authorized_operations"]:
            entry["authorized_operations"] = ALL_GROUP_OPERATIONS
        groups.append(entry)
    return {"groups": groups}


def _described(call: Call, name: str) -> Steps:
    entry: dict[str, Any] = {
        "error_code": KafkaError.NONE, "error_message": None, "group_id": name,
        "group_state": "Dead", "group_epoch": 0, "assignment_epoch": 0, "assignor_name": "simple",
        "members": [],
    }  # fmt: skip
    after = None
    while True:
        asked = {"group": name, "part": "members", "after": after}
        answer = yield call.ask(Api.DESCRIBE_GROUP, asked)
        if answer.code is not ErrorCode.OK:
            entry.update(error_code=coordinator_error(answer.code), error_message=answer.sentence)
            return entry
        page = answer.json()
        group = page["group"]
        if group["kind"] != "share":
            entry.update(
                error_code=KafkaError.GROUP_ID_NOT_FOUND,
                error_message=f"Group {name} is not a share group.",
            )
            return entry
        entry.update(
            group_state=STATES.get(group["state"], "Stable"), group_epoch=group["epoch"],
            assignment_epoch=group["epoch"],
        )  # fmt: skip
        entry["members"] += [_member(call, member) for member in page["members"]]
        after = page["next"]
        if after is None:
            return entry


def _member(call: Call, member: dict[str, Any]) -> dict[str, Any]:
    """A member; it may get records of every partition of its topics."""
    routes, partitions = call.services.routes, []
    for name in member["topics"]:
        route = routes.find_by_name(name, 0)
        if route is not None:
            partitions.append(
                {"topic_id": route.topic_id, "topic_name": name,
                 "partitions": list(range(route.partition_count))}
            )  # fmt: skip
    return {
        "member_id": member["member_id"], "rack_id": None, "member_epoch": member["epoch"],
        "client_id": member["client_id"] or "", "client_host": "",
        "subscribed_topic_names": member["topics"],
        "assignment": {"topic_partitions": partitions},
    }  # fmt: skip
