"""A handshake that is answered in the step in which a connection is opened again: whoever waits to
send is told, and does not sleep until its time is up.
"""

from __future__ import annotations

from tailrace.client.connections.connection import HANDSHAKE_RETRY_NS, Connection
from tailrace.client.connections.runtime import Runtime
from tailrace.client.connections.steps import call_json_now
from tailrace.protocol.frame import Api
from tests.kit.peers.scripted_front import Clock, ScriptedFront

TIMEOUT_MS = 30_000


def connected(front: ScriptedFront) -> tuple[Connection, Clock]:
    clock = Clock()
    runtime = Runtime(
        lambda: clock.now_ns, lambda _: front.connect(), clock.sleep, lambda: 0.5, has_threads=False
    )
    return Connection("tcp://127.0.0.1:1", "test", runtime), clock


def test_a_request_leaves_at_once() -> None:
    front = ScriptedFront()
    connection, clock = connected(front)
    connection.process()
    front.restart()
    started_ns = clock.now_ns
    answer = call_json_now(connection, Api.METADATA, {"topics": ["t"]}, TIMEOUT_MS)
    assert [topic["name"] for topic in answer["topics"]] == ["t"]
    assert connection.opened_count == 2
    assert clock.now_ns - started_ns < HANDSHAKE_RETRY_NS


def test_a_step_is_due_until_what_came_was_seen() -> None:
    front = ScriptedFront()
    connection, clock = connected(front)
    connection.process()
    front.restart()
    connection.process()
    clock.now_ns = connection.next_tick_ns() or 0
    connection.tick(clock.now_ns)
    assert connection.is_ready
    assert connection.opened_count == 2
    due_ns = connection.next_tick_ns()
    assert due_ns is not None
    assert due_ns <= clock.now_ns
    connection.process()
    assert connection.next_tick_ns() is None
