"""Log lines of the appliances that a test started, for the report of a test that fails: a temporary
log goes with its appliance.

Owner: the test process; `tests/conftest.py` installs it. Invariants: a log is read before it is
    removed; what ended in an earlier test is not shown.
"""

from __future__ import annotations

import functools
import shutil
import weakref
from typing import Any

from tailrace.embedded_appliance import EmbeddedAppliance

LINES = 100
_running: weakref.WeakSet[EmbeddedAppliance] = weakref.WeakSet()
_ended: list[tuple[str, str]] = []
"""(which appliance, the end of its log)."""


def install() -> None:
    """From now on each appliance of this process is known, and the end of its log is kept when it
    stops.
    """
    begin, stop = EmbeddedAppliance.__init__, EmbeddedAppliance.stop

    def begin_known(self: EmbeddedAppliance, *arguments: Any) -> None:
        begin(self, *arguments)
        _running.add(self)

    @functools.wraps(stop)
    def stop_kept(self: EmbeddedAppliance) -> int:
        remove, self._remove = self._remove, None
        try:
            code = stop(self)
            _ended.append((f"{self.address}, ended with status {code}", _last_lines(self.log_path)))
            _running.discard(self)
        finally:
            self._remove = remove
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
            self._remove = None
        return code

    setattr(EmbeddedAppliance, "__init__", begin_known)  # noqa: B010 (mypy lets no method be assigned to)
    setattr(EmbeddedAppliance, "stop", stop_kept)  # noqa: B010


def forget_ended() -> None:
    """A test begins: what ended before is not its own."""
    _ended.clear()


def sections() -> list[tuple[str, str]]:
    """(title, the last lines) of each appliance that runs, or has ended since the test began."""
    running = [
        (f"{appliance.address}, running", _last_lines(appliance.log_path)) for appliance in _running
    ]
    return [
        (f"log of the appliance at {which}", text) for which, text in [*_ended, *running] if text
    ]


def _last_lines(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-LINES:])
    except OSError:
        return ""  # stopped a second time: its log is gone
