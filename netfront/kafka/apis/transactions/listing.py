"""DescribeTransactions, ListTransactions."""

from __future__ import annotations

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups.topic_patterns import checked_pattern
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

STATES = {
    "empty": "Empty", "ongoing": "Ongoing", "committing": "PrepareCommit",
    "aborting": "PrepareAbort", "prepared": "PrepareCommit",
}  # fmt: skip


def describe_transactions(call: Call) -> Steps:
    """Describe transactional ids."""
    found = []
    for name in call.request["transactional_ids"]:
        answer = yield call.ask(Api.DESCRIBE_TRANSACTION, {"transactional_id": name})
        if answer.code is not ErrorCode.OK:
            code = coordinator_error(answer.code)
            if answer.code is ErrorCode.UNKNOWN_TRANSACTIONAL_ID:
                code = KafkaError.TRANSACTIONAL_ID_NOT_FOUND
            found.append({"error_code": code, "transactional_id": name})
            continue
        one = answer.json()
        begun_ms = -1
        if one["open_ms"] is not None:
            begun_ms = call.services.wall_us() // 1000 - one["open_ms"]
        found.append(
            {"error_code": KafkaError.NONE, "transactional_id": name,
             "transaction_state": STATES.get(one["state"], "Ongoing"),
             "transaction_timeout_ms": one["timeout_ms"], "transaction_start_time_ms": begun_ms,
             "producer_id": one["producer_id"], "producer_epoch": one["producer_epoch"]}
        )  # fmt: skip
    return {"transaction_states": found}


def list_transactions(call: Call) -> Steps:
    """List transactional ids by state, producer id, age and pattern."""
    request = call.request
    states, ids = set(request["state_filters"]), set(request["producer_id_filters"])
    age_ms = request.get("duration_filter", -1)
    text = request.get("transactional_id_pattern")
    pattern = checked_pattern(text) if text else None
    listed, following = [], None
    while True:
        answer = yield call.ask(
            Api.LIST_TRANSACTIONS, {"next": following} if following is not None else {}
        )
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        page = answer.json()
        for one in page["transactions"]:
            state = STATES.get(one["state"], "Ongoing")
            if (
                (not states or state in states)
                and (not ids or one["producer_id"] in ids)
                and (age_ms < 0 or (one["open_ms"] or 0) > age_ms)
                and (pattern is None or pattern.matches(one["transactional_id"]))
            ):
                listed.append(
                    {"transactional_id": one["transactional_id"], "transaction_state": state,
                     "producer_id": one["producer_id"]}
                )  # fmt: skip
        following = page["next"]
        if following is None:
            break
    unknown = [name for name in states if name not in {*STATES.values(), "CompleteCommit",
               "CompleteAbort", "Dead", "PrepareEpochFence"}]  # fmt: skip
    return {
        "error_code": KafkaError.NONE, "unknown_state_filters": unknown,
        "transaction_states": listed,
    }  # fmt: skip
