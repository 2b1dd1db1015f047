"""A connection that ends between two uses: its user learns of it at once, sends again, and a client
that ends knows how long it has been away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.reachability import AWAY_AFTER_NS
from tailrace.client.connections.runtime import NEVER_NS, Runtime
from tailrace.client.connections.steps import call_json_now
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import Api
from tests.kit.peers.scripted_front import Clock, ScriptedFront

TIMEOUT_MS = 30_000


class EndingSocket:
    """A socket whose connection ends with the first request of an API. As with libzmq, the send
    that finds it has taken the signal away from the descriptor.
    """

    def __init__(self, front: ScriptedFront, ends: list[bool]) -> None:
        self._socket: Any = front.connect()
        self._ends = ends
        self.is_lost = False

    def try_send(self, frames: Sequence[Readable], *, copy: bool = True) -> bool:
        if self._ends and self._ends.pop():
            self.is_lost = True
        return not self.is_lost and self._socket.try_send(frames, copy=copy)

    def try_receive(self) -> Any:
        return None if self.is_lost else self._socket.try_receive()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._socket.close()


def connected(ends: list[bool]) -> tuple[Connection, Clock]:
    clock, front = Clock(), ScriptedFront()
    runtime = Runtime(
        lambda: clock.now_ns,
        lambda _: EndingSocket(front, ends),
        clock.sleep,
        lambda: 0.5,
        has_threads=False,
    )
    connection = Connection("tcp://127.0.0.1:1", "test", runtime)
    connection.process()
    assert connection.is_ready
    return connection, clock


def test_a_request_that_the_ended_connection_did_not_take_is_sent_over_the_next_at_once() -> None:
    ends: list[bool] = []
    connection, clock = connected(ends)
    ends.append(True)
    begun_ns = clock.now_ns
    answer = call_json_now(connection, Api.METADATA, {"topics": ["t"]}, TIMEOUT_MS)
    assert [topic["name"] for topic in answer["topics"]] == ["t"]
    assert connection.opened_count == 2
    assert clock.now_ns - begun_ns < AWAY_AFTER_NS


def test_an_appliance_is_away_some_time_after_the_connection_has_ended() -> None:
    connection, clock = connected([])
    assert connection.reachability.away_at_ns() >= NEVER_NS
    connection.give_up_socket()
    ended_ns = clock.now_ns
    assert connection.reachability.away_at_ns() == ended_ns + AWAY_AFTER_NS
    clock.now_ns += 1
    connection.give_up_socket()
    assert connection.reachability.away_at_ns() == ended_ns + AWAY_AFTER_NS
    clock.now_ns = connection.next_tick_ns() or 0
    connection.tick(clock.now_ns)
    assert connection.is_ready
    assert connection.reachability.away_at_ns() >= NEVER_NS
