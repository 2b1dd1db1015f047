"""Log lines of a producer whose batches wait because the appliance's disk is full. A program that
only waits looks hung.

Owner: a Producer, under its lock.
"""

from __future__ import annotations

from tailrace.core.log import logger

REPEAT_NS = 10_000_000_000
"""Interval of the line while the producer waits."""
NS_PER_S = 1_000_000_000


class FullDiskLog:
    """The partitions whose batches are refused with DISK_FULL."""

    def __init__(self) -> None:
        self._since_ns: dict[tuple[str, int], int] = {}
        """Time of the first refusal by topic and partition."""
        self._logged_ns = 0

    def __bool__(self) -> bool:
        return bool(self._since_ns)

    def on_refusal(self, topic: str, partition: int, now_ns: int) -> None:
        """Log the first refusal, and each REPEAT_NS that the producer waits."""
        is_first = not self._since_ns
        since_ns = self._since_ns.setdefault((topic, partition), now_ns)
        if not is_first and now_ns - self._logged_ns < REPEAT_NS:
            return
        self._logged_ns = now_ns
        waited = "" if is_first else f" (for {(now_ns - since_ns) // NS_PER_S} s now)"
        logger.warning(
            "the producer waits%s: the appliance's disk is full, and it refuses records of topic "
            "%s, partition %d. It goes on by itself when there is room: free some space, lower "
            "retention.ms or retention.bytes, or run tailrace topic delete-records",
            waited, topic, partition,
        )  # fmt: skip

    def on_success(self, topic: str, partition: int, now_ns: int) -> None:
        """Log that records are accepted again, once for all partitions that waited."""
        since_ns = self._since_ns.pop((topic, partition), None)
        if since_ns is not None and not self._since_ns:
            logger.warning(
                "the appliance's disk has room; the producer goes on after %d s",
                (now_ns - since_ns) // NS_PER_S,
            )
