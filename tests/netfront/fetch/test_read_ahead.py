"""Read-ahead of what a client will ask for next: the same bytes, none that are not its own, and no
memory that is not given back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from netfront.fetch import read_ahead as read_ahead
from netfront.fetch.log.read_result import LogReadError
from netfront.fetch.read_ahead import ReadAhead
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import fetch_messages
from tests.kit.stepped.fronts import FakeClient, FakeFront

ROOM = 4
"""Bytes of an answer; a batch is one."""


def ahead(world: FakeFront) -> ReadAhead:
    return world.front._fetches._ahead


def data_of(client: FakeClient, asked: int) -> bytes:
    code, body = client.heard()[asked]
    assert code is ErrorCode.OK
    ((_, data),) = fetch_messages.decode_fetched(body)
    return bytes(data)


def filled(world: FakeFront, count: int = 12) -> Assignment:
    (assignment,) = world.add_topic("t", 1)
    world.log.logs[assignment.slot] = [b"%c" % (97 + number) for number in range(count)]
    return assignment


def read_first(world: FakeFront, client: FakeClient, assignment: Assignment) -> None:
    asked = client.fetch([assignment], 0, max_bytes=ROOM)
    world.settle()
    assert data_of(client, asked) == b"abcd"


def test_what_is_asked_for_behind_a_full_answer_is_there_already(
    world: FakeFront, client: FakeClient
) -> None:
    topic = filled(world)
    read_first(world, client, topic)
    assert world.log.reads == 2
    world.log.failure = AssertionError("nothing is read between the request and its answer")
    asked = client.fetch([topic], 4, max_bytes=ROOM)
    while not world.transport.answers[client.identity]:
        world.step()
    assert data_of(client, asked) == b"efgh"
    world.log.failure = None
    world.settle()
    for offset, data in ((8, b"ijkl"), (12, b"")):
        asked = client.fetch([topic], offset, max_bytes=ROOM, max_wait_ms=0)
        world.settle()
        assert data_of(client, asked) == data
    assert (world.log.reads, ahead(world)._bytes) == (3, 0), (
        "each batch is read once, and nothing behind the last"
    )


@pytest.mark.parametrize("how", ["seek", "smaller", "epoch", "cold", "damaged", "few"])
def test_what_was_not_asked_for_or_cannot_be_read_ahead_changes_no_answer(
    world: FakeFront, client: FakeClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled(world)
    offset, room, expected = {"seek": (5, ROOM, b"fghi"), "smaller": (4, 2, b"ef")}.get(
        how, (4, ROOM, b"efgh")
    )
    real_read, log = world.log.read, world.log.logs[topic.slot]

    def read(*arguments: Any) -> Any:
        if world.log.reads == 1 and how == "cold":
            world.log.is_cold = True
        elif world.log.reads == 1 and how == "damaged":
            world.log.failure = LogReadError(ErrorCode.CORRUPT_BATCH, "a disk", 5)
        return real_read(*arguments)

    monkeypatch.setattr(world.log, "read", read)
    if how == "few":
        del log[5:]
    read_first(world, client, topic)
    assert world.log.reads == 2
    world.log.is_cold, world.log.failure = False, None
    if how == "epoch":
        log[4:8] = [b"E", b"F", b"G", b"H"]
        real_state = world.log.state
        monkeypatch.setattr(
            world.log, "state", lambda route: real_state(route)._replace(leader_epoch=2)
        )
        expected = b"EFGH"
    elif how == "few":
        log += [b"f", b"g", b"h"]
    asked = client.fetch([topic], offset, max_bytes=room)
    world.settle()
    assert data_of(client, asked) == expected


def test_nothing_is_kept_for_clients_that_go_and_partitions_that_are_dropped(
    world: FakeFront, client: FakeClient
) -> None:
    topic = filled(world)
    read_first(world, client, topic)
    assert ahead(world)._bytes == ROOM
    world.controller.tell(dataclasses.replace(topic, dropped=True, version=99))
    world.settle()
    assert (ahead(world)._bytes, ahead(world)._by_session) == (0, {})
    other = world.connect(b"other")
    again = filled(world)
    read_first(world, other, again)
    assert ahead(world)._bytes == ROOM
    session = world.front._sessions.by_identity(b"other")
    assert session is not None
    world.front._fetches.forget_session(session)
    assert (ahead(world)._bytes, ahead(world)._by_session, ahead(world).is_due) == (0, {}, False)


def test_reads_ahead_take_a_bounded_memory_and_those_that_nobody_asks_for_give_place(
    world: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_MAX_BYTES", 2 * ROOM)
    topic = filled(world)
    clients = [world.connect(b"c%d" % number) for number in range(4)]
    for client in clients[:3]:
        read_first(world, client, topic)
    assert set(ahead(world)._by_session) == {1, 2}
    world.step(after_ms=read_ahead.AHEAD_MAX_NS // 1_000_000 + 1)
    read_first(world, clients[3], topic)
    assert set(ahead(world)._by_session) == {4}
    for client in clients:
        asked = client.fetch([topic], 4, max_bytes=ROOM)
        world.settle()
        assert data_of(client, asked) == b"efgh"
