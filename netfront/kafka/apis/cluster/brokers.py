"""Address and list of brokers, DescribeCluster: one broker, this gateway."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.network.listener import split_address
from shm.rights.kafka_listeners import advertised_for

ALL_CLUSTER_OPERATIONS = 0b0001_1111_1010_0000


def host_and_port(call: Call) -> tuple[str, int]:
    """The address for clients: `kafka.advertised`, or the one that this client connected to."""
    advertised = advertised_for(
        call.services.settings["kafka.advertised"], call.connection.protocol
    )
    return split_address(advertised) if advertised else call.connection.local


def brokers(call: Call) -> list[dict[str, Any]]:
    """The list of brokers: this gateway."""
    host, port = host_and_port(call)
    return [{"node_id": NODE_ID, "broker_id": NODE_ID, "host": host, "port": port, "rack": None}]


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
