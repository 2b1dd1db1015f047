"""Checks of the host before a start: a machine with ordered stores, and enough file descriptors for
the partitions.
"""

from __future__ import annotations

import logging
import os
import platform
import resource

from appliance.config.settings import Settings
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from tailrace.format.directory.data_dir import PARTITION_FILE

logger = logging.getLogger("appliance.supervise.supervisor")

MACHINES = ("x86_64", "amd64")
FILES_PER_PARTITION = 2
"""A flusher keeps the live segment and its index open."""
FILES_OF_A_PROCESS = 64
"""Descriptors of any process beside doorbells and segments: interpreter, sockets, catalog, journal,
the files of a roll, and a reserve.
"""


def unfit_machine() -> str:
    """The reason why the appliance must not run on this machine; "" if it may."""
    machine = platform.machine().lower()
    if machine in MACHINES:
        return ""
    return (
        f"this machine is {machine}; its processors may reorder stores as other processes see "
        "them, and Tailrace's shared memory relies on their order. Run it on x86-64"
    )


def refuse_unfit_machine() -> None:
    """Refuse a machine that the appliance must not run on.

    Raises: Halt.
    """
    reason = unfit_machine()
    if reason:
        raise Halt(ExitCode.CONFIG, f"{reason}.")


def warn_of_python_kernel() -> None:
    """Log that the kernel was not compiled where this was installed, and the remedy."""
    from tailrace import kernel  # the zygote has imported it

    if not kernel.IS_COMPILED and not kernel.is_wished():
        logger.warning(
            "kernel_not_compiled consequence='work for each record takes several times longer' "
            "advice='install gcc and python3-dev, then tailrace again: pip install "
            "--force-reinstall --no-cache-dir --no-deps tailrace'"
        )


def slots_for_open_files(settings: Settings, data_dirs: list[str], workers: int) -> int:
    """Number of partition slots: `slots`, or fewer, with a warning, if the limit of open files is
    too low.

    Raises: Halt if the limit is too low for the existing partitions.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return settings.slots
    processes = settings.front_count + workers + settings.dedicated_workers + len(data_dirs) + 4
    base = FILES_OF_A_PROCESS + processes + 2 * len(data_dirs)
    found = max((partitions_in(path) for path in data_dirs), default=0)
    needed = base + FILES_PER_PARTITION * max(found, 1)
    if limit < needed:
        raise Halt(
            ExitCode.CONFIG,
            f"the limit of open files is {limit}; {found} partitions and {processes} processes "
            f"need {needed}. Raise it: ulimit -n 65536, or LimitNOFILE=65536 in the unit.",
        )
    affordable = (limit - base) // FILES_PER_PARTITION
    if affordable < settings.slots:
        logger.warning(
            "few_open_files allowed=%d partitions_max=%d slots=%d advice='ulimit -n %d, or "
            "LimitNOFILE in the unit'",
            limit, affordable, settings.slots, base + FILES_PER_PARTITION * settings.slots,
        )  # fmt: skip
    return min(settings.slots, affordable)


def partitions_in(data_dir: str) -> int:
    """Number of partitions with files in a data directory.

    Raises: OSError.
    """
    return sum(
        1 for entry in os.scandir(data_dir) if os.path.lexists(f"{entry.path}/{PARTITION_FILE}")
    )


def allow_open_files() -> None:
    """Raise the limit of open files to the hard limit: a flusher keeps two open for each partition,
    and many shells begin with 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
