"""The thread of heartbeats, where what nobody expects happens in it."""

from __future__ import annotations

import os

import pytest

from tailrace import Consumer
from tailrace.core.errors import TailraceError
from tailrace.group import heartbeat
from tests.kit.processes import wait_until


def test_a_thread_that_fails_again_and_again_says_why_to_every_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.group.heartbeat.FAILURE_PAUSE_NS", 0)
    with Consumer("t", bootstrap="tcp://127.0.0.1:1", group_id="g") as consumer:
        assert consumer._group is not None
        thread = consumer._group._thread

        def fail() -> int:
            raise RuntimeError("nobody expects this")

        monkeypatch.setattr(thread.beats, "step", fail)
        with pytest.raises(TailraceError, match="RuntimeError: nobody expects this"):
            consumer.poll(60_000)
        wait_until(lambda: thread.failure is not None, "the thread gives up")
        for _ in range(2):
            with pytest.raises(TailraceError, match="nobody expects this"):
                consumer.poll(0)


def test_a_wakeup_that_outlives_the_names_of_its_module_is_closed_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So is it at the interpreter's end, in a cycle or in another module."""
    wakeup = heartbeat.Wakeup()
    fd = wakeup.fd
    monkeypatch.setattr(heartbeat, "os", None)
    del wakeup
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
