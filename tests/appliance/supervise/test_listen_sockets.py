"""Sockets that systemd passes: which front gets which, and what is refused."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess

import pytest

from appliance.supervise.listen_sockets import inherited_sockets, sockets_of_fronts
from appliance.supervise.processes.restart_policy import ExitCode
from tailrace import Admin, launcher
from tailrace.core.errors import InvalidSettingError
from tests.kit.processes import HANG_LIMIT_S


def test_variables_for_another_process_are_ignored_and_removed() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b", "HOME": "/"}
    assert inherited_sockets(environment) == {}
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    ("listen", "passed"),
    [
        ("tcp://127.0.0.1:7420", "tcp://127.0.0.1:7420"),
        ("tcp://localhost:7420", "tcp://127.0.0.1:7420"),
        ("tcp://*:7420", "tcp://[::]:7420"),
        ("tcp://*:7420", "tcp://0.0.0.0:7420"),
        ("ipc:///run/tailrace/s", "ipc:///run/tailrace/s"),
    ],
)
def test_an_address_and_its_socket_find_each_other(listen: str, passed: str) -> None:
    assert sockets_of_fronts({passed: 3}, ["tcp://10.0.0.1:7000", listen], 1) == {listen: 3}


def test_each_front_gets_the_socket_of_its_port() -> None:
    passed = {"tcp://127.0.0.1:7421": 3, "tcp://127.0.0.1:7420": 4}
    assert sockets_of_fronts(passed, ["tcp://127.0.0.1:7420"], 2) == passed


def test_a_socket_that_no_front_has_is_refused_with_both_sides() -> None:
    with pytest.raises(InvalidSettingError, match=r"a socket at tcp://127\.0\.0\.1:80, and listen"):
        sockets_of_fronts({"tcp://127.0.0.1:80": 3}, ["tcp://127.0.0.1:7420"], 1)


def serve(tmp_path: pathlib.Path, listening: socket.socket, address: str) -> subprocess.Popen[str]:
    """An appliance that is started as systemd does it, with one socket."""
    command = launcher.command(
        "appliance.supervise.supervisor", "--data-dir", str(tmp_path / "data"), "--listen", address,
        "--set", "http.listen=", "--set", "ring_bytes=1MiB",
    )  # fmt: skip
    script = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&"$FD"'
    environment = {**os.environ, "FD": str(listening.fileno())}
    return subprocess.Popen(
        ["bash", "-c", script, "sh", *command], env=environment, stderr=subprocess.PIPE, text=True,
        pass_fds=[listening.fileno()],
    )  # fmt: skip


def test_a_client_that_comes_before_the_appliance_is_served_and_the_socket_stays(
    tmp_path: pathlib.Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(2):
            with Admin(address, connect_timeout_ms=int(HANG_LIMIT_S * 1000)) as admin:
                served = serve(tmp_path, listening, address)
                try:
                    assert admin.list_topics() == []
                finally:
                    served.terminate()
                    _, errors = served.communicate(timeout=HANG_LIMIT_S)
                assert served.returncode == 0, errors
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_socket_of_another_address_ends_the_start(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = serve(tmp_path, listening, "tcp://127.0.0.1:0")
        _, errors = served.communicate(timeout=HANG_LIMIT_S)
        assert served.returncode == ExitCode.USAGE
        assert "ListenStream= of the socket unit" in errors
