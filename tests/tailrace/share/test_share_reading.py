"""Reading what was acquired: what cannot be read holds up nothing that can, and questions that fail have changed nothing."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tailrace.connection import Connection
from tailrace.errors import CorruptBatchError, NotReachableError, StorageError, TailraceError
from tailrace.protocol.wire import Api
from tailrace.schema import DEFAULT_SCHEMA
from tailrace.settings import ConsumerSettings
from tailrace.share.reading import ShareReading
from tailrace.share.requests import Acquired
from tests.kit.batches import TOPIC_ID, make_batch, stamped

NEVER_NS = 1 << 62


def described(topic_id: bytes = TOPIC_ID, partitions: int = 1) -> dict[str, Any]:
    schema = base64.b64encode(DEFAULT_SCHEMA.serialize().to_pybytes()).decode()
    return {
        "name": "t", "topic_id": topic_id.hex(), "version": 1, "typed": False, "schema_id": 1, "schema": schema, "settings": {},
        "partitions": [{}] * partitions, "code": 0,
    }  # fmt: skip


class World:
    """A reading whose questions the test answers."""

    def __init__(self) -> None:
        self.connection = Connection("tcp://127.0.0.1:1", "test")
        self.topic = described()
        self.failure: TailraceError | None = None
        self.asked: list[Api] = []
        self.reading = ShareReading(self.connection, ConsumerSettings(), self.call)
        self.reading.look_up(["t"])

    def call(self, api: Api, _request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(api)
        if self.failure is not None:
            raise self.failure
        return {"topics": [self.topic]}

    def acquire(self, first: int, last: int, partition: int = 0, topic_id: bytes = TOPIC_ID) -> None:
        self.reading.acquired([Acquired(topic_id.hex(), partition, first, last, 1, False, NEVER_NS)])

    def needs_topics(self) -> bool:
        return self.reading.needs_topics

    def offsets(self) -> list[tuple[int, int]]:
        return [(record.partition, record.offset) for _, _, piece in self.reading.pieces(100) for record in piece.records]


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.connection.close()


def test_a_damaged_batch_behind_a_sound_one_does_not_hold_that_up(world: World) -> None:
    world.acquire(0, 5)
    (feed,) = world.reading._feeds.values()
    feed.aim(0)
    feed.cursor.buffered.append((memoryview(stamped(make_batch(3), 0)), 3))
    feed.cursor.error = error = CorruptBatchError("the next one is cut off")
    error.next_offset = 5
    assert world.reading.broken() == []
    assert world.offsets() == [(0, 0), (0, 1), (0, 2)]
    assert world.offsets() == []
    (broken,) = world.reading.broken()
    world.reading.repair(broken)
    pieces = list(world.reading.pieces(100))
    assert [(piece.first, piece.last, piece.unreadable) for _, _, piece in pieces] == [(3, 4, error)]
    assert (feed.cursor.position, [run.first for run in feed.runs]) == (5, [5])


def test_what_is_acquired_of_a_partition_that_is_not_known_waits_for_a_look_that_succeeds(world: World) -> None:
    world.acquire(0, 2, partition=1)
    world.reading.wait_at([])
    assert world.reading.has_runs
    assert world.needs_topics()
    world.failure = NotReachableError("no appliance")
    with pytest.raises(NotReachableError):
        world.reading.learn_topics()
    assert world.needs_topics()
    world.failure = None
    world.topic = described(partitions=2)
    assert world.reading.learn_topics() == []
    assert not world.needs_topics()
    assert [(feed.key.partition, feed.runs[0].first, feed.runs[0].last) for feed in world.reading._feeds.values()] == [(1, 0, 2)]


def test_a_topic_made_anew_takes_the_place_of_the_old_one_with_what_was_acquired_of_it(world: World) -> None:
    world.acquire(0, 5)
    world.acquire(0, 1, topic_id=b"2" * 16)
    world.topic = described(b"2" * 16)
    assert world.reading.learn_topics() == ["t"]
    (feed,) = world.reading._feeds.values()
    assert [(run.first, run.last) for run in feed.runs] == [(0, 1)]
    assert world.reading.topic_id("t") == (b"2" * 16).hex()
    assert world.reading.forget_runs() == 2


def test_an_error_that_may_pass_is_raised_once_and_tried_again(world: World) -> None:
    world.acquire(0, 5)
    (feed,) = world.reading._feeds.values()
    feed.cursor.error = StorageError("the disk")
    with pytest.raises(StorageError):
        world.reading.repair(*world.reading.broken())
    assert world.reading.broken() == []
    assert world.reading.has_runs
