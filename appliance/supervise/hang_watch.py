"""Hang watch: kills processes that show no beat, and feeds systemd's watchdog while none hangs.

Owner: the supervisor.
Invariants: idle processes are rung at each check, so that they show a beat. Time in which the host
stood still counts for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from appliance.config.settings import Settings
from appliance.supervise.processes.child_processes import NS_PER_MS, check_heartbeats
from appliance.supervise.processes.process_table import ProcessTable
from appliance.supervise.sd_notify import Notifier
from shm.queues.doorbell import Doorbell
from shm.tables.control import Control


class HangWatch:
    """Checks the processes four times in `hang_timeout_ms`."""

    def __init__(
        self,
        processes: ProcessTable,
        control: Control,
        bells: Mapping[str, Doorbell],
        notifier: Notifier,
        settings: Callable[[], Settings],
    ) -> None:
        """`settings`: those in force."""
        self._processes = processes
        self._control = control
        self._bells = bells
        self._notifier = notifier
        self._settings = settings
        self._checked_ns = 0

    def next_check_ns(self) -> int:
        """The time when a check is due."""
        return self._checked_ns + self._interval_ns()

    def is_due(self, now_ns: int) -> bool:
        """True if it is time for `check`."""
        return not self._checked_ns or now_ns >= self.next_check_ns()

    def check(self, now_ns: int) -> bool:
        """Kill processes that hang. Returns True if none does."""
        late_ns = now_ns - (self._checked_ns or now_ns) - self._interval_ns()
        self._checked_ns = now_ns
        healthy = check_heartbeats(
            self._processes, self._control, self._settings().hang_timeout_ms, now_ns, late_ns
        )
        for bell in self._bells.values():
            bell.ring()
        if healthy and self._notifier.watchdog_ns:
            self._notifier.feed_watchdog()
        return healthy

    def _interval_ns(self) -> int:
        interval_ns = self._settings().hang_timeout_ms * NS_PER_MS // 4
        watchdog_ns = self._notifier.watchdog_ns
        return min(interval_ns, watchdog_ns // 3) if watchdog_ns else interval_ns
