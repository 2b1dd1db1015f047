"""Metadata, DescribeTopicPartitions.

The answers come from the front's copy of the catalog.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.apis.cluster.brokers import ALL_CLUSTER_OPERATIONS, brokers
from netfront.kafka.apis.cluster.topic_creation import create_if_allowed
from netfront.kafka.apis.cluster.topic_entries import (
    ALL_TOPIC_OPERATIONS,
    missing_topic,
    topic_entry,
    topic_entry_of_id,
)
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError

TOPICS_AT_ONCE_MAX = 10_000
PARTITIONS_PER_PAGE = 2_000


def metadata(call: Call) -> Steps:
    """Describe topics by name or id, or all of them."""
    services, request = call.services, call.request
    asked = request["topics"]
    if asked is None or (call.version == 0 and not asked):
        found = [topic_entry(services, name) for name in services.routes.names()]
    else:
        found = []
        creates = bool(request.get("allow_auto_topic_creation", True))
        named = {(each.get("name"), each.get("topic_id")): each for each in asked}
        for number, topic in enumerate(list(named.values())[:TOPICS_AT_ONCE_MAX]):
            yield from give_way(services, number)
            name = topic.get("name")
            if name is None:
                found.append(topic_entry_of_id(services, topic.get("topic_id", ZERO_UUID)))
                continue
            if creates and not services.routes.partition_count(name):
                error = yield from create_if_allowed(call, name)
                if error is not KafkaError.NONE:
                    found.append(missing_topic(name, error))
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
