"""The host of an installation: whether a service can be installed there, and the commands for it.

Invariants: everything that would stop an installation half way is checked before the first write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

from appliance.supervise.processes.restart_policy import ExitCode, Halt

SYSTEMD_RUNS = "run/systemd/system"
"""Directory that exists where systemd is PID 1 (sd_booted(3))."""
CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container")


def refuse_unfit_host(root: str, directories: Iterable[str]) -> None:
    """Refuse a host on which no service can be installed. `root` is "" for the running one.

    Raises: Halt.
    """
    if os.geteuid() and not root:
        raise Halt(ExitCode.FAILED, "only root can install a service: run it with sudo")
    if root and not os.path.isdir(root):
        raise Halt(ExitCode.USAGE, f"--root is {root}, which is no directory")
    if not root and not os.path.isdir(f"/{SYSTEMD_RUNS}"):
        raise Halt(ExitCode.CONFIG, _without_systemd())
    for directory in directories:
        existing = root + directory
        while not os.path.isdir(existing):
            if os.path.lexists(existing):
                raise Halt(ExitCode.CONFIG, f"{existing} is no directory; move it away first")
            existing = os.path.dirname(existing)
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            raise Halt(
                ExitCode.CONFIG,
                f"{existing} is on a file system that is mounted read-only: nothing was "
                "installed. Mount it writable (mount -o remount,rw), or build the files into the "
                "image of this host with --root",
            )


def _without_systemd() -> str:
    where = "this machine"
    if any(os.path.exists(f"/{mark}") for mark in CONTAINER_MARKS):
        where = "this container"
    try:
        with open("/proc/1/comm", encoding="ascii", errors="replace") as file:
            first = file.read().strip()
    except OSError:
        first = "unknown"
    return (
        f"{where} is not run by systemd (its first process is {first}), so there is no service to "
        "install. Let what runs it start `tailrace serve --config FILE`; `tailrace config default` "
        "prints such a file"
    )


def commands(root: str, sysusers: str, tmpfiles: str, sysctl: str) -> list[list[str]]:
    """Commands behind the files: user, directories, kernel settings, units."""
    if root:
        return [
            ["systemd-sysusers", f"--root={root}", root + sysusers],
            ["systemd-tmpfiles", f"--root={root}", "--create", root + tmpfiles],
        ]
    return [
        ["systemd-sysusers", sysusers],
        ["systemd-tmpfiles", "--create", tmpfiles],
        ["sysctl", "--quiet", "--load", sysctl],
        ["systemctl", "daemon-reload"],
    ]


def run_command(command: list[str]) -> str:
    """Run a command; "" or the reason why it failed."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["no message"]
    return f"exit status {done.returncode}: {'; '.join(lines)[:500]}"


HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")
"""Directories that the unit's ProtectHome and PrivateTmp hide from the service."""
ADVICE = (
    "Install tailrace where every user may read: python3 -m venv /opt/tailrace; "
    "/opt/tailrace/bin/pip install tailrace; /opt/tailrace/bin/tailrace install (with pipx: "
    "PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install tailrace)"
)


def refuse_hidden_program(paths: Iterable[str]) -> None:
    """Refuse a program, or an interpreter, that the service's user cannot run.

    Raises: Halt.
    """
    for path in paths:
        real = os.path.realpath(path)
        if not os.path.exists(real):
            raise Halt(ExitCode.CONFIG, f"there is no {path}. {ADVICE}")
        for hidden in HIDDEN:
            if real.startswith(hidden):
                raise Halt(
                    ExitCode.CONFIG,
                    f"{real} lies in {hidden}, which the service does not see. {ADVICE}",
                )
        parent = real
        while (parent := os.path.dirname(parent)) != "/":
            if not os.stat(parent).st_mode & 0o001:
                raise Halt(
                    ExitCode.CONFIG,
                    f"{real} lies in {parent}, which other users may not enter (chmod o+x "
                    f"{parent}). {ADVICE}",
                )
