"""Limit of log lines about failed logins, by host. The audit log has every one.

Owner: one gateway.
Invariants: a host has at most LINES_MAX lines in WINDOW_NS. A line says how many failures before it
had none.
Bounds: HOSTS_MAX hosts; when there are more, the one that began first is forgotten.
"""

from __future__ import annotations

WINDOW_NS = 60_000_000_000
LINES_MAX = 10
HOSTS_MAX = 1_000


class FailureLimit:
    """Failures of each host in its present window."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[int, int, int]] = {}
        """(Begin of the window, lines in it, failures without a line), the oldest host first."""

    def note(self, host: str, now_ns: int) -> int | None:
        """Count a failure. Returns the number of failures since the last line if this one gets a
        line, else None.
        """
        begun_ns, lines, unnamed = self._hosts.get(host, (now_ns, 0, 0))
        if now_ns - begun_ns >= WINDOW_NS:
            self._hosts.pop(host)
            begun_ns, lines = now_ns, 0
        if lines >= LINES_MAX:
            self._hosts[host] = begun_ns, lines, unnamed + 1
            return None
        self._hosts[host] = begun_ns, lines + 1, 0
        if len(self._hosts) > HOSTS_MAX:
            del self._hosts[next(iter(self._hosts))]
        return unnamed
