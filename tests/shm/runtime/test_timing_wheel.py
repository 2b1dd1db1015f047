"""The timing wheel against a sorted list, with time jumping, standing still and running
backwards.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shm.runtime.timing_wheel import Timer, TimingWheel
from tests.kit.seeds import examples

TICK = 1000
STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(-5 * TICK, 70 * TICK)),
    st.tuples(st.just("add"), st.integers(0, 10**10 * TICK)),
    st.tuples(st.just("cancel"), st.integers(0, 1000)),
    st.tuples(st.just("advance"), st.integers(-3 * TICK, 130 * TICK)),
    st.tuples(st.just("advance"), st.integers(0, 10**9 * TICK)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEP, max_size=80), st.integers(0, 10**15), st.integers(1, 7))
def test_wheel_fires_what_a_sorted_list_would(
    steps: list[tuple[str, int]], start: int, limit: int
) -> None:
    wheel: TimingWheel[int] = TimingWheel(start, TICK)
    now = latest = start
    pending: dict[int, tuple[int, Timer[int]]] = {}
    for number, (step, amount) in enumerate(steps):
        if step == "add":
            pending[number] = (now + amount, wheel.add(now + amount, number))
        elif step == "cancel" and pending:
            key = list(pending)[amount % len(pending)]
            assert wheel.cancel(pending[key][1])
            assert not wheel.cancel(pending[key][1])
            del pending[key]
        elif step == "advance":
            now = max(now + amount, 0)
            latest = max(latest, now)
            fired: list[int] = []
            while True:
                some = wheel.advance(now, limit)
                assert len(some) <= limit
                fired += some
                deadline = wheel.next_deadline_ns()
                if not some and (deadline is None or deadline // TICK > now // TICK):
                    break
            due = {
                key for key, (deadline, _) in pending.items() if -(-deadline // TICK) <= now // TICK
            }
            assert set(fired) >= due
            for key in fired:
                # Never early, by the latest time the wheel was ever told: a clock that goes back
                # takes nothing back.
                assert -(-pending[key][0] // TICK) <= latest // TICK
                del pending[key]
        assert len(wheel) == len(pending)
        deadline = wheel.next_deadline_ns()
        assert (deadline is None) == (not pending)


def test_timers_fire_in_order_of_deadline_then_of_adding() -> None:
    wheel: TimingWheel[str] = TimingWheel(0, TICK)
    for name, tick in (("c", 300), ("a", 5), ("b", 64), ("a2", 5), ("d", 70_000)):
        wheel.add(tick * TICK, name)
    assert wheel.advance(70_000 * TICK) == ["a", "a2", "b", "c", "d"]


def test_a_jump_of_years_costs_no_more_than_what_is_in_it() -> None:
    wheel: TimingWheel[int] = TimingWheel(0, TICK)
    wheel.add(10**18, 1)
    assert wheel.advance(10**18 - TICK) == []
    assert wheel.advance(10**18) == [1]
    assert wheel.next_deadline_ns() is None


def test_the_worked_example_of_the_docstring() -> None:
    wheel: TimingWheel[int] = TimingWheel(0, TICK)
    for tick in (5, 63, 64, 200, 70_000):
        wheel.add(tick * TICK, tick)
    seen = []
    for tick in range(1, 70_001):
        fired = wheel.advance(tick * TICK)
        assert all(item == tick for item in fired)
        seen += fired
    assert seen == [5, 63, 64, 200, 70_000]
