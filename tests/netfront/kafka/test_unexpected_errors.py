"""Errors that nothing foresaw end one connection, are counted, and the gateway goes on."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from netfront.kafka.dispatch import Dispatcher
from netfront.kafka.exchange.peers import PeerTransport
from netfront.kafka.exchange.waiter import Task
from netfront.kafka.gateway import Gateway
from netfront.kafka.network.connection import Connection, Exchange
from netfront.kafka.network.listener import Listener
from shm.runtime.timing_wheel import TimingWheel

MS = 1_000_000


class ConnectionBench:
    """A listener and a dispatcher with some connections, and what was counted."""

    def __init__(self) -> None:
        self.counted: list[str] = []
        services: Any = SimpleNamespace(
            gate=None,
            logins=None,
            now_ns=1,
            monotonic_ns=lambda: 1,
            timers=TimingWheel(0),
            front=SimpleNamespace(catch_up=lambda: None),
        )
        self.services = services
        measurements: Any = SimpleNamespace(
            began=lambda *_: None, ended=lambda *_: None, failed=lambda *_: None
        )
        handler: Any = SimpleNamespace(on_error=self.on_error)
        self.dispatcher = Dispatcher(services, PeerTransport(), handler, measurements)
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)
        self.address = server.getsockname()
        self.made: list[Connection] = []
        self.listener = Listener(
            [server], 10, self.dispatcher.on_frames, self.dispatcher.on_closed, self.on_error,
            self.connect,
        )  # fmt: skip
        self.dispatcher.listener = self.listener
        self.listener.accept_connections()
        self.clients = [self.client() for _ in range(2)]

    def on_error(self, context: str, error: Exception) -> str:
        self.counted.append(context.partition("=")[0])
        return repr(error)

    def connect(self, sock: socket.socket, address: str, now_ns: int, _number: int) -> Connection:
        if len(self.made) == 2:
            raise KeyError("a connection that cannot be made")
        self.made.append(Connection(sock, address, now_ns))
        return self.made[-1]

    def client(self) -> socket.socket:
        client = socket.create_connection(self.address)
        client.settimeout(30)
        self.listener.step(1)
        return client

    def close(self) -> None:
        self.listener.close_all()
        self.listener.stop()
        for client in self.clients:
            client.close()


@pytest.fixture
def bench() -> Any:
    made = ConnectionBench()
    yield made
    made.close()


def fail(*_: object) -> Any:
    raise KeyError("unforeseen")


@pytest.mark.parametrize("place", ["frames", "read", "flush", "begun again"])
def test_a_connection_that_cannot_be_served_ends_alone(
    bench: ConnectionBench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    first, other = bench.made
    if place == "read":
        monkeypatch.setattr(first, "read", fail)
        bench.clients[0].sendall(b"x")
        bench.listener.step(1)
    elif place == "flush":
        monkeypatch.setattr(first, "send", fail)
        first.exchanges.append(exchange := Exchange(3, 1, 7, 1))
        exchange.response = b"x"
        bench.listener.respond(first)
        bench.listener.flush()
    else:
        first.frames.append(bytes(8))
        monkeypatch.setattr(bench.dispatcher, "_begin", fail)
        if place == "frames":
            bench.dispatcher.on_frames(first)
        else:
            bench.dispatcher.waiting.append(first)
            bench.dispatcher.step()
    assert (first.is_closed, other.is_closed) == (True, False)
    assert bench.counted == ["kafka_connection"]
    assert bench.listener.refused_count == 1


def test_a_connection_that_cannot_be_made_is_closed_and_counted(bench: ConnectionBench) -> None:
    third = bench.client()
    assert third.recv(1) == b""
    third.close()
    assert bench.counted == ["kafka_connect"]
    assert len(bench.listener) == 2


def test_a_request_that_fails_at_its_end_ends_the_others_of_its_connection(
    bench: ConnectionBench,
) -> None:
    def steps(ended: list[str], name: str) -> Any:
        try:
            yield None
        finally:
            ended.append(name)
            if name == "first":
                fail()

    ended: list[str] = []
    for name in ("first", "second"):
        exchange = Exchange(3, 1, 7, 1)
        waits = steps(ended, name)
        next(waits)
        exchange.task = Task(waits, fail, fail)
        bench.made[0].exchanges.append(exchange)
    bench.listener.refuse(bench.made[0], "a test")
    assert ended == ["first", "second"]
    assert bench.counted == ["kafka_connection_end"]
    assert len(bench.listener) == 1


def test_an_answer_that_cannot_be_passed_on_ends_its_connection(bench: ConnectionBench) -> None:
    end = bench.dispatcher._guarded(bench.made[0], fail)
    end({"error_code": 0})
    assert (bench.made[0].is_closed, bench.made[1].is_closed) == (True, False)
    assert bench.counted == ["kafka_connection"]


def test_a_request_shorter_than_its_header_is_refused_when_it_is_begun(
    bench: ConnectionBench,
) -> None:
    for connection, size in zip(bench.made, (0, 7), strict=True):
        connection.exchanges.append(Exchange(0, 9, 1, 1))
        connection.frames.append(bytes(size))
        bench.dispatcher.on_frames(connection)
        assert not connection.is_closed, "those before it are answered"
        connection.exchanges.clear()
        bench.dispatcher.on_frames(connection)
        assert connection.is_closed
    assert bench.counted == []


def test_a_timer_that_fails_disturbs_no_other_one(bench: ConnectionBench) -> None:
    ran: list[int] = []
    timers = bench.services.timers
    timers.add(1 * MS, fail)
    timers.add(1 * MS, lambda: ran.append(1))
    front: Any = SimpleNamespace(accepts_input=True, step=lambda _now_ns: 0)
    slot: Any = SimpleNamespace(
        kafka=SimpleNamespace(set_connections=lambda _: None),
        load=lambda _: 0,
        store=lambda *_: None,
    )
    connector: Any = None
    gateway = Gateway(
        front, PeerTransport(), bench.dispatcher, bench.listener, bench.services, slot, connector
    )
    gateway.step(5 * MS)
    assert ran == [1]
    assert bench.counted == ["kafka_timer"]


@pytest.mark.parametrize(("version", "ends"), [(12, True), (13, False)])
def test_a_version_without_a_place_for_the_error_has_no_empty_response(
    bench: ConnectionBench, version: int, ends: bool
) -> None:
    """Metadata has one since version 13: an older client got a cluster without brokers."""
    connection = bench.made[0]
    connection.exchanges.append(exchange := Exchange(3, version, 7, 1))
    bench.dispatcher._fail(connection, exchange, KeyError("unforeseen"))
    assert connection.is_closed is ends
    assert (exchange.response is None) is ends
