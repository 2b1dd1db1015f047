"""Opens the catalog's file at a start: makes it, or rebuilds it from the partitions' files.

A `coordinator.db` that is missing or damaged is rebuilt from `partition.json` of all data
directories (`tailrace.format.directory.partition_metadata`). These hold every decision about a
topic. Where they leave a doubt, the start is refused with the reason.

Owner: the controller, before it serves.
Invariants:
- A damaged database is kept as `coordinator.db.damaged-N`.
- Symbolic links are not followed. Only this user may read the catalog.
- A rebuilt catalog gives a partition the slot that it has in shared memory, and never a producer id
  that may have been given before.
Crash: the new database gets its name when it is complete. Until then the next start rebuilds it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterable

from appliance.catalog.catalog import Catalog
from appliance.catalog.database import CatalogVersionError, error_kind
from appliance.catalog.deleted_topics import DeletedTopics
from appliance.catalog.log_dir_scan import (
    has_identity_of,
    partition_directories,
    survey,
    survey_bins,
)
from appliance.catalog.moved_partitions import read_moved
from appliance.catalog.restored_topics import LiveSlot, SurveyError, deleted_topics, restored_topics
from shm.memory.layout import SlotState
from shm.runtime.elapsed_time import Mark
from shm.tables.partition_table import PartitionTable
from tailrace.core.errors import StorageError
from tailrace.format.directory.data_dir import BIN_DIRECTORY, CATALOG_FILE

logger = logging.getLogger(__name__)

_MAGIC = b"SQLite format 3\0"
_COMPANIONS = ("", "-wal", "-shm")
_DAMAGED_KINDS = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_ERROR,
)
_BUSY_KINDS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
ADOPTED_KEPT_MS = 7 * 86_400_000
"""Retention of deleted topics that a catalog did not have."""
PRODUCER_IDS_PER_SECOND = 1 << 20
"""Producer ids counted per second of the clock, more than can be given. Ids that begin at the
present time are above all earlier ones.
"""


class CatalogUnusableError(RuntimeError):
    """The catalog can neither be used nor rebuilt; the sentence names the file and says what
    to do.
    """


class CatalogBusyError(RuntimeError):
    """Another process holds the database for a moment."""


class _DamagedError(RuntimeError):
    """The database must be rebuilt, for this reason."""


def open_catalog(
    directories: list[tuple[str, str]], slot_count: int, live: Iterable[LiveSlot], now_us: int
) -> tuple[Catalog, list[int]]:
    """The catalog of these data directories, (identity, path), in the first of which it lies, and
    the number it has for each. `live`: partitions that processes serve now. Raises
    CatalogUnusableError, CatalogBusyError, MissingDirectoryError.
    """
    path = f"{directories[0][1]}/{CATALOG_FILE}"
    try:
        try:
            catalog = _open_file(path, slot_count)
            _check_age(catalog, [directory for _, directory in directories])
        except _DamagedError as reason:
            _rebuild(path, str(reason), directories, slot_count, list(live), now_us)
            catalog = _open_file(path, slot_count)
        if catalog.slots.needed > slot_count:
            catalog.close()
            raise CatalogUnusableError(
                f"slots is {slot_count}; the existing partitions need {catalog.slots.needed}. "
                f"Set slots to {catalog.slots.needed} or more (slots of deleted partitions are "
                "used again, so the number of partitions may be smaller)."
            )
        numbers = catalog.slots.register(directories)
        _warn_unknown_topics(catalog, [directory for _, directory in directories])
        _adopt_deleted(catalog, [directory for _, directory in directories], numbers, now_us)
        return catalog, numbers
    except _DamagedError as reason:
        raise CatalogUnusableError(
            f"{path} was rebuilt and cannot be used ({reason}): check the disk"
        ) from None
    except sqlite3.Error as error:
        found = _not_usable(path, error)
        raise (
            CatalogUnusableError(f"{path} cannot be used: {error}; check the disk")
            if isinstance(found, _DamagedError)
            else found
        ) from None
    except SurveyError as error:
        raise CatalogUnusableError(
            f"{path} is missing or damaged and cannot be rebuilt from the partitions' files: "
            f"{error} Or restore {path} from a backup."
        ) from None
    except OSError as error:
        raise CatalogUnusableError(
            f"{error.filename or path}: {error.strerror}; make it readable and writable for this "
            "user"
        ) from None


def _unknown_directories(catalog: Catalog, data_dirs: list[str]) -> list[tuple[str, str]]:
    """(name, path) of what has a partition's name and file, and is none of the catalog's."""
    known = {
        f"{topic.name}-{row.partition}" for topic in catalog.topics() for row in topic.partitions
    }
    known |= {f"{each.name}-{each.partition}" for each in read_moved(catalog.database)}
    return [(name, path) for name, path in partition_directories(data_dirs) if name not in known]


def _check_age(catalog: Catalog, data_dirs: list[str]) -> None:
    """Refuse a catalog that is older than the partitions.

    A topic is in the catalog before its directories are made, and until they are removed. The
    former directory of a partition that has moved may outlive it, and is in the table `moves`.
    Partitions that belong here and are unknown to the catalog show that its write-ahead log was
    lost, or that it is from a backup.

    Raises: _DamagedError.
    """
    unknown = [
        path
        for name, path in _unknown_directories(catalog, data_dirs)
        if has_identity_of(path, name)
    ]
    if unknown:
        catalog.close()
        raise _DamagedError(
            f"it is older than {len(unknown)} partitions that are here, such as {unknown[0]}"
        )


def _warn_unknown_topics(catalog: Catalog, data_dirs: list[str]) -> None:
    """Warn of partition directories that belong to no topic."""
    unknown = [path for _, path in _unknown_directories(catalog, data_dirs)]
    if unknown:
        logger.warning(
            "directories_of_no_topic count=%d first=%r advice=%r", len(unknown), unknown[0],
            "they were copied or renamed, or an older version wrote them: move them away",
        )  # fmt: skip


def _adopt_deleted(catalog: Catalog, data_dirs: list[str], numbers: list[int], now_us: int) -> None:
    """Note the deleted topics that the bins have and the catalog does not: it was rebuilt, or is
    from a backup. Their retention begins anew.
    """
    if not any(os.path.isdir(f"{data_dir}/{BIN_DIRECTORY}") for data_dir in data_dirs):
        return
    binned = DeletedTopics(catalog)
    known = {topic.topic_id for topic in catalog.topics()}
    known |= {deleted.topic.topic_id for deleted in binned.all()}
    unknown = [
        each
        for each in survey_bins(data_dirs)
        if each.file is not None and each.file.topic_id not in known
    ]
    if not unknown:
        return
    mark = Mark.of_rows(catalog.database.execute("SELECT name, value FROM meta").fetchall())
    expires_ms = (0 if mark is None else mark.elapsed_ms) + ADOPTED_KEPT_MS
    found = deleted_topics(unknown, numbers, now_us, expires_ms)
    for deleted in found:
        binned.restore(deleted)
    logger.warning(
        "deleted_topics_found count=%d first=%r advice=%r", len(found), unknown[0].topic,
        "the catalog did not have them: see `tailrace topic list --deleted`",
    )  # fmt: skip


_NOT_SERVED = (int(SlotState.FREE), int(SlotState.DELETED))


def live_slots(tables: list[PartitionTable]) -> list[LiveSlot]:
    """The slots of the partitions that the flushers of this run serve."""
    found = []
    for index, table in enumerate(tables):
        for slot in range(table.slot_count):
            if (
                table.bounds(slot)[2] in _NOT_SERVED
            ):  # most slots are free; reading all would take a tenth of a start
                continue
            state = table.read(slot)
            if state.state not in _NOT_SERVED:
                found.append(
                    LiveSlot(state.topic_id, state.partition, index, slot, state.applied_version)
                )
    return found


def _open_file(path: str, slot_count: int) -> Catalog:
    """Open the database and check it.

    Raises: _DamagedError, CatalogUnusableError, CatalogBusyError, OSError.
    """
    for companion in _COMPANIONS:
        _make_private(path + companion)
    if not os.path.exists(path):
        raise _DamagedError("it is missing")
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC))
    if head != _MAGIC:
        raise _DamagedError("not an SQLite database" if head else "it is empty")
    catalog = None
    try:
        catalog = Catalog(path, slot_count)
        wrong = catalog.check()
        if wrong:
            raise _DamagedError(wrong)
        catalog.topics()
        return catalog
    except (sqlite3.Error, StorageError, ValueError, TypeError, _DamagedError) as error:
        if catalog is not None:
            catalog.close()
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if isinstance(cause, sqlite3.Error):
            raise _not_usable(path, cause) from None
        raise error if isinstance(error, _DamagedError) else _DamagedError(str(error)) from None
    except CatalogVersionError as error:
        raise CatalogUnusableError(
            f"{error}. Start the build that wrote it, or a newer one."
        ) from None


def _not_usable(path: str, error: sqlite3.Error) -> Exception:
    kind = error_kind(error)
    if (
        kind in _DAMAGED_KINDS
        or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHORT_READ
    ):
        return _DamagedError(str(error))
    if kind in _BUSY_KINDS:
        return CatalogBusyError(f"{path} cannot be opened: {error}")
    return CatalogUnusableError(
        f"{path} cannot be used: {error}. Check the disk's free space and health and the file's "
        "owner, then start again."
    )


def _make_private(path: str) -> None:
    """Check that a file of the catalog is a plain file, and make it readable for this user only.

    Raises: CatalogUnusableError, OSError.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        kind = (
            "a symbolic link"
            if stat.S_ISLNK(found.st_mode)
            else "a directory"
            if stat.S_ISDIR(found.st_mode)
            else "no plain file"
        )
        raise CatalogUnusableError(
            f"{path} is {kind}; links are not followed. Put the file itself there, or move it "
            "away: the catalog is then rebuilt from the partitions' files."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)


