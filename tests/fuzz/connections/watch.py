"""The fuzzer's view of the appliance from outside: processes that end, memory, and what the log
says that it should not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import children

MEMORY_MAX_BYTES = 256 << 20
"""Private memory that a process may have, whatever is sent to it; the run's rings and budgets are
small (see `protocol_fuzzer.SETTINGS`).
"""
SCHEDULER_EXTRA_BYTES = 128 << 20
"""The scheduler loads pyarrow and numpy."""
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d .* (INFO|WARNING|ERROR|CRITICAL) process=")
_ENDED = re.compile(r" ended process=\S+ pid=(?P<pid>\d+) ")
_INTERNAL = re.compile(r"reason=(?P<reason>.*) at=(?P<at>\S+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be. `kind`: process_ended, process_hangs, internal_error, memory,
    unanswered, answer, witness, latency, stop.
    """

    kind: str
    detail: str


class Watch:
    """Watcher of one appliance, from now on."""

    def __init__(self, appliance: EmbeddedAppliance) -> None:
        self._appliance = appliance
        self._pids = children(appliance)
        self._changed: set[str] = set()
        self._told: set[int] = set()
        """Process ids whose end the log has told."""
        self.peak_bytes: dict[str, int] = {}
        self.internal_errors: Counter[str] = Counter()
        """(reason, place) of failures that a process survived, and how often."""
        self._log = open(appliance.log_path, encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in `close`)
        self._log.seek(0, 2)
        self._cut_line = ""
        self._outcries: list[str] = []
        """The last lines that no logger wrote: tracebacks."""

    def look(self) -> list[Finding]:
        """Return the new findings. Memory is remembered at its highest."""
        found = self._read_log()
        now = children(self._appliance)
        for name, pid in now.items():
            self._pids.setdefault(
                name, pid
            )  # started when it was first needed: groups, dedicated workers
        self._pids = {
            name: now.get(name, pid) if pid in self._told else pid
            for name, pid in self._pids.items()
        }
        changed = {
            name
            for name, pid in self._pids.items()
            if now.get(name) != pid and pid not in self._told
        }
        if (
            changed and changed == self._changed
        ):  # the log has had its time to say so, with the reason
            found += [
                Finding(
                    "process_ended",
                    f"{name} had process id {self._pids[name]} and has {now.get(name)}",
                )
                for name in sorted(changed)
            ]
        self._changed = changed
        for name, pid in now.items():
            used = private_bytes(pid)
            limit = MEMORY_MAX_BYTES + SCHEDULER_EXTRA_BYTES * name.startswith("tr-scheduler")
            if used > limit >= self.peak_bytes.get(name, 0):
                found.append(
                    Finding(
                        "memory",
                        f"{name} has {used >> 20} MiB of its own; {limit >> 20} are its bound",
                    )
                )
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), used)
        return found

    def _read_log(self) -> list[Finding]:
        *lines, self._cut_line = (self._cut_line + self._log.read()).split("\n")
        found = []
        for line in lines:
            if not _LOG_LINE.match(line):
                self._outcries = [*self._outcries[-40:], line]
            elif ended := _ENDED.search(line):
                self._told.add(int(ended["pid"]))
                found.append(Finding("process_ended", "\n".join([line, *self._outcries[-12:]])))
                self._outcries = []
            elif "hangs process=" in line:
                found.append(Finding("process_hangs", line))
            elif "internal_error " in line:
                known = _INTERNAL.search(line)
                what = f"{known['reason'][:160]} at {known['at']}" if known else line
                if what not in self.internal_errors:
                    found.append(Finding("internal_error", line))
                self.internal_errors[what] += 1
        return found

    def close(self) -> None:
        self._log.close()


def private_bytes(pid: int) -> int:
    """Memory that is the process's own: neither files nor shared memory. 0 when there is no such
    process.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return next(
                (int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:")), 0
            )
    except OSError:
        return 0
