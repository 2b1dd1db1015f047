"""Retention: which segments have expired. Pure decisions on what is known of them.

Kafka's rules: a closed segment goes when its newest record is older than retention.ms, or while the log without it still has
retention.bytes; oldest first, and never one behind another that stays. The live segment goes too once it has expired: it is closed first. -1 keeps for ever.

A record's timestamp is the producer's. One from the future would keep a segment for ever, so a segment's age counts from its newest timestamp or from
when it was last appended to, whichever is earlier; but see OLD_RECORDS_STAY_US.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.checkpoint import SealedSegment

KEEP_FOR_EVER = -1
OLD_RECORDS_STAY_US = 300_000_000
"""Records that are old when they come (a backfill) stay this long at least: in Kafka, too, they live until its retention check, every five minutes."""


def expires_us(max_timestamp_us: int, last_append_us: int, retention_ms: int) -> int:
    """Retention expiry time of a segment, microseconds since 1970. `last_append_us` 0: not known."""
    by_timestamp = max_timestamp_us + retention_ms * 1000
    if not last_append_us:
        return by_timestamp
    return min(last_append_us + retention_ms * 1000, max(by_timestamp, last_append_us + OLD_RECORDS_STAY_US))


def new_start(
    segments: Sequence[SealedSegment],
    live_base: int,
    live_bytes: int,
    *,
    retention_ms: int,
    retention_bytes: int,
    now_us: int,
    leased_from: int | None,
) -> int:
    """The log start offset that retention asks for: the base of the oldest segment that stays (`live_base`, where the live segment begins or would
    begin, if none does). `leased_from`: the lowest offset that a reader has asked to keep.
    """
    bases = [*(segment.base for segment in segments), live_base]
    total = live_bytes + sum(segment.size for segment in segments)
    gone = 0
    for segment in segments:
        too_old = retention_ms != KEEP_FOR_EVER and expires_us(segment.max_timestamp_us, segment.last_append_us, retention_ms) < now_us
        too_much = retention_bytes != KEEP_FOR_EVER and total - segment.size >= retention_bytes
        if not (too_old or too_much) or (leased_from is not None and bases[gone + 1] > leased_from):
            break
        total -= segment.size
        gone += 1
    return bases[gone]


class CautiousClock:
    """The wall clock for decisions that destroy: it never runs ahead of the time that has really passed since the start.

    A wall clock that jumps forward an hour would expire an hour of records too early; one that jumps back only keeps them longer.
    """

    def __init__(self, wall_us: int, monotonic_ns: int) -> None:
        self._ahead_us = wall_us - monotonic_ns // 1000

    def now_us(self, wall_us: int, monotonic_ns: int) -> int:
        return min(wall_us, self._ahead_us + monotonic_ns // 1000)
