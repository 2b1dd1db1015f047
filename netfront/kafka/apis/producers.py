"""InitProducerId: an id for idempotent producers, and the next epoch of one."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.transactions import init_transactions
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api


def init_producer_id(call: Call) -> Steps:
    """Give a producer id and epoch."""
    request = call.request
    if request["transactional_id"] is not None:
        return (yield from init_transactions(call))
    asked: dict[str, Any] = {}
    if request.get("producer_id", -1) >= 0:
        asked = {name: request[name] for name in ("producer_id", "producer_epoch")}
    answer = yield call.ask(Api.INIT_PRODUCER_ID, asked)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    return {
        "error_code": KafkaError.NONE,
        "producer_id": found["producer_id"],
        "producer_epoch": found["producer_epoch"],
    }
