"""A Kafka client that goes on with its offset in a topic that was deleted and created again."""

from __future__ import annotations

import pytest

from netfront.kafka.groups import read_positions
from netfront.kafka.groups.read_positions import ReadPositions

OLD, NEW = b"1" * 16, b"2" * 16
PLACE = "orders", 0
CLIENT = "app", "10.0.0.1", "alice"


class Connection:
    """Connection of a client."""


def test_a_position_in_a_deleted_topic_is_refused_once_and_its_commits_until_then() -> None:
    positions, connection = ReadPositions(), Connection()
    assert positions.fetch(connection, CLIENT, PLACE, OLD, 4)
    positions.fetched(connection, PLACE, 10)
    assert not positions.is_stale(CLIENT, PLACE, OLD)
    assert positions.is_stale(CLIENT, PLACE, NEW)
    assert not positions.is_stale(CLIENT, ("orders", 1), NEW)
    assert not positions.is_stale(("app", "10.0.0.1", "bob"), PLACE, NEW)
    assert not positions.is_stale(("other", "10.0.0.1", "alice"), PLACE, NEW)
    assert not positions.fetch(connection, CLIENT, PLACE, NEW, 7)  # in the midst of what it got
    assert positions.fetch(connection, CLIENT, PLACE, NEW, 0)
    assert positions.fetch(connection, CLIENT, PLACE, NEW, 7)
    assert not positions.is_stale(CLIENT, PLACE, NEW)


@pytest.mark.parametrize("offset", [0, 3, 11])
def test_a_client_that_was_somewhere_else_has_sought(offset: int) -> None:
    positions, connection = ReadPositions(), Connection()
    positions.fetch(connection, CLIENT, PLACE, OLD, 4)
    positions.fetched(connection, PLACE, 10)
    assert positions.fetch(connection, CLIENT, PLACE, NEW, offset)
    assert not positions.is_stale(CLIENT, PLACE, NEW)


def test_clients_of_one_name_and_host_are_one_and_what_has_ended_is_forgotten() -> None:
    positions, one, other = ReadPositions(), Connection(), Connection()
    positions.fetch(one, CLIENT, PLACE, OLD, 4)
    assert positions.fetch(other, CLIENT, PLACE, NEW, 4), "another connection's position"
    assert not positions.is_stale(CLIENT, PLACE, NEW), "one of them reads the new topic"
    del other
    assert positions.is_stale(CLIENT, PLACE, NEW)
    others = [Connection() for _ in range(read_positions.CONNECTIONS_MAX)]
    for each in others:
        positions.fetch(each, CLIENT, PLACE, OLD, 4)
    assert not positions.is_stale(CLIENT, PLACE, NEW), "these are several clients"
    del one, each, others
    assert not positions.is_stale(CLIENT, PLACE, NEW)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_positions, "PARTITIONS_MAX", 3)
    monkeypatch.setattr(read_positions, "NAMES_MAX", 3)
    positions, connection = ReadPositions(), Connection()
    for number in range(10):
        positions.fetch(connection, CLIENT, (f"t{number}", 0), OLD, 4)
    assert [
        number for number in range(10) if positions.is_stale(CLIENT, (f"t{number}", 0), NEW)
    ] == [
        7,
        8,
        9,
    ]
    for number in range(100):
        positions.fetch(Connection(), (f"c{number}", "", ""), PLACE, OLD, 4)
    assert len(positions._connections) < 30
