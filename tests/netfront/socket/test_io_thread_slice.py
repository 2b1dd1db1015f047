"""The time slice of libzmq's I/O thread: short while a front has little to do, never another
policy.
"""

from __future__ import annotations

import os
import threading

import pytest
import zmq

from netfront.socket.io_thread_slice import (
    BUSY_PER_S,
    SHORT_SLICE_NS,
    IoThreadSlice,
    io_threads,
    set_slice_ns,
)
from tests.kit.processes import HANG_LIMIT_S, wait_until

S = 1_000_000_000


def noting() -> tuple[list[int], IoThreadSlice]:
    """Note what is set, and what sets it."""
    calls: list[int] = []

    def set_slice(slice_ns: int) -> bool:
        calls.append(slice_ns)
        return True

    return calls, IoThreadSlice(set_slice)


def test_it_is_short_while_little_moves_and_the_kernels_own_under_load() -> None:
    calls, io_slice = noting()
    moved = 0
    for second, rate in enumerate(
        (10, BUSY_PER_S - 1, BUSY_PER_S, 100 * BUSY_PER_S, BUSY_PER_S - 1, 0), start=1
    ):
        moved += rate
        io_slice.sample(second * S, moved)
    assert calls == [SHORT_SLICE_NS, 0, SHORT_SLICE_NS]


def test_looks_that_follow_at_once_decide_nothing() -> None:
    calls, io_slice = noting()
    io_slice.sample(S, 0)
    for moment in range(100):
        io_slice.sample(S + moment, 1 + moment)
    assert calls == [SHORT_SLICE_NS]


def test_what_cannot_be_set_is_tried_once() -> None:
    calls: list[int] = []

    def refuse(slice_ns: int) -> bool:
        calls.append(slice_ns)
        return False

    io_slice = IoThreadSlice(refuse)
    for second in range(1, 9):
        io_slice.sample(second * S, second % 2 * 100 * BUSY_PER_S)
    assert len(calls) == 1


def test_a_threads_policy_and_nice_value_stay_and_others_are_left_alone() -> None:
    """A thread of this process, made nicer first; then one under another policy."""
    ready, done, found = threading.Event(), threading.Event(), list[int]()

    def be_nice() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        found.append(threading.get_native_id())
        ready.set()
        done.wait(HANG_LIMIT_S)

    thread = threading.Thread(target=be_nice, daemon=True)
    thread.start()
    assert ready.wait(HANG_LIMIT_S)
    try:
        if not set_slice_ns(found, SHORT_SLICE_NS):
            pytest.skip("this system lets nobody set slices")
        assert os.getpriority(os.PRIO_PROCESS, found[0]) == 5
        assert os.sched_getscheduler(found[0]) == os.SCHED_OTHER
        os.sched_setscheduler(found[0], os.SCHED_BATCH, os.sched_param(0))
        assert not set_slice_ns(found, SHORT_SLICE_NS)
        assert os.sched_getscheduler(found[0]) == os.SCHED_BATCH
    finally:
        done.set()
        thread.join()


def test_libzmqs_io_threads_are_found_by_their_names() -> None:
    before = set(io_threads())
    with zmq.Context() as context, context.socket(zmq.PAIR):
        wait_until(
            lambda: len(set(io_threads()) - before) == 1, "the thread has given itself its name"
        )
