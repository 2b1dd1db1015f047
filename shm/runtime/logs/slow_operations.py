"""Operations that take longer than `slow_operation_ms` are logged, one line each.

    slow_operation operation=sync ms=1320 data_dir=/var/lib/tailrace bytes=65536 partitions=3

Owner: each process its limit, which follows the settings.
"""

from __future__ import annotations

import logging

from shm.runtime.timing_wheel import NEVER_NS

logger = logging.getLogger(__name__)

NS_PER_MS = 1_000_000


class SlowOperations:
    """The limit of this process, for comparisons on hot paths."""

    def __init__(self) -> None:
        self.limit_ns = NEVER_NS

    def set_limit(self, limit_ms: int) -> None:
        """0: nothing is slow."""
        self.limit_ns = limit_ms * NS_PER_MS if limit_ms else NEVER_NS

    def log(self, operation: str, duration_ns: int, **facts: object) -> None:
        """Log an operation that took longer than the limit."""
        names = "".join(f" {name}=%s" for name in facts)
        logger.warning(
            f"slow_operation operation=%s ms=%d{names}",
            operation, duration_ns // NS_PER_MS, *facts.values(),
        )  # fmt: skip


SLOW = SlowOperations()
