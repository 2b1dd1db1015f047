"""A client without an appliance says once, after a second, what it waits for; one that has an
appliance, or wants nothing of one, says nothing; and it tries often enough to be served within 100
ms.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Sequence

import pytest
import zmq

from tailrace import Producer
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import (
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    DealerSocket,
    Runtime,
)
from tailrace.client.connections.steps import call_now
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import NotReachableError, RequestTimeoutError
from tailrace.format.crc32c import Readable
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import API_VERSIONS, Api, decode_request_header, encode_response

MS = 1_000_000
SAID = "the consumer gets no answer at tcp://127.0.0.1:1; it goes on trying"


class Socket:
    """Socket whose messages the appliance answers, while there is one."""

    is_lost = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._queued: list[list[Readable]] = []
        self._answers: deque[list[bytes]] = deque()

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        self._queued.append(list(frames))
        return True

    def try_receive(self) -> list[bytes] | None:
        if self._world.has_appliance:  # ZeroMQ delivers what was queued when it connects
            for header_bytes, *_ in self._queued:
                header = decode_request_header(header_bytes)
                body = [
                    requests.encode_json(
                        {
                            "versions": {str(int(a)): v[1] for a, v in API_VERSIONS.items()},
                            "cluster_id": "x",
                        }
                    )
                ]
                self._answers.append(
                    [
                        bytes(f)
                        for f in encode_response(
                            header.api, 1, header.correlation_id, 0, 1 << 30, 1, body
                        )
                    ]
                )
            self._queued.clear()
        return self._answers.popleft() if self._answers else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._queued.clear()


class World:
    """A clock that sleeping moves, and perhaps an appliance."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.has_appliance = False
        self.runtime = Runtime(
            lambda: self.now_ns, lambda _: Socket(self), self._sleep, lambda: 0.5, has_threads=False
        )
        self.connection = Connection("tcp://127.0.0.1:1", "x", self.runtime, "consumer")

    def _sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.now_ns += max(timeout_ns, MS)

    def ask(self, timeout_ms: int) -> None:
        call_now(self.connection, Api.PING, [], timeout_ms)


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.WARNING, "tailrace")
    return World()


def test_what_is_waited_for_is_said_once_and_after_a_second(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotReachableError):
        world.ask(999)
    assert not caplog.messages
    with pytest.raises(NotReachableError):
        world.ask(60_000)
    assert caplog.messages == [SAID]


def test_it_is_said_a_second_after_the_wait_begins_and_not_when_the_handshake_is_due_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.now_ns += 700 * MS  # nothing was wanted of it so far
    with pytest.raises(NotReachableError):
        world.ask(1_001)
    assert caplog.messages == [SAID]


@pytest.mark.parametrize("idle_ms", [0, 1_500, 3_600_000])
def test_a_client_that_idled_before_its_first_use_with_a_live_appliance_says_nothing(
    world: World, caplog: pytest.LogCaptureFixture, idle_ms: int
) -> None:
    world.has_appliance = True
    world.now_ns += idle_ms * MS
    world.ask(5_000)
    world.now_ns += idle_ms * MS
    world.ask(5_000)
    assert not caplog.messages


def test_idle_time_without_an_appliance_is_no_time_of_waiting(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.now_ns += 3_600_000 * MS
    with pytest.raises(NotReachableError):
        world.ask(500)
    world.has_appliance = True
    world.ask(5_000)
    assert not caplog.messages


def test_an_appliance_that_goes_again_is_waited_for_aloud_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotReachableError):
        world.ask(5_000)
    world.has_appliance = True
    world.ask(5_000)
    world.has_appliance = False
    with pytest.raises(RequestTimeoutError):
        world.ask(30_000)
    assert caplog.messages == [SAID, SAID]


def test_a_client_without_an_appliance_tries_again_within_100_ms() -> None:
    """libzmq waits RECONNECT_MS at first, doubled up to RECONNECT_MAX_MS, and less than
    RECONNECT_MS by chance; nothing else stands between attempts.
    """
    assert RECONNECT_MAX_MS + RECONNECT_MS < 100
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(60)
        client = DealerSocket(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        try:
            assert client._socket.getsockopt(zmq.RECONNECT_IVL_MAX) == RECONNECT_MAX_MS
            for _ in range(12):  # more often than it takes to come to the longest pause
                listening.accept()[0].close()
        finally:
            client.close()


def test_a_producer_that_waits_asks_again_and_again_at_an_address_that_hangs_up() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(60)
        with Producer(f"127.0.0.1:{listening.getsockname()[1]}", max_block_ms=1):
            for _ in range(25):  # beyond a second, after which the handshake is begun anew
                listening.accept()[0].close()


def test_handshakes_that_are_not_answered_come_less_and_less_often_until_one_is(
    world: World,
) -> None:
    """Many clients at once on a host without a free core: each handshake that is given up was work
    for nothing.
    """

    def opened_after(seconds: int) -> list[float]:
        connection, started_ns, found = world.connection, world.now_ns, []
        count = connection.opened_count
        while world.now_ns - started_ns < seconds * 1_000 * MS:
            world.now_ns = max(world.now_ns + MS, connection.next_tick_ns() or 0)
            connection.tick(world.now_ns)
            if connection.opened_count != count:
                count = connection.opened_count
                found.append((world.now_ns - started_ns) / 1e9)
        return found

    assert opened_after(15) == [1.0, 3.0, 7.0, 11.0, 15.0]
    world.has_appliance = True
    world.ask(5_000)
    world.has_appliance = False
    world.connection._lose(ErrorCode.TIMED_OUT, "gone")
    reopened, first, second, *_ = opened_after(5)
    assert (reopened, first - reopened, second - first) == pytest.approx(
        (0.015, 1.0, 2.0), abs=0.01
    )
