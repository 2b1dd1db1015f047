"""Rolling restart: ends processes one after the other, each when the one before serves again.

Owner: the supervisor, which steps it with its loop.
Invariants:
- At most one process is down for it at a time.
- A process that does not end within STOP_MS is killed, which every process may be at any time.
- It ends early, with a reason, when a process does not serve again within SERVE_MS.
Crash: it is forgotten. What was restarted stays so.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from appliance.supervise.processes.child_processes import NS_PER_MS, Child
from appliance.supervise.processes.process_table import ProcessTable
from shm.memory.layout import Role

logger = logging.getLogger("appliance.supervise.supervisor")

ORDER = (
    Role.FRONT,
    Role.WORKER,
    Role.FLUSHER,
    Role.CLEANER,
    Role.SCHEDULER,
    Role.GROUPS,
    Role.CONTROLLER,
    Role.CONSOLE,
)
STOP_MS = 1_000
"""Time for an orderly end. A worker under constant load has no moment without input."""
SERVE_MS = 60_000
SETTLE_MS = 500
"""Pause behind each process, in which clients connect again and what waited is done. Without it
the gaps of the processes would add up.
"""


def chosen(children: Iterable[Child], names: Sequence[str]) -> list[Child]:
    """The processes of these names or kinds ("front-0", "front", "tr-front-0"), all without any, in
    the order of a restart.

    Raises ValueError for a name of no process.
    """
    running = sorted(
        (child for child in children if not child.is_dismissed),
        key=lambda child: (ORDER.index(child.role), child.index),
    )
    if not names:
        return running
    found = []
    for name in names:
        plain = name.removeprefix("tr-")
        named = [
            child
            for child in running
            if plain
            in (child.name, child.role.name.lower(), f"{child.role.name.lower()}-{child.index}")
        ]
        if not named:
            raise ValueError(
                f"there is no process {name[:100]}; there are "
                f"{', '.join(child.name for child in running)}"
            )
        found += named
    return [child for child in running if child in found]


class RollingRestart:
    """One rolling restart. `on_event` gets the progress."""

    def __init__(
        self,
        children: Sequence[Child],
        table: ProcessTable,
        is_serving: Callable[[Child], bool],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._waiting = list(children)
        self._count = len(self._waiting)
        self._table = table
        self._is_serving = is_serving
        self._on_event = on_event
        self._current: Child | None = None
        self._generation = 0
        """Generation of the current process before its restart."""
        self._begun_ns = 0
        self._is_killed = False
        self._next_at_ns = 0
        """Time at which the next process may be restarted."""
        self.failure = ""
        """The reason why it ended early."""

    @property
    def is_finished(self) -> bool:
        return self._current is None and not self._waiting

    @property
    def next_deadline_ns(self) -> int | None:
        """Time of the next step that nothing announces."""
        if self._current is None:
            return self._next_at_ns if self._waiting else None
        limit_ms = SERVE_MS if self._is_killed or self._has_ended(self._current) else STOP_MS
        return self._begun_ns + limit_ms * NS_PER_MS

    def step(self, now_ns: int) -> None:
        """Begin the next process if the current one serves, or act on a limit that has passed."""
        child = self._current
        if child is not None:
            if child not in self._table.children:  # its topic was deleted meanwhile
                self._current = None
            elif child.generation != self._generation and self._is_serving(child):
                self._report(child, now_ns)
            elif now_ns - self._begun_ns >= SERVE_MS * NS_PER_MS:
                self.failure = (
                    f"{child.name} does not serve {SERVE_MS // 1000} s after its restart began; "
                    f"{len(self._waiting)} others were left alone. Look at its log lines."
                )
                self._waiting, self._current = [], None
                logger.error("restart_ended_early reason=%r", self.failure)
            elif (
                not self._is_killed
                and not self._has_ended(child)
                and now_ns - self._begun_ns >= STOP_MS * NS_PER_MS
            ):
                self._is_killed = True
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        if self._current is None and self._waiting and now_ns >= self._next_at_ns:
            self._begin(self._waiting.pop(0), now_ns)

    def _has_ended(self, child: Child) -> bool:
        return child.pidfd < 0 or child.generation != self._generation

    def _begin(self, child: Child, now_ns: int) -> None:
        self._current, self._generation = child, child.generation
        self._begun_ns, self._is_killed = now_ns, False
        self._on_event({"process": child.name, "state": "stopping", "of": self._count})
        if child.pidfd >= 0:  # otherwise it is being restarted by itself
            self._table.begin_restart(child)

    def _report(self, child: Child, now_ns: int) -> None:
        took_ms = (now_ns - self._begun_ns) // NS_PER_MS
        self._current, self._next_at_ns = None, now_ns + SETTLE_MS * NS_PER_MS
        self._on_event({"process": child.name, "state": "serving", "pid": child.pid, "ms": took_ms})
        logger.info("restarted_on_request process=%s ms=%d", child.name, took_ms)
