"""Log format: one line per record, without control characters, and limited in rate.

A flood of refusals must not fill the disk.

Owner: each process configures its own root logger (`shm.runtime.agent_runner.configure_logging`).

Invariants:
- A record is one line.
- Warnings and errors have a rate limit of their own. The number of dropped lines is in the next
  line written.

If standard error is systemd's journal (JOURNAL_STREAM), a line begins with its priority, as in
sd-daemon(3), and the journal adds the time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

LINES_PER_S = 50
BURST_LINES = 500
LINE_MAX = 4_000

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x2028: "\\u2028", 0x2029: "\\u2029", ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t",
}  # fmt: skip


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Syslog priority of each level and above."""


class OneLineFormatter(logging.Formatter):
    """Escapes control characters, so that text from clients and files cannot
    start a line or move the cursor.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).translate(_ESCAPES)
        return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}... ({len(text)} characters)"


class JournalFormatter(OneLineFormatter):
    """Puts the priority first.

    The journal removes it, and `journalctl -p warning` filters by it.
    """

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{super().format(record)}"


def is_journal(fd: int) -> bool:
    """True if `fd` is systemd's journal.

    JOURNAL_STREAM names its device and inode. They are compared, since a program with redirected
    output inherits the variable too.
    """
    found = os.fstat(fd)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def formatter(process: str, fd: int) -> logging.Formatter:
    """Return the formatter for lines that `process` writes to `fd`."""
    if is_journal(fd):
        return JournalFormatter(f"process={process} %(message)s")
    return OneLineFormatter(f"%(asctime)s %(levelname)s process={process} %(message)s")


class RateLimit(logging.Filter):
    """Two token buckets: one for warnings and above, one for the rest.

    A flood of refusals hides no error.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._tokens = {False: float(BURST_LINES), True: float(BURST_LINES)}
        self._filled_s = {False: now_s(), True: now_s()}
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        is_serious, now_s = record.levelno >= logging.WARNING, self._now_s()
        tokens = min(
            float(BURST_LINES),
            self._tokens[is_serious] + (now_s - self._filled_s[is_serious]) * LINES_PER_S,
        )
        self._filled_s[is_serious] = now_s
        if tokens < 1:
            self._tokens[is_serious] = tokens
            self._dropped += 1
            return False
        self._tokens[is_serious] = tokens - 1
        if self._dropped:
            record.msg, record.args = (
                f"{record.getMessage()} lines_dropped_before_this=%d",
                (self._dropped,),
            )
            self._dropped = 0
        return True
