"""Retention: decides which segments have expired. Pure.

Kafka's rules:
- A sealed segment expires when its newest record is older than retention.ms, or while the log
  without it still has retention.bytes.
- Segments are deleted oldest first, and never one after another that stays.
- The active segment expires too. It is sealed first.
- -1 keeps segments for ever.

A record's timestamp is set by the producer. One from the future would keep a segment for ever. A
segment's age therefore counts from its newest timestamp or its last append, whichever is earlier,
with OLD_RECORDS_STAY_US as an exception. Jumps of the wall clock move the timestamps before this
module sees them (`workers.log.retention.wall_clock_jumps`).
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.segment.checkpoint import SealedSegment

KEEP_FOR_EVER = -1
OLD_RECORDS_STAY_US = 300_000_000
"""Minimum time that records stay which are old when appended (a backfill). In Kafka too they live
until its next retention check, every five minutes.
"""


def expires_us(max_timestamp_us: int, last_append_us: int, retention_ms: int) -> int:
    """Return the expiry time of a segment in microseconds since 1970.

    `last_append_us` is 0 if not known.
    """
    by_timestamp = max_timestamp_us + retention_ms * 1000
    if not last_append_us:
        return by_timestamp
    return min(
        last_append_us + retention_ms * 1000,
        max(by_timestamp, last_append_us + OLD_RECORDS_STAY_US),
    )


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
    """Return the log start offset after retention: the base of the oldest segment that stays.

    It is `live_base`, the base of the active or next segment, if no segment stays. `leased_from` is
    the lowest offset that a reader has leased.
    """
    bases = [*(segment.base for segment in segments), live_base]
    total = live_bytes + sum(segment.size for segment in segments)
    gone = 0
    for segment in segments:
        too_old = (
            retention_ms != KEEP_FOR_EVER
            and expires_us(segment.max_timestamp_us, segment.last_append_us, retention_ms) < now_us
        )
        too_much = retention_bytes != KEEP_FOR_EVER and total - segment.size >= retention_bytes
        if not (too_old or too_much) or (leased_from is not None and bases[gone + 1] > leased_from):
            break
        total -= segment.size
        gone += 1
    return bases[gone]
