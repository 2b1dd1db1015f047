"""Order in which partitions of a topic with hash slots wait for one another in a reader."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.client.connections.steps import lifted, run_at_once
from tailrace.client.topics.list_offsets import At
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.hash_slots import HandOver
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.hash_slot_barrier import RETRY_INTERVAL_NS, HashSlotBarrier
from tailrace.fetch.partition_position import PartitionPosition


class Reader:
    """Cursors of one topic, and an appliance that says where logs end."""

    def __init__(self, hand_overs: dict[int, HandOver], partitions: Iterable[int]) -> None:
        info: Any = SimpleNamespace(topic_id=b"t" * 16, hand_overs=hand_overs)
        self.cursors = {
            TopicPartition("t", number): PartitionPosition(TopicPartition("t", number), info)
            for number in partitions
        }
        self.ends: dict[int, int] | None = None
        self.asked = 0
        self.now_ns = 0
        self.unread: dict[TopicPartition, int] = {}
        self.barrier = HashSlotBarrier(lifted(self._offsets), self.unread.get, lambda: self.now_ns)
        self.barrier.arm(self.cursors)

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> dict[TopicPartition, int]:
        self.asked += 1
        if self.ends is None:
            raise TailraceError("its log is not open", ErrorCode.NOT_READY)
        return {key: self.ends.get(key.partition, 1_000) for key in keys}

    def waiting_at(self, *positions: int | None) -> list[int]:
        """The partitions that wait when the cursors stand there."""
        for cursor, position in zip(self.cursors.values(), positions, strict=False):
            cursor.position = position
        run_at_once(self.barrier.step())
        return [key.partition for key, cursor in self.cursors.items() if cursor.is_paused]


def test_each_waits_for_all_that_gave_it_slots_also_for_those_that_wait_themselves() -> None:
    reader = Reader({2: ((0, 10), (1, 20)), 3: ((2, 5),)}, range(4))
    reader.ends = {}
    assert reader.waiting_at(None, None, None, None) == [2, 3]
    assert reader.waiting_at(10, 19, 0, 0) == [2, 3]
    assert reader.waiting_at(10, 20, 0, 0) == [3]
    assert reader.waiting_at(10, 20, 4, 0) == [3]
    assert reader.waiting_at(10, 20, 5, 0) == []
    assert reader.waiting_at(0, 0, 0, 0) == [], "positions that go on do not go back but by a seek"
    reader.barrier.on_seek()
    assert reader.waiting_at(0, 20, 0, 0) == [2, 3]
    assert reader.asked == 1


def test_what_is_not_read_here_is_not_waited_for_and_what_was_given_up_lets_go() -> None:
    reader = Reader({2: ((0, 10), (1, 20))}, [1, 2])
    assert reader.waiting_at(19, 0) == [2]
    reader.barrier.arm(
        {key: cursor for key, cursor in reader.cursors.items() if key.partition == 2}
    )
    assert reader.waiting_at(19, 0) == []
    assert Reader({2: ((0, 10),)}, [2]).waiting_at(0) == []


def test_a_log_that_was_cut_is_read_when_it_ends() -> None:
    reader = Reader({1: ((0, 10),)}, range(2))
    assert reader.waiting_at(7, 0) == [1]
    reader.ends = {0: 8}
    assert reader.waiting_at(8, 0) == [1], "it is not asked again at once"
    reader.now_ns += RETRY_INTERVAL_NS
    assert reader.waiting_at(7, 0) == [1]
    assert reader.waiting_at(8, 0) == []
    assert reader.asked == 2


@pytest.mark.parametrize("pauses", ["by_user", "delivery"])
def test_other_reasons_to_pause_stay(pauses: str) -> None:
    reader = Reader({1: ((0, 10),)}, range(2))
    source, waits = reader.cursors.values()
    waits.pause(**{pauses: True})
    source.pause(by_user=True)
    reader.unread[source.key] = 9
    assert reader.waiting_at(10, 0) == [0, 1], "what was paused has a record that is not handed out"
    assert waits.waits_for_others
    reader.unread.clear()
    assert reader.waiting_at(10, 0) == [0, 1]
    assert not waits.waits_for_others, "what is paused at its end is read"
