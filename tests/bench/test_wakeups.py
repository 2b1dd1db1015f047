"""The bench of wake-ups reads the output of other programs."""

from __future__ import annotations

import os

from bench.stages.wakeups import _CALL, _WAKING, threads_of


def test_who_wakes_whom_is_read_from_perf() -> None:
    line = (
        "     ZMQbg/IO/0    832 59722.582156:       sched:sched_waking: comm=tr-front-0 "
        "pid=830 prio=120 target_cpu=001"
    )
    found = _WAKING.match(line)
    assert found is not None
    assert found.groups() == ("ZMQbg/IO/0", "832", "830")


def test_calls_are_read_from_strace_once_each() -> None:
    lines = [
        "832   poll([{fd=7}], 1, 0) = 0",
        "832   epoll_wait(5,  <unfinished ...>",
        "832   <... epoll_wait resumed>, 256, -1) = 1",
    ]
    found = [_CALL.match(line) for line in lines]
    assert [match and match.groups() for match in found] == [
        ("832", "poll"),
        ("832", "epoll_wait"),
        ("832", "epoll_wait"),
    ]


def test_the_counters_of_a_process_are_read() -> None:
    found = threads_of([os.getpid()])
    assert found[os.getpid()].cpu_us > 0
    assert found[os.getpid()].switches > 0
