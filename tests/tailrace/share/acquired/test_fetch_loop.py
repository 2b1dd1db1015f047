"""Fetching of acquired ranges: an unreadable range delays no other, and a failed lookup changes
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import lifted, run_at_once
from tailrace.core.errors import CorruptBatchError, NotReachableError, StorageError, TailraceError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api
from tailrace.share.acquired.fetch_loop import ShareFetchLoop
from tailrace.share.acquired.ranges import FetchedRange
from tailrace.share.requests import Acquired
from tests.kit.appliances.topics import described
from tests.kit.batches import TOPIC_ID, make_batch, stamped

NEVER_NS = 1 << 62


class World:
    """A fetch loop whose requests the test answers."""

    def __init__(self) -> None:
        self.connection = Connection("tcp://127.0.0.1:1", "test")
        self.number = 0
        self.topic = described()
        self.failure: TailraceError | None = None
        self.asked: list[Api] = []
        self.fetch_loop = ShareFetchLoop(self.connection, ConsumerSettings(), lifted(self.call))
        run_at_once(self.fetch_loop.lookup(["t"]))

    def call(self, api: Api, _request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(api)
        if self.failure is not None:
            raise self.failure
        return {"topics": [self.topic]}

    def acquire(
        self, first: int, last: int, partition: int = 0, topic_id: bytes = TOPIC_ID
    ) -> None:
        self.number += 1
        self.fetch_loop.acquired(
            self.number, [Acquired(topic_id.hex(), partition, first, last, 1, False, NEVER_NS)]
        )

    def needs_topics(self) -> bool:
        return self.fetch_loop.needs_topics

    def offsets(self) -> list[tuple[int, int]]:
        return [
            (record.partition, record.offset) for piece in self.pieces() for record in piece.records
        ]

    def pieces(self) -> list[FetchedRange]:
        found = []
        for _, _, piece in self.fetch_loop.pieces(100):
            found.append(piece)
            piece.run.first = piece.last + 1
        return found


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.connection.close()


def test_a_damaged_batch_does_not_delay_the_batch_before_it(world: World) -> None:
    world.acquire(0, 5)
    (acquired_ranges,) = world.fetch_loop._acquired.values()
    acquired_ranges.aim(0)
    acquired_ranges.cursor.buffered.append((memoryview(stamped(make_batch(3), 0)), 3))
    acquired_ranges.cursor.error = error = CorruptBatchError("the next one is cut off")
    error.next_offset = 5
    assert world.fetch_loop.broken() == []
    assert world.offsets() == [(0, 0), (0, 1), (0, 2)]
    assert world.offsets() == []
    (broken,) = world.fetch_loop.broken()
    run_at_once(world.fetch_loop.repair(broken))
    pieces = world.pieces()
    assert [(piece.first, piece.last, piece.unreadable) for piece in pieces] == [(3, 4, error)]
    assert (acquired_ranges.cursor.position, [run.first for run in acquired_ranges.runs]) == (
        5,
        [5],
    )


def test_ranges_of_an_unknown_partition_wait_for_a_successful_lookup(
    world: World,
) -> None:
    world.acquire(0, 2, partition=1)
    world.fetch_loop.wait_at([])
    assert world.fetch_loop.has_ranges
    assert world.needs_topics()
    world.failure = NotReachableError("no appliance")
    with pytest.raises(NotReachableError):
        run_at_once(world.fetch_loop.learn_topics())
    assert world.needs_topics()
    world.failure = None
    world.topic = described(partitions=2)
    assert run_at_once(world.fetch_loop.learn_topics()) == []
    assert not world.needs_topics()
    assert [
        (acquired_ranges.key.partition, acquired_ranges.runs[0].first, acquired_ranges.runs[0].last)
        for acquired_ranges in world.fetch_loop._acquired.values()
    ] == [(1, 0, 2)]


def test_a_recreated_topic_replaces_the_old_one_and_its_ranges(
    world: World,
) -> None:
    world.acquire(0, 5)
    world.acquire(0, 1, topic_id=b"2" * 16)
    world.topic = described(b"2" * 16)
    assert run_at_once(world.fetch_loop.learn_topics()) == ["t"]
    (acquired_ranges,) = world.fetch_loop._acquired.values()
    assert [(run.first, run.last) for run in acquired_ranges.runs] == [(0, 1)]
    assert world.fetch_loop.topic_id("t") == (b"2" * 16).hex()
    assert [run[:3] for run in world.fetch_loop.forget_ranges()] == [(TopicPartition("t", 0), 0, 1)]


def test_a_retriable_error_is_raised_once_and_retried(world: World) -> None:
    world.acquire(0, 5)
    (acquired_ranges,) = world.fetch_loop._acquired.values()
    acquired_ranges.cursor.error = StorageError("the disk")
    with pytest.raises(StorageError):
        run_at_once(world.fetch_loop.repair(*world.fetch_loop.broken()))
    assert world.fetch_loop.broken() == []
    assert world.fetch_loop.has_ranges
