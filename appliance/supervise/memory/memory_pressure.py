"""Memory pressure: the share of time in which tasks waited for memory, as Linux measures it (PSI).

The kernel makes tasks wait while it reclaims memory, before it kills one. While they wait for more
than memory.pressure.percent of the time, the fronts give producers credit for one batch at a time
(`netfront.limits.credit_budget`): clients slow down, and what is in flight needs less memory.

Owner: the supervisor, which reads the file of its own cgroup, or of the host where there is none.

Invariants: it ends at half the share at which it begins, so that the state does not flap.
"""

from __future__ import annotations

import logging

from appliance.config.topology import cgroup_directories

logger = logging.getLogger("appliance.supervise.supervisor")

CHECK_NS = 2_000_000_000
"""Interval of the kernel's own averages."""
HOST_FILE = "/proc/pressure/memory"


class MemoryPressure:
    """The pressure of one appliance."""

    def __init__(self, path: str = "") -> None:
        """`path`: a file in the kernel's format; "": that of the cgroup, or of the host."""
        candidates = [f"{group}/memory.pressure" for group in cgroup_directories()[:1]]
        self._paths = [path] if path else [*candidates, HOST_FILE]
        self.is_high = False
        self.percent = 0.0
        """Share of the last 10 s in which some task waited, when the state last changed."""
        self.next_check_ns: int | None = 0
        """None: this kernel does not measure it."""

    def check(self, threshold_percent: int, now_ns: int) -> bool:
        """Read the pressure if that is due; return True if the state changed. A threshold of 0
        turns it off.
        """
        if self.next_check_ns is None or now_ns < self.next_check_ns:
            return False
        self.next_check_ns = now_ns + CHECK_NS
        percent = self._read() if threshold_percent else 0.0
        if percent is None:
            self.next_check_ns = None
            logger.info("memory_pressure_unknown files=%s", ",".join(self._paths))
            percent = 0.0
        is_high = bool(threshold_percent) and (
            percent * 2 >= threshold_percent if self.is_high else percent >= threshold_percent
        )
        if is_high is self.is_high:
            return False
        self.is_high, self.percent = is_high, percent
        if is_high:
            logger.warning(
                "memory_short stalled_percent=%.1f limit_percent=%d advice='give the appliance "
                "more memory, lower ring_bytes or credit_bytes, or move other programs away'",
                percent, threshold_percent,
            )  # fmt: skip
        else:
            logger.info("memory_has_room stalled_percent=%.1f", percent)
        return True

    def _read(self) -> float | None:
        """The share of the last 10 s, in percent; None if no file has it."""
        for path in self._paths:
            try:
                with open(path, encoding="ascii", errors="replace") as file:
                    for line in file:
                        kind, _, rest = line.partition(" avg10=")
                        if kind == "some":
                            return float(rest.split()[0])
            except (OSError, ValueError, IndexError):
                continue
        return None
