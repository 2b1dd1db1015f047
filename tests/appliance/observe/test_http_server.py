"""The console's pages over a socket, and when it imports the modules that answer."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from appliance.observe.http_server import Console
from appliance.observe.process_states import ProcessStates
from shm.memory.atomic_word import AtomicCounter
from tests.kit.processes import HANG_LIMIT_S

SERVICE = "appliance.observe.http_service"


class BrokenStates(ProcessStates):
    """An appliance whose state cannot be read."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), list)

    def not_serving(self) -> list[str]:
        raise ZeroDivisionError


@pytest.fixture
def port_cell() -> AtomicCounter:
    return AtomicCounter(memoryview(bytearray(8)).cast("Q"), 0)


@pytest.fixture
def console(port_cell: AtomicCounter) -> Iterator[Console]:
    """It listens."""
    listening = Console(
        "127.0.0.1",
        0,
        BrokenStates(),
        lambda: "tcp://127.0.0.1:1",
        port_cell,
        may_move=False,
        data_dir="/nowhere",
        host_names=frozenset(),
        topics_max=10,
    )
    listening.step(0)
    yield listening
    listening.begin_stop()


@pytest.fixture
def connected(console: Console, port_cell: AtomicCounter) -> Iterator[socket.socket]:
    """A client's end of a connection that the console has accepted."""
    with socket.create_connection(("127.0.0.1", port_cell.load()), HANG_LIMIT_S) as connection:
        console.step(0)
        yield connection


def _rest(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(4096):
        received += piece
    return received


def test_what_answers_is_imported_with_the_first_connection(
    monkeypatch: pytest.MonkeyPatch, console: Console, port_cell: AtomicCounter
) -> None:
    monkeypatch.delitem(sys.modules, SERVICE, raising=False)
    console.step(0)
    assert SERVICE not in sys.modules
    with socket.create_connection(("127.0.0.1", port_cell.load()), HANG_LIMIT_S) as connection:
        console.step(0)
        connection.sendall(b"GET /health/live HTTP/1.1\r\n\r\n")
        assert _rest(connection).endswith(b"\r\n\r\nalive\n")
    assert SERVICE in sys.modules


def test_a_request_may_come_byte_by_byte(connected: socket.socket) -> None:
    for byte in b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n":
        connected.sendall(bytes([byte]))
    assert _rest(connected).endswith(b"\r\n\r\nalive\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(b"GET /" + b"y" * 65_532, b"414"), (b"GET / HTTP/1.1\r\nx: " + b"y" * 65_534, b"431")],
)
def test_a_request_that_never_ends_is_refused(
    connected: socket.socket, request_bytes: bytes, status: bytes
) -> None:
    connected.sendall(request_bytes)
    assert status in connected.recv(16)


def test_a_page_that_fails_is_answered_and_logged(
    connected: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        connected.sendall(b"GET /health/ready HTTP/1.1\r\n\r\n")
        assert b" 500 " in _rest(connected).partition(b"\r\n")[0]
    assert "request_failed path='/health/ready'" in caplog.text
