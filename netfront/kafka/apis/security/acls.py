"""DescribeAcls, CreateAcls, DeleteAcls: the appliance's rules in Kafka's numbers.

Rules of resources that Kafka does not have (delays, console) are not shown to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.rights.acl import (
    ALL,
    ALTER,
    ALTER_CONFIGS,
    ANY,
    CLUSTER,
    CLUSTER_ACTION,
    CREATE,
    DELETE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    IDEMPOTENT_WRITE,
    LITERAL,
    PREFIXED,
    READ,
    THE_CLUSTER,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
    checked_acl,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api

ANY_NUMBER = 1
MATCH = 2
TYPES = {2: TOPIC, 3: GROUP, 4: CLUSTER, 5: TRANSACTIONAL_ID}
PATTERNS = {3: LITERAL, 4: PREFIXED}
OPERATIONS = {
    2: ALL, 3: READ, 4: WRITE, 5: CREATE, 6: DELETE, 7: ALTER, 8: DESCRIBE, 9: CLUSTER_ACTION,
    10: DESCRIBE_CONFIGS, 11: ALTER_CONFIGS, 12: IDEMPOTENT_WRITE,
}  # fmt: skip
PERMISSIONS = {2: "deny", 3: "allow"}
KAFKAS_CLUSTER = "kafka-cluster"
"""Kafka's name of the cluster as a resource."""
RULES_AT_ONCE = 500
Rule = dict[str, Any]


def _number(table: dict[int, str], word: str) -> int:
    return next((number for number, known in table.items() if known == word), 0)


def _check_users(call: Call) -> None:
    if call.services.gate is None:
        raise RefusedError(
            KafkaError.SECURITY_DISABLED,
            "this appliance has no users: set security.enabled = true",
        )


# ---- rules of a filter ---------------------------------------------------------------------------


def _found(call: Call, asked: dict[str, Any]) -> Steps:
    """The rules that a filter of Kafka's chooses. Raises RefusedError."""
    exact = _exact_fields(asked)
    found: list[Rule] = []
    after = None
    while exact is not None:
        answer = yield call.ask(Api.LIST_ACLS, {"filter": exact, "after": after})
        if answer.code is not ErrorCode.OK:
            raise RefusedError(_error(answer.code), answer.sentence)
        page = answer.json()
        found += [rule for rule in page["acls"] if _is_chosen(rule, asked)]
        after = page["next"]
        if after is None:
            break
    return found


