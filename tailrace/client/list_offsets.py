"""Asking for offsets: LIST_OFFSETS, in pieces that the appliance takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.client.steps import Call as StepsCall
from tailrace.client.steps import Steps
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRequestError, RequestTimeoutError, error_for
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api

OFFSETS_AT_ONCE = 1_024
RETRY_INTERVAL_S = 0.05
Call = Callable[[Api, dict[str, Any]], dict[str, Any]]
"""A request and its answer, both JSON, of what is called and does not wait by steps."""
At = str | int | dict[str, int]
"""Which offset: "earliest", "latest", a time in microseconds, {"behind": an offset}: where the
batch behind that one begins, or {"time_of": an offset}: the first record there or after it, whose
time is in the answer."""


def list_offsets(
    call: StepsCall, requested: Iterable[tuple[TopicPartition, At]]
) -> Steps[dict[TopicPartition, dict[str, Any]]]:
    """What LIST_OFFSETS says of each partition; an entry may be a refusal (see `offset_in`)."""
    items = [{"topic": key.topic, "partition": key.partition, "at": at} for key, at in requested]
    found: dict[TopicPartition, dict[str, Any]] = {}
    for start in range(0, len(items), OFFSETS_AT_ONCE):
        answer = yield from call(
            Api.LIST_OFFSETS, {"partitions": items[start : start + OFFSETS_AT_ONCE]}
        )
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
    """What `ask` (`Admin.offsets`) says of each partition, all of them offsets. One that is being
    opened, as all are for a moment after the appliance's start, is asked for again. Raises what an
    entry says, RequestTimeoutError when one is not open after `timeout_ms`.
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
    """The offset that one entry of a LIST_OFFSETS answer says; -1: no record is as late as the
    time. Raises what the entry says.
    """
    return int(check_offsets_answer(item)["offset"])


def check_offsets_answer(item: dict[str, Any]) -> dict[str, Any]:
    """One entry of a LIST_OFFSETS answer, which has an offset. Raises what the entry says:
    UnknownTopicError, PartitionOutOfRangeError, ...
    """
    code = code_of(item["code"])
    if code is not ErrorCode.OK:
        raise error_for(code, f"{item['topic']}-{item['partition']}")
    if "offset" not in item:
        raise InvalidRequestError("an offset is missing in the answer")
    return item
