"""Log lines: one line each whatever a client has sent, and so many a second that a flood of refusals does not fill the disk.

Owner: each process configures its own root logger with them (`shm.runtime.process.configure_logging`).
Invariants: a record is one line, without control characters; warnings and errors are dropped only by a limit of their own, and how many lines were dropped
    is said in the next line that is not.

Where standard error leads to systemd's journal (JOURNAL_STREAM names it), a line begins with its priority, as in sd-daemon(3), and the time is the journal's.
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
"""The lowest level -> syslog's number."""


class OneLineFormatter(logging.Formatter):
    """Text of clients and files cannot begin a line of its own, nor move the cursor of who reads the log."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).translate(_ESCAPES)
        return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}... ({len(text)} characters)"


class JournalFormatter(OneLineFormatter):
    """The priority first: the journal takes it off, and `journalctl -p warning` goes by it."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{super().format(record)}"


def is_journal(fd: int) -> bool:
    """Whether `fd` leads to systemd's journal: JOURNAL_STREAM names its device and inode, and a program whose output was redirected inherits it too."""
    found = os.fstat(fd)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def formatter(process: str, fd: int) -> logging.Formatter:
    """For the lines that `process` writes to `fd`."""
    if is_journal(fd):
        return JournalFormatter(f"process={process} %(message)s")
    return OneLineFormatter(f"%(asctime)s %(levelname)s process={process} %(message)s")


class RateLimit(logging.Filter):
    """A token bucket for each of two classes: warnings and above, the rest. So a flood of refusals hides no error."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._tokens = {False: float(BURST_LINES), True: float(BURST_LINES)}
        self._filled_s = {False: now_s(), True: now_s()}
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        is_serious, now_s = record.levelno >= logging.WARNING, self._now_s()
        tokens = min(float(BURST_LINES), self._tokens[is_serious] + (now_s - self._filled_s[is_serious]) * LINES_PER_S)
        self._filled_s[is_serious] = now_s
        if tokens < 1:
            self._tokens[is_serious] = tokens
            self._dropped += 1
            return False
        self._tokens[is_serious] = tokens - 1
        if self._dropped:
            record.msg, record.args = f"{record.getMessage()} lines_dropped_before_this=%d", (self._dropped,)
            self._dropped = 0
        return True
