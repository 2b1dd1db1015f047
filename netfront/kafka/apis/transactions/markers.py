"""WriteTxnMarkers: an operator ends a hanging transaction, with `kafka-transactions abort`.

The transaction is aborted as by `tailrace transaction abort`: in all its partitions.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api


def write_markers(call: Call) -> Steps:
    """Abort transactions by producer id and epoch."""
    markers = []
    for marker in call.request["markers"]:
        code = KafkaError.INVALID_REQUEST  # a commit: the coordinator alone decides one
        if not marker["transaction_result"]:
            code = yield from _abort(call, marker)
        markers.append(
            {
                "producer_id": marker["producer_id"],
                "topics": [
                    {
                        "name": topic["name"],
                        "partitions": [
                            {"partition_index": index, "error_code": code}
                            for index in topic["partition_indexes"]
                        ],
                    }
                    for topic in marker["topics"]
                ],
            }
        )
    return {"markers": markers}


def _abort(call: Call, marker: dict[str, Any]) -> Steps:
    """Returns a KafkaError."""
    asked: dict[str, Any] = {
        "producer_id": marker["producer_id"], "producer_epoch": marker["producer_epoch"],
    }  # fmt: skip
    following = None
    while True:
        answer = yield call.ask(Api.LIST_TRANSACTIONS, {"states": ["ongoing"], "next": following})
        if answer.code is not ErrorCode.OK:
            return coordinator_error(answer.code)
        page = answer.json()
        for one in page["transactions"]:
            if (one["producer_id"], one["producer_epoch"]) == tuple(asked.values()):
                asked = {"transactional_id": one["transactional_id"]}
                break
        following = page["next"]
        if following is None or "transactional_id" in asked:
            break
    answer = yield call.ask(Api.ABORT_TRANSACTION, asked)
    return coordinator_error(answer.code)
