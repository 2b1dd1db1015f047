"""Rules of topics, settings and the cluster."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.rights.checks import (
    ON_CLUSTER,
    AnsweredError,
    Entry,
    Merge,
    Rule,
    denied_topics,
    is_allowed,
    sentence,
    separated,
    show_cluster_operations,
    show_topic_operations,
    topic_error,
)
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.rights.acl import (
    ALTER,
    CLUSTER,
    CREATE,
    DELETE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    TOPIC,
)

_CODE = KafkaError.TOPIC_AUTHORIZATION_FAILED

# ---- Metadata, DescribeTopicPartitions, DescribeCluster ------------------------------------------


def metadata(call: Call) -> Merge:
    """Describe of each topic; all that may be described, if none is named."""
    request = call.request
    names_all = request["topics"] is None or (call.version == 0 and not request["topics"])
    denied = [] if names_all else denied_topics(call, request, "topics", DESCRIBE)
    if denied and not request["topics"]:
        request["topics"] = []
        if call.version == 0:  # there an empty list names all
            raise AnsweredError(_described_alone(call, denied))

    def merge(response: Entry) -> None:
        topics = response["topics"]
        if names_all:
            topics = [topic for topic in topics if call.may(DESCRIBE, TOPIC, topic["name"])]
        show_topic_operations(call, topics)
        show_cluster_operations(call, response)
        response["topics"] = [*topics, *(_undescribed(topic, error) for topic, error in denied)]

    return merge


def _described_alone(call: Call, denied: list[tuple[Entry, KafkaError]]) -> Entry:
    from netfront.kafka.apis.cluster.brokers import brokers

    return {
        "brokers": brokers(call), "topics": [_undescribed(topic, error) for topic, error in denied]
    }  # fmt: skip


def _undescribed(topic: Entry, error: KafkaError) -> Entry:
    return {
        "error_code": error, "name": topic.get("name"), "is_internal": False, "partitions": [],
        "topic_id": topic.get("topic_id", ZERO_UUID),
    }  # fmt: skip


def topic_partitions(call: Call) -> Merge:
    """Describe of each topic; all that may be described, if none is named."""
    request = call.request
    names = [topic["name"] for topic in request["topics"]]
    denied = [name for name in dict.fromkeys(names) if not is_allowed(call, DESCRIBE, TOPIC, name)]
    if not names:
        names = list(call.services.routes.names())
    visible = [name for name in names if call.may(DESCRIBE, TOPIC, name)]
    if not visible:
        raise AnsweredError(
            {"topics": [_undescribed({"name": name}, _CODE) for name in denied],
             "next_cursor": None}
        )  # fmt: skip
    request["topics"] = [{"name": name} for name in visible]

    def merge(response: Entry) -> None:
        show_topic_operations(call, response["topics"])
        response["topics"] += [_undescribed({"name": name}, _CODE) for name in denied]

    return merge


def describe_cluster(call: Call) -> Merge:
    """Nothing."""
    return lambda response: show_cluster_operations(call, response)


# ---- CreateTopics, DeleteTopics, CreatePartitions ------------------------------------------------


def create_topics(call: Call) -> Steps:
    """Create of each topic, or of the cluster. Its settings are shown to who may describe them."""
    request = call.request
    denied: list[Entry] = []
    if not call.may(CREATE, *ON_CLUSTER):
        request["topics"], denied = yield from separated(
            call, request["topics"], lambda topic: is_allowed(call, CREATE, TOPIC, topic["name"])
        )

    def merge(response: Entry) -> None:
        for topic in response["topics"]:
            if topic.get("configs") and not call.may(DESCRIBE_CONFIGS, TOPIC, topic["name"]):
                topic.update(
                    configs=None, num_partitions=-1, replication_factor=-1,
                    topic_config_error_code=_CODE,
                )  # fmt: skip
        response["topics"] += [
            {"name": topic["name"], "error_code": _CODE,
             "error_message": sentence(call, CREATE, TOPIC, topic["name"])}
            for topic in denied
        ]  # fmt: skip

    return merge


def delete_topics(call: Call) -> Merge | None:
    """Delete of each topic."""
    request = call.request
    if request.get("topics"):
        denied = denied_topics(call, request, "topics", DELETE)
    else:
        names = request.get("topic_names") or []
        denied = [
            ({"name": name}, _CODE) for name in names if not is_allowed(call, DELETE, TOPIC, name)
        ]
        refused = {topic["name"] for topic, _ in denied}
        request["topic_names"] = [name for name in names if name not in refused]

    def merge(response: Entry) -> None:
        response["responses"] += [
            {"name": topic["name"], "topic_id": topic.get("topic_id", ZERO_UUID),
             "error_code": error, "error_message": None}
            for topic, error in denied
        ]  # fmt: skip

    return merge if denied else None


def create_partitions(call: Call) -> Merge | None:
    """Alter of each topic."""
    denied = denied_topics(call, call.request, "topics", ALTER)

    def merge(response: Entry) -> None:
        response["results"] += [
            {"name": topic["name"], "error_code": error,
             "error_message": sentence(call, ALTER, TOPIC, topic["name"])}
            for topic, error in denied
        ]  # fmt: skip

    return merge if denied else None


# ---- settings ------------------------------------------------------------------------------------

TOPIC_RESOURCE, GROUP_RESOURCE = 2, 32


def configs(operation: str, answered: str) -> Rule:
    """The operation on each topic; on the cluster for other resources."""

    def error(call: Call, resource: Entry) -> tuple[KafkaError, str]:
        name, kind = resource["resource_name"], resource["resource_type"]
        if kind == TOPIC_RESOURCE:
            if topic_error(call, operation, {"name": name}) is KafkaError.NONE:
                return KafkaError.NONE, ""
            return _CODE, sentence(call, operation, TOPIC, name)
        if kind == GROUP_RESOURCE and operation == DESCRIBE_CONFIGS:
            if is_allowed(call, DESCRIBE, GROUP, name):
                return KafkaError.NONE, ""
            return KafkaError.GROUP_AUTHORIZATION_FAILED, sentence(call, DESCRIBE, GROUP, name)
        if is_allowed(call, operation, *ON_CLUSTER):
            return KafkaError.NONE, ""
        return KafkaError.CLUSTER_AUTHORIZATION_FAILED, sentence(call, operation, CLUSTER, "")

    def rule(call: Call) -> Merge | None:
        resources = call.request["resources"]
        errors = [error(call, resource) for resource in resources]
        call.request["resources"] = [
            resource
            for resource, (code, _) in zip(resources, errors, strict=True)
            if code is KafkaError.NONE
        ]
        denied = [
            {"error_code": code, "error_message": reason, "configs": [],
             "resource_type": resource["resource_type"], "resource_name": resource["resource_name"]}
            for resource, (code, reason) in zip(resources, errors, strict=True)
            if code is not KafkaError.NONE
        ]  # fmt: skip

        def merge(response: Entry) -> None:
            response[answered] += denied

        return merge if denied else None

    return rule


# ---- directories ---------------------------------------------------------------------------------


def describe_log_dirs(call: Call) -> Merge:
    """Describe of the cluster. Topics that may be described are shown."""
    if not is_allowed(call, DESCRIBE, *ON_CLUSTER):
        raise AnsweredError(
            {"error_code": KafkaError.CLUSTER_AUTHORIZATION_FAILED, "results": []}
        )  # fmt: skip

    def merge(response: Entry) -> None:
        for directory in response["results"]:
            directory["topics"] = [
                topic for topic in directory["topics"] if call.may(DESCRIBE, TOPIC, topic["name"])
            ]

    return merge


def alter_replica_log_dirs(call: Call) -> None:
    """Alter of the cluster."""
    if is_allowed(call, ALTER, *ON_CLUSTER):
        return
    results: dict[str, list[dict[str, Any]]] = {}
    for directory in call.request["dirs"]:
        for topic in directory["topics"]:
            results.setdefault(topic["name"], []).extend(
                {"partition_index": partition,
                 "error_code": KafkaError.CLUSTER_AUTHORIZATION_FAILED}
                for partition in topic["partitions"]
            )  # fmt: skip
    raise AnsweredError(
        {"results": [{"topic_name": name, "partitions": found} for name, found in results.items()]}
    )
