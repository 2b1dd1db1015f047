"""ShareAcknowledge, and the acknowledgements that a ShareFetch carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.share_groups.sessions import (
    Partition,
    ShareMember,
    begin_request,
    identity_of,
    share_error,
)
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import SHARE_RUNS_MAX

OUTCOMES = {0: "accept", 1: "accept", 2: "release", 3: "reject", 4: "renew"}
"""Our outcomes for Kafka's types. 0 is a gap: an offset without a record."""


def runs_of_request(call: Call) -> list[list[Any]]:
    """The acknowledgements of a request as our runs of offsets. Raises RefusedError."""
    found: list[list[Any]] = []
    for topic in call.request["topics"]:
        for partition in topic["partitions"]:
            place = bytes(topic["topic_id"]).hex(), partition["partition_index"]
            for batch in partition["acknowledgement_batches"]:
                found += _runs_of(place, batch)
    return found


def _runs_of(place: Partition, batch: dict[str, Any]) -> Iterator[list[Any]]:
    first, last, types = batch["first_offset"], batch["last_offset"], batch["acknowledge_types"]
    count = last - first + 1
    if first < 0 or count < 1 or len(types) not in (1, count) or not set(types) <= set(OUTCOMES):
        raise RefusedError(
            KafkaError.INVALID_REQUEST,
            f"an acknowledgement of the offsets {first} to {last} has {len(types)} types; it takes "
            "one, or one for each offset, from 0 to 4",
        )
    if len(types) == 1:
        yield [*place, first, last, OUTCOMES[types[0]]]
        return
    start = 0
    for at in range(1, count + 1):
        if at == count or OUTCOMES[types[at]] != OUTCOMES[types[start]]:
            yield [*place, first + start, first + at - 1, OUTCOMES[types[start]]]
            start = at


def acknowledge_runs(call: Call, member: ShareMember, runs: list[list[Any]]) -> Steps:
    """Returns the error of each partition of which a run was refused."""
    errors: dict[Partition, KafkaError] = {}
    for start in range(0, len(runs), SHARE_RUNS_MAX):
        some = runs[start : start + SHARE_RUNS_MAX]
        answer = yield call.ask(Api.SHARE_ACKNOWLEDGE, {**identity_of(call, member),
                                                        "acknowledge": some})  # fmt: skip
        if answer.code is not ErrorCode.OK:
            error = share_error(answer.code)
            errors |= {(run[0], run[1]): error for run in some}
            continue
        for refused in answer.json()["refused"]:
            errors[refused[0], refused[1]] = share_error(refused[4])
    return errors


def acknowledge(call: Call) -> Steps:
    """ShareAcknowledge: end the locks of records."""
    runs = runs_of_request(call)
    member = begin_request(call)
    errors = yield from acknowledge_runs(call, member, runs)
    return {
        "error_code": KafkaError.NONE,
        "responses": [
            {
                "topic_id": topic["topic_id"],
                "partitions": [
                    {
                        "partition_index": partition["partition_index"],
                        "error_code": errors.get(
                            (bytes(topic["topic_id"]).hex(), partition["partition_index"]),
                            KafkaError.NONE,
                        ),
                    }
                    for partition in topic["partitions"]
                ],
            }
            for topic in call.request["topics"]
        ],
    }
