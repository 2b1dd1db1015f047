"""Children that hang and are killed, and those that lived on a host that stood still."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from appliance.supervise.processes.child_processes import (
    NS_PER_MS,
    SUSPENDED_NS,
    Child,
    check_heartbeats,
)
from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role
from shm.tables.control import Control
from tests.kit.memory import simulated
from tests.kit.processes import HANG_LIMIT_S

HANG_TIMEOUT_MS = 30_000
TIMEOUT_NS = HANG_TIMEOUT_MS * NS_PER_MS


class World:
    """One process, looked at by hand."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        self.process = process
        self.control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.child = Child(Role.WORKER, 0, pid=process.pid, pidfd=pidfd)

    def beat(self, now_ns: int) -> None:
        self.control.process(Role.WORKER, 0).store(ProcessWord.BEAT, now_ns)

    def look(self, now_ns: int, late_ns: int = 0) -> bool:
        return check_heartbeats([self.child], self.control, HANG_TIMEOUT_MS, now_ns, late_ns)


@pytest.fixture
def world() -> Iterator[World]:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            yield World(process, pidfd)
        finally:
            os.close(pidfd)
            process.kill()


def test_a_process_without_a_beat_for_the_timeout_is_killed(world: World) -> None:
    world.beat(1)
    assert world.look(1)
    assert not world.look(TIMEOUT_NS * 7 // 8), "systemd's watchdog is not fed any more"
    world.look(TIMEOUT_NS + 1)
    assert world.process.wait(HANG_LIMIT_S) == -signal.SIGKILL


def test_when_the_host_stood_still_no_process_is_to_blame(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.beat(1)
    assert world.look(1)
    stood_ns = 2 * TIMEOUT_NS
    with caplog.at_level(logging.WARNING):
        assert world.look(1 + stood_ns, late_ns=stood_ns)
    assert f"host_stood_still ms={2 * HANG_TIMEOUT_MS}" in caplog.text
    assert world.process.poll() is None
    world.look(1 + stood_ns + TIMEOUT_NS)
    assert world.process.wait(HANG_LIMIT_S) == -signal.SIGKILL, (
        "silent for the timeout while the host ran"
    )


def test_a_look_that_is_a_little_late_changes_nothing(world: World) -> None:
    world.beat(1)
    assert world.look(1)
    world.look(1 + TIMEOUT_NS, late_ns=SUSPENDED_NS - 1)
    assert world.process.wait(HANG_LIMIT_S) == -signal.SIGKILL
