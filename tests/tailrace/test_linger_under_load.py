"""How long an open batch fills: `linger_ms`, and longer while records come fast over many partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tailrace.accumulator import FAST_RECORDS_PER_S, SMALL_BATCHES_PER_S
from tailrace.environment import Environment
from tailrace.formats.checksum import Readable
from tailrace.partition_queue import PartitionQueue
from tailrace.sender import Sender
from tailrace.settings import ProducerSettings
from tailrace.topics import TopicInfo

MS = 1_000_000
PARTITIONS = 64


class NobodyThere:
    """A socket without another end."""

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        return True

    def try_receive(self) -> list[bytes] | None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class SlowOrFast:
    """A sender on a clock of its own, with an open batch in each of many partitions."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        settings = ProducerSettings(bootstrap="tcp://127.0.0.1:1", linger_ms=5)
        environment = Environment(lambda: self.now_ns, lambda _: NobodyThere(), lambda _fds, _ns: None, lambda: 0.5, has_threads=False)
        self.sender = Sender(settings, lambda _info: None, environment)
        described: dict[str, Any] = {
            "name": "t", "topic_id": "00" * 16, "version": 1, "typed": False, "schema_id": 1, "schema": "", "settings": {}, "partitions": [{}] * PARTITIONS,
        }  # fmt: skip
        info = TopicInfo(described)
        self.queues = [PartitionQueue(info, partition) for partition in range(PARTITIONS)]
        self.sender.accumulator.queues = {(b"", queue.partition): queue for queue in self.queues}

    def records_come(self, per_second: int, milliseconds: int) -> None:
        for _ in range(milliseconds):
            self.now_ns += MS
            for queue in self.queues:
                batch = queue.open or self.sender.accumulator.open_batch(queue)
                for _ in range(per_second // 1000 // PARTITIONS):
                    batch.rows.add(None, b"x", self.now_ns // 1000)
            self.sender.pump()

    def closed_count(self) -> int:
        return sum(len(queue.ready) for queue in self.queues)


@pytest.fixture
def world() -> SlowOrFast:
    return SlowOrFast()


def test_while_records_come_fast_batches_of_many_partitions_fill_beyond_linger(world: SlowOrFast) -> None:
    world.records_come(10 * FAST_RECORDS_PER_S, 100)
    before = world.closed_count()
    world.records_come(10 * FAST_RECORDS_PER_S, 1000)
    assert SMALL_BATCHES_PER_S // 2 <= world.closed_count() - before <= SMALL_BATCHES_PER_S * 5 // 4


def test_slow_records_leave_after_linger(world: SlowOrFast) -> None:
    world.records_come(FAST_RECORDS_PER_S * 2 // 3, 100)
    assert world.closed_count() >= PARTITIONS * 100 // 8


def test_a_producer_that_goes_quiet_sends_what_was_held(world: SlowOrFast) -> None:
    world.records_come(10 * FAST_RECORDS_PER_S, 100)
    assert any(queue.open for queue in world.queues)
    for _ in range(2):
        world.now_ns += 21 * MS
        world.sender.pump()
    assert not any(queue.open for queue in world.queues)
