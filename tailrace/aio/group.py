"""The heartbeats of a group's member in an event loop.

The loop watches the connection of the heartbeats beside the reader's. They go on while the program
awaits anything. Code that blocks the loop for longer than session_timeout_ms loses the membership.
Rebalances are steps of the consumer's operations (`tailrace.group.group_coordinator`).

Owner: one event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.aio.event_loop import LoopConnection
from tailrace.group.heartbeat import HeartbeatManager


class HeartbeatLoopConnection(LoopConnection):
    """The connection of the heartbeats, and the loop that watches it."""

    def __init__(self, kind: str, beats: HeartbeatManager, on_event: Callable[[], None]) -> None:
        """`on_event`: called when the membership has an event for the consumer."""
        super().__init__(kind, beats.connection)
        self._beats = beats
        self._on_event = on_event

    def run_timers(self) -> None:
        """Receive messages, and send the heartbeats that are due."""
        self._beats.step()
        if self._beats.membership.has_events:
            self._on_event()

    def beat(self) -> None:
        """Send the heartbeats that are due after a change of the membership."""
        try:
            self._beats.step()
        finally:
            self.settle()

    def due_ns(self) -> int | None:
        """The time of the next step if nothing comes."""
        return (
            None if self._is_closed or self.connection.fatal is not None else self._beats.next_ns()
        )
