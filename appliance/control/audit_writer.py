"""Audit writer: takes the fronts' events and answers when they are on the disk.

Owner: the controller.

Invariants:
- An event is answered OK when its line is synced.
- While the log cannot be written, events are answered AUDIT_UNAVAILABLE with a sentence, and fronts
  refuse administration. The next events try again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from appliance.audit.audit_log import AuditLog, read_key
from tailrace.core.errors import AuditUnavailableError, InvalidRequestError

logger = logging.getLogger(__name__)


class AuditWriter:
    """The audit log of a controller that has one."""

    def __init__(self, settings: dict[str, Any], wall_us: Callable[[], int]) -> None:
        """`settings`: directory, key_file, file_bytes, files_max, journal."""
        self._settings = settings
        self._wall_us = wall_us
        self._log: AuditLog | None = None
        self._is_failing = False
        self._line_counts: Counter[str] = Counter()
        """Lines by event, of this process. Names of fronts and of the log itself alone."""
        self._dropped_count = 0
        self._failure_count = 0

    def described(self) -> dict[str, Any]:
        """Counters of this process, and whether the log is written."""
        return {
            "directory": self._settings["directory"],
            "is_failing": self._is_failing,
            "lines": dict(self._line_counts),
            "dropped": self._dropped_count,
            "failures": self._failure_count,
        }

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write `events`. Raises AuditUnavailableError."""
        events = request.get("events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise InvalidRequestError("`events` must be a list of objects")
        try:
            if self._log is None:
                self._log = self._open()
            self._log.append(events)
        except (OSError, ValueError) as error:
            directory = self._settings["directory"]
            if not self._is_failing:
                logger.error("audit_not_written path=%s error=%r", directory, str(error))
            self._is_failing = True
            self._failure_count += 1
            if self._log is not None:
                self._log.close()
                self._log = None
            raise AuditUnavailableError(
                f"the audit log in {directory} cannot be written ({error}); administration is "
                "refused until it can"
            ) from error
        for event in events:
            self._line_counts[str(event.get("event"))] += 1
            if event.get("event") == "events_dropped":
                self._dropped_count += int(event["count"])
        if self._is_failing:
            self._is_failing = False
            logger.info("audit_written_again path=%s", self._settings["directory"])
        return {}

    def _open(self) -> AuditLog:
        settings = self._settings
        return AuditLog(
            settings["directory"],
            key=read_key(settings["key_file"]),
            file_bytes=int(settings["file_bytes"]),
            files_max=int(settings["files_max"]),
            wall_us=self._wall_us,
            publish=_journal() if settings["journal"] else None,
        )


def _journal() -> Callable[[bytes], None]:
    """Sends a line to the journal, as the field AUDIT beside its event."""
    import socket

    import orjson

    from shm.runtime.logs.journal import SOCKET, encoded

    def publish(line: bytes) -> None:
        value = orjson.loads(line)
        fields = [
            ("MESSAGE", line.decode().rstrip()), ("PRIORITY", "6"),
            ("SYSLOG_IDENTIFIER", "tailrace-audit"),
            *((f"TAILRACE_AUDIT_{name.upper()}", str(value[name]))
              for name in ("seq", "event", "user", "api", "outcome", "hash") if name in value),
        ]  # fmt: skip
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(encoded(fields), SOCKET)
        except OSError as error:
            logger.warning("audit_not_in_journal error=%r", str(error))

    return publish
