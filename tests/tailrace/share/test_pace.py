"""The number of records that a loop over a share consumer acquires at a time."""

from __future__ import annotations

import pytest

from tailrace.share.pace import NS_PER_MS, SLICE_NS, Pace

LOCK_MS = 1_000


def loops(pace: Pace, record_ms: float, count: int, now_ns: int = 0) -> tuple[list[int], int]:
    """The numbers of records acquired in `count` rounds at `record_ms` a record, and the time
    afterwards.
    """
    requested = []
    for _ in range(count):
        requested.append(pace.requested(now_ns, LOCK_MS, 500))
        for _ in range(requested[-1]):
            pace.on_delivered(now_ns)
            now_ns += int(record_ms * NS_PER_MS)
    return requested, now_ns


def test_a_loop_begins_with_one_record_and_doubles_while_its_program_is_fast() -> None:
    assert loops(Pace(), 0, 11)[0] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 500]


@pytest.mark.parametrize("record_ms", [0.1, 1, 50, 240])
def test_acquired_records_are_processed_in_a_quarter_of_a_lock(record_ms: float) -> None:
    requested, _ = loops(Pace(), record_ms, 20)
    assert requested[-1] == min(500, int(SLICE_NS / (record_ms * NS_PER_MS)))
    assert max(requested) * record_ms * NS_PER_MS <= SLICE_NS


def test_a_job_longer_than_a_lock_gets_one_record_at_a_time_until_it_is_faster() -> None:
    pace = Pace()
    _, now_ns = loops(pace, 1, 12)
    _, now_ns = loops(pace, 5_000, 1, now_ns)
    requested, now_ns = loops(pace, 5_000, 3, now_ns)
    assert requested == [1, 1, 1]
    requested, _ = loops(pace, 1, 60, now_ns)
    assert 240 < requested[-1] <= 250
