"""FindCoordinator: the gateway is the coordinator of every group and transactional id."""

from __future__ import annotations

from netfront.kafka.apis.call import NODE_ID, Call
from netfront.kafka.apis.cluster.brokers import host_and_port
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError


def find_coordinator(call: Call) -> Steps:
    """Name this gateway."""
    yield from ()
    host, port = host_and_port(call)
    here = {"error_code": KafkaError.NONE, "node_id": NODE_ID, "host": host, "port": port}
    keys = call.request.get("coordinator_keys", [])
    return {**here, "coordinators": [{**here, "key": key} for key in keys]}
