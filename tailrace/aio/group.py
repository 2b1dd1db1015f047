"""A member of a group in an event loop: its heartbeats.

The loop watches the heartbeats' connection beside the reader's, so they go on while the program
awaits anything; code that holds the loop for longer than session_timeout_ms loses the membership,
as it stops everything else in the loop. Rebalances are steps of the consumer's operations
(`tailrace.group.group_coordinator`).

Owner: one event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.aio.event_loop import LoopConnection
from tailrace.group.heartbeat import HeartbeatManager


class HeartbeatLoopConnection(LoopConnection):
    """Heartbeats in the event loop."""

    def __init__(self, kind: str, beats: HeartbeatManager, on_event: Callable[[], None]) -> None:
        """`on_event`: called when the consumer has something to look at."""
        super().__init__(kind, beats.connection)
        self._beats = beats
        self._on_event = on_event

    def run_timers(self) -> None:
        """Take in what has come, and send what is due."""
        self._beats.step()
        if self._beats.membership.has_events:
            self._on_event()

    def beat(self) -> None:
        """The membership has changed: make the heartbeats that are due now."""
        try:
            self._beats.step()
        finally:
            self.settle()

    def due_ns(self) -> int | None:
        """When the next step is due though nothing comes."""
        return (
            None if self._is_closed or self.connection.fatal is not None else self._beats.next_ns()
        )
