"""Checks of the host and the appliance, one function each, which return a finding with its remedy.
Reads only.
"""

from __future__ import annotations

import glob
import os
import platform
import resource
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import psutil

from appliance.config.relations import planned_cores
from appliance.config.settings import Settings
from appliance.config.topology import read_topology
from appliance.observe.process_states import FULL_DISK_ADVICE, LOST_DISK_ADVICE
from appliance.supervise.preflight import unfit_machine
from tailrace.admin.admin import Admin
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.format.directory.data_dir import CATALOG_FILE, QUARANTINE_DIRECTORY

PARTITION_OFFLINE = "partition offline"
FILES_RECOMMENDED = 4096
MEMORY_RECOMMENDED_BYTES = 256 << 20
SHM_RECOMMENDED_BYTES = 256 << 20
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"}
_VOLATILE = {"tmpfs", "ramfs"}


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding about the host: the fact and its remedy."""

    name: str
    level: Level
    detail: str


def host_checks(data_dirs: list[str]) -> list[Check]:
    """Cores, the kernel of tailrace, shared memory, limits, and the disks under `data_dirs`."""
    return [
        _machine(),
        _cores(),
        _kernel(),
        _memory(),
        _shared_memory(),
        _open_files(),
        *(check for path in data_dirs for check in _disk(path)),
    ]


def _machine() -> Check:
    reason = unfit_machine()
    return (
        Check("machine", Level.PROBLEM, reason)
        if reason
        else Check("machine", Level.OK, platform.machine())
    )


def _cores() -> Check:
    topology = read_topology()
    count = len(topology.cpus)
    if count < 2:
        return Check(
            "cores",
            Level.WARNING,
            f"{count} core: front, worker and flusher share it; give the appliance two or more",
        )
    settings = Settings()
    busy = settings.busy_poll(planned_cores(settings, topology))
    return Check(
        "cores",
        Level.OK,
        f"{count} cores; busy_poll_us is {busy.us} with the default settings: {busy.reason}",
    )


def _kernel() -> Check:
    from tailrace import kernel  # an unusable kernel has ended the program already

    if kernel.IS_COMPILED or kernel.is_wished():
        return Check("kernel", Level.OK, kernel.KIND)
    return Check(
        "kernel", Level.WARNING, f"{kernel.KIND}: work for each record takes several times "
                                 "longer; install a wheel for this Python, or gcc, python3-dev "
                                 "and Cython and then tailrace again",
    )  # fmt: skip


def _memory() -> Check:
    found = psutil.virtual_memory()
    text = f"{found.available >> 20} of {found.total >> 20} MiB of memory available"
    if found.available < MEMORY_RECOMMENDED_BYTES:
        return Check(
            "memory",
            Level.WARNING,
            f"{text}; rings and the page cache need more: stop other programs, or lower ring_bytes",
        )
    return Check("memory", Level.OK, text)


def _shared_memory() -> Check:
    found = os.statvfs("/dev/shm")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"/dev/shm has {free >> 20} of {total >> 20} MiB free"
    if total < SHM_RECOMMENDED_BYTES:
        return Check(
            "shared memory",
            Level.PROBLEM,
            f"{text}; enlarge it: mount -o remount,size=1G /dev/shm (Docker: --shm-size=1g), or "
            "lower ring_bytes",
        )
    if free < total // 10:
        return Check(
            "shared memory",
            Level.WARNING,
            f"{text}; the next start may not find room for its rings",
        )
    return Check("shared memory", Level.OK, text)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed (at most {hard})"
    if soft < FILES_RECOMMENDED:
        return Check(
            "open files",
            Level.WARNING,
            f"{text}; a flusher keeps two files open for each partition: ulimit -n 65536, or "
            "LimitNOFILE=65536 in the unit",
        )
    return Check("open files", Level.OK, text)


def file_system_of(path: str) -> str:
    """The type of the file system that `path` lies on, from /proc/self/mountinfo."""
    device = os.stat(path).st_dev
    requested = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == requested:
                return rest.split()[0]
    return "unknown"


def _disk(path: str) -> list[Check]:
    if not os.path.isdir(path):
        return [
            Check(
                f"disk {path}",
                Level.PROBLEM,
                "there is no such directory here; run doctor on the appliance's host",
            )
        ]
    checks = [_space_check(path), *_readers_of(path), *_former_catalogs(path)]
    quarantine = f"{path}/{QUARANTINE_DIRECTORY}"
    reports = (
        [name for name in os.listdir(quarantine) if name.endswith(".json")]
        if os.path.isdir(quarantine)
        else []
    )
    if reports:
        newest = f"{quarantine}/{sorted(reports)[-1]}"
        checks.append(
            Check(
                f"quarantine {path}",
                Level.PROBLEM,
                f"{len(reports)} damaged ranges were found; {newest} names one: send it again "
                "from its source, then remove the report",
            )
        )
    return checks


def _former_catalogs(path: str) -> list[Check]:
    """Damaged catalogs that a start has put aside."""
    kept = f"{path}/{CATALOG_FILE}.damaged-"
    found = sorted(glob.glob(f"{glob.escape(kept)}*[0-9]"))
    if not found:
        return []
    return [
        Check(
            f"catalog {path}",
            Level.WARNING,
            f"the catalog was damaged, and was made again from the partitions' files; {found[-1]} "
            "is the damaged one. Compare tailrace topic list with the topics that you expect, set "
            "users, rights, quotas and what tailrace config set had again, then remove the file",
        )
    ]


def _space_check(path: str) -> Check:
    """The free space and the file system under `path`; the worst finding alone."""
    name = f"disk {path}"
    found = os.statvfs(path)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    kind = file_system_of(path)
    text = f"{free >> 20} of {total >> 20} MiB free, {kind}"
    if found.f_flag & os.ST_RDONLY:
        return Check(
            name,
            Level.PROBLEM,
            f"{text}, mounted read-only; look at the system log, then remount it for writing",
        )
    if free < total // 10:
        return Check(
            name,
            Level.WARNING,
            f"{text}; free some, or lower retention.ms or retention.bytes of the largest topics",
        )
    if kind in _VOLATILE:
        return Check(
            name,
            Level.WARNING,
            f"{text}: data is lost at a restart of the machine, whatever the topic's durability; "
            "use a disk",
        )
    if kind in _REMOTE:
        return Check(
            name,
            Level.WARNING,
            f"{text}: every acks=all takes a round trip over the network; use a local disk",
        )
    return Check(name, Level.OK, text)


def _readers_of(path: str) -> list[Check]:
    """The data directory's owner and mode."""
    name = f"directory {path}"
    try:
        found = os.stat(path)
        names = sorted(os.listdir(path))
        open_files = [
            entry
            for entry in names
            if os.lstat(f"{path}/{entry}").st_mode & (stat.S_IRGRP | stat.S_IROTH)
        ]
    except OSError as error:
        return [
            Check(
                name,
                Level.WARNING,
                f"cannot be read: {error.strerror}; run doctor as the appliance's user",
            )
        ]
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IWOTH:
        return [
            Check(
                name,
                Level.PROBLEM,
                f"mode {mode:o}: every user may write in it, and the next start refuses it; chmod "
                f"0700 {path}",
            )
        ]
    if mode & stat.S_IWGRP:
        return [
            Check(
                name, Level.WARNING, f"mode {mode:o}: its group may write in it; chmod 0700 {path}"
            )
        ]
    if mode & (stat.S_IXGRP | stat.S_IXOTH) and open_files:
        return [
            Check(
                name,
                Level.WARNING,
                f"mode {mode:o}: other users can read {open_files[0]}, and perhaps more; chmod "
                f"0700 {path}",
            )
        ]
    return []


