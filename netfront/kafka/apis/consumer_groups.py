"""ConsumerGroupHeartbeat, ConsumerGroupDescribe: Kafka's newer group protocol (KIP-848), which is
ours too.

A heartbeat becomes GROUP_HEARTBEAT. The differences: topics by id are bytes, the assignor `uniform`
is our `sticky`, session timeout and heartbeat interval are the server's, and a pattern of topic
names is matched here.

Invariants:
- A pattern is matched in time that is bounded by its form: `checked_pattern`.
- The pattern of a member is forgotten with the member: when it leaves, when the coordinator no
  longer knows it, or when it was silent for the longest session timeout.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.classic_groups import check_group_name, classic_groups
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

JOIN_EPOCH = 0
SESSION_TIMEOUT_MS = 45_000
HEARTBEAT_INTERVAL_MS = 3_000
ASSIGNORS = {"uniform": "sticky", "range": "range"}
ASSIGNOR_NAMES = {"sticky": "uniform"}
STATES = {
    "EMPTY": "Empty", "ASSIGNING": "Assigning", "RECONCILING": "Reconciling", "STABLE": "Stable",
    "DEAD": "Dead",
}  # fmt: skip
CONSUMER_MEMBER = 1
"""Type of a member in ConsumerGroupDescribe: of the newer protocol."""
PATTERN_MAX = 249
REPEATS_MAX = 3
PATTERNS_MAX = 10_000
GONE = (ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_GROUP)
"""Errors of a member that has to join again, and sends its pattern then."""
_REPEAT = re.compile(r"[*+?}]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


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
        _patterns(call).pop((name, member_id), None)
    answer = yield call.ask(Api.GROUP_HEARTBEAT, asked)
    if answer.code is not ErrorCode.OK:
        if answer.code in GONE:
            _patterns(call).pop((name, member_id), None)
        raise RefusedError(_error_of(answer.code), answer.sentence)
    found = answer.json()
    response = {
        "error_code": KafkaError.NONE,
        "member_id": found["member_id"],
        "member_epoch": found["member_epoch"],
        "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
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
    return coordinator_error(code)


def _changes(call: Call, member_id: str) -> dict[str, Any]:
    """The fields of our heartbeat that this one sets. Raises RefusedError."""
    request = call.request
    found: dict[str, Any] = {}
    topics = request["subscribed_topic_names"]
    matched = _matched(call, member_id, topics)
    if topics is not None or matched is not None:
        found["topics"] = sorted({*(topics or ()), *(matched or ())})
    owned = request["topic_partitions"]
    if owned is not None:
        found["owned"] = {
            bytes(topic["topic_id"]).hex(): topic["partitions"] for topic in owned
        }  # fmt: skip
    if request["member_epoch"] != JOIN_EPOCH:
        return found
    found |= {
        "session_timeout_ms": SESSION_TIMEOUT_MS, "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
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


# ---- patterns ------------------------------------------------------------------------------------


def _patterns(call: Call) -> dict[tuple[str, str], list[Any]]:
    """By (group, member): the pattern, the member's own topics, the list of names that it was last
    matched with, the time of the last heartbeat. The member that was silent longest comes first.
    """
    found: dict[tuple[str, str], list[Any]] = call.services.state.setdefault("patterns", {})
    return found


def _forget_silent(call: Call) -> None:
    patterns, services = _patterns(call), call.services
    silent_ms = max(SESSION_TIMEOUT_MS, services.settings["group.session.timeout.max.ms"])
    while patterns:
        key = next(iter(patterns))
        if services.now_ns - patterns[key][3] <= silent_ms * 1_000_000:
            return
        del patterns[key]


def _matched(call: Call, member_id: str, topics: list[str] | None) -> list[str] | None:
    """The topics of a member's pattern, when the pattern or the catalog has changed. Raises
    RefusedError.
    """
    patterns, key = _patterns(call), (call.request["group_id"], member_id)
    text = call.request.get("subscribed_topic_regex")
    if text is not None:
        if not text:
            patterns.pop(key, None)
            return [] if topics is None else None
        _forget_silent(call)
        if len(patterns) >= PATTERNS_MAX and key not in patterns:
            raise RefusedError(
                KafkaError.GROUP_MAX_SIZE_REACHED,
                f"{PATTERNS_MAX} members have patterns already; subscribe to names",
            )
        patterns[key] = [checked_pattern(text), topics or [], None, 0]
    kept = patterns.pop(key, None)
    if kept is None:
        return None
    patterns[key] = kept  # behind all others: it was heard of last
    kept[3] = call.services.now_ns
    if topics is not None:
        kept[1] = topics
    names = call.services.routes.names()
    if kept[2] is names and text is None:
        return None
    kept[2] = names
    return [*kept[1], *(name for name in names if kept[0].fullmatch(name))]


def checked_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern that is matched quickly whatever it is matched with. Raises RefusedError.

    Python's matcher tries all ways: with a repeated group, or many repetitions, it would take
    longer than anything here may.
    """
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", text)
    if (
        len(text) > PATTERN_MAX
        or "(?" in plain
        or re.search(r"\\[1-9]", text)
        or _REPEATED_GROUP.search(plain)
        or len(_REPEAT.findall(plain)) > REPEATS_MAX
    ):
        raise RefusedError(
            KafkaError.INVALID_REGULAR_EXPRESSION,
            f"the pattern is too complex: use at most {REPEATS_MAX} repetitions, of no group, and "
            f"{PATTERN_MAX} characters; or subscribe to names",
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise RefusedError(
            KafkaError.INVALID_REGULAR_EXPRESSION, f"the pattern is not valid: {error}"
        ) from None


# ---- describe ------------------------------------------------------------------------------------


def describe(call: Call) -> Steps:
    """Describe groups of this protocol."""
    groups = []
    for name in call.request["group_ids"]:
        groups.append((yield from _described(call, name)))
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
