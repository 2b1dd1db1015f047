"""Throttled fetches: they have data, and their clients must read earlier responses first. Or they
wait for a read, and there are too many.

Owner: one front's `FetchService`.
Invariants: a fetch that ends is in here no longer.
"""

from __future__ import annotations

from collections.abc import Callable

from netfront.fetch.purgatory import Fetch
from netfront.session.time_slicing import TimeSlicer
from shm.runtime.timing_wheel import NEVER_NS

THROTTLED_CHECK_NS = 5_000_000
"""Interval of checks whether the clients have read."""
CHECKS_PER_STEP = 256


class ThrottledFetches:
    """Those of a front, the oldest first."""

    def __init__(
        self,
        time_slicer: TimeSlicer,
        may_answer: Callable[[Fetch], bool],
        retry_fetch: Callable[[Fetch], None],
    ) -> None:
        """`may_answer`: True if the client has read enough. `retry_fetch` continues a fetch, which
        may be throttled by that.
        """
        self._time_slicer = time_slicer
        self._may_answer = may_answer
        self._retry_fetch = retry_fetch
        self.fetches: dict[Fetch, None] = {}
        self.check_at_ns = NEVER_NS
        """Time when `on_drained` next has work."""

    def add(self, fetch: Fetch, now_ns: int) -> None:
        self.fetches[fetch] = None
        if self.check_at_ns == NEVER_NS:
            self.check_at_ns = now_ns + THROTTLED_CHECK_NS

    def on_drained(self, now_ns: int) -> int:
        """Continue fetches whose clients have read enough of their earlier responses."""
        if not self.fetches:
            self.check_at_ns = NEVER_NS
            return 0
        self.check_at_ns = now_ns + THROTTLED_CHECK_NS
        full: set[int] = set()
        count = 0
        for fetch in list(self.fetches):
            if fetch not in self.fetches or fetch.session.number in full:
                continue  # an earlier response has shown that this client is gone
            if not fetch.is_answering and not self._may_answer(fetch):
                full.add(fetch.session.number)
                continue
            if count == CHECKS_PER_STEP or self._time_slicer.is_spent:
                break
            del self.fetches[fetch]
            self._retry_fetch(fetch)
            if fetch in self.fetches:
                full.add(fetch.session.number)
            else:
                count += 1
        return count
