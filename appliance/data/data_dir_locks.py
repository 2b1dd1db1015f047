"""The data directories of one appliance: taken together, and marked with who holds them.

The lock is the kernel's; the names and pids beside it serve the sentence of a second start, and the killing of what outlives a supervisor.

Owner: the supervisor. Invariants: the directory with the catalog is the first; two catalogs are two appliances, and are refused.
Crash: locks end with the process; pids that were recorded are looked at by the next start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

from appliance.directory_errors import DataDirectoryError
from appliance.ownership import Ownership, take
from tailrace.formats.data_directory import CATALOG_FILE, GROUPS_FILE

logger = logging.getLogger("appliance.supervisor")


def take_all(data_dirs: Sequence[str]) -> list[Ownership]:
    """Take every data directory, the one with the catalog first (where that is lost, the one with the groups). Raises DataDirectoryError."""
    paths = [os.path.abspath(path) for path in data_dirs]
    paths.sort(key=lambda path: (not os.path.exists(f"{path}/{CATALOG_FILE}"), not os.path.lexists(f"{path}/{GROUPS_FILE}")))
    with_catalog = [path for path in paths if os.path.exists(f"{path}/{CATALOG_FILE}")]
    if len(with_catalog) > 1:
        raise DataDirectoryError(
            f"{' and '.join(with_catalog)} both have a catalog: they belong to different appliances. Serve one of them, or start one for each."
        )
    return [take(path) for path in paths]


def record_holders(owners: Iterable[Ownership], pids: dict[str, int], addresses: list[str]) -> None:
    """Write down which processes hold the directories, and where clients connect; where that fails it is logged, since nothing that serves depends on it."""
    for owner in owners:
        try:
            owner.record_holder(pids, addresses)
        except OSError as error:
            logger.error("holder_not_recorded path=%s error=%r", owner.path, str(error))


def forget_holders(owners: Iterable[Ownership]) -> None:
    """The processes have ended."""
    for owner in owners:
        try:
            owner.forget_holder()
        except OSError as error:
            logger.error("holder_not_forgotten path=%s error=%r", owner.path, str(error))


def restore_locks(owners: Iterable[Ownership]) -> bool:
    """Make lock files anew where somebody has removed them; returns whether that was so."""
    is_made = False
    for owner in owners:
        try:
            is_made = owner.has_lost_its_file() or is_made
        except OSError as error:
            logger.error("lock_file_not_made path=%s error=%r", owner.path, str(error))
    return is_made
