"""Log format: one line per record, without control characters, and limited in rate.

A line is `event key=value ...`, or with log_format=json an object with the same fields. A warning
or an error ends with its advice (`shm.runtime.logs.advice`). A flood of refusals must not fill the
disk.

Owner: each process configures its own root logger (`shm.runtime.agent_runner.configure_logging`).

Invariants:
- A record is one line.
- Errors and warnings have rate limits of their own, and each event. The number of dropped lines is
  in the next line written.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from shm.runtime.logs.advice import advice_for
from shm.runtime.logs.fields import event_and_fields, event_of

BURST_LINES = 500
EVENTS_MAX = 1_000
LINE_MAX = 4_000

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x2028: "\\u2028", 0x2029: "\\u2029", ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t",
}  # fmt: skip


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Syslog priority of each level and above."""


def priority_of(record: logging.LogRecord) -> int:
    """Syslog priority of a record's level."""
    return next((number for level, number in _PRIORITIES if record.levelno >= level), 7)


class OneLineFormatter(logging.Formatter):
    """Escapes control characters, so that text from clients and files cannot
    start a line or move the cursor.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).translate(_ESCAPES)
        return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}... ({len(text)} characters)"


class JsonFormatter(logging.Formatter):
    """Makes an object of each record: time, level, process, event, and its fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        import orjson  # by those who ask for it

        event, fields = event_and_fields(record)
        found: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(), "process": self._process, "event": event,
            "fields": {name: _bounded(value) for name, value in fields.items()},
        }  # fmt: skip
        if record.exc_info:
            found["traceback"] = _bounded(self.formatException(record.exc_info))
        text = orjson.dumps(found, default=str).decode()
        return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x7f", "")


def _utc(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat("T", "microseconds")


def _bounded(value: Any) -> Any:
    """A field that takes part of a line at most, without what JSON cannot hold."""
    if not isinstance(value, str):
        return (
            value
            if value is None or isinstance(value, (bool, float)) or _fits(value)
            else str(value)
        )
    whole = value.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= LINE_MAX else f"{whole[:LINE_MAX]}... ({len(whole)} characters)"


def _fits(value: Any) -> bool:
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 64


class PriorityFormatter(logging.Formatter):
    """Puts the priority before another formatter's line, as in sd-daemon(3).

    The journal removes it, and `journalctl -p warning` filters by it.
    """

    def __init__(self, line: logging.Formatter) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        return f"<{priority_of(record)}>{self._line.format(record)}"


def is_journal(fd: int) -> bool:
    """True if `fd` is systemd's journal.

    JOURNAL_STREAM names its device and inode. They are compared, since a program with redirected
    output inherits the variable too.
    """
    found = os.fstat(fd)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def line_formatter(process: str, form: str, *, with_time: bool) -> logging.Formatter:
    """Return the formatter of a process's lines. `form`: text or json. `with_time`: the reader
    adds none.
    """
    if form == "json":
        return JsonFormatter(process)
    before = "%(asctime)s %(levelname)s " if with_time else ""
    return OneLineFormatter(f"{before}process={process} %(message)s")


class Advice(logging.Filter):
    """Appends its advice to a warning or an error that brings none."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and "advice=" not in str(record.msg):
            advice = advice_for(event_of(record))
            if advice:
                _append(record, "advice=%r", advice)
        return True


class _Bucket:
    """A token bucket: `burst` lines at once, and a tenth of them a second."""

    __slots__ = ("_burst", "_filled_s", "_tokens")

    def __init__(self, burst: int, now_s: float) -> None:
        self._burst = self._tokens = float(burst)
        self._filled_s = now_s

    def has_token(self, now_s: float) -> bool:
        """True if a line may be written now."""
        filled = self._tokens + (now_s - self._filled_s) * self._burst / 10
        self._tokens, self._filled_s = min(self._burst, filled), now_s
        return self._tokens >= 1

    def take(self) -> None:
        """Take the token that there is."""
        self._tokens -= 1


class RateLimit(logging.Filter):
    """A bucket each for errors, for warnings and for the rest, and one for each event.

    A flood of refusals hides no error, and one event takes a fifth of the lines at most.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._levels = [_Bucket(BURST_LINES, now_s()) for _ in range(3)]
        self._events: dict[str, _Bucket] = {}
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, level = self._now_s(), record.levelno
        buckets = (
            self._levels[(level >= logging.WARNING) + (level >= logging.ERROR)],
            self._bucket_of(str(record.msg).partition(" ")[0], now_s),
        )
        if not all(bucket.has_token(now_s) for bucket in buckets):
            self._dropped += 1
            return False
        for bucket in buckets:
            bucket.take()
        if self._dropped:
            _append(record, "lines_dropped_before_this=%d", self._dropped)
            self._dropped = 0
        return True

    def _bucket_of(self, event: str, now_s: float) -> _Bucket:
        if event not in self._events:
            if len(self._events) >= EVENTS_MAX:  # words of other libraries
                self._events.clear()
            self._events[event] = _Bucket(BURST_LINES // 5, now_s)
        return self._events[event]


def _append(record: logging.LogRecord, pattern: str, value: Any) -> None:
    """Append a field to a record, whose other fields stay as they are."""
    if isinstance(record.args, tuple) and record.args:
        record.msg, record.args = f"{record.msg} {pattern}", (*record.args, value)
    else:
        text = record.getMessage().replace("%", "%%")
        record.msg, record.args = f"{text} {pattern}", (value,)
