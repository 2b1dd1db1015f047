"""Offsets of partitions that are being opened, as all are for a moment after an appliance's
start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tailrace.client.topics import list_offsets as offset_lookup
from tailrace.client.topics.list_offsets import ready_offsets
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import RequestTimeoutError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition

KEYS = [TopicPartition("t", number) for number in range(3)]


class Opening:
    """An appliance that opens one partition more between two questions."""

    def __init__(self, code: ErrorCode = ErrorCode.NOT_READY) -> None:
        self.code = code
        self.asked: list[list[int]] = []

    def offsets(
        self, requested: Mapping[TopicPartition, str]
    ) -> dict[TopicPartition, dict[str, Any]]:
        self.asked.append([key.partition for key in requested])
        return {
            key: {
                "topic": "t",
                "partition": key.partition,
                "offset": 7,
                "code": int(ErrorCode.OK if key.partition < len(self.asked) else self.code),
            }
            for key in requested
        }


def test_a_partition_that_is_being_opened_is_asked_for_again_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan that began while the appliance recovered ended with `Try again shortly; the SDK does`,
    and so did a continuous export, which waits.
    """
    monkeypatch.setattr(offset_lookup, "RETRY_INTERVAL_S", 0)
    opening = Opening()
    found = ready_offsets(opening.offsets, KEYS, "latest", 60_000)
    assert {key: item["offset"] for key, item in found.items()} == dict.fromkeys(KEYS, 7)
    assert opening.asked == [[0, 1, 2], [1, 2], [2]]
    assert ready_offsets(opening.offsets, [], "latest", 0) == {}


def test_it_is_not_waited_for_without_end_and_other_refusals_are_raised_at_once() -> None:
    with pytest.raises(
        RequestTimeoutError, match="t-1 is being opened by the appliance, for 0 ms now"
    ):
        ready_offsets(Opening().offsets, KEYS, "latest", 0)
    unknown = Opening(ErrorCode.UNKNOWN_TOPIC)
    with pytest.raises(UnknownTopicError):
        ready_offsets(unknown.offsets, KEYS, "latest", 60_000)
    assert len(unknown.asked) == 1
