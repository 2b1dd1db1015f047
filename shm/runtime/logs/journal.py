"""Log records to systemd's journal with their fields, by its native protocol
(https://systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram of `NAME=value` lines, or of
`NAME`, newline, length as u64, value and newline where a value has several lines.

    journalctl -u tailrace TAILRACE_TOPIC=orders
    journalctl -u tailrace TAILRACE_EVENT=disk_full -o json

Owner: each process its socket.
Invariants:
- No record waits for the journal: one that it does not take at once is written to standard error,
  which is the journal's too, with its priority.
- Fields are MESSAGE, PRIORITY, SYSLOG_IDENTIFIER, TAILRACE_PROCESS, TAILRACE_EVENT, and
  TAILRACE_<NAME> for each field of the line.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from typing import Any

from shm.runtime.logs.fields import event_and_fields
from shm.runtime.logs.format import PriorityFormatter, priority_of

SOCKET = "/run/systemd/journal/socket"
PREFIX = "TAILRACE_"
NAME_MAX = 64
"""Longest name of a field that the journal takes."""


class JournalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Sends records to the journal."""

    def __init__(
        self, process: str, stream: Any, line: logging.Formatter, path: str = SOCKET
    ) -> None:
        """`stream`: standard error; `line`: formatter of MESSAGE."""
        super().__init__(stream)
        self.setFormatter(PriorityFormatter(line))
        self._line = line
        self._process = process
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            datagram = encoded(self._fields(record))
        except Exception:
            self.handleError(record)
            return
        try:
            self._socket.sendto(datagram, self._path)
        except OSError:
            super().emit(record)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> Iterable[tuple[str, str]]:
        event, fields = event_and_fields(record)
        yield "MESSAGE", self._line.format(record)
        yield "PRIORITY", str(priority_of(record))
        yield "SYSLOG_IDENTIFIER", "tailrace"
        yield f"{PREFIX}PROCESS", self._process
        yield f"{PREFIX}EVENT", event
        for name, value in fields.items():
            yield f"{PREFIX}{name.upper()}"[:NAME_MAX], str(value)


def encoded(fields: Iterable[tuple[str, str]]) -> bytes:
    """The datagram of these fields. A name may come several times."""
    pieces = []
    for name, text in fields:
        value = text.encode("utf-8", "backslashreplace")
        if b"\n" in value:
            length = len(value).to_bytes(8, "little")
            pieces.append(b"%s\n%s%s\n" % (name.encode(), length, value))
        else:
            pieces.append(b"%s=%s\n" % (name.encode(), value))
    return b"".join(pieces)
