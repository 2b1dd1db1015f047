"""Requests and their timeouts: who is late when, and what those cost that are answered in time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from netfront.produce.pending_produces import CLOSED_MAX, LATE_AT_ONCE, PendingProduces
from netfront.session.pending_requests import TIMEOUT_MAX_MS
from shm.runtime.timing_wheel import NEVER_NS

MS = 1_000_000


def pending_produces() -> PendingProduces:
    return PendingProduces(1 << 20, 1 << 20)


@given(seed=st.integers(0, 2**32))
def test_whoever_is_late_is_told_in_the_order_of_the_deadlines_and_nobody_else(seed: int) -> None:
    chance, asked, now_ms = random.Random(seed), pending_produces(), 0
    open_until: dict[int, int] = {}
    for number in range(chance.randrange(1, 400)):
        now_ms += chance.randrange(4)
        timeout_ms = chance.choice([0, 1, 7, 50, 1000])
        asked.open(1, number, 2, 1, now_ms * MS, timeout_ms)
        open_until[number] = now_ms + timeout_ms
        if chance.random() < 0.7 and open_until:
            answered = chance.choice(list(open_until))
            assert asked.take(1, answered) is not None
            del open_until[answered]
        if chance.random() < 0.3:
            assert not open_until or asked.expires_at_ns <= min(open_until.values()) * MS
            late = [request.correlation_id for request in asked.pop_expired(now_ms * MS)]
            assert late == sorted(
                (n for n, at in open_until.items() if at <= now_ms),
                key=lambda n: (open_until[n], n),
            )
            for number_of_late in late:
                del open_until[number_of_late]
    assert len(asked) == len(open_until)


def test_requests_that_are_answered_in_time_leave_no_more_than_a_few_deadlines() -> None:
    asked = pending_produces()
    for number in range(10 * CLOSED_MAX):
        asked.open(1, number, 2, 1, number, 30_000)
        asked.take(1, number)
    assert len(asked._deadlines) <= CLOSED_MAX + 1
    assert asked.pop_expired(0) == []
    assert asked.expires_at_ns == NEVER_NS


def test_many_that_are_late_are_told_in_pieces_and_the_next_is_due_at_once() -> None:
    asked = pending_produces()
    for number in range(LATE_AT_ONCE + 1):
        asked.open(1, number, 2, 1, 0, 5)
    assert len(asked.pop_expired(5 * MS)) == LATE_AT_ONCE
    assert asked.expires_at_ns == 5 * MS
    assert len(asked.pop_expired(5 * MS)) == 1


def test_a_timeout_beyond_the_longest_counts_as_the_longest() -> None:
    asked = pending_produces()
    asked.open(1, 1, 2, 1, 0, TIMEOUT_MAX_MS + 1)
    assert asked.expires_at_ns == TIMEOUT_MAX_MS * MS
