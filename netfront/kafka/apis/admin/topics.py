"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords, ElectLeaders,
ListPartitionReassignments.

The controller decides and validates, as for our own clients. Replication does not exist: its factor
is 1, and every replica is this node's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from netfront.kafka.apis.admin.config_values import ConfigError, described_topic, ours_of
from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.apis.cluster.topic_creation import wait_for_route
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

COMPACTED_ONLY = "compact"
"""The value of cleanup.policy whose topics keep the latest record of every key, however old."""
DEFAULT = -1
"""Number of partitions, and replication factor: the broker's default."""


class TopicError(Exception):
    """An entry of a request that is refused without asking the controller."""

    def __init__(self, code: KafkaError, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def create_topics(call: Call) -> Steps:
    """Create topics, or check what creating them would do."""
    request = call.request
    validate_only = bool(request.get("validate_only"))
    counts = Counter(topic["name"] for topic in request["topics"])
    named = {topic["name"]: topic for topic in request["topics"]}
    topics = []
    for number, (name, count) in enumerate(counts.items()):
        yield from give_way(call.services, number)
        entry: dict[str, Any] = {"name": name, "error_code": KafkaError.NONE}
        topics.append(entry)
        try:
            if count > 1:
                raise TopicError(
                    KafkaError.INVALID_REQUEST, f"the request names {name} {count} times"
                )
            asked = _topic_of(call, named[name])
        except (TopicError, ConfigError) as error:
            entry.update(error_code=error.code, error_message=str(error))
            continue
        answer = yield call.ask(
            Api.CREATE_TOPICS, {"topics": [asked], "validate_only": validate_only}
        )
        if not _note(entry, answer):
            continue
        entry.update(num_partitions=asked["partitions"], replication_factor=1)
        if not validate_only and (yield from wait_for_route(call, name)):
            route = call.services.routes.find_by_name(name, 0)
            assert route is not None
            entry["topic_id"] = route.topic_id
            entry["configs"] = [
                {key: config[key] for key in ("name", "value", "read_only", "config_source",
                                              "is_sensitive")}
                for config in described_topic(route, None)
            ]  # fmt: skip
    return {"topics": topics}


def _topic_of(call: Call, topic: dict[str, Any]) -> dict[str, Any]:
    """Our request for a topic. Raises TopicError, ConfigError."""
    partitions, factor = topic["num_partitions"], topic["replication_factor"]
    if topic["assignments"]:
        if partitions != DEFAULT or factor != DEFAULT:
            raise TopicError(
                KafkaError.INVALID_REQUEST,
                "give either assignments, or a number of partitions and a replication factor",
            )
        partitions = _checked_assignments(topic["assignments"])
    elif factor not in (DEFAULT, 1):
        raise TopicError(
            KafkaError.INVALID_REPLICATION_FACTOR,
            f"the replication factor is {factor}; there is one broker: use 1",
        )
    if partitions == DEFAULT:
        partitions = call.services.settings["kafka.num.partitions"]
    if partitions < 1:
        raise TopicError(
            KafkaError.INVALID_PARTITIONS,
            f"the number of partitions is {partitions}; use 1 or more",
        )
    configs = {config["name"]: config["value"] for config in topic["configs"]}
    return {
        "name": topic["name"], "partitions": partitions, "configs": ours_of(configs),
        "schema": None,
    }  # fmt: skip


def _checked_assignments(assignments: list[dict[str, Any]]) -> int:
    """The number of partitions of a manual assignment. Raises TopicError."""
    numbers = sorted(assignment["partition_index"] for assignment in assignments)
    if numbers != list(range(len(numbers))) or any(
        assignment["broker_ids"] != [NODE_ID] for assignment in assignments
    ):
        raise TopicError(
            KafkaError.INVALID_REPLICA_ASSIGNMENT,
            f"assign the partitions 0, 1, ... each to broker {NODE_ID} alone",
        )
    return len(numbers)


def _note(entry: dict[str, Any], answer: Any, position: int = 0) -> bool:
    """Note the result of a topic's change in its entry. Returns True if it is carried out."""
    code, sentence = answer.code, answer.sentence
    if code is ErrorCode.OK:
        result = answer.json()["results"][position]
        code, sentence = ErrorCode(result["code"]), result.get("message")
    if code is ErrorCode.OK:
        return True
    entry.update(error_code=kafka_error(code), error_message=sentence)
    return False


def delete_topics(call: Call) -> Steps:
    """Delete topics, by name or id."""
    routes = call.services.routes
    asked = call.request.get("topics") or [
        {"name": name, "topic_id": ZERO_UUID} for name in call.request.get("topic_names", ())
    ]
    responses = []
    for number, topic in enumerate(asked):
        yield from give_way(call.services, number)
        name, topic_id = topic["name"], topic["topic_id"]
        entry: dict[str, Any] = {
            "name": name, "topic_id": topic_id, "error_code": KafkaError.NONE,
            "error_message": None,
        }  # fmt: skip
        responses.append(entry)
        if name is None:
            route = routes.find(topic_id, 0)
            if route is None or route.delay_of:
                entry["error_code"] = KafkaError.UNKNOWN_TOPIC_ID
                continue
            name = entry["name"] = route.topic
        else:
            route = routes.find_by_name(name, 0)
            entry["topic_id"] = ZERO_UUID if route is None else route.topic_id
        answer = yield call.ask(Api.DELETE_TOPICS, {"topics": [{"name": name}]})
        _note(entry, answer)
    return {"responses": responses}


def create_partitions(call: Call) -> Steps:
    """Add partitions to topics."""
    results = []
    for number, topic in enumerate(call.request["topics"]):
        yield from give_way(call.services, number)
        name, count = topic["name"], topic["count"]
        entry: dict[str, Any] = {
            "name": name, "error_code": KafkaError.NONE, "error_message": None,
        }  # fmt: skip
        results.append(entry)
        known = call.services.routes.partition_count(name)
        if not known:
            entry["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            continue
        if count <= known:
            entry.update(
                error_code=KafkaError.INVALID_PARTITIONS,
                error_message=f"the topic has {known} partitions; the number can only grow, and "
                f"{count} was asked for",
            )
            continue
        assignments = topic.get("assignments")
        if assignments is not None and (
            len(assignments) != count - known
            or any(each["broker_ids"] != [NODE_ID] for each in assignments)
        ):
            entry["error_code"] = KafkaError.INVALID_REPLICA_ASSIGNMENT
            continue
        answer = yield call.ask(
            Api.ALTER_TOPICS,
            {"topics": [{"name": name, "partitions": count}],
             "validate_only": bool(call.request.get("validate_only"))},
        )  # fmt: skip
        if _note(entry, answer) and not call.request.get("validate_only"):
            yield from wait_for_route(call, name)
    return {"results": results}


def delete_records(call: Call) -> Steps:
    """Delete the records below offsets; -1: up to the high watermark.

    A topic that is compacted only is refused, as by Kafka: its readers rely on the latest record of
    every key. `tailrace topic delete-records` may do it, because a full disk or a damaged segment
    may leave no other way.
    """
    routes = call.services.routes
    topics = []
    for topic in call.request["topics"]:
        entries = []
        for partition in topic["partitions"]:
            index = partition["partition_index"]
            entry: dict[str, Any] = {
                "partition_index": index, "low_watermark": -1, "error_code": KafkaError.NONE,
            }  # fmt: skip
            entries.append(entry)
            route = routes.find_by_name(topic["name"], index)
            if route is None:
                entry["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                continue
            if route.settings.get("cleanup.policy") == COMPACTED_ONLY:
                entry["error_code"] = KafkaError.POLICY_VIOLATION
                continue
            asked = {"name": topic["name"], "partitions": {str(index): partition["offset"]}}
            answer = yield call.ask(Api.DELETE_RECORDS, {"topics": [asked]})
            if _note(entry, answer):
                starts = answer.json()["results"][0]["log_start_offsets"]
                entry["low_watermark"] = starts.get(str(index), -1)
            elif entry["error_code"] == KafkaError.INVALID_REQUEST:
                entry["error_code"] = KafkaError.OFFSET_OUT_OF_RANGE
        topics.append({"name": topic["name"], "partitions": entries})
    return {"topics": topics}
