"""Dry run of `tailrace serve`: settings, machine, data directories, limits, shared memory,
addresses. Reads only.

The order is that of a start (`appliance.supervise.supervisor`), and the exit status is that of the
first refusal. Faults that only a start finds (a damaged catalog, a port taken a moment later) are
not found here.
"""

from __future__ import annotations

import os
import resource
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.catalog.tables.partition_slots import missing_sentence
from appliance.config.relations import planned_cores, split_host_port
from appliance.config.settings import Settings
from appliance.config.settings_sources import (
    DEFAULT_SOURCE,
    SettingsError,
    checked_settings,
    origins,
)
from appliance.config.topology import read_topology
from appliance.data.credentials import credential_path
from appliance.data.data_dir_lock import inspect
from appliance.data.directory_errors import DataDirectoryError
from appliance.observe.checks.doctor_checks import Check, Level
from appliance.supervise.memory.memory_budget import mib, needs, read_rooms, shortage
from appliance.supervise.preflight import partitions_in, refuse_unfit_machine, slots_for_open_files
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from tailrace.core.errors import InvalidSettingError
from tailrace.format.directory.data_dir import CATALOG_FILE, Identity
from tailrace.protocol.listeners import front_address


@dataclass(slots=True)
class StartReport:
    """Findings of a dry run."""

    exit_status: int = ExitCode.OK
    """Exit status that `serve` would end with; 0: it would serve."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """{"name", "value", "source"} of every setting."""
    checks: list[Check] = field(default_factory=list)

    def ok(self, name: str, detail: str) -> None:
        """Report that a check passed."""
        self.checks.append(Check(name, Level.OK, detail))

    def warn(self, name: str, detail: str) -> None:
        """Report a problem with which it would serve all the same."""
        self.checks.append(Check(name, Level.WARNING, detail))

    def refuse(self, name: str, detail: str, code: int) -> None:
        """Report a refusal; the first one's code is the exit status."""
        self.checks.append(Check(name, Level.PROBLEM, detail))
        self.exit_status = self.exit_status or int(code)


def check_start(
    config: str | None, environment: Mapping[str, str], flags: Callable[[], list[tuple[str, Any]]]
) -> StartReport:
    """Run every check. `flags`: returns the pairs of the command line, or raises
    InvalidSettingError.
    """
    report = StartReport()
    topology = read_topology()
    try:
        settings, given = checked_settings(config, environment, flags(), topology)
    except SettingsError as error:
        for problem in error.problems:
            report.refuse("settings", str(problem), ExitCode.USAGE)
        return report
    except InvalidSettingError as error:
        report.refuse("settings", error.detail, ExitCode.USAGE)
        return report
    report.settings = origins(settings, given)
    plan = planned_cores(settings, topology)
    count = sum(row["source"] != DEFAULT_SOURCE for row in report.settings)
    report.ok("settings", f"{count} of {len(report.settings)} are not the defaults")
    workers = len(plan.workers)
    pinned = ", ".join(str(core) for core in plan.workers if core is not None)
    report.ok(
        "cores",
        f"{len(topology.cpus)} cores; {_workers(workers)}, "
        f"{f'pinned to {pinned}' if pinned else 'not pinned'}",
    )
    busy = settings.busy_poll(plan)
    report.ok(
        "busy poll",
        "fronts and workers "
        f"{f'look for work for {busy.us} us before they sleep' if busy.us else 'sleep at once'}: "
        f"{busy.reason}",
    )
    try:
        refuse_unfit_machine()
    except Halt as halt:
        report.refuse("machine", halt.reason, halt.code)
    existing = _check_directories(settings, settings.reserve_bytes(workers), report)
    _check_open_files(settings, existing, workers, report)
    _check_memory(settings, workers, report)
    _check_addresses(settings, report)
    _check_kafka(settings, report)
    return report


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


# ---- data directories ----------------------------------------------------------------------------


