"""Notifications to systemd: READY, RELOADING, STATUS, STOPPING, WATCHDOG (sd_notify(3), by its
documented datagram protocol).

Owner: the supervisor. Without NOTIFY_SOCKET every call does nothing.
Invariants: no descriptor is kept, so a fork inherits none.
"""

from __future__ import annotations

import os
import socket
import time

NS_PER_US = 1000
NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
SERVICE_VARIABLES = (*NOTIFY_VARIABLES, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""Variables that systemd sets for a service."""


class Notifier:
    """The notify socket, if there is one."""

    def __init__(self, address: str | None, watchdog_us: int = 0) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self.watchdog_ns = watchdog_us * 1000
        """Interval in which systemd expects WATCHDOG=1, 0: never."""
        self._serving = self._status = ""
        """Status while everything serves, and the status that was sent last."""

    @classmethod
    def from_environment(cls) -> Notifier:
        """Read and remove systemd's variables, so that children send no notifications."""
        address, watchdog, pid = (os.environ.pop(name, None) for name in NOTIFY_VARIABLES)
        mine = pid is None or pid == str(os.getpid())
        return cls(address, int(watchdog) if mine and watchdog and watchdog.isdigit() else 0)

    def notify(self, *lines: str) -> None:
        """Send the lines as one datagram. A systemd that does not listen is ignored."""
        if not self._address:
            return
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass

    def ready(self, status: str) -> None:
        """Tell systemd that the service serves."""
        self._serving = self._status = status
        self.notify("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def report_absent(self, names: list[str]) -> None:
        """Tell systemd, in the status, which processes do not serve now. Repeats nothing."""
        status = f"{self._serving}; starting {', '.join(names)}" if names else self._serving
        if status != self._status:
            self._status = status
            self.notify(f"STATUS={status}")

    def reloading(self) -> None:
        """Tell systemd that the settings are read again; `ready` ends that. The time is for units
        of Type=notify-reload (systemd 253 and later).
        """
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // NS_PER_US
        self.notify("RELOADING=1", f"MONOTONIC_USEC={now_us}", "STATUS=reading the settings again")

    def recovering(self, patience_ns: int) -> None:
        """Tell systemd that the start makes progress, so that it waits for `patience_ns` more. A
        recovery may take longer than the unit's TimeoutStartSec.
        """
        self.notify(
            "STATUS=starting: recovering the log",
            f"EXTEND_TIMEOUT_USEC={patience_ns // NS_PER_US}",
        )

    def stopping(self, timeout_ns: int) -> None:
        """Tell systemd that the stop has begun, and how long it may take at most."""
        self.notify(
            "STOPPING=1",
            "STATUS=stopping: draining, flushing, syncing",
            f"EXTEND_TIMEOUT_USEC={timeout_ns // NS_PER_US}",
        )

    def announce_replacement(self) -> None:
        """Tell systemd that the service stops and starts again under the same process id. A unit
        that has announced its stop (STOPPING) could not come back.
        """
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.notify("RELOADING=1", f"MONOTONIC_USEC={now_us}", "STATUS=starting again")

    def feed_watchdog(self) -> None:
        """Tell systemd that the service lives; needed every `watchdog_ns`."""
        self.notify("WATCHDOG=1")
