"""Samples on demand, rates, and the messages of a stream, with an injected clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.observe.console.sampling.sampler import IDLE_NS, Sampler, TopicRow
from appliance.observe.console.sampling.samples import (
    GroupTotals,
    Sample,
    TopicTotals,
    rates,
    take,
    topic_totals,
)
from tailrace.core.errors import StorageError
from tailrace.core.topic_partition import TopicPartition
from tests.kit.processes import HANG_LIMIT_S

NS = 1_000_000_000


def sample(now_ns: int, ends: dict[str, int], error: str = "") -> Sample:
    topics = {name: TopicTotals(1, end, end, 10 * end, 1, 0) for name, end in ends.items()}
    return Sample(now_ns, now_ns // 1_000_000, topics, error=error)


def test_a_rate_is_what_was_appended_between_two_samples() -> None:
    before, after = sample(0, {"a": 10, "b": 5}), sample(2 * NS, {"a": 30, "b": 5, "c": 7})
    assert rates(before, after) == {"a": 10.0, "b": 0.0, "c": 0.0}
    assert rates(None, after) == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert rates(after, sample(3 * NS, {"a": 1}))["a"] == 0.0  # the topic was made again


class WithoutGroups:
    """An administrator's client of an appliance whose groups.db is damaged."""

    def partition_counts(self, *, internal: bool) -> dict[str, int]:
        assert internal
        return {"a": 1}

    def offsets(self, partitions: dict[TopicPartition, str]) -> dict[TopicPartition, Any]:
        row = {"beginning": 0, "end": 1, "high_watermark": 1, "size_bytes": 9, "segments": 1}
        return {
            key: {"topic": key.topic, "code": 0, "state": "ONLINE", **row} for key in partitions
        }

    def describe_cluster(self) -> dict[str, Any]:
        return {"cluster_id": "x"}

    def describe_delays(self) -> list[dict[str, Any]]:
        return []

    def list_groups(self) -> dict[str, Any]:
        raise StorageError("groups.db cannot be used")


def test_a_sample_has_all_but_groups_where_their_database_cannot_be_used() -> None:
    admin: Any = WithoutGroups()
    taken = take(admin, [], lambda: True, None)
    assert not taken.error
    assert list(taken.topics) == ["a"]
    assert taken.cluster == {"cluster_id": "x", "groups_error": "groups.db cannot be used"}


def test_the_partitions_of_a_topic_are_summed_and_those_with_an_error_left_out() -> None:
    row = {
        "topic": "a",
        "code": 0,
        "beginning": 5,
        "end": 9,
        "high_watermark": 10,
        "size_bytes": 100,
        "segments": 2,
        "state": "ONLINE",
    }
    broken = {**row, "code": 3}
    offline = {**row, "state": "OFFLINE_FOR_WRITES"}
    assert topic_totals([row, broken, offline]) == {"a": TopicTotals(2, 10, 20, 200, 4, 1)}


class Appliance:
    """Gives one sample at a time, when the test allows it."""

    def __init__(self) -> None:
        self.now_ns = NS
        self.ends = {"a": 0, "b": 0}
        self.closed = 0
        self.gate = threading.Semaphore(0)
        self.asked_groups: list[bool] = []
        self.samplers: list[Sampler] = []
        self.is_over = False

    def sampler(self) -> Sampler:
        made = Sampler(self.take, self.close, lambda: self.now_ns, interval_ns=0)
        self.samplers.append(made)
        return made

    def take(self, groups: dict[str, GroupTotals] | None) -> Sample:
        assert self.gate.acquire(timeout=HANG_LIMIT_S)
        if self.is_over:
            raise RuntimeError("the test is over")
        self.asked_groups.append(groups is None)
        return sample(self.now_ns, dict(self.ends))

    def close(self) -> None:
        self.closed += 1

    def end(self) -> None:
        """End the threads of its samplers, wherever they are."""
        self.is_over = True
        self.now_ns += IDLE_NS + 1
        for sampler in self.samplers:
            with sampler._changed:
                thread = sampler._thread
                sampler._changed.notify_all()
            self.gate.release()
            if thread is not None:
                thread.join(HANG_LIMIT_S)
                assert not thread.is_alive()


@pytest.fixture
def appliance() -> Iterator[Appliance]:
    made = Appliance()
    yield made
    made.end()


def test_nobody_watches_no_sample_is_taken_and_the_first_reader_gets_a_new_one(
    appliance: Appliance,
) -> None:
    sampler = appliance.sampler()
    assert appliance.asked_groups == []
    appliance.gate.release()
    state = sampler.state(HANG_LIMIT_S)
    assert state is not None
    assert state["topics"] == {"a": (1, 0, 0, 1, 0, 0.0), "b": (1, 0, 0, 1, 0, 0.0)}
    assert appliance.asked_groups == [True]


def test_a_tick_has_the_rows_that_a_page_has_not_shown_and_the_topics_that_are_gone(
    appliance: Appliance,
) -> None:
    sampler = appliance.sampler()
    shown: dict[str, TopicRow] = {}
    appliance.gate.release()
    number = sampler.wait(0, HANG_LIMIT_S)
    first = sampler.tick(shown)
    assert first is not None
    assert set(first["topics"]) == {"a", "b"}
    appliance.ends = {"a": 50}
    appliance.now_ns += NS
    appliance.gate.release()
    number = sampler.wait(number, HANG_LIMIT_S)
    second = sampler.tick(shown)
    assert second is not None
    assert second["topics"] == {"a": (1, 50, 500, 1, 0, 50.0)}
    assert second["gone"] == ["b"]
    assert second["rate"] == 50.0
    appliance.now_ns += NS
    appliance.gate.release()
    sampler.wait(number, HANG_LIMIT_S)
    third = sampler.tick(shown)
    assert third is not None
    assert third["topics"] == {"a": (1, 50, 500, 1, 0, 0.0)}  # its rate has fallen


def test_the_thread_ends_and_closes_its_client_when_nobody_reads_any_more(
    appliance: Appliance,
) -> None:
    sampler = appliance.sampler()
    others = set(threading.enumerate())  # of other tests
    appliance.gate.release()
    number = sampler.wait(0, HANG_LIMIT_S)
    (thread,) = (t for t in threading.enumerate() if t.name == "sampler" and t not in others)
    appliance.now_ns += IDLE_NS + 1
    appliance.gate.release()
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()
    assert appliance.closed == 1
    appliance.gate.release()
    assert sampler.wait(number, HANG_LIMIT_S) > number  # a reader starts it again
