"""Rules of merging: which sealed segments are written again because their batches are small. Pure.

A segment is written again once, as long as it is due:

- it has at least SEGMENT_MIN_BYTES, and its batches on average fewer than `small.batch.bytes`;
- it is sealed, below the last stable offset, not the newest one, and not damaged;
- it was neither merged nor cleaned before. Its first batch says so (`BatchHeader.merged_count`).

Each segment is merged for itself, so that retention removes records in the portions that
`segment.ms` and `segment.bytes` have made.

Owner: pure. The flusher decides with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.segment.checkpoint import SealedSegment

SEGMENT_MIN_BYTES = 512 << 10
"""A smaller segment is left: what it would save is less than a job costs."""
SETTING = "small.batch.bytes"


def has_small_batches(segment: SealedSegment, below_bytes: int) -> bool:
    """True if a segment's batches are smaller than `below_bytes` on average."""
    return (
        segment.batch_count > 1
        and segment.size >= SEGMENT_MIN_BYTES
        and segment.size < segment.batch_count * below_bytes
    )
