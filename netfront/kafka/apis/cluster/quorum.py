"""DescribeQuorum: the metadata's quorum is this broker, which is its leader and one voter."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.apis.cluster.brokers import host_and_port
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError

METADATA_TOPIC = "__cluster_metadata"
LEADER_EPOCH = 1


def describe_quorum(call: Call) -> Steps:
    """Describe the quorum. The offset of the metadata is the number of changes to the routes."""
    yield from ()
    now_ms, version = call.services.wall_us() // 1000, call.services.routes.changes
    topics = []
    for topic in call.request["topics"]:
        partitions = []
        for partition in topic["partitions"]:
            index = partition["partition_index"]
            entry: dict[str, Any] = {
                "partition_index": index, "error_code": KafkaError.NONE, "error_message": None,
                "leader_id": NODE_ID, "leader_epoch": LEADER_EPOCH, "high_watermark": version,
                "observers": [],
                "current_voters": [
                    {"replica_id": NODE_ID, "replica_directory_id": ZERO_UUID,
                     "log_end_offset": version, "last_fetch_timestamp": now_ms,
                     "last_caught_up_timestamp": now_ms}
                ],
            }  # fmt: skip
            if (topic["topic_name"], index) != (METADATA_TOPIC, 0):
                entry["error_code"] = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            partitions.append(entry)
        topics.append({"topic_name": topic["topic_name"], "partitions": partitions})
    host, port = host_and_port(call)
    return {
        "error_code": KafkaError.NONE, "error_message": None, "topics": topics,
        "nodes": [
            {
                "node_id": NODE_ID,
                "listeners": [{"name": call.connection.protocol, "host": host, "port": port}],
            }
        ],
    }  # fmt: skip