def _rebuild(
    path: str,
    reason: str,
    directories: list[tuple[str, str]],
    slot_count: int,
    live: list[LiveSlot],
    now_us: int,
) -> None:
    """Make the database from the partitions' files. Raises SurveyError, sqlite3.Error, OSError,
    MissingDirectoryError.
    """
    restored = restored_topics(
        survey([directory for _, directory in directories]),
        live,
        slot_count,
        len(directories),
        now_us,
    )
    is_new = not restored.topics and not restored.warnings and not os.path.exists(path)
    temporary = f"{path}.rebuilding"
    for companion in (*_COMPANIONS, "-journal"):
        if os.path.lexists(temporary + companion):
            os.unlink(temporary + companion)
    os.close(
        os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    )
    catalog = Catalog(temporary, slot_count)
    try:
        numbers = catalog.slots.register(directories)
        for topic in restored.topics:
            catalog.restore_topic(restored.with_numbers(topic, numbers))
        if not is_new:
            catalog.producers.begin_at(now_us // 1_000_000 * PRODUCER_IDS_PER_SECOND)
    finally:
        catalog.close()
    aside = _set_aside(path)
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)  # independent of the umask
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    if is_new:
        return
    for warning in restored.warnings:
        logger.warning("catalog_rebuilt_with_a_gap reason=%r", warning)
    logger.warning(
        "catalog_rebuilt path=%s reason=%r topics=%d partitions=%d kept_in=%r producer_ids_from=%d",
        path, reason, len(restored.topics), sum(len(topic.partitions) for topic in restored.topics),
        aside,
        now_us // 1_000_000 * PRODUCER_IDS_PER_SECOND,
    )  # fmt: skip


def _set_aside(path: str) -> str:
    """Rename a damaged database with its journal files; return its new name, "" if there was none.
    A write-ahead log without its database would be taken for the new one's.
    """
    number = 1
    while os.path.lexists(f"{path}.damaged-{number}"):
        number += 1
    aside = f"{path}.damaged-{number}"
    found = [companion for companion in _COMPANIONS if os.path.lexists(path + companion)]
    for companion in reversed(
        found
    ):  # the database last: after a kill in between it is still there, and damaged
        os.rename(path + companion, aside + companion)
    return aside if found else ""
