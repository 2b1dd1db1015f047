"""The unit files, and the notify protocol over a real socket. `test_service.py` boots a systemd."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from appliance.supervise.processes.restart_policy import HALTING, ExitCode
from appliance.supervise.sd_notify import Notifier
from tests.kit.processes import HANG_LIMIT_S, comm, wait_until

UNITS = pathlib.Path(__file__).parents[3] / "systemd"
TAILRACE = pathlib.Path(sys.executable).parent / "tailrace"


def receive_until(server: socket.socket, requested: str) -> list[str]:
    """Datagrams up to the one that has `requested`."""
    server.settimeout(30)
    lines: list[str] = []
    while not any(line.startswith(requested) for line in lines):
        lines += server.recv(4096).decode().split("\n")
    return lines


def serve(
    tmp_path: pathlib.Path, notify_socket: str, *, watchdog_us: int, hang_timeout_ms: int
) -> subprocess.Popen[bytes]:
    """An appliance as systemd would start it."""
    environment = {**os.environ, "NOTIFY_SOCKET": notify_socket, "WATCHDOG_USEC": str(watchdog_us)}
    arguments = [
        str(TAILRACE),
        "serve",
        "--data-dir",
        str(tmp_path / "data"),
        "--listen",
        "tcp://127.0.0.1:0",
    ]
    return subprocess.Popen(
        [*arguments, "--set", f"hang_timeout_ms={hang_timeout_ms}"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )


def test_ready_watchdog_status_and_stopping_over_a_real_socket(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        served = serve(tmp_path, path, watchdog_us=900_000, hang_timeout_ms=30_000)
        try:
            lines = receive_until(server, "READY=1")
            assert any(line.startswith("STATUS=serving on tcp://127.0.0.1:") for line in lines)
            receive_until(server, "WATCHDOG=1")
            served.send_signal(signal.SIGTERM)
            receive_until(server, "STOPPING=1")
            assert served.wait(HANG_LIMIT_S) == 0
        finally:
            served.kill()
            served.wait()


def test_the_watchdog_is_not_fed_while_a_process_hangs(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        # The watchdog is not fed from 3 s of silence on; at 4 s the supervisor would kill the
        # process itself.
        served = serve(tmp_path, path, watchdog_us=300_000, hang_timeout_ms=4000)
        try:
            receive_until(server, "READY=1")
            receive_until(server, "WATCHDOG=1")
            import psutil

            worker = next(
                c for c in psutil.Process(served.pid).children() if comm(c.pid) == "tr-worker-0"
            )
            worker.suspend()
            server.settimeout(0.45)

            def is_silent() -> bool:
                try:
                    server.recv(4096)
                except TimeoutError:
                    return True
                return False

            wait_until(is_silent, "WATCHDOG=1 stops coming")
            worker.resume()
            served.terminate()
            assert served.wait(HANG_LIMIT_S) == 0
        finally:
            served.kill()
            served.wait()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine"
)
@pytest.mark.parametrize(
    "name", ["tailrace.service", "tailrace-verify.service", "tailrace-backup.service"]
)
def test_what_the_units_leave_open_is_little(name: str) -> None:
    """systemd's exposure level is under 2.0 ("OK")."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=19", str(UNITS / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_units_give_up_on_the_exit_codes_that_the_table_calls_final() -> None:
    text = (UNITS / "tailrace.service").read_text()
    (line,) = [x for x in text.splitlines() if x.startswith("RestartPreventExitStatus=")]
    final = {int(code) for code in (ExitCode.USAGE, ExitCode.ADDRESS_IN_USE, *HALTING)}
    assert {int(code) for code in line.partition("=")[2].split()} == final


def test_a_reload_is_told_with_its_time_and_ends_with_ready(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        notifier = Notifier(path)
        notifier.ready("serving")
        before_us = time.monotonic_ns() // 1000
        notifier.reloading()
        notifier.ready("serving")
        server.settimeout(30)
        lines = [server.recv(4096).decode().split("\n") for _ in range(3)]
    assert lines[0][:2] == lines[2][:2] == ["READY=1", "STATUS=serving"]
    assert lines[1][0] == "RELOADING=1"
    name, _, moment_us = lines[1][1].partition("=")
    assert name == "MONOTONIC_USEC"
    assert before_us <= int(moment_us) <= time.monotonic_ns() // 1000


def test_processes_that_start_again_are_in_the_status_once(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.setblocking(False)
        notifier = Notifier(path)
        notifier.ready("serving")
        for absent in ([], ["worker-0"], ["worker-0"], []):
            notifier.report_absent(absent)
        received = []
        with contextlib.suppress(BlockingIOError):
            while True:
                received.append(server.recv(4096).decode())
    assert received[1:] == ["STATUS=serving; starting worker-0", "STATUS=serving"]
