"""Notifications to systemd: READY, STATUS, STOPPING, WATCHDOG (sd_notify(3), by its documented
datagram protocol).

Owner: the supervisor. Without NOTIFY_SOCKET every call does nothing.
Invariants: no descriptor is kept, so a fork inherits none.
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """The notify socket, if there is one."""

    def __init__(self, address: str | None, watchdog_us: int = 0) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self.watchdog_ns = watchdog_us * 1000
        """Interval in which systemd expects WATCHDOG=1, 0: never."""

    @classmethod
    def from_environment(cls) -> Notifier:
        """Read and remove systemd's variables, so that children send no notifications."""
        address = os.environ.pop("NOTIFY_SOCKET", None)
        watchdog = os.environ.pop("WATCHDOG_USEC", "0")
        pid = os.environ.pop("WATCHDOG_PID", None)
        mine = pid is None or pid == str(os.getpid())
        return cls(address, int(watchdog) if mine and watchdog.isdigit() else 0)

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
        self.notify("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        self.notify(f"STATUS={status}")

    def stopping(self) -> None:
        """Tell systemd that the stop has begun."""
        self.notify("STOPPING=1", "STATUS=stopping: draining, flushing, syncing")

    def feed_watchdog(self) -> None:
        """Tell systemd that the service lives; needed every `watchdog_ns`."""
        self.notify("WATCHDOG=1")
