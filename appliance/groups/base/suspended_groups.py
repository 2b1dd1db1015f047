"""Groups for which a step has failed: nothing is done for them for a moment, so that they cost no
other group its step.

Owner: the service.
Invariants: a group that is held up changes in nothing but what the catalog's next change makes of
    it; its requests are refused with NOT_READY.
Crash: nothing is kept; a successor tries every group anew.
"""

from __future__ import annotations

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError

SUSPENSION_NS = 1_000_000_000
"""How long a group waits after a failure."""


class SuspendedGroups:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.until: dict[str, int] = {}
        """Name -> when it is tried again."""

    def add(self, group: str, now_ns: int) -> None:
        """Work for the group has failed."""
        self.until[group] = now_ns + SUSPENSION_NS

    def check(self, group: str) -> None:
        """Raises TailraceError (NOT_READY) for a request of a group that waits."""
        if group in self.until:
            raise TailraceError(
                f"the group {group!r:.100} has failed a moment ago; it is tried again within a "
                "second",
                ErrorCode.NOT_READY,
            )

    def release(self, now_ns: int) -> list[str]:
        """The groups that are to be tried again now."""
        over = [group for group, until_ns in self.until.items() if now_ns >= until_ns]
        for group in over:
            del self.until[group]
        return over

    def next_deadline_ns(self) -> int | None:
        """When `release` has something to return; None: never."""
        return min(self.until.values(), default=None)
