"""The support archive: configuration, status, metrics, versions, the end of the log, facts of the
host; without payloads, keys and secrets (`appliance.observe.support.redaction`).

Invariants:
- Only the user who makes it can read it, until that user gives it away.
- It appears whole under its name, or not at all. An existing file is not replaced.
- A part that cannot be had is a line in `missing.txt`.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from appliance.observe.checks.doctor_checks import Check
from appliance.observe.support.redaction import log_lines, without_secrets
from tailrace import __version__, kernel
from tailrace.admin.admin import Admin
from tailrace.admin.configs import ConfigResource

LOG_LINES_MAX = 5_000
LISTED_MAX = 20_000
"""Files of a data directory that are listed."""
TIMEOUT_S = 10
PROC_FILES = (
    "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/version", "/etc/os-release",
    "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io", "/proc/swaps",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/sys/vm/swappiness",
    "/proc/sys/vm/dirty_bytes", "/proc/sys/vm/dirty_ratio", "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/core/somaxconn", "/proc/sys/fs/file-nr",
)  # fmt: skip
OF_PROCESS = ("limits", "cgroup", "status")
PACKAGES = (
    "pyzmq", "orjson", "fastcrc", "pyarrow", "numpy", "cronsim", "posix-ipc", "click", "rich",
    "psutil", "prometheus-client",
)  # fmt: skip


class Bundle:
    """Files of the archive, by name."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._missing: list[str] = []

    def add(self, name: str, make: Callable[[], str]) -> None:
        """Add a file. One that cannot be made is noted as missing."""
        try:
            self.files[name] = without_secrets(make())
        except Exception as error:  # the archive is for hosts on which something is wrong
            self._missing.append(f"{name}: {type(error).__name__}")

    def add_json(self, name: str, make: Callable[[], Any]) -> None:
        self.add(name, lambda: _json(make()))

    def write(self, path: str) -> None:
        """Write the archive: FILE.tar.gz or FILE.tar.zst. Raises OSError, FileExistsError."""
        self.files["missing.txt"] = "".join(f"{line}\n" for line in self._missing)
        temporary = f"{path}.part"
        if os.path.lexists(path):
            raise FileExistsError(17, "there is already a file", path)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as raw:
                raw.write(self._tar(is_zstd=path.endswith(".zst")))
                raw.flush()
                os.fsync(raw.fileno())
            os.link(temporary, path)
        finally:
            os.unlink(temporary)

    def _tar(self, *, is_zstd: bool) -> bytes:
        """The compressed archive: some MB, as the log is cut."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w" if is_zstd else "w:gz") as archive:
            self._add_all(archive)
        if not is_zstd:
            return buffer.getvalue()
        import pyarrow as pa

        return bytes(pa.Codec("zstd").compress(buffer.getvalue(), asbytes=True))

    def _add_all(self, archive: tarfile.TarFile) -> None:
        for name, text in sorted(self.files.items()):
            data = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"tailrace-support/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def collect(
    checks: Sequence[Check],
    settings: Callable[[], list[dict[str, Any]]],
    cluster: Mapping[str, Any] | None,
    bootstrap: str,
    data_dirs: Sequence[str],
    logs: Sequence[str],
) -> Bundle:
    """Collect everything. `settings`: those that a start would use, secrets not shown. `cluster`:
    as `Admin.describe_cluster`; None: no appliance answers. `logs`: files; none: the journal.
    """
    bundle = Bundle()
    bundle.add_json(
        "doctor.json",
        lambda: [
            {"check": check.name, "level": check.level.value, "detail": check.detail}
            for check in checks
        ],
    )
    bundle.add_json("versions.json", _versions)
    bundle.add_json("settings.json", settings)
    if cluster is not None:
        bundle.add_json("status.json", lambda: cluster)
        with Admin(bootstrap, connect_timeout_ms=TIMEOUT_S * 1000) as admin:
            broker = ConfigResource("broker")
            bundle.add_json(
                "running_settings.json",
                lambda: [row._asdict() for row in admin.describe_configs(broker)[broker].values()],
            )
            bundle.add_json("topics.json", lambda: admin.describe_topics(admin.list_topics()))
            bundle.add_json("delays.json", admin.describe_delays)
            if any(process["name"] == "groups-0" for process in cluster["processes"]):
                bundle.add_json("groups.json", admin.list_groups)
                bundle.add_json("transactions.json", admin.transaction_totals)
        bundle.add("metrics.txt", lambda: _metrics(str(cluster["console"])))
        for process in cluster["processes"]:
            for name in OF_PROCESS:
                path = f"/proc/{process['pid']}/{name}"
                bundle.add(f"processes/{process['name']}.{name}.txt", partial(_text, path))
    for path in PROC_FILES:
        bundle.add(f"host/{path.strip('/').replace('/', '_')}.txt", partial(_text, path))
    bundle.add("host/cpu.txt", _cpu)
    bundle.add("host/shared_memory.txt", _shared_memory)
    for number, directory in enumerate(data_dirs):
        bundle.add(f"host/data_dir_{number}.txt", partial(_listing, directory))
        bundle.add(f"host/mount_{number}.txt", partial(_mount, directory))
    bundle.add("log.txt", lambda: "".join(f"{line}\n" for line in log_lines(_log(logs))))
    return bundle


def _json(value: Any) -> str:
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(value, default=str, option=options).decode()


def _versions() -> dict[str, Any]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {
        "tailrace": __version__, "kernel": kernel.KIND, "python": platform.python_version(),
        "system": platform.platform(), "machine": platform.machine(), "packages": found,
    }  # fmt: skip


def _metrics(console: str) -> str:
    with urllib.request.urlopen(f"{console}/metrics", timeout=TIMEOUT_S) as answer:
        return bytes(answer.read()).decode()


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _cpu() -> str:
    """Model and flags of the first core, and the number of cores."""
    first = _text("/proc/cpuinfo").partition("\n\n")[0]
    cores = sorted(os.sched_getaffinity(0))
    return f"cores: {os.cpu_count()}, ours: {cores}\n{first}\n"


def _shared_memory() -> str:
    lines = []
    for name in sorted(os.listdir("/dev/shm")):
        if name.startswith("tailrace-"):
            found = os.stat(f"/dev/shm/{name}")
            lines.append(f"{found.st_size}\t{found.st_uid}\t{name}\n")
    return "".join(lines)


def _listing(directory: str) -> str:
    """Size, time and name of each file, without content."""
    lines = [f"{directory}\n"]
    for parent, _, names in os.walk(directory):
        for name in sorted(names):
            path = os.path.join(parent, name)
            found = os.lstat(path)
            if len(lines) > LISTED_MAX:
                return "".join([*lines, "and more\n"])
            shown = os.path.relpath(path, directory)
            lines.append(f"{found.st_size}\t{found.st_mtime:.0f}\t{found.st_mode:o}\t{shown}\n")
    return "".join(lines)


def _mount(directory: str) -> str:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = _text("/proc/self/mountinfo").splitlines()
    found = os.statvfs(directory)
    space = (
        f"blocks={found.f_blocks} free={found.f_bavail} size={found.f_frsize} "
        f"inodes={found.f_files} free_inodes={found.f_favail}"
    )
    mounts = [line for line in lines if line.split()[2] == number]
    return "".join(f"{line}\n" for line in [*mounts, space])


def _log(files: Sequence[str]) -> Iterable[str]:
    """The last lines of the log: of files, or of the journal. Raises OSError, and
    FileNotFoundError without a journal.
    """
    if files:
        lines: deque[str] = deque(maxlen=LOG_LINES_MAX)
        for path in files:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines.extend(file)
        return lines
    program = shutil.which("journalctl")
    if program is None:
        raise FileNotFoundError("journalctl")
    done = subprocess.run(
        [program, "--unit=tailrace*", f"--lines={LOG_LINES_MAX}", "--output=short-iso",
         "--no-pager"],
        capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()
