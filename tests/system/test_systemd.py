"""The unit file, the notify protocol over a real socket, and a systemd booted in namespaces of its
own.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.kit.processes import HANG_LIMIT_S, comm, wait_until

UNIT = pathlib.Path(__file__).parents[2] / "systemd" / "tailrace.service"
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
def test_systemd_analyze_verify_finds_nothing(tmp_path: pathlib.Path) -> None:
    # The user and the command are the installation's; everything else is as shipped.
    text = UNIT.read_text().replace("/usr/bin/env tailrace", str(TAILRACE))
    unit = tmp_path / "tailrace.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def namespaces_work() -> bool:
    if (
        os.geteuid() != 0
        or not pathlib.Path("/lib/systemd/systemd").exists()
        or not shutil.which("nsenter")
    ):
        return False
    return (
        subprocess.run(
            [
                "unshare",
                "--pid",
                "--fork",
                "--mount",
                "--cgroup",
                "--uts",
                "--ipc",
                "--net",
                "true",
            ],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


BOOT = """\
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
ip link set lo up 2>/dev/null || true
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
container=x SYSTEMD_UNIT_PATH={units} exec /lib/systemd/systemd --system --unit=my.target
"""


@pytest.mark.root
@pytest.mark.skipif(not namespaces_work(), reason="needs root, systemd and namespaces")
def test_under_a_real_systemd_it_becomes_ready_survives_a_kill_and_stops_cleanly(
    tmp_path: pathlib.Path,
) -> None:
    cgroup = _make_cgroup()
    if cgroup is None:
        pytest.skip("no unified cgroup hierarchy that can be written")
    units = tmp_path / "units"
    units.mkdir()
    state = f"tailrace-test-{os.urandom(4).hex()}"
    text = (
        UNIT.read_text()
        .replace("/usr/bin/env tailrace", str(TAILRACE))
        .replace("User=tailrace\nGroup=tailrace\n", "")
    )
    text = text.replace("StateDirectory=tailrace\n", f"StateDirectory={state}\n").replace(
        "RuntimeDirectory=tailrace\n", ""
    )
    # The checkout and its environment may lie under /root or in a temporary directory: let the unit
    # see them.
    text = text.replace("ProtectHome=yes", "ProtectHome=no").replace(
        "PrivateTmp=yes", "PrivateTmp=no"
    )
    log = tmp_path / "log"
    (units / "tailrace.service").write_text(
        text.replace("[Service]\n", f"[Service]\nStandardError=append:{log}\n")
    )
    for name in ("sysinit", "basic", "shutdown"):
        (units / f"{name}.target").write_text("[Unit]\nDescription=stub\nDefaultDependencies=no\n")
    (units / "my.target").write_text("[Unit]\nDescription=stub\nDefaultDependencies=no\n")
    boot = tmp_path / "boot.sh"
    boot.write_text(BOOT.format(units=units))
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount",
        "--mount-proc",
        "--cgroup",
        "--uts",
        "--ipc",
        "--net",
        "sh",
        str(boot),
    ]
    enter = f"echo $$ > {cgroup}/cgroup.procs; exec {' '.join(command)}"
    booted = subprocess.Popen(
        ["sh", "-c", enter], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        import psutil

        wait_until(
            lambda: any(
                comm(c.pid) == "systemd"
                for c in psutil.Process(booted.pid).children(recursive=True)
            ),
            "systemd boots",
        )
        pid = next(
            c.pid
            for c in psutil.Process(booted.pid).children(recursive=True)
            if comm(c.pid) == "systemd"
        )

        def systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
            enter_namespaces = ["nsenter", "-t", str(pid), "-p", "-m", "-C", "-u", "-i", "-n"]
            return subprocess.run(
                [*enter_namespaces, "systemctl", *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG_LIMIT_S,
            )

        wait_until(lambda: systemctl("list-units").returncode == 0, "systemd answers")
        done = systemctl("start", "tailrace.service")
        status = systemctl("status", "tailrace.service").stdout
        assert done.returncode == 0, done.stderr + status + log.read_text()
        assert "serving on tcp://127.0.0.1:7420" in status
        first = systemctl("show", "-P", "MainPID", "tailrace.service").stdout.strip()
        assert (
            systemctl("kill", "--kill-whom=main", "--signal=KILL", "tailrace.service").returncode
            == 0
        )
        wait_until(
            lambda: (
                systemctl("is-active", "tailrace.service").stdout.strip() == "active"
                and systemctl("show", "-P", "MainPID", "tailrace.service").stdout.strip()
                not in (first, "0")
            ),
            "systemd restarts it",
        )
        assert systemctl("stop", "tailrace.service").returncode == 0
        shown = systemctl(
            "show", "-P", "Result", "-P", "ExecMainStatus", "tailrace.service"
        ).stdout.split()
        assert shown == ["success", "0"]
    finally:
        booted.kill()
        booted.wait()
        shutil.rmtree(f"/var/lib/{state}", ignore_errors=True)
        _remove_cgroup(cgroup)


def _make_cgroup() -> pathlib.Path | None:
    """A cgroup of the test's own in the unified hierarchy, wherever that is mounted."""
    mounts = pathlib.Path("/proc/mounts").read_text().splitlines()
    root = next(
        (pathlib.Path(line.split()[1]) for line in mounts if line.split()[2] == "cgroup2"), None
    )
    if root is None:
        return None
    group = root / f"tailrace-test-{os.urandom(4).hex()}"
    try:
        group.mkdir()
    except OSError:
        return None
    return group


def _remove_cgroup(group: pathlib.Path) -> None:
    def gone() -> bool:
        # systemd made groups below; the deepest go first.
        for directory in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            try:
                directory.rmdir()
            except OSError:
                continue
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    try:
        wait_until(gone, "the cgroup is empty")
    except AssertionError:
        subprocess.run(["sh", "-c", textwrap.dedent(f"echo 1 > {group}/cgroup.kill")], check=False)
