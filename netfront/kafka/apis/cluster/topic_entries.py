"""Topics as Metadata and DescribeTopicPartitions show them: entries from the front's routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from netfront.kafka.apis.call import NODE_ID, Services
from netfront.kafka.apis.cluster.leader_epochs import to_kafka
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.messages.lane_messages import Assignment

NO_LEADER = -1
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")
"""A name that a topic can have."""
ALL_TOPIC_OPERATIONS = 0b0000_1101_1111_1000
"""Bits of read, write, create, delete, alter, describe, describe and alter configs."""


def topic_entry(services: Services, name: str) -> dict[str, Any]:
    """A topic in Metadata's response."""
    first = services.routes.find_by_name(name, 0)
    if first is None:
        return missing_topic(name, missing_error(name))
    return {
        "error_code": KafkaError.NONE,
        "name": name,
        "topic_id": first.topic_id,
        "is_internal": False,
        "partitions": [
            _partition(services, first.topic_id, index) for index in range(first.partition_count)
        ],
    }


def routes_of(services: Services, first: Assignment) -> Iterable[Assignment]:
    """The routes of a topic's partitions, those that are open."""
    for partition in range(first.partition_count):
        route = services.routes.find(first.topic_id, partition)
        if route is not None:
            yield route


def _partition(services: Services, topic_id: bytes, index: int) -> dict[str, Any]:
    """A partition. One whose route has not come yet is counted: a producer that knew fewer
    partitions than there are would send keys elsewhere.
    """
    route = services.routes.find(topic_id, index)
    is_known = route is not None
    epoch = -1
    if route is not None:
        epoch = to_kafka(route, services.front.log_bounds.leader_epoch(route))
    return {
        "error_code": KafkaError.NONE if is_known else KafkaError.LEADER_NOT_AVAILABLE,
        "partition_index": index,
        "leader_id": NODE_ID if is_known else NO_LEADER,
        "leader_epoch": epoch,
        "replica_nodes": [NODE_ID],
        "isr_nodes": [NODE_ID],
        "offline_replicas": [],
        "eligible_leader_replicas": [],
        "last_known_elr": [],
    }


def topic_entry_of_id(services: Services, topic_id: bytes) -> dict[str, Any]:
    first = services.routes.find(topic_id, 0)
    if first is None or first.delay_of:
        return {"error_code": KafkaError.UNKNOWN_TOPIC_ID, "name": None, "topic_id": topic_id}
    return topic_entry(services, first.topic)


def missing_error(name: str) -> KafkaError:
    """The error of a topic that does not exist."""
    if _NAME.fullmatch(name):
        return KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    return KafkaError.INVALID_TOPIC_EXCEPTION  # clients wait for no topic of such a name


def missing_topic(name: str, error: KafkaError) -> dict[str, Any]:
    return {"error_code": error, "name": name, "topic_id": ZERO_UUID, "partitions": []}
