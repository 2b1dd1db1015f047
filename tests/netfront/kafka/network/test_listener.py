"""Peers that are slow, silent, half gone or too many: each ends alone, and the others are served.

Time is passed in: nothing here waits for a minute.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from netfront.kafka.network import listener as listener_module
from netfront.kafka.network.connection import FRAMES_MAX, UNSENT_HIGH_BYTES, Connection, Exchange
from netfront.kafka.network.listener import (
    IDLE_NS,
    INCOMPLETE_NS,
    SWEEP_NS,
    UNREAD_NS,
    Listener,
)

SECOND_NS = 1_000_000_000
REQUEST = struct.pack(">ihhih", 10, 3, 1, 7, -1)


class Peers:
    """A listener with a clock of its own, and its clients."""

    def __init__(self, connections_max: int = 10) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)
        self.address = server.getsockname()
        self.answers = True
        self.ended: list[Connection] = []
        self.made: list[Connection] = []
        self.begun = 0
        self.miscounted = 0
        """Requests that were begun while the listener did not know what all connections hold."""
        self.response = b"\0" * 8
        self.listener = Listener(
            [server], connections_max, self._begin, self.ended.append,
            lambda _context, error: repr(error), self._connect,
        )  # fmt: skip
        self.listener.accept_connections()
        self.now_ns = SWEEP_NS
        self.clients: list[socket.socket] = []

    def _connect(self, sock: socket.socket, address: str, now_ns: int, _number: int) -> Connection:
        self.made.append(Connection(sock, address, now_ns))
        return self.made[-1]

    def _begin(self, connection: Connection) -> None:
        """Answer at once, or never."""
        while connection.frames and connection.unsent_bytes < UNSENT_HIGH_BYTES:
            if not self.answers and connection.exchanges:
                return
            connection.take_frame()
            self.begun += 1
            held = sum(made.retained_bytes for made in self.connections())
            self.miscounted += self.listener.unsent_bytes() != held
            exchange = Exchange(3, 1, 7, self.now_ns)
            connection.exchanges.append(exchange)
            if self.answers:
                exchange.response = self.response
                self.listener.respond(connection)

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.address)
        client.settimeout(30)
        self.clients.append(client)
        self.step()
        return client

    def step(self, seconds: float = 0) -> None:
        """Pass time, and serve what the sockets have until nothing is left to do."""
        self.now_ns += int(seconds * SECOND_NS)
        while self.listener.step(self.now_ns) + self.listener.flush():
            pass

    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [made for made in self.made if not made.is_closed]

    def is_answered(self, client: socket.socket) -> bool:
        client.sendall(REQUEST)
        self.step()
        return client.recv(8) == bytes(8)

    def close(self) -> None:
        self.listener.close_all()
        self.listener.stop()
        for client in self.clients:
            client.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def test_a_byte_a_second_has_a_minute_and_others_are_served_meanwhile(peers: Peers) -> None:
    slow, other = peers.connect(), peers.connect()
    claimed = struct.pack(">ihhi", 1_000, 3, 1, 7)
    for second in range(INCOMPLETE_NS // SECOND_NS + SWEEP_NS // SECOND_NS + 1):
        assert slow.fileno() >= 0
        if len(peers.ended) == 0:
            slow.sendall(claimed[second % len(claimed) :][:1])
        peers.step(1)
        if not second % 10:
            assert peers.is_answered(other)
    assert len(peers.ended) == 1
    assert peers.listener.refused_count == 1
    assert slow.recv(1) == b""
    assert peers.is_answered(other)


def test_a_request_whose_rest_is_not_read_does_not_grow_old(peers: Peers) -> None:
    peers.answers = False
    client = peers.connect()
    client.sendall(REQUEST * (FRAMES_MAX + 1) + REQUEST[:9])
    peers.step()
    for _ in range(30):
        peers.step(5)
    assert peers.ended == []


def test_a_peer_that_vanished_without_a_word_ends_after_ten_minutes(peers: Peers) -> None:
    vanished, other = peers.connect(), peers.connect()
    assert peers.is_answered(vanished)
    for _ in range(IDLE_NS // SECOND_NS // 60 + 2):
        peers.step(60)
        assert peers.is_answered(other)
    assert len(peers.ended) == 1
    assert vanished.recv(1) == b""


def test_a_peer_that_has_ended_its_half_gets_what_it_asked_for(peers: Peers) -> None:
    client = peers.connect()
    client.sendall(REQUEST * 3)
    client.shutdown(socket.SHUT_WR)
    peers.step()
    found = b""
    while piece := client.recv(100):
        found += piece
    assert found == bytes(24)
    assert len(peers.ended) == 1


def test_a_peer_that_never_reads_has_few_responses_of_memory_and_ends(peers: Peers) -> None:
    peers.response = b"\0" * (1 << 20)
    reader = peers.connect()
    deaf = peers.connect()
    deaf.setblocking(False)
    sent = 0
    for _ in range(2_000):
        try:
            sent += deaf.send(REQUEST * 100)
        except BlockingIOError:
            break
        peers.step()
    assert peers.begun * len(REQUEST) < sent
    assert peers.listener.unsent_bytes() < UNSENT_HIGH_BYTES + (2 << 20)
    reader.sendall(REQUEST)
    peers.step()
    assert len(reader.recv(100)) == 100
    reader.close()
    for _ in range(IDLE_NS // SECOND_NS // 60 + 2):
        peers.step(60)
    assert len(peers.listener) == 0


def test_a_connection_beyond_the_limit_is_closed_and_counted() -> None:
    peers = Peers(connections_max=3)
    clients = [peers.connect() for _ in range(5)]
    assert len(peers.listener) == 3
    assert peers.listener.refused_count == 2
    assert all(peers.is_answered(client) for client in clients[:3])
    assert [client.recv(1) for client in clients[3:]] == [b"", b""]
    clients[0].close()
    peers.step()
    assert peers.is_answered(peers.connect())
    peers.close()


def test_the_one_that_holds_the_most_ends_when_all_hold_too_much(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "UNSERVED_MAX_BYTES", 1 << 20)
    head = struct.pack(">ihhi", 3 << 20, 3, 1, 7)
    small, large = peers.connect(), peers.connect()
    small.sendall(head + bytes(300 << 10))
    peers.step()
    large.setblocking(False)
    data = memoryview(head + bytes((3 << 20) - 8))
    while len(data) and not peers.ended:
        try:
            data = data[large.send(data) :]
        except (BlockingIOError, ConnectionError):
            pass
        peers.step()
    assert len(peers.ended) == 1
    assert len(peers.listener) == 1


def test_those_that_never_read_end_when_they_keep_others_from_reading(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that reads goes on, however long it has been there."""
    monkeypatch.setattr(listener_module, "UNSENT_MAX_BYTES", 6 << 20)
    peers.response = bytes(1 << 20)
    reader, *deaf = (peers.connect() for _ in range(4))
    for client in deaf:
        client.sendall(REQUEST * 12)
    peers.step()
    held = peers.listener.unsent_bytes()
    assert held > 6 << 20
    peers.response = bytes(8)
    peers.step(UNREAD_NS // SECOND_NS - 1)
    assert peers.is_answered(reader)
    assert peers.ended == []
    assert peers.listener.unsent_bytes() == held
    peers.step(2 * SWEEP_NS // SECOND_NS)
    assert 0 < len(peers.ended) < len(deaf)
    assert peers.listener.unsent_bytes() <= 6 << 20
    assert peers.is_answered(reader)
    peers.step(IDLE_NS // SECOND_NS // 2)
    assert len(peers.listener) > 1


def test_responses_of_all_connections_have_a_bound_also_while_they_are_sent(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of responses that were just being sent were not counted: each of their next
    requests found room.
    """
    monkeypatch.setattr(listener_module, "UNSENT_HARD_MAX_BYTES", 8 << 20)
    peers.response = bytes(1 << 20)
    deaf = [peers.connect() for _ in range(6)]
    for client in deaf:
        client.sendall(REQUEST * 12)
    peers.step()
    assert peers.miscounted == 0
    assert 0 < peers.listener.unsent_bytes() <= 8 << 20
    assert 0 < len(peers.ended) < len(deaf)


def test_a_client_that_reads_slowly_is_not_the_one_that_ends(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "UNSENT_MAX_BYTES", 4 << 20)
    peers.response = bytes(1 << 20)
    slow, deaf = peers.connect(), peers.connect()
    for client in (slow, deaf):
        client.sendall(REQUEST * 10)
        peers.step()
    for _ in range(6):
        left = 1 << 20
        while left:
            left -= len(slow.recv(left))
            peers.step()
        peers.step(10)
    assert len(peers.ended) == 1
    assert deaf.recv(1 << 30)
    assert slow.recv(1)