def _check_directories(settings: Settings, reserve_bytes: int, report: StartReport) -> list[str]:
    """The directories that exist and may be taken."""
    existing: dict[str, Identity] = {}
    for path in map(os.path.abspath, settings.data_dirs):
        name = f"data directory {path}"
        try:
            identity = inspect(path)
        except DataDirectoryError as error:
            report.refuse(name, str(error), ExitCode.DATA_UNUSABLE)
            continue
        if identity is None:
            report.ok(name, "is made, mode 0700")
            continue
        existing[path] = identity
        _report_directory(path, reserve_bytes, report, name)
    catalogs = [path for path in existing if os.path.exists(f"{path}/{CATALOG_FILE}")]
    if len(catalogs) > 1:
        sentence = (
            f"{' and '.join(catalogs)} both have a catalog: they belong to different "
            "appliances. Serve one of them, or start an appliance for each"
        )
        report.refuse("catalog", sentence, ExitCode.DATA_UNUSABLE)
    elif catalogs:
        known = [identity.instance.hex() for identity in existing.values()]
        for missing in _directories_that_lack(f"{catalogs[0]}/{CATALOG_FILE}", known):
            listed = {os.path.abspath(path) for path in settings.data_dirs}
            report.refuse("catalog", missing_sentence([missing], listed), ExitCode.CONFIG)
    return list(existing)


def _report_directory(path: str, reserve_bytes: int, report: StartReport, name: str) -> None:
    """Report a directory's space. A full disk does not prevent a start: records are read, and
    producers are refused.
    """
    found = os.statvfs(path)
    free, count = found.f_bavail * found.f_frsize, partitions_in(path)
    text = f"{count} partition{'' if count == 1 else 's'}, {free >> 20} MiB free"
    reserve_bytes = min(reserve_bytes, found.f_blocks * found.f_frsize // 8)
    if free < reserve_bytes:
        report.warn(
            name,
            f"{text}, less than the reserve of {reserve_bytes >> 20} MiB: producers would get "
            "DISK_FULL. Free some, or lower disk_reserve_bytes",
        )
    else:
        report.ok(name, text)


def _directories_that_lack(catalog: str, known: list[str]) -> Iterator[tuple[str, int]]:
    """(path, partitions) of directories that the catalog knows and that are not configured. Nothing
    is written; the content of a write-ahead log is not read.
    """
    marks = ",".join("?" * len(known))
    query = (
        "SELECT path, count(*) FROM partitions JOIN data_dirs ON number = data_dir WHERE "
        f"directory_id NOT IN ({marks}) GROUP BY path"
    )
    try:
        database = sqlite3.connect(f"file:{_quoted(catalog)}?mode=ro&immutable=1", uri=True)
        try:
            yield from database.execute(query, known)
        finally:
            database.close()
    except sqlite3.Error:
        return  # a start checks more, and rebuilds a damaged catalog


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


# ---- limits and memory ---------------------------------------------------------------------------


def _check_open_files(
    settings: Settings, existing: list[str], workers: int, report: StartReport
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard, hard)
    )  # of this process, as the supervisor does in its own
    try:
        slots = slots_for_open_files(settings, existing, workers)
    except Halt as halt:
        report.refuse("open files", halt.reason, halt.code)
        return
    text = f"{hard} allowed, for {slots} partitions"
    if slots < settings.slots:
        report.warn(
            "open files",
            f"{text} of the {settings.slots} that slots asks for; ulimit -n 65536, or "
            "LimitNOFILE=65536 in the unit",
        )
    else:
        report.ok("open files", text)


def _check_memory(settings: Settings, workers: int, report: StartReport) -> None:
    lines, rooms = needs(settings, workers), read_rooms()
    too_much = shortage(lines, rooms)
    if too_much:
        report.refuse("memory", too_much, ExitCode.SHARED_MEMORY)
        return
    together = mib(sum(line.byte_count for line in lines))
    parts = ", ".join(f"{line.name} {mib(line.byte_count)}" for line in lines)
    free = ", ".join(f"{room.free_bytes >> 20} MiB free in {room.name}" for room in rooms)
    report.ok("memory", f"{together} MiB: {parts}; {free}")


# ---- addresses -----------------------------------------------------------------------------------


