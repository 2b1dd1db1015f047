"""Suspension of groups whose work has failed, so that they do not fail the steps of other groups.

Owner: the service.
Invariants:
- A suspended group does not change. It catches up with the catalog when it is released.
- Its requests are refused with NOT_READY.
Crash: nothing is stored; a successor retries every group.
"""

from __future__ import annotations

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError

SUSPENSION_NS = 1_000_000_000
"""Duration of a suspension."""


class SuspendedGroups:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.until: dict[str, int] = {}
        """Name -> end of its suspension, ns."""

    def add(self, group: str, now_ns: int) -> None:
        """Suspend a group, since its work has failed."""
        self.until[group] = now_ns + SUSPENSION_NS

    def check(self, group: str) -> None:
        """Raises TailraceError (NOT_READY) when the group is suspended."""
        if group in self.until:
            raise TailraceError(
                f"the group {group!r:.100} is suspended for a second after an internal error",
                ErrorCode.NOT_READY,
            )

    def release(self, now_ns: int) -> list[str]:
        """Remove and return the groups whose suspension has ended."""
        over = [group for group, until_ns in self.until.items() if now_ns >= until_ns]
        for group in over:
            del self.until[group]
        return over

    def next_deadline_ns(self) -> int | None:
        """The next end of a suspension; None: no group is suspended."""
        return min(self.until.values(), default=None)
