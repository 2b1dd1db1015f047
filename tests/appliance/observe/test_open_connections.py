"""Connections of the console: which is closed, and when."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from appliance.observe.open_connections import (
    ANSWER_TIMEOUT_S,
    CONNECTIONS_MAX,
    NS_PER_S,
    REQUEST_TIMEOUT_S,
    OpenConnections,
)

REQUEST_NS, ANSWER_NS = int(REQUEST_TIMEOUT_S * NS_PER_S), int(ANSWER_TIMEOUT_S * NS_PER_S)


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """The console's ends of connections."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(CONNECTIONS_MAX + 1)]
        for one in (end for pair in pairs for end in pair):
            stack.enter_context(one)
        for ours, _ in pairs:
            ours.setblocking(False)
        yield [ours for ours, _ in pairs]


def _is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_silent_connection_makes_room_and_none_that_has_asked(
    sockets: list[socket.socket],
) -> None:
    connections = OpenConnections()
    for connection in sockets[:-1]:
        assert connections.add(connection, 0)
    connections.has_asked(sockets[0])
    assert connections.add(sockets[-1], 0)
    assert [_is_ended(connection) for connection in sockets[:3]] == [False, True, False]
    for connection in sockets:
        connections.has_asked(connection)
    with socket.socket() as another:
        assert not connections.add(another, 0)
    connections.remove(sockets[0])
    assert connections.add(sockets[1], 0)


def test_a_request_and_an_answer_have_their_time(sockets: list[socket.socket]) -> None:
    connections = OpenConnections()
    for connection in sockets[:2]:
        connections.add(connection, 0)
        connections.begin_request(connection, 0)
    connections.has_asked(sockets[1])
    assert connections.next_end_ns() == REQUEST_NS
    connections.end_late(REQUEST_NS)
    assert [_is_ended(connection) for connection in sockets[:2]] == [True, False]
    assert connections.next_end_ns() == ANSWER_NS
    connections.end_late(ANSWER_NS)
    assert _is_ended(sockets[1])
    assert connections.next_end_ns() is None


def test_the_time_of_a_request_begins_when_the_console_reads_it_and_needs_no_wake(
    sockets: list[socket.socket],
) -> None:
    """A slow import of the modules that read it is no fault of the client."""
    connections, first = OpenConnections(), sockets[0]
    connections.add(first, 0)
    connections.end_late(REQUEST_NS)
    assert not _is_ended(first)
    wake_ns = connections.next_end_ns()
    connections.begin_request(first, REQUEST_NS + 5)
    end_ns = connections.next_end_ns()
    assert wake_ns is not None
    assert end_ns is not None
    assert wake_ns <= end_ns == 2 * REQUEST_NS + 5
    connections.end_late(end_ns)
    assert _is_ended(first)