def _exact_fields(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The fields that all chosen rules have. None: there is no such rule."""
    fields: dict[str, Any] = {}
    for field, number, table in (
        ("resource_type", asked["resource_type_filter"], TYPES),
        ("operation", asked["operation"], OPERATIONS),
        ("permission", asked["permission_type"], PERMISSIONS),
    ):
        if number == ANY_NUMBER:
            continue
        if number not in table:
            return None
        fields[field] = table[number]
    for field in ("principal", "host"):
        if asked[f"{field}_filter"] is not None:
            fields[field] = asked[f"{field}_filter"]
    return fields


def _is_chosen(rule: Rule, asked: dict[str, Any]) -> bool:
    if rule["resource_type"] not in TYPES.values():
        return False
    pattern, name = asked.get("pattern_type_filter", 3), asked["resource_name_filter"]
    if pattern in PATTERNS and rule["pattern"] != PATTERNS[pattern]:
        return False
    if name is None:
        return True
    own = _shown_name(rule)
    if pattern != MATCH:
        return bool(own == name)
    if rule["pattern"] == PREFIXED:
        return str(name).startswith(own)
    return own in (ANY, name)


def _shown_name(rule: Rule) -> str:
    return KAFKAS_CLUSTER if rule["resource_type"] == CLUSTER else str(rule["name"])


def _shown(rule: Rule) -> dict[str, Any]:
    return {
        "principal": rule["principal"], "host": rule["host"],
        "operation": _number(OPERATIONS, rule["operation"]),
        "permission_type": _number(PERMISSIONS, rule["permission"]),
    }  # fmt: skip


def _resource(rule: Rule) -> dict[str, Any]:
    return {
        "resource_type": _number(TYPES, rule["resource_type"]),
        "resource_name": _shown_name(rule),
        "pattern_type": _number(PATTERNS, rule["pattern"]),
    }


def _error(code: ErrorCode) -> KafkaError:
    if code is ErrorCode.NOT_AUTHORIZED:
        return KafkaError.CLUSTER_AUTHORIZATION_FAILED
    return kafka_error(code)


# ---- handlers ------------------------------------------------------------------------------------


def describe_acls(call: Call) -> Steps:
    """List the rules that a filter chooses, by resource."""
    _check_users(call)
    found = yield from _found(call, call.request)
    resources: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rule in found:
        resource = _resource(rule)
        entry = resources.setdefault(tuple(resource.values()), {**resource, "acls": []})
        entry["acls"].append(_shown(rule))
    return {
        "error_code": KafkaError.NONE, "error_message": None, "resources": list(resources.values())
    }  # fmt: skip


def create_acls(call: Call) -> Steps:
    """Add rules; one that is there already stays."""
    creations = call.request["creations"]
    results: list[dict[str, Any]] = [
        {"error_code": KafkaError.NONE, "error_message": None} for _ in creations
    ]
    added: list[tuple[dict[str, Any], Rule]] = []
    for number, (creation, result) in enumerate(zip(creations, results, strict=True)):
        yield from give_way(call.services, number)
        try:
            _check_users(call)
            added.append((result, _rule_of(creation)))
        except RefusedError as refused:
            result.update(error_code=refused.code, error_message=refused.sentence)
    for some in _parts(added):
        answer = yield call.ask(Api.ALTER_ACLS, {"add": [rule for _, rule in some]})
        if answer.code is not ErrorCode.OK:
            for result, _ in some:
                result.update(error_code=_error(answer.code), error_message=answer.sentence)
    return {"results": results}


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), RULES_AT_ONCE):
        yield items[start : start + RULES_AT_ONCE]


def _rule_of(creation: dict[str, Any]) -> Rule:
    """Our rule of a creation. Raises RefusedError."""
    kind = TYPES.get(creation["resource_type"], "")
    name = creation["resource_name"]
    if kind == CLUSTER:
        if name != KAFKAS_CLUSTER:
            raise RefusedError(
                KafkaError.INVALID_REQUEST, f"the only cluster resource is {KAFKAS_CLUSTER!r}"
            )
        name = THE_CLUSTER
    rule = {
        "principal": creation["principal"], "resource_type": kind, "name": name,
        "pattern": PATTERNS.get(creation.get("resource_pattern_type", 3), ""),
        "operation": OPERATIONS.get(creation["operation"], ""), "host": creation["host"],
        "permission": PERMISSIONS.get(creation["permission_type"], ""),
    }  # fmt: skip
    try:
        checked_acl(rule)
    except TailraceError as error:
        raise RefusedError(KafkaError.INVALID_REQUEST, error.detail) from None
    return rule


def delete_acls(call: Call) -> Steps:
    """Remove the rules that filters choose."""
    results = []
    for number, asked in enumerate(call.request["filters"]):
        yield from give_way(call.services, number)
        result: dict[str, Any] = {
            "error_code": KafkaError.NONE, "error_message": None, "matching_acls": [],
        }  # fmt: skip
        results.append(result)
        try:
            _check_users(call)
            found = yield from _found(call, asked)
        except RefusedError as refused:
            result.update(error_code=refused.code, error_message=refused.sentence)
            continue
        for some in _parts(found):
            removed = [{"number": rule["number"]} for rule in some]
            answer = yield call.ask(Api.ALTER_ACLS, {"remove": removed})
            code = _error(answer.code)
            result["matching_acls"] += [
                {"error_code": code, "error_message": answer.sentence or None, **_resource(rule),
                 **_shown(rule)}
                for rule in some
            ]  # fmt: skip
    return {"filter_results": results}
