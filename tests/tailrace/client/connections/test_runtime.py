"""Sleeping on descriptors."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tailrace.client.connections.runtime import (
    FINE_BELOW_NS,
    NEAR_SEND_BUFFER_BYTES,
    SELECT_FDS_MAX,
    DealerSocket,
    sleep_on,
)

SHORT_NS, LONG_NS = FINE_BELOW_NS // 2, FINE_BELOW_NS * 500


@pytest.fixture
def fds() -> Iterator[tuple[int, int]]:
    """Two that do not ring."""
    made = os.eventfd(0), os.eventfd(0)
    yield made
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("timeout_ns", [0, SHORT_NS, LONG_NS])
def test_those_that_are_readable_are_told(fds: tuple[int, int], timeout_ns: int) -> None:
    os.eventfd_write(fds[1], 1)
    assert sleep_on((-1, *fds), timeout_ns) == [fds[1]]


@pytest.mark.parametrize("timeout_ns", [-5, 0, SHORT_NS])
def test_nothing_is_readable_when_the_time_is_up(fds: tuple[int, int], timeout_ns: int) -> None:
    assert sleep_on(fds, timeout_ns) == []
    assert sleep_on((), timeout_ns) == []


def test_short_times_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # any that select takes: how many files the tests' process has open is nothing to this test
    fd = 7
    asked: list[Any] = []

    def noted(*arguments: Any) -> tuple[list[int], list[int], list[int]]:
        asked.append(arguments)
        return [], [], []

    monkeypatch.setattr(select, "select", noted)
    sleep_on((fd, -1), 1_234_567)
    assert asked == [([fd], (), (), 0.001234567)]


@pytest.mark.parametrize("timeout_ns", [SHORT_NS, LONG_NS])
def test_one_that_is_closed_meanwhile_ends_the_sleep(timeout_ns: int) -> None:
    gone = os.eventfd(0)
    os.close(gone)
    assert sleep_on((gone,), timeout_ns) == [gone]


def test_more_descriptors_than_select_takes_are_slept_on_too(fds: tuple[int, int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= SELECT_FDS_MAX + 1:
        pytest.skip("the limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SELECT_FDS_MAX + 64), hard))
    try:
        high = os.dup2(fds[0], SELECT_FDS_MAX + 1, inheritable=False)
        try:
            assert sleep_on((high,), SHORT_NS) == []
            os.eventfd_write(fds[0], 1)
            assert sleep_on((high,), SHORT_NS) == [high]
        finally:
            os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:7420", NEAR_SEND_BUFFER_BYTES),
        ("tcp://localhost:7420", NEAR_SEND_BUFFER_BYTES),
        ("tcp://192.0.2.1:7420", -1),
        ("tcp://localhost.example:7420", -1),
    ],
)
def test_only_a_connection_within_the_host_has_a_small_buffer(address: str, expected: int) -> None:
    socket = DealerSocket(address)
    assert socket._socket.getsockopt(zmq.SNDBUF) == expected
    socket.close()
