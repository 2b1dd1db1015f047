"""A systemd booted as PID 1 in namespaces of its own, over a throw-away copy of this host's files.

The copy is an overlay on tmpfs: units, users and directories that a test makes in it are gone with
it. `/dev/shm`, `/run` and the network are its own too. The checkout and the interpreter are bound
to paths that a service's user may read, because a checkout may lie under /root.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.kit.hosts.installed import ROOT
from tests.kit.processes import HANG_LIMIT_S, comm, wait_until

SYSTEMD = "/lib/systemd/systemd"
NAMESPACES = ("--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net")
PREFIX = "/opt/tailrace"
CHECKOUT = "/opt/tailrace-checkout"
PYTHON = "/opt/tailrace-python"
PROGRAM = f"{PREFIX}/bin/tailrace"
STUB_TARGETS = ("sysinit", "basic", "shutdown", "network", "multi-user", "timers", "sockets")

BOOT = f"""\
set -e
mount --make-rprivate /
ip link set lo up
mount -t tmpfs tmpfs {{scratch}}
cd {{scratch}}
mkdir upper work root
mount -t overlay overlay -o lowerdir={{lower}},upperdir=upper,workdir=work root
mount -t proc proc root/proc
# as in a container: neither udevd nor sysctl may reach the host's devices and kernel
mount --bind root/proc/sys root/proc/sys
mount -o remount,bind,ro root/proc/sys
mount --rbind /sys root/sys
mount -o remount,bind,ro root/sys
umount -R root/sys/fs/cgroup
mount -t cgroup2 cgroup2 root/sys/fs/cgroup
mount --rbind /dev root/dev
mount -t tmpfs tmpfs root/dev/shm
mount -t tmpfs tmpfs root/run
mount -t tmpfs tmpfs root/tmp
mkdir -p root{CHECKOUT} root{PYTHON} root/mnt/old
mount --bind {ROOT} root{CHECKOUT}
mount --bind {sys.base_prefix} root{PYTHON}
rm -rf root/etc/systemd/system
cp -a {{etc}}/. root/
pivot_root root root/mnt/old
umount -l /mnt/old
# as a container's manager does: else credentials are mounted where the service does not see them
mount --make-rshared /
exec env -i container=tailrace-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    {SYSTEMD} --system --unit=multi-user.target
"""


def namespaces_work() -> bool:
    """True if this process may make the namespaces, and a systemd is installed."""
    if os.geteuid() or not os.path.exists(SYSTEMD) or not shutil.which("nsenter"):
        return False
    done = subprocess.run(
        ["unshare", "--fork", *NAMESPACES, "true"], capture_output=True, check=False
    )
    return done.returncode == 0 and unified_cgroups() is not None


def unified_cgroups() -> pathlib.Path | None:
    """The mount point of the unified cgroup hierarchy."""
    mounts = pathlib.Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    return next(
        (pathlib.Path(line.split()[1]) for line in mounts if line.split()[2] == "cgroup2"), None
    )


class BootedSystemd:
    """The running systemd."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def run(
        self, *command: str, status: int | None = 0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command beside it, as root. Fails the test on another exit status."""
        enter = ["nsenter", "-t", str(self._pid), "-a", "env", "-i", "LANG=C.UTF-8"]
        done = subprocess.run(
            [*enter, "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", *command],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_LIMIT_S,
        )
        assert status is None or done.returncode == status, (
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def systemctl(self, *arguments: str, status: int | None = 0) -> str:
        """Run systemctl; its standard output."""
        return self.run("systemctl", *arguments, status=status).stdout

    def property(self, unit: str, name: str) -> str:
        return self.systemctl("show", "-P", name, unit).strip()

    def wait_for(self, unit: str, name: str, value: str) -> None:
        """Wait until a property of a unit has this value."""
        wait_until(
            lambda: self.property(unit, name) == value,
            f"{unit} has {name}={value}; {self.systemctl('status', unit, status=None)}",
        )


@contextmanager
def booted_systemd(directory: pathlib.Path, *, lower: str = "/") -> Iterator[BootedSystemd]:
    """Boot, and end everything behind the block. `directory` is a scratch directory; files below
    its `etc` are copied to the new root. `lower` is the root directory to copy.
    """
    scratch, files = directory / "scratch", directory / "root"
    scratch.mkdir()
    (files / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    for name in STUB_TARGETS:
        text = f"[Unit]\nDescription=stub of {name}\nDefaultDependencies=no\n"
        (files / f"etc/systemd/system/{name}.target").write_text(text)
    boot = directory / "boot.sh"
    boot.write_text(BOOT.format(scratch=scratch, etc=files, lower=lower))
    group = _make_cgroup()
    enter = f"echo $$ > {group}/cgroup.procs; exec unshare --fork --kill-child " + " ".join(
        [*NAMESPACES, "sh", str(boot)]
    )
    with (directory / "boot.log").open("wb") as log:
        process = subprocess.Popen(["sh", "-c", enter], stdout=log, stderr=log)
    try:
        yield _wait_for_boot(process, directory / "boot.log")
    finally:
        process.kill()
        process.wait()
        _remove_cgroup(group)


def _wait_for_boot(process: subprocess.Popen[bytes], log: pathlib.Path) -> BootedSystemd:
    found: list[int] = []

    def is_there() -> bool:
        assert process.poll() is None, log.read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        found[:] = [child.pid for child in children if comm(child.pid) == "systemd"]
        return bool(found)

    wait_until(is_there, "systemd is executed")
    booted = BootedSystemd(found[0])
    wait_until(
        lambda: booted.run("systemctl", "list-units", status=None).returncode == 0,
        "systemd answers",
    )
    return booted


def _make_cgroup() -> pathlib.Path:
    root = unified_cgroups()
    assert root is not None
    group = root / f"tailrace-test-{os.urandom(4).hex()}"
    group.mkdir()
    return group


def _remove_cgroup(group: pathlib.Path) -> None:
    (group / "cgroup.kill").write_text("1")

    def is_removed() -> bool:
        # systemd made groups below; the deepest go first.
        for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            try:
                path.rmdir()
            except OSError:
                continue
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    wait_until(is_removed, "the cgroup is empty")


def install_program(booted: BootedSystemd) -> None:
    """Make a virtual environment at PREFIX that runs this checkout, as `pip install -e` would."""
    # The interpreter may be linked to a library below /root, which a service does not see.
    booted.run("tee", "/etc/ld.so.conf.d/0-interpreter.conf", stdin=f"{PYTHON}/lib\n")
    booted.run("ldconfig")
    booted.run(f"{PYTHON}/bin/python3", "-m", "venv", "--without-pip", PREFIX)
    packages = sysconfig.get_path("purelib").replace(str(ROOT), CHECKOUT)
    site = f"{PREFIX}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    booted.run("tee", f"{site}/checkout.pth", stdin=f"{CHECKOUT}\n{packages}\n")
    program = (
        f"#!{PREFIX}/bin/python3\nfrom tailrace.launcher import command_line\ncommand_line()\n"
    )
    booted.run("tee", PROGRAM, stdin=program)
    booted.run("chmod", "0755", PROGRAM)
