"""ListGroups, DescribeGroups, DeleteGroups: groups of both protocols.

Classic groups with members are the gateway's. All others are the process of groups': those of our
protocol, which is Kafka's new one (KIP-848), share groups, and groups that have only offsets.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups.classic_groups import ALL_GROUP_OPERATIONS, check_group_name
from netfront.kafka.apis.pause import give_way
from netfront.kafka.apis.shared_state import classic_groups
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.groups.classic_group import ClassicGroup, State
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

_STATES = {
    "EMPTY": "Empty", "ASSIGNING": "Assigning", "RECONCILING": "Reconciling", "STABLE": "Stable",
}  # fmt: skip


def list_groups(call: Call) -> Steps:
    """List groups, by state and type since versions 4 and 5."""
    rows = {
        group.name: {
            "group_id": group.name, "protocol_type": group.protocol_type,
            "group_state": group.state.value, "group_type": "classic",
        }
        for group in classic_groups(call.services)
        if group.members
    }  # fmt: skip
    after = ""
    while True:
        answer = yield call.ask(Api.LIST_GROUPS, {"after": after})
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        value = answer.json()
        for each in value["groups"]:
            rows.setdefault(each["group"], _listed(each))
        after = value["next"]
        if after is None:
            break
    states = {each.lower() for each in call.request.get("states_filter") or ()}
    types = {each.lower() for each in call.request.get("types_filter") or ()}
    return {
        "error_code": KafkaError.NONE,
        "groups": [
            row
            for row in rows.values()
            if (not states or row["group_state"].lower() in states)
            and (not types or row["group_type"].lower() in types)
        ],
    }


def _listed(summary: dict[str, Any]) -> dict[str, Any]:
    is_share = summary["kind"] == "share"
    kind = "share" if is_share else "consumer"
    if not is_share and not summary["members"]:
        kind = "classic"  # offsets alone: a group of either protocol, as Kafka shows them
    return {
        "group_id": summary["group"],
        "protocol_type": "share" if is_share else "consumer",
        "group_state": _STATES.get(summary["state"], "Stable"),
        "group_type": kind,
    }


def describe_groups(call: Call) -> Steps:
    """Describe groups of the classic protocol, and groups without members."""
    groups = []
    for number, name in enumerate(dict.fromkeys(call.request["groups"])):
        yield from give_way(call.services, number)
        group = classic_groups(call.services).get(name)
        if group is not None and group.members:
            entry = _described(group)
        else:
            entry = yield from _describe_other(call, name)
        if call.request.get("include_authorized_operations"):
            entry["authorized_operations"] = ALL_GROUP_OPERATIONS
        groups.append(entry)
    return {"groups": groups}


def _described(group: ClassicGroup) -> dict[str, Any]:
    is_stable = group.state is State.STABLE
    protocol = (group.protocol or "") if is_stable else ""
    return {
        "error_code": KafkaError.NONE,
        "group_id": group.name,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type,
        "protocol_data": protocol,
        "members": [
            {
                "member_id": member.member_id, "group_instance_id": member.instance_id,
                "client_id": member.client_id, "client_host": member.host,
                "member_metadata": member.metadata(protocol) if is_stable else b"",
                "member_assignment": member.assignment if is_stable else b"",
            }
            for member in group.members.values()
        ],
    }  # fmt: skip


def _describe_other(call: Call, name: str) -> Steps:
    """A group without classic members."""
    entry = {
        "error_code": KafkaError.NONE, "group_id": name, "group_state": "Dead",
        "protocol_type": "", "protocol_data": "", "members": [],
    }  # fmt: skip
    try:
        check_group_name(name)
    except RefusedError as refused:
        return {**entry, "error_code": refused.code, "error_message": refused.sentence}
    answer = yield call.ask(Api.DESCRIBE_GROUP, {"group": name, "part": "members", "after": None})
    if answer.code is ErrorCode.UNKNOWN_GROUP:
        if call.version < 6:
            return entry
        return {
            **entry,
            "error_code": KafkaError.GROUP_ID_NOT_FOUND,
            "error_message": f"there is no group {name}",
        }
    if answer.code is not ErrorCode.OK:
        return {
            **entry,
            "error_code": coordinator_error(answer.code),
            "error_message": answer.sentence,
        }
    found = answer.json()
    if found["group"]["members"] or found["group"]["kind"] == "share":
        # Kafka's answer for a group of another protocol, which has an API of its own.
        return {
            **entry,
            "error_code": KafkaError.GROUP_ID_NOT_FOUND if call.version >= 6 else KafkaError.NONE,
            "error_message": f"Group {name} is not a classic group.",
        }
    return {**entry, "group_state": "Empty", "protocol_type": "consumer"}


def delete_groups(call: Call) -> Steps:
    """Delete groups without members."""
    names, results = call.request["groups_names"], {}
    for name in names:
        group = classic_groups(call.services).get(name)
        if group is not None and group.members:
            results[name] = KafkaError.NON_EMPTY_GROUP
    asked = [name for name in dict.fromkeys(names) if name not in results]
    for start in range(0, len(asked), 1_000):
        answer = yield call.ask(Api.DELETE_GROUPS, {"groups": asked[start : start + 1_000]})
        if answer.code is not ErrorCode.OK:
            failed = coordinator_error(answer.code)
            results |= dict.fromkeys(asked[start : start + 1_000], failed)
            continue
        for each in answer.json()["results"]:
            results[each["group"]] = coordinator_error(each["code"])
    return {
        "results": [
            {"group_id": name, "error_code": results.get(name, KafkaError.UNKNOWN_SERVER_ERROR)}
            for name in dict.fromkeys(names)
        ]
    }
