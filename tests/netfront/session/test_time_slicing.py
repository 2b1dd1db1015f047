"""Slices: what one turn of the loop may cost, whose turn it is, and what may wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netfront.session.sessions import Session
from netfront.session.time_slicing import (
    SESSION_BYTES_MAX,
    SESSION_TASKS_MAX,
    STARTED_MAX,
    UNITS_PER_STEP,
    Task,
    TimeSlicer,
)
from netfront.socket.flow_control import Credit
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError


def session(number: int) -> Session:
    return Session(number, number, b"%d" % number, "test", Credit(), 0)


class Work:
    """Tasks that write down what they cost."""

    def __init__(self) -> None:
        self.spent = 0
        self.done: list[str] = []
        self.errors: list[Exception] = []
        self.started = 0

    def task(
        self, owner: Session, name: str, units: int, size_bytes: int = 0, *, fails: bool = False
    ) -> Task:
        def work() -> Iterator[int]:
            self.started += 1
            for _ in range(units):
                self.spent += 1
                yield 1
            if fails:
                raise RuntimeError(name)
            self.done.append(name)

        return Task(owner, size_bytes, work, self.errors.append)


def test_small_work_is_done_at_once_and_large_work_in_turns_of_bounded_cost() -> None:
    time_slicer, work = TimeSlicer(), Work()
    time_slicer.begin(work.task(session(1), "small", 50), try_now=True)
    assert work.done == ["small"]
    time_slicer.begin(work.task(session(1), "large", 5 * UNITS_PER_STEP), try_now=True)
    while time_slicer:
        before = work.spent
        assert time_slicer.step()
        assert work.spent - before <= UNITS_PER_STEP + 1
    assert work.done == ["small", "large"]
    assert time_slicer.step() == 0


def test_a_session_with_much_to_do_does_not_keep_the_others_waiting() -> None:
    time_slicer, work = TimeSlicer(), Work()
    busy, other = session(1), session(2)
    for number in range(SESSION_TASKS_MAX):
        time_slicer.begin(work.task(busy, f"busy{number}", 10 * UNITS_PER_STEP), try_now=False)
    time_slicer.begin(work.task(other, "other", UNITS_PER_STEP), try_now=False)
    for _ in range(4):
        time_slicer.step()
    assert work.done == ["other"]


def test_few_tasks_hold_half_made_answers() -> None:
    time_slicer, work = TimeSlicer(), Work()
    for number in range(100):
        time_slicer.begin(
            work.task(session(number), f"t{number}", 10 * UNITS_PER_STEP), try_now=False
        )
    for _ in range(20):
        time_slicer.step()
    assert work.started == STARTED_MAX


def test_what_waits_is_bounded_by_number_and_by_bytes() -> None:
    time_slicer, work = TimeSlicer(), Work()
    for _ in range(SESSION_TASKS_MAX):
        time_slicer.begin(work.task(session(1), "t", 1), try_now=False)
    with pytest.raises(WireError) as caught:
        time_slicer.begin(work.task(session(1), "t", 1), try_now=False)
    assert caught.value.code is ErrorCode.TOO_MANY_REQUESTS
    time_slicer.begin(work.task(session(2), "t", 1, SESSION_BYTES_MAX), try_now=False)
    with pytest.raises(WireError):
        time_slicer.begin(work.task(session(2), "t", 1, 1), try_now=False)
    while time_slicer:
        time_slicer.step()
    assert not time_slicer._queued_of
    assert time_slicer._bytes == 0


def test_work_that_fails_is_told_and_ends_nothing_else() -> None:
    time_slicer, work = TimeSlicer(), Work()
    time_slicer.begin(work.task(session(1), "bad", 500, fails=True), try_now=True)
    time_slicer.begin(work.task(session(2), "good", 500), try_now=True)
    while time_slicer:
        time_slicer.step()
    assert [str(error) for error in work.errors] == ["bad"]
    assert work.done == ["good"]


def test_a_session_that_ends_in_the_midst_of_its_own_work_leaves_nothing() -> None:
    time_slicer = TimeSlicer()
    owner = session(1)

    def work() -> Iterator[int]:
        yield UNITS_PER_STEP
        time_slicer.forget_session(owner)
        yield UNITS_PER_STEP
        raise AssertionError("it goes on")

    for _ in range(3):
        time_slicer.begin(Task(owner, 10, work, print), try_now=False)
    while time_slicer:
        time_slicer.step()
    assert (time_slicer._bytes, len(time_slicer), time_slicer._queued_of) == (0, 0, {})
