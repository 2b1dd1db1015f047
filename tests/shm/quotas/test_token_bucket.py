"""Token buckets against the bound of their module, with clocks that jump and stand still."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shm.quotas.token_bucket import BURST_S, NS, WAIT_MIN_NS, TokenBucket

STEPS = st.lists(st.tuples(st.integers(-5 * NS, 5 * NS), st.integers(1, 5_000)), max_size=100)


@given(STEPS, st.integers(1, 1_000))
def test_use_stays_below_rate_times_time_and_one_amount_more(
    steps: list[tuple[int, int]], rate: int
) -> None:
    now_ns = latest_ns = 7 * NS
    bucket = TokenBucket(rate, now_ns)
    used = largest = 0
    for jump_ns, amount in steps:
        now_ns += jump_ns
        latest_ns = max(latest_ns, now_ns)
        if bucket.balance(now_ns) >= 1:
            bucket.take(amount, now_ns)
            used += amount
            largest = max(largest, amount)
        assert used <= rate * ((latest_ns - 7 * NS) / NS + BURST_S) + largest + 1
        assert bucket.balance(now_ns) <= rate * BURST_S


@given(STEPS, st.integers(1, 1_000))
def test_at_the_time_that_it_names_it_is_open(steps: list[tuple[int, int]], rate: int) -> None:
    now_ns = 0
    bucket = TokenBucket(rate, now_ns)
    for jump_ns, amount in steps:
        now_ns += abs(jump_ns)
        bucket.take(amount, now_ns)
        ready_ns = bucket.ready_ns(now_ns)
        if bucket.balance(now_ns) >= 1:
            assert ready_ns == now_ns
        else:
            assert ready_ns >= now_ns + WAIT_MIN_NS
            assert bucket.balance(ready_ns + 2) > 0.99
            now_ns = ready_ns


def test_a_clock_that_is_set_back_gives_nothing_and_takes_nothing() -> None:
    bucket = TokenBucket(100, 50 * NS)
    bucket.take(100, 50 * NS)
    assert bucket.balance(0) == 0
    assert bucket.balance(50 * NS) == 0
    assert bucket.balance(51 * NS) == 100


def test_what_is_given_back_does_not_exceed_the_burst() -> None:
    bucket = TokenBucket(100, 0)
    bucket.take(30, 0)
    bucket.take(-500, 0)
    assert bucket.balance(0) == 100


def test_a_changed_rate_keeps_the_debt() -> None:
    bucket = TokenBucket(100, 0)
    bucket.take(1_100, 0)
    bucket.set_rate(1_000, 0)
    assert bucket.balance(0) == -1_000
    assert bucket.ready_ns(0) >= NS
    bucket.set_rate(10, 10 * NS)
    assert bucket.balance(10 * NS) == 10
