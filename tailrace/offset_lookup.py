"""Asking for offsets: LIST_OFFSETS, in pieces that the appliance takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tailrace.errors import InvalidRequestError, error_for
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition

OFFSETS_AT_ONCE = 1_024
Call = Callable[[Api, dict[str, Any]], dict[str, Any]]
"""A request and its answer, both JSON."""
At = str | int | dict[str, int]
"""Which offset: "earliest", "latest", a time in microseconds, {"behind": an offset}: where the batch behind that one begins, or
{"time_of": an offset}: the first record there or after it, whose time is in the answer."""


def list_offsets(call: Call, wanted: Iterable[tuple[TopicPartition, At]]) -> dict[TopicPartition, dict[str, Any]]:
    """What LIST_OFFSETS says of each partition; an entry may be a refusal (see `offset_in`)."""
    items = [{"topic": key.topic, "partition": key.partition, "at": at} for key, at in wanted]
    found: dict[TopicPartition, dict[str, Any]] = {}
    for start in range(0, len(items), OFFSETS_AT_ONCE):
        answer = call(Api.LIST_OFFSETS, {"partitions": items[start : start + OFFSETS_AT_ONCE]})
        found.update((TopicPartition(item["topic"], item["partition"]), item) for item in answer["offsets"])
    return found


def offset_in(item: dict[str, Any]) -> int:
    """The offset that one entry of a LIST_OFFSETS answer says; -1: no record is as late as the time. Raises what the entry says."""
    return int(check_offsets_answer(item)["offset"])


def check_offsets_answer(item: dict[str, Any]) -> dict[str, Any]:
    """One entry of a LIST_OFFSETS answer, which has an offset. Raises what the entry says: UnknownTopicError, PartitionOutOfRangeError, ..."""
    code = code_of(item["code"])
    if code is not ErrorCode.OK:
        raise error_for(code, f"{item['topic']}-{item['partition']}")
    if "offset" not in item:
        raise InvalidRequestError("an offset is missing in the answer")
    return item
