"""DescribeClientQuotas, AlterClientQuotas: the appliance's quotas of users and clients.

Kafka's `request_percentage` is a share of threads that do not exist here, and `ip` is no entity:
both are refused with a sentence. Quotas of prefixes are not shown to Kafka's tools.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.quotas.quota_rules import DEFAULT, Entity, parse_rules
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

USER, CLIENT = "user", "client-id"
EXACT, IS_DEFAULT, SPECIFIED = 0, 1, 2


def describe_quotas(call: Call) -> Steps:
    """List the quotas of entities that have these parts."""
    components = call.request["components"]
    for component in components:
        if component["entity_type"] not in (USER, CLIENT):
            raise RefusedError(KafkaError.INVALID_REQUEST, _no_entity(component["entity_type"]))
    if len({component["entity_type"] for component in components}) < len(components):
        raise RefusedError(
            KafkaError.INVALID_REQUEST, "the request names a type of entity twice: name each once"
        )
    answer = yield call.ask(Api.DESCRIBE_QUOTAS, {})
    if answer.code is not ErrorCode.OK:
        raise RefusedError(_error(answer.code), answer.sentence)
    rules = parse_rules(answer.json()["rules"])
    entries = [
        {
            "entity": [
                {"entity_type": kind, "entity_name": None if name == DEFAULT else name}
                for kind, name in _parts(entity).items()
            ],
            "values": [{"key": name, "value": float(value)} for name, value in values.items()],
        }
        for entity, values in rules.items()
        if entity.prefix is None and _is_chosen(entity, components, call.request["strict"])
    ]
    return {"error_code": KafkaError.NONE, "error_message": None, "entries": entries}


def _parts(entity: Entity) -> dict[str, str]:
    found = {USER: entity.user, CLIENT: entity.client}
    return {kind: name for kind, name in found.items() if name is not None}


def _is_chosen(entity: Entity, components: list[dict[str, Any]], strict: bool) -> bool:
    parts = _parts(entity)
    if strict and set(parts) != {component["entity_type"] for component in components}:
        return False
    for component in components:
        name, match = parts.get(component["entity_type"]), component["match_type"]
        if (
            name is None
            or (match == EXACT and name != component["match"])
            or (match == IS_DEFAULT and name != DEFAULT)
        ):
            return False
    return True


def alter_quotas(call: Call) -> Steps:
    """Change the quotas of entities, one by one."""
    entries = []
    for number, asked in enumerate(call.request["entries"]):
        yield from give_way(call.services, number)
        entry = {
            "error_code": KafkaError.NONE, "error_message": None, "entity": asked["entity"]
        }  # fmt: skip
        entries.append(entry)
        try:
            change = _change(asked)
        except RefusedError as refused:
            entry.update(error_code=refused.code, error_message=refused.sentence)
            continue
        request = {"changes": [change], "validate_only": bool(call.request["validate_only"])}
        answer = yield call.ask(Api.ALTER_QUOTAS, request)
        if answer.code is not ErrorCode.OK:
            entry.update(error_code=_error(answer.code), error_message=answer.sentence)
    return {"entries": entries}


def _error(code: ErrorCode) -> KafkaError:
    if code is ErrorCode.NOT_AUTHORIZED:
        return KafkaError.CLUSTER_AUTHORIZATION_FAILED
    return KafkaError.INVALID_REQUEST if code is ErrorCode.INVALID_SETTING else kafka_error(code)


def _change(asked: dict[str, Any]) -> dict[str, Any]:
    """Our change of an entry. Raises RefusedError."""
    entity: dict[str, str | None] = {"user": None, "client": None, "prefix": None}
    for part in asked["entity"]:
        kind = {USER: "user", CLIENT: "client"}.get(part["entity_type"])
        if kind is None:
            raise RefusedError(KafkaError.INVALID_REQUEST, _no_entity(part["entity_type"]))
        entity[kind] = DEFAULT if part["entity_name"] is None else part["entity_name"]
    given, removed = {}, []
    for operation in asked["ops"]:
        name, value = operation["key"], operation["value"]
        if name == "request_percentage":
            raise RefusedError(
                KafkaError.INVALID_REQUEST,
                "request_percentage is a share of threads that do not exist here: set "
                "request_rate, requests a second",
            )
        if operation["remove"]:
            removed.append(name)
        elif value != value or abs(value) > 1 << 62:
            raise RefusedError(KafkaError.INVALID_REQUEST, f"{name} is {value}; give a number")
        else:
            given[name] = int(value)
    return {**entity, "set": given, "unset": removed}


def _no_entity(kind: str) -> str:
    return f"there are quotas of user and client-id, and none of {kind[:40]!r}"