def appliance_checks(state: dict[str, Any]) -> list[Check]:
    """Check the description of a running appliance (`Admin.describe_cluster`), with
    `groups_error` and `settings`.
    """
    checks = [_process_check(state), *_directory_checks(state)]
    checks += _settings_checks(state.get("settings") or {})
    if state.get("uncleanable"):
        left = state["uncleanable_count"] - len(state["uncleanable"])
        more = f" and {left:,} more" if left > 0 else ""
        checks.append(
            Check(
                "compaction",
                Level.PROBLEM,
                f"{', '.join(state['uncleanable'])}{more}: something cannot be read, and what "
                "follows is not compacted; the log has cleaning_stopped with the place. Look at "
                "the disk, then run: tailrace topic compact TOPIC",
            )
        )
    if state.get("groups_error"):
        checks.append(
            Check(
                "groups",
                Level.PROBLEM,
                "groups, committed offsets and transactions are not served: "
                f"{state['groups_error']}",
            )
        )
    checks += [_failed_move(row) for row in state.get("moves", ()) if row["state"] == "failed"]
    for offline in state["offline"]:
        checks.append(
            Check(
                PARTITION_OFFLINE,
                Level.PROBLEM,
                f"{offline['topic']}-{offline['partition']} takes no writes "
                f"({offline['reason']}); repair or replace the disk, "
                f"then run: tailrace topic online {offline['topic']}",
            )
        )
    return checks


