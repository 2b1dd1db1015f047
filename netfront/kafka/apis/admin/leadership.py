"""ElectLeaders and reassignments: one broker leads every partition."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError


def elect_leaders(call: Call) -> Steps:
    """Answer that no election is needed: every partition has this leader."""
    yield from ()
    asked = call.request["topic_partitions"] or ()
    results = [
        {
            "topic": topic["topic"],
            "partition_result": [
                {"partition_id": partition, "error_code": _election(call, topic, partition)}
                for partition in topic["partitions"]
            ],
        }
        for topic in asked
    ]
    return {"error_code": KafkaError.NONE, "replica_election_results": results}


def _election(call: Call, topic: dict[str, Any], partition: int) -> KafkaError:
    route = call.services.routes.find_by_name(topic["topic"], partition)
    if route is None:
        return KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    return KafkaError.ELECTION_NOT_NEEDED


def list_reassignments(_call: Call) -> Steps:
    """Answer that no partition moves."""
    yield from ()
    return {"error_code": KafkaError.NONE, "topics": []}


def alter_reassignments(call: Call) -> Steps:
    """Accept partitions that shall be where they are."""
    yield from ()
    routes = call.services.routes
    responses = []
    for topic in call.request["topics"]:
        entries = []
        for partition in topic["partitions"]:
            index, replicas = partition["partition_index"], partition["replicas"]
            code = KafkaError.NONE
            if routes.find_by_name(topic["name"], index) is None:
                code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            elif replicas is None:
                code = KafkaError.NO_REASSIGNMENT_IN_PROGRESS
            elif replicas != [NODE_ID]:
                code = KafkaError.INVALID_REPLICA_ASSIGNMENT
            entries.append({"partition_index": index, "error_code": code})
        responses.append({"name": topic["name"], "partitions": entries})
    return {"error_code": KafkaError.NONE, "responses": responses}
