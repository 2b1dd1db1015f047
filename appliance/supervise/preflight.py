"""What the host must give before an appliance starts: a machine whose stores are seen in order, and descriptors for its partitions. Said before anything is
made.
"""

from __future__ import annotations

import logging
import os
import platform
import resource

from appliance.restart_policy import ExitCode, Halt
from appliance.settings import Settings
from tailrace.formats.partition_file import PARTITION_FILE

logger = logging.getLogger("appliance.supervisor")

MACHINES = ("x86_64", "amd64")
FILES_PER_PARTITION = 2
"""A flusher keeps the live segment and its index open."""
FILES_OF_A_PROCESS = 64
"""What any process has beside doorbells and segments: interpreter, sockets, catalog, journal, what a roll opens for a moment, and a reserve."""


def unfit_machine() -> str:
    """Why the appliance must not run on this machine; empty: it may."""
    machine = platform.machine().lower()
    if machine in MACHINES:
        return ""
    return (
        f"this machine is {machine}; its processors may show stores to other processes out of order, and what Tailrace keeps in shared memory relies on "
        "their order. Run it on x86-64"
    )


def refuse_unfit_machine() -> None:
    """Raises Halt."""
    reason = unfit_machine()
    if reason:
        raise Halt(ExitCode.CONFIG, f"{reason}.")


def slots_for_open_files(settings: Settings, data_dirs: list[str], workers: int) -> int:
    """How many partitions there can be: `slots`, or fewer where the limit of open files is too low for them, which is said. Raises Halt when it is too low
    for what there is already.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return settings.slots
    processes = settings.fronts + workers + settings.dedicated_workers + len(data_dirs) + 4
    base = FILES_OF_A_PROCESS + processes + 2 * len(data_dirs)
    found = max((partitions_in(path) for path in data_dirs), default=0)
    needed = base + FILES_PER_PARTITION * max(found, 1)
    if limit < needed:
        raise Halt(
            ExitCode.CONFIG,
            f"{limit} open files are allowed for a process; {found} partitions and {processes} processes need {needed}. Allow more: ulimit -n 65536, or "
            "LimitNOFILE=65536 in the unit.",
        )
    affordable = (limit - base) // FILES_PER_PARTITION
    if affordable < settings.slots:
        logger.warning(
            "few_open_files allowed=%d partitions_max=%d slots=%d advice='ulimit -n %d, or LimitNOFILE in the unit'",
            limit, affordable, settings.slots, base + FILES_PER_PARTITION * settings.slots,
        )  # fmt: skip
    return min(settings.slots, affordable)


def partitions_in(data_dir: str) -> int:
    """How many partitions have files there. Raises OSError."""
    return sum(1 for entry in os.scandir(data_dir) if os.path.lexists(f"{entry.path}/{PARTITION_FILE}"))


def allow_open_files() -> None:
    """As many as the host lets this user have: a flusher keeps two open for each partition, and many shells begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
