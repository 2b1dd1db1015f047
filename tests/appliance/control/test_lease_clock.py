"""Leases end by elapsed time: what is done to the wall clock neither ends them nor keeps them, over
restarts of the controller too. Each is its user's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from appliance.catalog.catalog import Catalog
from appliance.control import offset_leases
from appliance.control.offset_leases import OffsetLeases
from tailrace.core.errors import InvalidRequestError, UnknownTopicIdError

SECOND_NS = 1_000_000_000
TTL_MS = 600_000


class Way:
    index = 0


class World:
    """A controller's catalog and leases, with a monotonic clock of its own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "coordinator.db")
        self.now_ns = 1_000 * SECOND_NS
        self.way = Way()
        self.start()
        self.topic = self.catalog.create_topic("orders", 1, {}, b"schema", False, 1)

    def start(self) -> None:
        self.catalog = Catalog(self.path, 16)
        self.told: list[dict[str, Any]] = []
        self.leases: OffsetLeases[Any] = OffsetLeases(
            self.catalog.database, lambda: self.now_ns, lambda _: self.topic, lambda _: self.way,
            lambda _way, _slot, payload: self.told.append(orjson.loads(payload)), lambda _: None,  # type: ignore[arg-type, return-value]
            lambda *_: None,
        )  # fmt: skip

    def restart(self) -> None:
        self.catalog.close()
        self.start()

    def take(self, **more: Any) -> None:
        request = {
            "lease": "scan",
            "ttl_ms": TTL_MS,
            "topic": "orders",
            "partition": 0,
            "offset": 0,
            **more,
        }
        self.leases.take(None, request, self.now_ns)

    def left_ms(self) -> list[int]:
        """Time left of the leases that a flusher is told of at its start."""
        self.told.clear()
        self.leases.feed(self.way, [self.topic])
        return [told["ttl_ms"] for told in self.told]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.catalog.close()


def test_a_lease_lasts_as_long_as_it_was_asked_for_over_restarts(world: World) -> None:
    world.take()
    for passed_s in (0, 100, 500):
        world.now_ns = (1_000 + passed_s) * SECOND_NS
        world.restart()
        assert world.left_ms() == [TTL_MS - passed_s * 1_000]
    world.now_ns = 1_601 * SECOND_NS
    world.restart()
    assert world.left_ms() == []


def test_leases_of_an_earlier_build_last_as_long_again(world: World) -> None:
    world.take()
    world.catalog.close()
    with sqlite3.connect(world.path) as database:
        database.execute("DELETE FROM meta WHERE name LIKE 'elapsed%'")
        database.execute("UPDATE leases SET ends_us = 1700000000000000")
    database.close()
    world.start()
    [(ends_us,)] = world.catalog.database.execute("SELECT ends_us FROM leases").fetchall()
    assert ends_us == TTL_MS * 1_000


def test_a_lease_of_another_topic_of_the_name_is_refused(world: World) -> None:
    world.take(topic_id=world.topic.topic_id.hex())
    with pytest.raises(UnknownTopicIdError):
        world.take(topic_id="0" * 32)


def test_a_lease_is_not_changed_by_another_user_with_its_name(world: World) -> None:
    world.take(user="alice", ttl_ms=500_000)
    world.take(user="bob", ttl_ms=0)
    assert world.left_ms() == [500_000]
    world.take(user="bob", ttl_ms=100_000)
    assert sorted(world.left_ms()) == [100_000, 500_000]
    world.take(user="alice", ttl_ms=0)
    assert world.left_ms() == [100_000]


@pytest.mark.parametrize("bound", ["MAX", "PER_PARTITION_MAX"])
def test_a_user_has_half_of_the_leases_at_most(
    world: World, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(offset_leases, bound, 8)
    for number in range(4):
        world.take(user="bob", lease=f"{number}")
    with pytest.raises(InvalidRequestError, match=r"4 leases of user 'bob'.*the limit of a user"):
        world.take(user="bob", lease="one more")
    world.take(user="bob", lease="3")  # renewed
    for number in range(4):
        world.take(user="alice", lease=f"{number}")
    with pytest.raises(InvalidRequestError, match="8 leases, and the limit is 8"):
        world.take(user="carol")
    assert len(world.left_ms()) == 8
