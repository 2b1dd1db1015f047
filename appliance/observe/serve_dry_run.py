"""What `tailrace serve` would do, and what would keep it from it: settings, machine, data directories, limits, shared memory, addresses. Reading only.

The order is that of a start (`appliance.supervisor`), and the exit status is the one that the first refusal would end it with. What only a start can find out
(a damaged catalog, a port that is taken a moment later) is not promised.
"""

from __future__ import annotations

import os
import resource
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.directory_errors import DataDirectoryError
from appliance.host_checks import Check, Level
from appliance.host_needs import partitions_in, refuse_unfit_machine, slots_for_open_files
from appliance.memory_plan import plan_regions
from appliance.ownership import look
from appliance.restart_policy import ExitCode, Halt
from appliance.settings import Given, Settings, gather_settings, setting_names, settings_of, split_host_port
from tailrace.errors import InvalidSettingError
from tailrace.formats.data_directory import CATALOG_FILE, Identity
from tailrace.front_addresses import front_address

DEFAULT_SOURCE = "default"


@dataclass(slots=True)
class StartReport:
    """What was found."""

    exit_status: int = ExitCode.OK
    """That `serve` would end with; 0: it would serve."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """{"name", "value", "source"} of every setting."""
    checks: list[Check] = field(default_factory=list)

    def ok(self, name: str, detail: str) -> None:
        """Nothing is wrong with it."""
        self.checks.append(Check(name, Level.OK, detail))

    def warn(self, name: str, detail: str) -> None:
        """It would serve all the same."""
        self.checks.append(Check(name, Level.WARNING, detail))

    def refuse(self, name: str, detail: str, code: int) -> None:
        """It would not serve; the first code is the exit status."""
        self.checks.append(Check(name, Level.PROBLEM, detail))
        self.exit_status = self.exit_status or int(code)


def check_start(config: str | None, environment: Mapping[str, str], flags: Callable[[], list[tuple[str, Any]]]) -> StartReport:
    """Look at everything. `flags`: makes the pairs that the command line gives, or raises InvalidSettingError."""
    report = StartReport()
    available = os.sched_getaffinity(0)
    try:
        given = gather_settings(config, environment, flags())
        settings = settings_of(given)
        report.settings = effective(settings, given)
        plan = settings.check(available)
    except InvalidSettingError as error:
        report.refuse("settings", error.detail, ExitCode.USAGE)
        return report
    count = sum(row["source"] != DEFAULT_SOURCE for row in report.settings)
    report.ok("settings", f"{count} of {len(report.settings)} are not the defaults")
    workers = max(len(plan.workers), len(settings.data_dirs))
    pinned = ", ".join(str(core) for core in plan.workers if core is not None)
    report.ok("cores", f"{len(available)} cores; {_workers(workers)}, {f'pinned to {pinned}' if pinned else 'not pinned'}")
    busy = settings.busy_poll(plan)
    report.ok(
        "busy poll",
        f"fronts and workers {f'look for work for {busy.us} us before they sleep' if busy.us else 'sleep at once'}: {busy.reason}",
    )
    try:
        refuse_unfit_machine()
    except Halt as halt:
        report.refuse("machine", halt.reason, halt.code)
    existing = _check_directories(settings, settings.reserve_bytes(workers), report)
    _check_open_files(settings, existing, workers, report)
    _check_shared_memory(settings, workers, report)
    _check_addresses(settings, report)
    return report


def effective(settings: Settings, given: Mapping[str, Given]) -> list[dict[str, Any]]:
    """Every setting with its value and where that came from."""
    return [
        {"name": name, "value": getattr(settings, item.name), "source": given[name].source if name in given else DEFAULT_SOURCE}
        for name, item in setting_names().items()
    ]


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


# ---- data directories ----------------------------------------------------------------------------------------------------------------


def _check_directories(settings: Settings, reserve_bytes: int, report: StartReport) -> list[str]:
    """The directories that exist and may be taken."""
    existing: dict[str, Identity] = {}
    for path in map(os.path.abspath, settings.data_dirs):
        name = f"data directory {path}"
        try:
            identity = look(path)
        except DataDirectoryError as error:
            report.refuse(name, str(error), ExitCode.DATA_UNUSABLE)
            continue
        if identity is None:
            report.ok(name, "is made, mode 0700")
            continue
        existing[path] = identity
        _say_what_a_directory_holds(path, reserve_bytes, report, name)
    catalogs = [path for path in existing if os.path.exists(f"{path}/{CATALOG_FILE}")]
    if len(catalogs) > 1:
        sentence = (
            f"{' and '.join(catalogs)} both have a catalog: they belong to different appliances. Serve one of them, or start one for each"
        )
        report.refuse("catalog", sentence, ExitCode.DATA_UNUSABLE)
    elif catalogs:
        known = [identity.instance.hex() for identity in existing.values()]
        for path, count in _directories_that_lack(f"{catalogs[0]}/{CATALOG_FILE}", known):
            sentence = (
                f"data_dirs lacks {path} with {count} partitions; list every directory that holds partitions, or delete the topics first"
            )
            report.refuse("catalog", sentence, ExitCode.CONFIG)
    return list(existing)


def _say_what_a_directory_holds(path: str, reserve_bytes: int, report: StartReport, name: str) -> None:
    """A disk that is full stops nobody from starting: records are read, and producers are refused."""
    found = os.statvfs(path)
    free, count = found.f_bavail * found.f_frsize, partitions_in(path)
    text = f"{count} partition{'' if count == 1 else 's'}, {free >> 20} MiB free"
    reserve_bytes = min(reserve_bytes, found.f_blocks * found.f_frsize // 8)
    if free < reserve_bytes:
        report.warn(
            name,
            f"{text}, less than the reserve of {reserve_bytes >> 20} MiB: producers would get DISK_FULL. Free some, or lower disk_reserve_bytes",
        )
    else:
        report.ok(name, text)


def _directories_that_lack(catalog: str, known: list[str]) -> Iterator[tuple[str, int]]:
    """(path, partitions) of directories that the catalog knows and that are not configured. Nothing is written: what a write-ahead log still holds is not
    seen.
    """
    marks = ",".join("?" * len(known))
    query = f"SELECT path, count(*) FROM partitions JOIN data_dirs ON number = data_dir WHERE directory_id NOT IN ({marks}) GROUP BY path"
    try:
        database = sqlite3.connect(f"file:{_quoted(catalog)}?mode=ro&immutable=1", uri=True)
        try:
            yield from database.execute(query, known)
        finally:
            database.close()
    except sqlite3.Error:
        return  # a start looks closer, and makes a damaged catalog again


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


# ---- limits and memory ---------------------------------------------------------------------------------------------------------------


def _check_open_files(settings: Settings, existing: list[str], workers: int, report: StartReport) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # of this process, as the supervisor does in its own
    try:
        slots = slots_for_open_files(settings, existing, workers)
    except Halt as halt:
        report.refuse("open files", halt.reason, halt.code)
        return
    text = f"{hard} allowed, for {slots} partitions"
    if slots < settings.slots:
        report.warn("open files", f"{text} of the {settings.slots} that slots asks for; ulimit -n 65536, or LimitNOFILE=65536 in the unit")
    else:
        report.ok("open files", text)


def _check_shared_memory(settings: Settings, workers: int, report: StartReport) -> None:
    needed = sum(plan.size for plan in plan_regions(settings, workers, settings.fronts, len(settings.data_dirs)))
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    text = f"{_mib(needed)} MiB of /dev/shm for rings and lanes, {free >> 20} MiB are free"
    if free < needed:
        advice = "mount -o remount,size=1G /dev/shm (Docker: --shm-size=1g), or lower ring_bytes and lane_bytes"
        report.refuse("shared memory", f"{text}: {advice}", ExitCode.SHARED_MEMORY)
    else:
        report.ok("shared memory", text)


def _mib(count: int) -> int:
    return -(-count >> 20)


# ---- addresses -----------------------------------------------------------------------------------------------------------------------


def _check_addresses(settings: Settings, report: StartReport) -> None:
    for front in range(settings.fronts):
        for address in (front_address(given, front) for given in settings.listen):
            try:
                report.ok(f"listen {address}", _look_at(address))
            except OSError as error:
                sentence = f"cannot listen on {address}: {error.strerror}. Stop what uses it, or choose another with --listen"
                report.refuse(f"listen {address}", sentence, ExitCode.ADDRESS_IN_USE)
    if not settings.http_listen:
        report.ok("console", "there is none: http.listen is empty")
        return
    host, port = split_host_port(settings.http_listen)
    try:
        _try_bind(host, port)
        report.ok("console", f"http://{settings.http_listen}")
    except OSError as error:
        report.warn(
            "console",
            f"http.listen {settings.http_listen}: {error.strerror}. The console waits for it where you set http.listen, else it takes a free port",
        )


def _look_at(address: str) -> str:
    """What there is to say of an address that is free. Raises OSError."""
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host.strip("[]") in {name for _, name in socket.if_nameindex()}:
            return "an interface's address; whether it is free is not looked at"
        _try_bind("" if host == "*" else host.strip("[]"), int(port or 0))
        return "any free port" if not port or not int(port) else "free"
    path = address.removeprefix("ipc://")
    if path.startswith("@"):
        return "an abstract socket; whether it is free is not looked at"
    directory = os.path.dirname(os.path.abspath(path))
    os.stat(directory)  # says what is wrong with it
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, os.strerror(13), directory)
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        if any(line.rstrip("\n").endswith(f" {os.path.abspath(path)}") for line in file):
            raise OSError(98, os.strerror(98), path)
    return "free"


def _try_bind(host: str, port: int) -> None:
    """Bind and let go, without listening: nobody can connect meanwhile. Raises OSError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(error.errno, f"no such host {host!r} ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
