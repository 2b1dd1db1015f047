"""An appliance that a test starts is a fork of the image where that makes no difference."""

from __future__ import annotations

import pathlib
import signal
import sys

import psutil
import pytest

from tailrace import NotReachableError, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.starts import forked_starts
from tests.kit.starts.forked_starts import ForkedSupervisor


def is_fork(appliance: EmbeddedAppliance) -> bool:
    return isinstance(appliance._process, ForkedSupervisor)


def test_a_fork_is_a_child_with_the_arguments_of_a_supervisor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests before this one may have changed what the process passes on
    monkeypatch.setattr(forked_starts, "_usual", forked_starts._inherited())
    running = start_embedded(data_dir=str(tmp_path / "data"))
    try:
        assert is_fork(running)
        process = psutil.Process(running.pid)
        assert process.ppid() == psutil.Process().pid
        line = process.cmdline()
        assert "appliance.supervise.supervisor" in line
        assert line[line.index("--data-dir") + 1] == str(tmp_path / "data")
        with Producer(running.address) as producer:
            assert producer.send("t", b"x").result(HANG_LIMIT_S).offset == 0
    finally:
        assert running.stop() == 0


def test_a_killed_fork_is_reaped_with_the_signals_number() -> None:
    running = start_embedded()
    psutil.Process(running.pid).kill()
    assert running.stop() == -signal.SIGKILL
    assert not psutil.pid_exists(running.pid)


def test_a_start_that_the_settings_forbid_ends_with_its_exit_code() -> None:
    with pytest.raises(NotReachableError, match="exit code 2"):
        start_embedded(settings={"ring_bytes": "none"})


def test_another_environment_has_an_interpreter_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_embedded().stop()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    running = start_embedded()
    try:
        assert not is_fork(running)
        assert psutil.Process(running.pid).environ()["MALLOC_ARENA_MAX"] == "3"
    finally:
        assert running.stop() == 0


def test_a_program_in_place_of_the_interpreter_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho ran > {tmp_path}/note\nexec {sys.executable} "$@"\n')
    shell.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(shell))
    running = start_embedded()
    try:
        assert not is_fork(running)
        assert (tmp_path / "note").read_text() == "ran\n"
    finally:
        assert running.stop() == 0


def test_other_limits_and_another_directory_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    before = forked_starts._inherited()
    assert forked_starts._inherited() == before
    monkeypatch.chdir(tmp_path)
    assert forked_starts._inherited() != before
