"""Rules of compaction: which segments of a log are cleaned, when, and together with which. Pure.

Kafka's rules:
- Sealed segments are cleaned, from the log's beginning up to the first that must wait: one that is
  not below the last stable offset, is younger than min.compaction.lag.ms, or is damaged.
- The segments of this part that a pass has cleaned come first. The others are *dirty*. The dirty
  ratio is dirty bytes / all bytes of this part.
- A log is due above min.cleanable.dirty.ratio, or when its oldest dirty records are older than
  max.compaction.lag.ms.
- A pass reads the keys of the dirty segments and writes all segments of the part again, small ones
  together up to segment.bytes.

Owner: pure. The flusher decides with it; times are corrected for jumps of the clock before.

Invariants:
- In the cleaned part no two records have one key, beside those without a key.
- A pass takes whole segments, in order, and leaves none out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A sealed segment as compaction sees it."""

    base: int
    end: int
    size: int
    first_append_us: int
    """0 if not known."""
    last_append_us: int
    """0 if not known: it counts as old."""
    is_cleaned: bool
    is_damaged: bool = False
    schema_id: int = -1
    """The schema of its batches, -1 if it is not known."""


class Cleanable(NamedTuple):
    """The part of a log that can be cleaned now."""

    segments: tuple[Candidate, ...]
    clean_count: int
    """Number of segments at its beginning that a pass has cleaned."""

    @property
    def clean_bytes(self) -> int:
        return sum(segment.size for segment in self.segments[: self.clean_count])

    @property
    def dirty_bytes(self) -> int:
        return sum(segment.size for segment in self.segments[self.clean_count :])

    @property
    def dirty_ratio(self) -> float:
        """0.0 if nothing is dirty."""
        dirty = self.dirty_bytes
        return dirty / (dirty + self.clean_bytes) if dirty else 0.0

    @property
    def dirty_since_us(self) -> int:
        """The append time of the oldest dirty records, 0 if nothing is dirty or it is not known."""
        dirty = self.segments[self.clean_count :]
        return (dirty[0].first_append_us or dirty[0].last_append_us) if dirty else 0


def cleanable(
    segments: Iterable[Candidate], *, stable_offset: int, now_us: int, min_lag_ms: int
) -> Cleanable:
    """The part of the sealed segments, oldest first, that can be cleaned now."""
    part: list[Candidate] = []
    clean_count = 0
    for segment in segments:
        if (
            segment.is_damaged
            or segment.end > stable_offset
            or (not segment.is_cleaned and 0 < min_lag_ms * 1000 > now_us - segment.last_append_us)
        ):
            break
        if segment.is_cleaned and clean_count == len(part):
            clean_count += 1
        part.append(segment)
    return Cleanable(tuple(part), clean_count)


def is_overdue(part: Cleanable, *, now_us: int, max_lag_ms: int) -> bool:
    """True if the oldest dirty records are older than max.compaction.lag.ms."""
    return bool(part.dirty_bytes) and now_us - part.dirty_since_us >= max_lag_ms * 1000


def is_due(part: Cleanable, *, now_us: int, min_ratio: float, max_lag_ms: int) -> bool:
    """True if the part should be cleaned."""
    return bool(part.dirty_bytes) and (
        part.dirty_ratio > min_ratio or is_overdue(part, now_us=now_us, max_lag_ms=max_lag_ms)
    )


def runs(segments: Sequence[Candidate], segment_bytes: int) -> list[list[Candidate]]:
    """Divide segments into runs that become one segment each: those of one schema, as long as
    their sizes sum up to `segment_bytes`.
    """
    found: list[list[Candidate]] = []
    size = 0
    for segment in segments:
        if (
            found
            and size + segment.size <= segment_bytes
            and segment.schema_id == found[-1][-1].schema_id
        ):
            found[-1].append(segment)
            size += segment.size
        else:
            found.append([segment])
            size = segment.size
    return found
