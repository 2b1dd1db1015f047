"""A loop over a group's consumer polls while its buffer is full: auto commit, rebalances and
`max_poll_interval_ms` see a program that handles one record after the other.

The clock of the clients jumps with each record, so no test waits for time to pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, RebalanceListener, Record, TopicPartition
from tailrace.aio import AsyncConsumer
from tailrace.aio.event_loop import LOOP_RUNTIME
from tailrace.client.connections.runtime import SYSTEM
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.group.membership import Phase
from tests.conformance.worlds import LoopWorld
from tests.kit.processes import wait_until

COUNT = 12
NS_PER_S = 1_000_000_000


class JumpingClock:
    """The monotonic clock, and what was added to it."""

    def __init__(self) -> None:
        self._added_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self._added_ns

    def jump(self, seconds: int) -> None:
        self._added_ns += seconds * NS_PER_S


class Lost(RebalanceListener):
    """Notes the partitions that were lost."""

    def __init__(self) -> None:
        self.partitions: list[TopicPartition] = []

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self.partitions += lost


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """One batch of COUNT records, which lies in the buffer from the first poll on."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic))
        for number in range(COUNT):
            producer.send(topic, b"%d" % number)
    return topic


def test_auto_commit_follows_a_slow_loop(appliance: EmbeddedAppliance, filled: str) -> None:
    """It committed when the buffer was empty, however long that took."""
    clock, key, seen = JumpingClock(), TopicPartition(filled, 0), list[int]()
    with Consumer(
        filled,
        bootstrap=appliance.address,
        group_id=filled,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=1_000,
        runtime=replace(SYSTEM, monotonic_ns=clock),
    ) as consumer:

        def is_committed_up_to(offset: int) -> Callable[[], bool]:
            return lambda: (consumer.committed(key) or 0) == offset

        for record in consumer:
            wait_until(is_committed_up_to(record.offset), "the records before are committed")
            seen.append(record.offset)
            if len(seen) == COUNT:
                break
            clock.jump(1)
    assert seen == list(range(COUNT))


@pytest.mark.parametrize("reads", ["async for", "getone"])
def test_auto_commit_follows_a_coroutine_that_reads_one_record_after_the_other(
    appliance: EmbeddedAppliance, filled: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, key, seen = JumpingClock(), TopicPartition(filled, 0), list[int]()
    monkeypatch.setattr(
        "tailrace.aio.consumer.LOOP_RUNTIME", replace(LOOP_RUNTIME, monotonic_ns=clock)
    )

    async def one_after_the_other(consumer: AsyncConsumer) -> AsyncIterator[Record]:
        while True:
            yield await consumer.getone()

    async def body() -> None:
        async with AsyncConsumer(
            filled,
            bootstrap=appliance.address,
            group_id=filled,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=1_000,
        ) as consumer:
            async for record in consumer if reads != "getone" else one_after_the_other(consumer):
                while (await consumer.committed(key) or 0) != record.offset:
                    await asyncio.sleep(0)
                seen.append(record.offset)
                if len(seen) == COUNT:
                    break
                clock.jump(1)

    LoopWorld().run(body())
    assert seen == list(range(COUNT))


@pytest.mark.parametrize(
    "is_begun_again", [False, True], ids=["one loop", "a loop for each record"]
)
def test_a_loop_that_is_slower_than_max_poll_interval_for_its_buffer_stays_in_its_group(
    appliance: EmbeddedAppliance, filled: str, is_begun_again: bool
) -> None:
    """It was given up with records in its buffer, even with `max_poll_records=1`."""
    clock, listener, seen = JumpingClock(), Lost(), list[int]()
    consumer = Consumer(
        bootstrap=appliance.address,
        group_id=filled,
        auto_offset_reset="earliest",
        max_poll_interval_ms=10_000,
        session_timeout_ms=10_000,
        max_poll_records=1,
        runtime=replace(SYSTEM, monotonic_ns=clock),
    )
    assert consumer._group is not None
    group, membership = consumer._group, consumer._group.membership

    def work() -> None:
        before = membership.heartbeat_count
        clock.jump(4)  # longer than heartbeat_interval_ms
        group.wakeup()
        wait_until(
            lambda: membership.heartbeat_count > before or membership.phase is not Phase.MEMBER,
            "the time of the last poll was looked at",
        )

    with consumer:
        consumer.subscribe([filled], listener=listener)
        while len(seen) < COUNT:
            for record in consumer:
                seen.append(record.offset)
                work()
                if is_begun_again or len(seen) == COUNT:
                    break
        consumer.poll()
    assert seen == list(range(COUNT))
    assert not listener.partitions
