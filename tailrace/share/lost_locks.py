"""Lost locks of a share consumer: what becomes of the records that it had when its group, or their
topic, forgot them.

Owner: one share consumer, in one thread or event loop.
Invariants: no record whose lock is lost reaches the program, and each acknowledgement that was made
under such a lock is counted as failed: the next commit raises for it.
"""

from __future__ import annotations

from tailrace.core.log import logger
from tailrace.share.acknowledgements import Acknowledgements
from tailrace.share.acquired.buffer import record_count
from tailrace.share.acquired.fetch_loop import ShareFetchLoop
from tailrace.share.delivery import Delivery
from tailrace.share.requests import ShareRequests
from tailrace.share.undeliverable import Undeliverable


class LostLocks:
    """Forgets records, and says how many."""

    def __init__(
        self,
        group: str,
        delivery: Delivery,
        acknowledgements: Acknowledgements,
        requests: ShareRequests,
        fetch_loop: ShareFetchLoop,
        undeliverable: Undeliverable,
        counters: dict[str, int],
    ) -> None:
        """`counters`: the consumer's; "locks_lost" is counted."""
        self._group = group
        self._delivery = delivery
        self._acknowledgements = acknowledgements
        self._requests = requests
        self._fetch_loop = fetch_loop
        self._undeliverable = undeliverable
        self._counters = counters

    def forget_all(self, reason: str) -> None:
        """The consumer is not a member any more: all its locks are lost."""
        self._delivery.register()
        acknowledged_count, failed = self._acknowledgements.clear()
        self._requests.refuse(failed)
        count = (
            acknowledged_count
            + record_count(self._fetch_loop.forget_ranges())
            + self._delivery.clear()
        )
        self._undeliverable.forget()
        self._count(count, reason)

    def forget_topics(self, names: list[str]) -> None:
        """Topics were deleted and created again: the locks in the old ones are lost."""
        self._delivery.register()
        for name in names:
            self._undeliverable.forget(name)
            acknowledged_count, failed = self._acknowledgements.clear(name)
            self._requests.refuse(failed)
            count = acknowledged_count + self._delivery.buffered.drop_topic(name)
            self._count(count, f"topic {name} was recreated")

    def _count(self, count: int, reason: str) -> None:
        if count:
            self._counters["locks_lost"] += count
            logger.warning(
                "share_locks_lost group=%s records=%d reason=%s", self._group, count, reason
            )