def groups_error(admin: Admin) -> str:
    """The reason why groups and transactions are not served; "": they are."""
    try:
        admin.list_transactions(["prepared"])
    except TailraceError as error:
        return error.detail if error.code is ErrorCode.STORAGE_ERROR else ""
    return ""


def settings_state(admin: Admin) -> dict[str, Any]:
    """Settings that wait for a restart, errors of the last reload, settings of `config set` that
    are not in force, and processes that lag.
    """
    found = admin.config_state()
    return {
        "restart": [row["name"] for row in found["configs"] if "after_restart" in row],
        "errors": found["reload"]["errors"],
        "left_out": found.get("left_out", []),  # an appliance has none before its upgrade
        "not_applied": found["not_applied"],
    }


def _settings_checks(settings: Mapping[str, Any]) -> Iterator[Check]:
    errors = settings.get("errors") or ()
    if errors:
        shown = "; ".join(error.rstrip(".") for error in errors)
        yield Check(
            "configuration",
            Level.PROBLEM,
            f"the configuration was not reloaded: {shown}. Correct it, then run tailrace reload",
        )
    for row in settings.get("left_out") or ():
        yield Check(
            "setting not in force",
            Level.PROBLEM,
            f"{row['name']}, which tailrace config set has stored, is not in force: "
            f"{row['reason']}. Correct it with tailrace config set or the configuration, or remove "
            f"it: tailrace config unset {row['name']}",
        )


def _failed_move(row: dict[str, Any]) -> Check:
    name = f"{row['topic']}:{row['partition']}"
    target = row["to"] or "DIRECTORY"
    return Check(
        "partition not moved",
        Level.WARNING,
        f"{name} was not moved to {target}: {row['reason']}. It is in {row['from']} and takes "
        f"records; to try again: tailrace partition move {name} --to {target}",
    )


def _process_check(state: dict[str, Any]) -> Check:
    down = [p["name"] for p in state["processes"] if not p["live"]]
    if down:
        return Check(
            "processes", Level.PROBLEM, f"down: {', '.join(down)}; the appliance's log says why"
        )
    restarted = [
        f"{p['name']} {p['restarts']} times" for p in state["processes"] if p["restarts"] > 0
    ]
    if restarted:
        return Check(
            "processes",
            Level.WARNING,
            f"restarted: {', '.join(restarted)}; the appliance's log says why",
        )
    return Check("processes", Level.OK, f"{len(state['processes'])} processes, none restarted")


def _directory_checks(state: dict[str, Any]) -> list[Check]:
    checks = []
    for directory in state["data_dirs"]:
        if directory["state"] == "FULL":
            checks.append(
                Check(
                    "disk full",
                    Level.PROBLEM,
                    f"{directory['path']} takes no writes because its disk is full: "
                    f"{FULL_DISK_ADVICE} ({directory['free_bytes'] >> 20} MiB are free)",
                )
            )
        elif directory["state"] != "OK":
            checks.append(
                Check(
                    "disk lost",
                    Level.PROBLEM,
                    f"{directory['path']} cannot be used, its disk is gone or failing: "
                    f"{LOST_DISK_ADVICE}; the partitions of other directories go on",
                )
            )
    return checks
