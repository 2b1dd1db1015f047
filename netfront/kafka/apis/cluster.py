"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions.

The answers come from the front's copy of the catalog. A missing topic is created on request if
`auto_create_topics` allows it, with `kafka.num.partitions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from netfront.kafka.apis.call import NODE_ID, Call, Services
from netfront.kafka.exchange.waiter import Steps, Waiter
from netfront.kafka.network.listener import split_address
from netfront.kafka.wire.codec import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

TOPICS_AT_ONCE_MAX = 10_000
ROUTE_WAIT_NS = 5_000_000_000
ROUTE_TICK_NS = 5_000_000
ALL_TOPIC_OPERATIONS = 0b0000_1101_1111_1000
"""Bits of read, write, create, delete, alter, describe, describe and alter configs."""
ALL_CLUSTER_OPERATIONS = 0b0001_1111_1010_0000
UNASKED = -(1 << 31)
PARTITIONS_PER_PAGE = 2_000


def host_and_port(call: Call) -> tuple[str, int]:
    """The address for clients: `kafka.advertised`, or the one that this client connected to."""
    advertised = call.services.settings["kafka.advertised"]
    return split_address(advertised) if advertised else call.connection.local


def brokers(call: Call) -> list[dict[str, Any]]:
    """The list of brokers: this gateway."""
    host, port = host_and_port(call)
    return [{"node_id": NODE_ID, "broker_id": NODE_ID, "host": host, "port": port, "rack": None}]


def metadata(call: Call) -> Steps:
    """Describe topics by name or id, or all of them."""
    services, request = call.services, call.request
    asked = request["topics"]
    if asked is None or (call.version == 0 and not asked):
        found = [topic_entry(services, name) for name in services.routes.names()]
    else:
        found = []
        creates = bool(request.get("allow_auto_topic_creation", True))
        for topic in asked[:TOPICS_AT_ONCE_MAX]:
            name = topic.get("name")
            if name is None:
                found.append(_entry_of_id(services, topic.get("topic_id", ZERO_UUID)))
                continue
            if creates and not services.routes.partition_count(name):
                error = yield from create_if_allowed(call, name)
                if error is not KafkaError.NONE:
                    found.append(_missing(name, error))
                    continue
            found.append(topic_entry(services, name))
    if request.get("include_topic_authorized_operations"):
        for entry in found:
            entry["topic_authorized_operations"] = ALL_TOPIC_OPERATIONS
    response: dict[str, Any] = {
        "brokers": brokers(call),
        "cluster_id": services.cluster_id,
        "controller_id": NODE_ID,
        "topics": found,
    }
    if request.get("include_cluster_authorized_operations"):
        response["cluster_authorized_operations"] = ALL_CLUSTER_OPERATIONS
    return response


def topic_entry(services: Services, name: str) -> dict[str, Any]:
    """A topic in Metadata's response."""
    first = services.routes.find_by_name(name, 0)
    if first is None:
        return _missing(name, KafkaError.UNKNOWN_TOPIC_OR_PARTITION)
    return {
        "error_code": KafkaError.NONE,
        "name": name,
        "topic_id": first.topic_id,
        "is_internal": False,
        "partitions": [_partition(services, route) for route in routes_of(services, first)],
    }


def routes_of(services: Services, first: Assignment) -> Iterable[Assignment]:
    """The routes of a topic's partitions, those that are open."""
    for partition in range(first.partition_count):
        route = services.routes.find(first.topic_id, partition)
        if route is not None:
            yield route


def _partition(services: Services, route: Assignment) -> dict[str, Any]:
    return {
        "error_code": KafkaError.NONE,
        "partition_index": route.partition,
        "leader_id": NODE_ID,
        "leader_epoch": services.front.leader_epoch(route),
        "replica_nodes": [NODE_ID],
        "isr_nodes": [NODE_ID],
        "offline_replicas": [],
        "eligible_leader_replicas": [],
        "last_known_elr": [],
    }


def _entry_of_id(services: Services, topic_id: bytes) -> dict[str, Any]:
    first = services.routes.find(topic_id, 0)
    if first is None or first.delay_of:
        return {"error_code": KafkaError.UNKNOWN_TOPIC_ID, "name": None, "topic_id": topic_id}
    return topic_entry(services, first.topic)


def _missing(name: str, error: KafkaError) -> dict[str, Any]:
    return {"error_code": error, "name": name, "topic_id": ZERO_UUID, "partitions": []}


def create_if_allowed(call: Call, name: str) -> Steps:
    """Create a missing topic, if `auto_create_topics` allows it. Returns a KafkaError."""
    services = call.services
    if not services.settings["auto_create_topics"]:
        return KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    topic = {
        "name": name, "partitions": services.settings["kafka.num.partitions"],
        "configs": {}, "schema": None,
    }  # fmt: skip
    answer = yield call.ask(Api.CREATE_TOPICS, {"topics": [topic], "validate_only": False})
    code = answer.code
    if code is ErrorCode.OK:
        code = ErrorCode(answer.json()["results"][0]["code"])
    if code not in (ErrorCode.OK, ErrorCode.TOPIC_EXISTS):
        return kafka_error(code)
    yield from wait_for_route(call, name)
    return KafkaError.NONE


def wait_for_route(call: Call, name: str) -> Steps:
    """Wait until the front serves all partitions of a topic that was just created. Returns True if
    it does.
    """
    services = call.services
    until_ns = services.now_ns + ROUTE_WAIT_NS
    while services.now_ns < until_ns:
        first = services.routes.find_by_name(name, 0)
        if first is not None and len(list(routes_of(services, first))) == first.partition_count:
            return True
        yield pause(services, ROUTE_TICK_NS)
    return False


def pause(services: Services, duration_ns: int) -> Waiter:
    """A waiter that is completed after a time."""
    waiter = Waiter()
    services.timers.add(services.now_ns + duration_ns, waiter.complete)
    return waiter


# ---- DescribeCluster, DescribeTopicPartitions ----------------------------------------------------


def describe_cluster(call: Call) -> Steps:
    """Describe the cluster: one broker."""
    yield from ()
    response = {
        "cluster_id": call.services.cluster_id, "controller_id": NODE_ID, "brokers": brokers(call),
        "endpoint_type": call.request.get("endpoint_type", 1),
    }  # fmt: skip
    if call.request.get("include_cluster_authorized_operations"):
        response["cluster_authorized_operations"] = ALL_CLUSTER_OPERATIONS
    return response


def describe_topic_partitions(call: Call) -> Steps:
    """Describe topics, page by page."""
    yield from ()
    services, request = call.services, call.request
    names = sorted({topic["name"] for topic in request["topics"]}) or list(services.routes.names())
    limit = max(1, min(request["response_partition_limit"], PARTITIONS_PER_PAGE))
    cursor = request.get("cursor")
    start_name = cursor["topic_name"] if cursor else ""
    topics: list[dict[str, Any]] = []
    following = None
    for name in names:
        if name < start_name:
            continue
        entry = topic_entry(services, name)
        entry["topic_authorized_operations"] = ALL_TOPIC_OPERATIONS
        if cursor and name == start_name:
            first = cursor["partition_index"]
            entry["partitions"] = [p for p in entry["partitions"] if p["partition_index"] >= first]
        rest = entry["partitions"][limit:]
        entry["partitions"] = entry["partitions"][:limit]
        limit -= len(entry["partitions"])
        topics.append(entry)
        if rest:
            following = {"topic_name": name, "partition_index": rest[0]["partition_index"]}
            break
    return {"topics": topics, "next_cursor": following}
