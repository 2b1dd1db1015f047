"""Elapsed time: over restarts of a process exact, over a boot of the host never too fast, and kept
as seldom as it may be.
"""

from __future__ import annotations

import pytest

from shm.runtime.elapsed_time import MARK_EVERY_MS, NS_PER_MS, ElapsedTime, Mark, this_boot

DAY_NS = 86_400_000 * NS_PER_MS


def at(mark: Mark | None, now_ns: int, boot: int = 1) -> ElapsedTime:
    return ElapsedTime(mark, now_ns, lambda: boot)


def kept(time: ElapsedTime, now_ns: int) -> Mark:
    mark = time.mark_due(now_ns, 0)
    assert mark is not None
    time.kept(mark)
    return mark


def test_it_begins_with_nothing_and_counts_what_the_monotonic_clock_counts() -> None:
    time = at(None, 7 * DAY_NS)
    assert time.ms(7 * DAY_NS) == 0
    assert time.ms(8 * DAY_NS) == 86_400_000
    assert time.ms(DAY_NS) == 0, "a reading from before is no less than nothing"


def test_a_restart_of_the_process_costs_nothing_however_old_the_mark_is() -> None:
    mark = kept(at(None, 0), 5)
    assert at(mark, 3 * DAY_NS).ms(4 * DAY_NS) == 4 * 86_400_000


def test_a_restart_of_the_host_counts_none_of_the_time_it_was_off() -> None:
    time = at(None, 0)
    mark = kept(time, DAY_NS)
    after = at(mark, 90 * DAY_NS, boot=2)
    assert after.ms(90 * DAY_NS) == 86_400_000
    assert after.ms(91 * DAY_NS) == 2 * 86_400_000
    again = at(kept(after, 91 * DAY_NS), 5, boot=3)
    assert again.ms(5) == 2 * 86_400_000, "a monotonic clock that begins anew takes nothing back"


def test_a_monotonic_clock_before_the_mark_is_another_boot() -> None:
    assert at(Mark(1_000, DAY_NS, 1), 5).ms(5) == 1_000
    assert at(Mark(1_000, 5, 0), DAY_NS, boot=0).ms(DAY_NS) == 1_000, (
        "without a boot's number nothing is known of it"
    )


def test_a_mark_is_due_when_none_of_this_boot_is_kept_and_then_after_a_while() -> None:
    time = at(Mark(0, 0, 1), 5, boot=2)
    assert time.mark_due(6) is not None
    kept(time, 6)
    assert time.mark_due(MARK_EVERY_MS * NS_PER_MS) is None
    assert time.mark_due(MARK_EVERY_MS * NS_PER_MS + 6) is not None


@pytest.mark.parametrize("step_ns", [1, 999_999, 1_000_001, 7_777_777])
def test_marks_lose_no_fraction(step_ns: int) -> None:
    time, now_ns = at(None, 0), 0
    for _ in range(1_000):
        now_ns += step_ns
        kept(time, now_ns)
    assert time.ms(now_ns) == now_ns // NS_PER_MS


def test_the_kernel_names_the_boot() -> None:
    assert this_boot() == this_boot() > 0
