"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, ListConfigResources.

A setting that does not exist here is refused by its name. The settings of the broker are those of
the appliance, and `group_configs` has those of groups.

Invariants:
- An alteration of a resource is carried out whole, or refused.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.admin.config_values import (
    DEFAULT_SOURCE,
    DYNAMIC_BROKER_SOURCE,
    POLICY,
    STATIC_BROKER_SOURCE,
    ConfigError,
    described,
    described_topic,
    ours_of,
    policy_of,
)
from netfront.kafka.apis.admin.group_configs import alter_group, described_group
from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.apis.cluster.brokers import host_and_port
from netfront.kafka.apis.cluster.group_settings import groups_with_settings
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

TOPIC, BROKER, GROUP = 2, 4, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
UNALTERABLE = ("partitioner", "worker.dedicated", "key.column", "derived.from")
"""Settings that the full form of AlterConfigs leaves as they are."""
OF_REPLICATION = (
    "leader.replication.throttled.rate", "follower.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second", "leader.replication.throttled.replicas",
    "follower.replication.throttled.replicas",
)  # fmt: skip
"""Settings that `kafka-reassign-partitions` removes when it is done. They are never set here."""


def describe_configs(call: Call) -> Steps:
    """Describe topics, groups and the broker."""
    results = []
    resources = {
        (each["resource_type"], each["resource_name"]): each["configuration_keys"]
        for each in call.request["resources"]
    }  # one that is named twice is described once
    for number, ((kind, name), named) in enumerate(resources.items()):
        yield from give_way(call.services, number)
        keys = set(named) if named else None  # an empty list names all, as with Kafka
        result: dict[str, Any] = {
            "error_code": KafkaError.NONE, "error_message": None, "resource_type": kind,
            "resource_name": name, "configs": [],
        }  # fmt: skip
        results.append(result)
        if kind == TOPIC:
            route = call.services.routes.find_by_name(name, 0)
            if route is None:
                result["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                continue
            result["configs"] = described_topic(route, keys)
        elif kind == BROKER and name in ("", str(NODE_ID)):
            answer = yield call.ask(Api.DESCRIBE_CONFIGS, {"names": None})
            if answer.code is not ErrorCode.OK:
                result.update(error_code=kafka_error(answer.code), error_message=answer.sentence)
                continue
            result["configs"] = _kafkas_of_broker(call, keys)
            result["configs"] += _described_broker(answer.json()["configs"], keys)
        elif kind == GROUP and name:
            result["configs"] = described_group(call.services, name, keys)
        else:
            result.update(
                error_code=KafkaError.INVALID_REQUEST,
                error_message=f"there are settings of topics, of groups and of broker {NODE_ID}, "
                f"and none of type {kind} and name {name!r}",
            )
    return {"results": results}


def _kafkas_of_broker(call: Call, keys: set[str] | None) -> list[dict[str, Any]]:
    """Settings of a Kafka broker that tools ask for, as they are here."""
    host, port = host_and_port(call)
    settings = call.services.settings
    values: dict[str, Any] = {
        "advertised.listeners": f"{call.connection.protocol}://{host}:{port}",
        "auto.create.topics.enable": settings["auto_create_topics"],
        "default.replication.factor": 1,
        "log.dirs": list(call.services.data_dirs),
        "min.insync.replicas": 1,
        "node.id": NODE_ID,
        "num.partitions": settings["kafka.num.partitions"],
    }
    return [
        described(name, value, STATIC_BROKER_SOURCE, read_only=True)
        for name, value in values.items()
        if keys is None or name in keys
    ]


def _described_broker(configs: list[dict[str, Any]], keys: set[str] | None) -> list[dict[str, Any]]:
    found = []
    for config in configs:
        name = config["name"]
        if keys is not None and name not in keys:
            continue
        source = STATIC_BROKER_SOURCE
        if config["source"] == "default":
            source = DEFAULT_SOURCE
        elif config["source"] == "config set":
            source = DYNAMIC_BROKER_SOURCE
        found.append(described(name, config["value"], source, read_only=not config["reload"]))
    return found


def alter_configs(call: Call) -> Steps:
    """Replace all settings of resources: those that are not named get their defaults."""
    responses = []
    for number, resource in enumerate(call.request["resources"]):
        yield from give_way(call.services, number)
        given = {config["name"]: config["value"] for config in resource["configs"]}
        if resource["resource_type"] == TOPIC:
            route = call.services.routes.find_by_name(resource["resource_name"], 0)
            former = {} if route is None else route.given
            given = {
                **{name: None for name in former if name not in UNALTERABLE}, **given,
            }  # fmt: skip
        responses.append((yield from _alter(call, resource, given, whole=True)))
    return {"responses": responses}


def incremental_alter_configs(call: Call) -> Steps:
    """Change single settings of resources."""
    responses = []
    for number, resource in enumerate(call.request["resources"]):
        yield from give_way(call.services, number)
        try:
            given = _changes(call, resource)
        except ConfigError as error:
            responses.append(_response(resource, error.code, str(error)))
            continue
        responses.append((yield from _alter(call, resource, given)))
    return {"responses": responses}


def _changes(call: Call, resource: dict[str, Any]) -> dict[str, str | None]:
    """The values that a resource's settings get; None: the default. Raises ConfigError."""
    route = call.services.routes.find_by_name(resource["resource_name"], 0)
    given: dict[str, str | None] = {}
    for config in resource["configs"]:
        name, value, operation = config["name"], config["value"], config["config_operation"]
        if name in given:
            raise ConfigError(f"the request names {name} twice")
        if operation == DELETE:
            if name not in OF_REPLICATION:
                given[name] = None
        elif operation == SET:
            given[name] = value
        elif operation in (APPEND, SUBTRACT) and name == POLICY and route is not None:
            parts = set(str(route.settings[POLICY]).split(","))
            change = set((value or "").split(","))
            given[name] = policy_of(parts | change if operation == APPEND else parts - change)
        else:
            raise ConfigError(f"{name} is no list: set it")
    return given


def _alter(
    call: Call, resource: dict[str, Any], given: dict[str, str | None], *, whole: bool = False
) -> Steps:
    """Returns the response's entry. `whole`: settings that are not named get their defaults."""
    kind, name = resource["resource_type"], resource["resource_name"]
    validate_only = bool(call.request["validate_only"])
    if kind == TOPIC:
        if not call.services.routes.partition_count(name):
            return _response(resource, KafkaError.UNKNOWN_TOPIC_OR_PARTITION, "")
        try:
            configs = ours_of(given)
        except ConfigError as error:
            return _response(resource, error.code, str(error))
        topic = {"name": name, "configs": configs}
        answer = yield call.ask(
            Api.ALTER_TOPICS, {"topics": [topic], "validate_only": validate_only}
        )
        code, sentence = answer.code, answer.sentence
        if code is ErrorCode.OK:
            result = answer.json()["results"][0]
            code, sentence = ErrorCode(result["code"]), result.get("message", "")
    elif kind == BROKER and name in ("", str(NODE_ID)):
        asked = {
            "set": {key: value for key, value in given.items() if value is not None},
            "unset": [key for key, value in given.items() if value is None],
            "validate_only": validate_only,
        }
        answer = yield call.ask(Api.ALTER_CONFIGS, asked)
        code, sentence = answer.code, answer.sentence
    elif kind == GROUP:
        return _response(resource, *(yield from alter_group(call, name, given, whole=whole)))
    else:
        return _response(
            resource,
            KafkaError.INVALID_REQUEST,
            f"there are settings of topics, of groups and of broker {NODE_ID}, and none of type "
            f"{kind}",
        )
    return _response(resource, kafka_error(code), sentence)


def _response(resource: dict[str, Any], code: KafkaError, sentence: str) -> dict[str, Any]:
    return {
        "error_code": code, "error_message": sentence or None,
        "resource_type": resource["resource_type"], "resource_name": resource["resource_name"],
    }  # fmt: skip


def list_config_resources(call: Call) -> Steps:
    """List what has settings; version 0 asks for client metrics, of which there are none."""
    yield from ()
    kinds = set(call.request.get("resource_types", ())) if call.version else set()
    if call.version and not kinds:
        kinds = {TOPIC, BROKER, GROUP}
    found = []
    if TOPIC in kinds:
        found += [
            {"resource_name": name, "resource_type": TOPIC} for name in call.services.routes.names()
        ]
    if BROKER in kinds:
        found.append({"resource_name": str(NODE_ID), "resource_type": BROKER})
    if GROUP in kinds:
        found += [
            {"resource_name": name, "resource_type": GROUP}
            for name in groups_with_settings(call.services)
        ]
    return {"error_code": KafkaError.NONE, "config_resources": found}
