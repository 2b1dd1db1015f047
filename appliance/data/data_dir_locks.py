"""Locks of all data directories of one appliance, taken together, with the holder's name and pids.

The kernel's locks decide. The recorded names and pids serve the error of a second start, and the
killing of processes that outlive a supervisor.

Owner: the supervisor.
Invariants: the directory with the catalog is the first. Two directories with catalogs are two
appliances, and are refused.
Crash: locks end with the process. The next start checks the recorded pids.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

from appliance.data.data_dir_lock import DataDirLock, take
from appliance.data.directory_errors import DataDirectoryError
from tailrace.format.directory.data_dir import CATALOG_FILE, GROUPS_FILE

logger = logging.getLogger("appliance.supervise.supervisor")


def acquire_all(data_dirs: Sequence[str]) -> list[DataDirLock]:
    """Take every data directory, the one with the catalog first (where that is lost, the one with
    the groups). Raises DataDirectoryError.
    """
    paths = [os.path.abspath(path) for path in data_dirs]
    paths.sort(
        key=lambda path: (
            not os.path.exists(f"{path}/{CATALOG_FILE}"),
            not os.path.lexists(f"{path}/{GROUPS_FILE}"),
        )
    )
    with_catalog = [path for path in paths if os.path.exists(f"{path}/{CATALOG_FILE}")]
    if len(with_catalog) > 1:
        raise DataDirectoryError(
            f"{' and '.join(with_catalog)} both have a catalog: they belong to different "
            "appliances. Serve one of them, or start an appliance for each."
        )
    return [take(path) for path in paths]


def record_holders(
    owners: Iterable[DataDirLock], pids: dict[str, int], addresses: list[str]
) -> None:
    """Record the processes that hold the directories, and the addresses for clients. A failure is
    logged, for nothing that serves depends on it.
    """
    for owner in owners:
        try:
            owner.record_holder(pids, addresses)
        except OSError as error:
            logger.error("holder_not_recorded path=%s error=%r", owner.path, str(error))


def forget_holders(owners: Iterable[DataDirLock]) -> None:
    """Clear the records of all directories after the processes have ended."""
    for owner in owners:
        try:
            owner.forget_holder()
        except OSError as error:
            logger.error("holder_not_forgotten path=%s error=%r", owner.path, str(error))


def restore_locks(owners: Iterable[DataDirLock]) -> bool:
    """Make removed lock files again; return True if there were any."""
    is_made = False
    for owner in owners:
        try:
            is_made = owner.has_lost_its_file() or is_made
        except OSError as error:
            logger.error("lock_file_not_made path=%s error=%r", owner.path, str(error))
    return is_made
