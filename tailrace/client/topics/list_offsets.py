"""LIST_OFFSETS requests, of at most OFFSETS_AT_ONCE partitions each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.client.connections.steps import Call as StepsCall
from tailrace.client.connections.steps import Steps, Wait, Wakeup
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRequestError, RequestTimeoutError, error_for
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.fetch_messages import READ_COMMITTED, READ_UNCOMMITTED
from tailrace.protocol.frame import Api

OFFSETS_AT_ONCE = 1_024
RETRY_INTERVAL_S = 0.05
CARRIED_OUT_MAX_NS = 1_000_000_000
"""Longest wait for the markers of a committed transaction: a partition may be offline."""
CARRIED_OUT_INTERVAL_NS = 1_000_000
Call = Callable[[Api, dict[str, Any]], dict[str, Any]]
"""A blocking request: (API, JSON) -> JSON."""
LOG_END = "log_end"
"""As "latest" without transactions: the high watermark, at any isolation level."""
At = str | int | dict[str, int]
"""The offset to look up: "earliest", "latest", LOG_END, a time in microseconds, {"behind": offset}
for the begin of the next batch, or {"time_of": offset} for the first record from there on, with its
time.
"""


def list_offsets(
    call: StepsCall,
    requested: Iterable[tuple[TopicPartition, At]],
    isolation_level: str = READ_COMMITTED,
) -> Steps[dict[TopicPartition, dict[str, Any]]]:
    """The LIST_OFFSETS entry of each partition. An entry may have an error (see `offset_in`).

    The end of committed records lies behind all transactions that were committed before: a commit
    returns when it is durable, and its markers are in the partitions milliseconds later.
    """
    asked = dict(requested)
    if LOG_END in asked.values():
        asked, isolation_level = dict.fromkeys(asked, "latest"), READ_UNCOMMITTED
    isolation = {} if isolation_level == READ_COMMITTED else {"isolation": isolation_level}
    items = [
        {"topic": key.topic, "partition": key.partition, "at": at} for key, at in asked.items()
    ]
    found: dict[TopicPartition, dict[str, Any]] = {}
    for start in range(0, len(items), OFFSETS_AT_ONCE):
        request = {"partitions": items[start : start + OFFSETS_AT_ONCE], **isolation}
        answer = yield from call(Api.LIST_OFFSETS, request)
        decided, begin_ns = answer.get("decided", 0), time.monotonic_ns()
        while answer.get("carried_out", decided) < decided:
            now_ns = time.monotonic_ns()
            if now_ns - begin_ns >= CARRIED_OUT_MAX_NS:
                break
            yield Wait(now_ns + CARRIED_OUT_INTERVAL_NS, Wakeup())
            answer = yield from call(Api.LIST_OFFSETS, request)
        found.update(
            (TopicPartition(item["topic"], item["partition"]), item) for item in answer["offsets"]
        )
    return found


def ready_offsets(
    ask: Callable[[Mapping[TopicPartition, str]], dict[TopicPartition, dict[str, Any]]],
    keys: Iterable[TopicPartition],
    at: str,
    timeout_ms: int,
) -> dict[TopicPartition, dict[str, Any]]:
    """The entries of `ask` (`Admin.offsets`), all with an offset. Partitions that the appliance is
    still opening, as after its start, are asked for again. Raises an entry's error, and
    RequestTimeoutError if a partition is not open after `timeout_ms`.
    """
    by_s = time.monotonic() + timeout_ms / 1000
    found: dict[TopicPartition, dict[str, Any]] = {key: {} for key in keys}
    missing = list(found)
    while missing:
        found.update(ask(dict.fromkeys(missing, at)))
        missing = [key for key in missing if code_of(found[key]["code"]) is ErrorCode.NOT_READY]
        if missing and time.monotonic() >= by_s:
            raise RequestTimeoutError(
                f"{missing[0].topic}-{missing[0].partition} is being opened by the appliance, for "
                f"{timeout_ms} ms now"
            )
        if missing:
            time.sleep(RETRY_INTERVAL_S)
    return {key: check_offsets_answer(item) for key, item in found.items()}


def offset_in(item: dict[str, Any]) -> int:
    """The offset in an entry of LIST_OFFSETS. -1: all records are older than the time. Raises the
    entry's error.
    """
    return int(check_offsets_answer(item)["offset"])


def check_offsets_answer(item: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of LIST_OFFSETS that has an offset. Raises the entry's error, such as
    UnknownTopicError or PartitionOutOfRangeError.
    """
    code = code_of(item["code"])
    if code is not ErrorCode.OK:
        raise error_for(code, f"{item['topic']}-{item['partition']}")
    if "offset" not in item:
        raise InvalidRequestError(
            f"the LIST_OFFSETS response has no offset for {item['topic']}-{item['partition']}"
        )
    return item
