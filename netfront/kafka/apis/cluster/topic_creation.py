"""Creation of a missing topic that a client uses, if `auto_create_topics` allows it.

It gets `kafka.num.partitions`.
"""

from __future__ import annotations

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.cluster.topic_entries import missing_error, routes_of
from netfront.kafka.apis.pause import pause
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

ROUTE_WAIT_NS = 5_000_000_000
ROUTE_TICK_NS = 5_000_000


def create_if_allowed(call: Call, name: str) -> Steps:
    """Create a missing topic, if `auto_create_topics` allows it. Returns a KafkaError."""
    services = call.services
    if not services.settings["auto_create_topics"]:
        return missing_error(name)
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
