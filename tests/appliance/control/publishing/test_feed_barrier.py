"""The moments at which fronts and scheduler are fed while topics change."""

from __future__ import annotations

import pytest

from appliance.catalog.catalog import Topic
from appliance.catalog.rows import COMES_BACK
from appliance.control.publishing.feed_barrier import (
    CREATED_VERSION,
    PATIENCE_NS,
    FeedBarrier,
    is_known_to_clients,
)
from shm.memory.layout import Role

FRONT, OTHER = (Role.FRONT, 0), (Role.FRONT, 1)


class World:
    """Topics, and a barrier over them."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic] = {}
        self.lacking: set[str] = set()
        self.barrier = self.successor()

    def successor(self) -> FeedBarrier:
        """The barrier of a controller that starts now."""
        return FeedBarrier(self.topics, lambda topic: topic.name in self.lacking)

    def set(self, name: str, state: str, version: int, kept_ms: int = 0) -> Topic:
        topic = Topic(
            name.encode(), name, state, version, False, 1, b"", {}, (), 0, bin=kept_ms
        )  # fmt: skip
        self.topics[name] = topic
        return topic


def test_a_feed_waits_for_the_end_of_a_change_of_a_topic_that_clients_know() -> None:
    world = World()
    assert world.barrier.is_open(FRONT, 1, 0)
    world.set("orders", "changing", CREATED_VERSION + 1)
    assert not world.barrier.is_open(FRONT, 1, 0)
    world.set("orders", "active", CREATED_VERSION + 1)
    assert world.barrier.is_open(FRONT, 1, 0)


@pytest.mark.parametrize(
    ("state", "version", "kept_ms", "known"),
    [
        ("active", CREATED_VERSION, 0, True),
        ("changing", CREATED_VERSION, 0, False),
        ("changing", CREATED_VERSION + 1, 0, True),
        ("changing", CREATED_VERSION + 3, COMES_BACK, False),
        ("deleting", CREATED_VERSION + 1, 0, False),
        ("deleting", CREATED_VERSION + 1, 5, False),
    ],
)
def test_clients_know_a_topic_from_its_creation_to_its_deletion(
    state: str, version: int, kept_ms: int, known: bool
) -> None:
    world = World()
    assert is_known_to_clients(world.set("orders", state, version, kept_ms)) is known
    assert world.barrier.is_open(FRONT, 1, 0) is not (known and state == "changing")


def test_a_feed_waits_for_a_creation_of_a_predecessor_alone() -> None:
    world = World()
    world.set("new", "changing", CREATED_VERSION)
    assert world.barrier.is_open(FRONT, 1, 0)
    successor = world.successor()
    assert not successor.is_open(FRONT, 1, 0)
    world.set("new", "active", CREATED_VERSION)
    assert successor.is_open(FRONT, 1, 0)


def test_a_change_that_a_disk_does_not_carry_out_holds_one_feed_up_and_no_later_one() -> None:
    world = World()
    world.set("orders", "changing", 2)
    assert not world.barrier.is_open(FRONT, 1, 7)
    assert not world.barrier.is_open(OTHER, 1, 8)
    assert not world.barrier.is_open(FRONT, 1, 7 + PATIENCE_NS - 1)
    assert world.barrier.is_open(FRONT, 1, 7 + PATIENCE_NS)
    assert world.barrier.is_open(OTHER, 1, 7 + PATIENCE_NS)
    assert world.barrier.is_open(FRONT, 2, 8 + PATIENCE_NS)
    world.set("orders", "changing", 3)
    assert not world.barrier.is_open(FRONT, 3, 9 + PATIENCE_NS), "the next change is another one"


def test_the_patience_is_counted_from_each_request() -> None:
    world = World()
    world.set("orders", "changing", 2)
    assert not world.barrier.is_open(FRONT, 1, 0)
    assert not world.barrier.is_open(FRONT, 2, PATIENCE_NS), "the process has started again"
    assert not world.barrier.is_open(FRONT, 2, 2 * PATIENCE_NS - 1)
    assert world.barrier.is_open(FRONT, 2, 2 * PATIENCE_NS)


def test_a_topic_whose_worker_has_no_memory_holds_no_feed_up() -> None:
    world = World()
    world.set("orders", "changing", 2)
    world.lacking.add("orders")
    assert world.barrier.is_open(FRONT, 1, 0)
