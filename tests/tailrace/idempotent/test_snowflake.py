"""Ids: each larger than the one before and of no other generator, whatever the clock, the threads
and fork() do.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import ClientClosedError, IdGenerator, InvalidRequestError
from tailrace.idempotent.snowflake import EPOCH_MS, SEQUENCE_MAX, derived_instance, parts

NOW_MS = 1_790_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def __call__(self) -> int:
        return self.now_ms


@given(
    steps=st.lists(
        st.tuples(
            st.one_of(st.integers(-5, 5), st.integers(-(10**10), 10**10)), st.integers(0, 10_000)
        ),
        max_size=30,
    ),
    instance=st.integers(0, 1023),
)
def test_ids_ascend_whatever_the_clock_does(steps: list[tuple[int, int]], instance: int) -> None:
    clock = Clock()
    ids = IdGenerator(instance, wall_ms=clock)
    made, highest_ms, taken = [next(ids)], clock.now_ms, 1
    for jump_ms, count in steps:
        clock.now_ms = max(0, clock.now_ms + jump_ms)
        highest_ms = max(highest_ms, clock.now_ms)
        made += ids.take(count)
        taken += count
        assert parts(made[-1]).timestamp <= highest_ms + taken // (SEQUENCE_MAX + 1) + 1, (
            "ahead of the clock by no more than was taken"
        )
    assert made == sorted(set(made))
    assert all(0 <= number < 2**63 and number >> 12 & 1023 == instance for number in made)


@given(ms=st.integers(0, 2**41 - 1), instance=st.integers(0, 1023))
def test_an_id_says_when_and_where_it_was_made(ms: int, instance: int) -> None:
    ids = IdGenerator(instance, wall_ms=lambda: EPOCH_MS + ms)
    first, second = ids.take(2)
    assert parts(first) == (EPOCH_MS + ms, instance, 0)
    assert IdGenerator.parts(second) == (EPOCH_MS + ms, instance, 1)
    assert parts(first).datetime == dt.datetime(2020, 1, 1, tzinfo=dt.UTC) + dt.timedelta(
        milliseconds=ms
    )
    # The one at the bottom of the layout's drawing: no bit is anywhere else.
    assert first == ms << 22 | instance << 12


def test_ids_of_two_instances_differ_and_those_of_a_successor_come_behind() -> None:
    clock = Clock()
    one, other = IdGenerator(1, wall_ms=clock), IdGenerator(2, wall_ms=clock)
    assert not {*one.take(5000)} & {*other.take(5000)}
    last = one.next_id()
    clock.now_ms -= 3_600_000
    assert next(IdGenerator(1, wall_ms=clock)) < last, (
        "a successor does not know that the clock went back"
    )
    assert next(IdGenerator(1, after=last, wall_ms=clock)) > last
    assert next(IdGenerator(1000, after=last, wall_ms=clock)) > last


def test_threads_share_a_generator() -> None:
    ids = IdGenerator(3, wall_ms=lambda: NOW_MS)
    barrier, made = threading.Barrier(4), list[list[int]]()

    def take() -> None:
        barrier.wait()
        mine = [number for _ in range(200) for number in (*ids.take(20), next(ids))]
        assert mine == sorted(mine)
        made.append(mine)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for mine in made for number in mine}) == 4 * 200 * 21


def test_a_child_has_an_instance_of_its_own_or_is_refused() -> None:
    derived, told = IdGenerator(), IdGenerator(7)
    receive, send = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            send.send((derived.instance, next(derived)))
            next(told)
        except ClientClosedError as error:
            code = 7 if "made before fork()" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    instance, number = receive.recv()
    assert parts(number).instance == instance
    # One of 1,024 times they are equal by chance: what differs is the seed.
    assert len({derived_instance() for _ in range(100)}) > 50


def test_what_makes_no_sense_is_refused() -> None:
    given_ones: list[dict[str, Any]] = [
        {"instance": -1},
        {"instance": 1024},
        {"instance": "1"},
        {"instance": True},
        {"instance": 1, "after": -1},
    ]
    for arguments in given_ones:
        with pytest.raises(InvalidRequestError, match="whole number"):
            IdGenerator(**arguments)
    ids = IdGenerator(1)
    for count in (-1, 1_000_001, 1.5):
        with pytest.raises(InvalidRequestError, match="count is"):
            ids.take(count)  # type: ignore[arg-type]
    assert ids.take(0) == []
    with pytest.raises(InvalidRequestError, match="an id is -1"):
        parts(-1)
    last = IdGenerator(1, wall_ms=lambda: EPOCH_MS + 2**41 - 1)
    assert max(last.take(4096)) < 2**63
    with pytest.raises(InvalidRequestError, match="beyond the year 2089"):
        next(last)
    assert next(IdGenerator(1, wall_ms=lambda: 0)) == 1 << 12, "a clock that was never set"