def _check_addresses(settings: Settings, report: StartReport) -> None:
    for front in range(settings.fronts):
        for address in (front_address(given, front) for given in settings.listen):
            try:
                report.ok(f"listen {address}", _try_open(address))
            except OSError as error:
                sentence = (
                    f"cannot listen on {address}: {error.strerror}. Stop the program that uses "
                    "it, or choose another with --listen"
                )
                report.refuse(f"listen {address}", sentence, ExitCode.ADDRESS_IN_USE)
    if not settings.http_listen:
        report.ok("console", "off: http.listen is empty")
        return
    host, port = split_host_port(settings.http_listen)
    try:
        _try_bind(host, port)
        report.ok("console", f"http://{settings.http_listen}")
    except OSError as error:
        report.warn(
            "console",
            f"http.listen {settings.http_listen}: {error.strerror}. If http.listen is set, the "
            "console retries it; otherwise it takes a free port",
        )


def _check_kafka(settings: Settings, report: StartReport) -> None:
    """The addresses of the Kafka port, and the files of its certificate."""
    from shm.rights.kafka_listeners import kafka_listener

    listeners = [
        kafka_listener(
            text,
            has_users=settings.is_secured,
            has_certificate=bool(settings.kafka_tls_certificate),
        )
        for text in settings.kafka_listen
    ]
    for listener in listeners:
        name = f"kafka.listen {listener.address}"
        host, port = split_host_port(listener.address)
        try:
            _try_bind(host, port)
            report.ok(name, f"{listener.protocol}, {'free' if port else 'any free port'}")
        except OSError as error:
            report.refuse(
                name,
                f"cannot listen on {listener.address}: {error.strerror}. Stop the program that "
                "uses it, or choose another with kafka.listen",
                ExitCode.ADDRESS_IN_USE,
            )
    if any(listener.has_tls for listener in listeners):
        _check_certificate(settings, report)
    has_logins = settings.is_secured and any(listener.has_sasl for listener in listeners)
    if has_logins and "OAUTHBEARER" in settings.kafka_sasl_enabled_mechanisms:
        _check_token_keys(credential_path(settings.kafka_oauth_jwks), report)


def _check_token_keys(path: str, report: StartReport) -> None:
    from shm.rights.bearer_tokens import TokenKeysError, read_keys

    try:
        count = len(read_keys(path))
    except TokenKeysError as error:
        report.refuse("kafka token keys", str(error), ExitCode.CONFIG)
    else:
        report.ok("kafka token keys", f"{path}, keys: {count}")


def _check_certificate(settings: Settings, report: StartReport) -> None:
    from shm.rights.kafka_tls import REQUIRED, TlsError, server_context

    certificate = credential_path(settings.kafka_tls_certificate)
    key = credential_path(settings.kafka_tls_key)
    authority = credential_path(settings.kafka_tls_client_ca)
    try:
        server_context(certificate, key, authority, REQUIRED)
    except TlsError as error:
        report.refuse("kafka certificate", str(error), ExitCode.CONFIG)
    else:
        report.ok("kafka certificate", certificate)


def _try_open(address: str) -> str:
    """Check that an address is free, and return a remark.

    Raises: OSError.
    """
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host.strip("[]") in {name for _, name in socket.if_nameindex()}:
            return "an interface's address; not tried"
        _try_bind("" if host == "*" else host.strip("[]"), int(port or 0))
        return "any free port" if not port or not int(port) else "free"
    path = address.removeprefix("ipc://")
    if path.startswith("@"):
        return "an abstract socket; not tried"
    directory = os.path.dirname(os.path.abspath(path))
    os.stat(directory)  # raises the reason
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, os.strerror(13), directory)
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        if any(line.rstrip("\n").endswith(f" {os.path.abspath(path)}") for line in file):
            raise OSError(98, os.strerror(98), path)
    return "free"


def _try_bind(host: str, port: int) -> None:
    """Bind without listening, and close, so that no client can connect.

    Raises: OSError.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise OSError(error.errno, f"no such host {host!r} ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
