"""Moves that did not come about: each is logged, and described for a day.

Owner: the controller (`partition_moves`).
Bounds: FAILED_MAX of them; the oldest goes first.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

from appliance.control.moves.moving_partition import Key, Move

logger = logging.getLogger(__name__)

FAILED_MAX = 16
FAILED_SHOWN_NS = 86_400_000_000_000


class FailedMoves:
    """The last move of each partition that stayed where it was."""

    def __init__(self) -> None:
        self._failed: dict[Key, tuple[int, dict[str, Any]]] = {}
        """With the time until which it is described."""

    def note(self, each: Move, stays_in: str, to: str, reason: str, now_ns: int) -> None:
        """Say that a partition stays in the directory `stays_in`."""
        logger.warning(
            "partition_stays topic=%s partition=%d to=%s reason=%r advice=%r", each.name,
            each.partition, to, reason, "run tailrace partition move again",
        )  # fmt: skip
        while len(self._failed) >= FAILED_MAX:
            del self._failed[next(iter(self._failed))]
        row = {
            "topic": each.name, "partition": each.partition, "state": "failed",
            "from": stays_in, "to": to, "reason": reason,
        }  # fmt: skip
        self._failed[each.key] = now_ns + FAILED_SHOWN_NS, row

    def forget(self, key: Key) -> None:
        """A partition moves, whatever became of its last move."""
        self._failed.pop(key, None)

    def described(self, topic_ids: Container[bytes], now_ns: int) -> list[dict[str, Any]]:
        """Rows for JSON, those of these topics."""
        return [
            row
            for (topic_id, _), (until_ns, row) in self._failed.items()
            if topic_id in topic_ids and now_ns < until_ns
        ]
