"""Segments that expire: by age, by bytes, never what a reader has leased. A clock that jumps:
`test_wall_jumps`.
"""

from __future__ import annotations

from workers.log.retention.expiry import KEEP_FOR_EVER, new_start
from workers.segment.checkpoint import UNKNOWN_TIME_US, SealedSegment

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
NOW_US = 1_700_000_000_000_000


def segments(*ages_us: int, size: int = 100) -> list[SealedSegment]:
    """Ten records each, as old as said."""
    return [
        SealedSegment(10 * n, size, 1, NOW_US - age, NOW_US - age) for n, age in enumerate(ages_us)
    ]


def start_of(
    found: list[SealedSegment],
    *,
    retention_ms: int = KEEP_FOR_EVER,
    retention_bytes: int = KEEP_FOR_EVER,
    leased: int | None = None,
) -> int:
    return new_start(
        found,
        10 * len(found),
        100,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        now_us=NOW_US,
        leased_from=leased,
    )


def test_segments_go_when_their_newest_record_is_too_old() -> None:
    assert start_of(segments(5 * DAY_US, 3 * DAY_US, DAY_US), retention_ms=2 * 86_400_000) == 20


def test_segments_go_oldest_first_while_the_rest_still_has_the_bytes() -> None:
    assert start_of(segments(3, 2, 1), retention_bytes=250) == 10
    assert start_of(segments(3, 2, 1), retention_bytes=400) == 0


def test_nothing_goes_without_limits() -> None:
    assert start_of(segments(100 * DAY_US)) == 0


def test_old_records_that_came_a_moment_ago_stay_a_while() -> None:
    found = [SealedSegment(0, 100, 1, NOW_US - 10 * DAY_US, NOW_US - 299_000_000)]
    assert start_of(found, retention_ms=86_400_000) == 0
    found = [SealedSegment(0, 100, 1, NOW_US - 10 * DAY_US, NOW_US - 301_000_000)]
    assert start_of(found, retention_ms=86_400_000) == 10


def test_records_of_the_future_go_when_they_have_lain_long_enough() -> None:
    found = [SealedSegment(0, 100, 1, NOW_US + 1000 * DAY_US, NOW_US - 2 * DAY_US)]
    assert start_of(found, retention_ms=86_400_000) == 10


def test_what_a_reader_has_leased_stays() -> None:
    assert start_of(segments(5 * DAY_US, 4 * DAY_US, 3 * DAY_US), retention_ms=1, leased=15) == 10


def test_a_segment_of_unknown_age_stays_and_so_does_what_follows_it() -> None:
    found = segments(5 * DAY_US, 4 * DAY_US)
    found[0] = found[0]._replace(max_timestamp_us=UNKNOWN_TIME_US, last_append_us=UNKNOWN_TIME_US)
    assert start_of(found, retention_ms=1) == 0
