"""Memory budget of a start: what an appliance of these settings takes, line by line, against what
the host gives.

Owner: pure, but for `read_rooms`, which reads /dev/shm, /proc and the cgroup.

Invariants:
- A start that does not fit is refused before it allocates anything. Without that the kernel would
  end one of its processes later.
- /dev/shm must hold what a start makes. Memory must hold that, what is made when it is first
  needed, and what clients may have in flight.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from appliance.config.settings import Settings
from appliance.config.topology import cgroup_directories, content_of
from appliance.supervise.memory.memory_plan import (
    RegionPlan,
    plan_groups,
    plan_regions,
    plan_transactions,
)
from shm.memory.layout import RegionKind

MIB = 1 << 20
SHARED_PROCESS_BYTES = 24 * MIB
"""Memory that the processes have in common, and the zygote."""
PROCESS_BYTES = 6 * MIB
"""Private memory of a process before it has clients or topics."""
PROCESSES_ALWAYS = 3
"""Supervisor, controller and console."""
GROUPS_BYTES = 16 * MIB
"""Private memory of the group coordinator with some groups."""
SHARED_MEMORY = "/dev/shm"


class Need(NamedTuple):
    """One line of the sum."""

    name: str
    byte_count: int
    origin: str
    """The settings that it follows from, "" for none."""
    is_at_start: bool = False
    """True for shared memory that every start makes."""


class Room(NamedTuple):
    """Memory that is free in one place."""

    name: str
    free_bytes: int
    remedy: str
    """Remedy that gives it more room."""
    is_shared_only: bool = False
    """True for /dev/shm, which has the regions of a start only."""


def needs(settings: Settings, workers: int) -> list[Need]:
    """Every line for so many workers."""
    fronts, directories = settings.front_count, len(settings.data_dirs)
    plans = plan_regions(settings, workers, fronts, directories)

    def of(*kinds: RegionKind) -> int:
        return _size(plan for plan in plans if plan.kind in kinds)

    later = [plan for worker in range(workers) for plan in plan_transactions(worker)]
    processes = PROCESSES_ALWAYS + fronts + workers + directories
    return [
        Need("rings", of(RegionKind.RING), f"ring_bytes, {_counted(workers, 'worker')}", True),
        Need("lanes", of(RegionKind.LANE), f"lane_bytes, {_counted(fronts, 'front')}", True),
        Need("partition tables", of(RegionKind.TABLE), "slots", True),
        Need("control", of(RegionKind.CONTROL, RegionKind.SETTINGS), "", True),
        Need("batches in flight", settings.credit_bytes * fronts, "credit_bytes"),
        Need("processes", SHARED_PROCESS_BYTES + PROCESS_BYTES * processes, "fronts, cores"),
        Need("group coordinator", GROUPS_BYTES + _size([*plan_groups(fronts), *later]), ""),
    ]


def _size(plans: Iterable[RegionPlan]) -> int:
    return sum(plan.size for plan in plans)


def shortage(lines: list[Need], rooms: list[Room]) -> str:
    """The sentence for the first place where the sum does not fit, "" if it fits everywhere."""
    for room in rooms:
        counted = [line for line in lines if line.is_at_start or not room.is_shared_only]
        total = sum(line.byte_count for line in counted)
        if total > room.free_bytes:
            largest = max((line for line in counted if line.origin), key=lambda n: n.byte_count)
            return (
                f"{room.name} has no room for this appliance: it needs {mib(total):,} MiB, and "
                f"{room.free_bytes // MIB:,} MiB are free.\n{table(counted)}\n"
                f"Lower {largest.origin.partition(',')[0]} ({largest.name} are the largest part), "
                f"or {room.remedy}."
            )
    return ""


def table(lines: list[Need]) -> str:
    """The sum, line by line."""
    rows = [*lines, Need("together", sum(line.byte_count for line in lines), "")]
    return "\n".join(
        f"  {line.name:<18} {mib(line.byte_count):>7,} MiB  {line.origin}".rstrip() for line in rows
    )


def mib(byte_count: int) -> int:
    """Bytes as MiB, rounded up."""
    return -(-byte_count // MIB)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# ---- the host ------------------------------------------------------------------------------------


def read_rooms(root: str = "") -> list[Room]:
    """The places that bound memory. What cannot be read bounds nothing. `root`: a directory that
    has /proc, /sys and /dev/shm.
    """
    rooms = []
    try:
        found = os.statvfs(f"{root}{SHARED_MEMORY}")
        rooms.append(
            Room(
                SHARED_MEMORY,
                found.f_bavail * found.f_frsize,
                "enlarge it: mount -o remount,size=1G /dev/shm (Docker: --shm-size=1g)",
                is_shared_only=True,
            )
        )
    except OSError:
        pass
    memory = _fields(f"{root}/proc/meminfo")
    if "MemAvailable:" in memory:
        free = (memory["MemAvailable:"] + memory.get("SwapFree:", 0)) << 10
        rooms.append(Room("memory", free, "stop other programs, or add memory"))
    return [*rooms, *_cgroup_rooms(root)]


def _cgroup_rooms(root: str) -> list[Room]:
    rooms = []
    for path in cgroup_directories(root):
        bound, used = _number(f"{path}/memory.max"), _number(f"{path}/memory.current")
        if bound is None or used is None:
            continue
        found = _fields(f"{path}/memory.stat")
        cached = found.get("inactive_file", 0) + found.get("active_file", 0)
        name = path.removeprefix(f"{root}/sys/fs/cgroup") or "/"
        rooms.append(
            Room(
                f"the cgroup {name}",
                max(0, bound - max(0, used - cached)),
                "raise its memory.max (MemoryMax= in the unit; docker --memory)",
            )
        )
    return rooms


def _fields(path: str) -> dict[str, int]:
    rows = (line.split() for line in content_of(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: str) -> int | None:
    text = content_of(path).strip()
    return int(text) if text.isdigit() else None
