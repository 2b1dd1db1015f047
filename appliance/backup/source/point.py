"""The point of a backup: one moment's databases, and the end of each log at that moment.

While both databases are locked against writers, no topic changes, no offset is committed and no
transaction is decided. In that time the ends are read, those of delay logs last, and a reader of
each database takes its view. All of it takes a few milliseconds for a thousand partitions.

Owner: reads what controller, groups and flushers own; docs/adr/0040 has the reasons for the order.

Invariants:
- Each committed offset lies at or below the end of its log.
- A transaction that a log has a marker of is decided in the databases' view. One that the view
  does not know any more has all its markers.
- A delayed record that a topic has below its end was closed by a mark below its delay log's end.

Crash: the locks end with this process.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from appliance.backup.errors import BackupError, NotReadyError
from appliance.catalog.database import error_kind
from appliance.data import region_manifest
from shm.memory.layout import RegionKind, SlotState
from shm.memory.region import Region, RegionError
from shm.tables.partition_table import PartitionTable
from tailrace.format.directory.data_dir import (
    BIN_DIRECTORY,
    CATALOG_FILE,
    GROUPS_FILE,
    LOCK_FILE,
    bin_name,
    read_identity,
)

DATABASES = (GROUPS_FILE, CATALOG_FILE)
"""In the order of their locks: that of groups is written all the time, and is waited for with
nothing locked.
"""
LOCK_TIMEOUT_S = 10.0
SECOND_LOCK_TIMEOUT_S = 0.1
"""Less than the appliance's processes wait for a locked database."""
_OPEN = (SlotState.ONLINE, SlotState.OFFLINE_FOR_WRITES)


@dataclass(frozen=True, slots=True)
class SourcePartition:
    """A partition of the catalog at the point."""

    topic: str
    topic_id: bytes
    partition: int
    directory: str
    is_delay_log: bool
    end: int | None
    """Its log's end; None: the end of its files."""

    @property
    def is_arriving(self) -> bool:
        """True while its files are in the bin: it comes back, or moves here."""
        data_dir = os.path.dirname(self.directory)
        return os.path.exists(
            f"{data_dir}/{BIN_DIRECTORY}/{bin_name(self.topic_id, self.partition)}"
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One moment."""

    began_us: int
    point_us: int
    partitions: list[SourcePartition]
    databases: dict[str, str]
    """Name of a database -> path of its copy."""


class Source:
    """A data directory: that of a running appliance, or a stopped one."""

    def __init__(self, data_dir: str) -> None:
        """`data_dir`: the one with the catalog. Raises BackupError."""
        self.data_dir = os.path.abspath(data_dir)
        self._lock_fds: list[int] = []
        try:
            owner = os.stat(self.data_dir).st_uid
        except OSError as error:
            raise BackupError(f"{self.data_dir}: {error.strerror}.") from None
        if not os.path.exists(f"{self.data_dir}/{CATALOG_FILE}"):
            raise BackupError(
                f"{self.data_dir} has no {CATALOG_FILE}: name the first data directory of the "
                "appliance."
            )
        if owner != os.geteuid():
            raise BackupError(
                f"{self.data_dir} belongs to user {owner}: run the backup as that user."
            )
        identity = read_identity(self.data_dir)
        if identity is None:
            raise BackupError(f"{self.data_dir}/instance.json is missing or damaged.")
        self.instance = identity.instance.hex()
        self.is_running = not self._try_lock()
        if not self.is_running and region_manifest.read(self.data_dir).existed:
            self.close()
            raise BackupError(
                f"the appliance of {self.data_dir} did not stop cleanly: what it acknowledged may "
                "not be in its files. Start it, and back up then."
            )

    def _try_lock(self) -> bool:
        """Take the locks of `appliance.data.data_dir_lock`, so that no appliance starts meanwhile;
        False if one runs.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._lock_fds = [os.open(self.data_dir, flags | os.O_DIRECTORY)]
        try:
            self._lock_fds.append(os.open(f"{self.data_dir}/{LOCK_FILE}", flags | os.O_NOFOLLOW))
        except FileNotFoundError:
            pass
        for fd in self._lock_fds:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                return False
            except OSError:  # a network file system that cannot lock a directory
                continue
        return True

    def close(self) -> None:
        """Give the locks of a stopped directory back."""
        for fd in self._lock_fds:
            os.close(fd)
        self._lock_fds = []

    # ---- the catalog -----------------------------------------------------------------------------

    def partitions(self) -> list[SourcePartition]:
        """The partitions of the catalog now, without ends. Raises BackupError."""
        with _opened(f"{self.data_dir}/{CATALOG_FILE}") as catalog:
            return [partition for partition, _, _ in _partitions_of(catalog)]

    def directories(self) -> list[str]:
        """The data directories, this one first. Raises BackupError."""
        with _opened(f"{self.data_dir}/{CATALOG_FILE}") as catalog:
            listed = [path for (path,) in catalog.execute("SELECT path FROM data_dirs")]
        return [self.data_dir, *listed]

    def point(self, scratch: str) -> Point:
        """Take the point; the copies of the databases are made in `scratch`. Raises NotReadyError
        while a partition is not open, BackupError, OSError.
        """
        with ExitStack() as readers:
            began_us = time.time_ns() // 1000
            with ExitStack() as locks:
                views: dict[str, sqlite3.Connection] = {}
                for name in DATABASES:
                    path = f"{self.data_dir}/{name}"
                    if os.path.exists(path):
                        views[name] = readers.enter_context(_opened(path))
                        timeout_s = SECOND_LOCK_TIMEOUT_S if len(views) > 1 else LOCK_TIMEOUT_S
                        locks.enter_context(_locked(path, timeout_s))
                for view in views.values():
                    view.execute("BEGIN")
                    view.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                partitions = self._with_ends(views[CATALOG_FILE])
                if GROUPS_FILE not in views and os.path.exists(f"{self.data_dir}/{GROUPS_FILE}"):
                    raise NotReadyError(f"{GROUPS_FILE} was made at this moment.")
                point_us = time.time_ns() // 1000
            copies = {}
            for name, view in views.items():
                copies[name] = f"{scratch}/{name}"
                if os.path.exists(copies[name]):
                    os.unlink(copies[name])
                with _opened(copies[name]) as copy:
                    view.backup(copy)
        return Point(began_us, point_us, partitions, copies)

    def _with_ends(self, catalog: sqlite3.Connection) -> list[SourcePartition]:
        found = _partitions_of(catalog)
        if not self.is_running:
            return [partition for partition, _, _ in found]
        manifest = region_manifest.read(self.data_dir).manifest
        if manifest is None:
            raise NotReadyError(f"the appliance of {self.data_dir} is starting or stopping.")
        tables: dict[str, PartitionTable] = {}
        ended = []
        for partition, directory_id, slot in sorted(found, key=lambda each: each[0].is_delay_log):
            table = tables.get(directory_id)
            if table is None:
                try:
                    number = manifest.directories.index(directory_id)
                    region = Region.attach(manifest.regions[f"table-{number}"], RegionKind.TABLE)
                except (ValueError, KeyError, RegionError) as error:
                    raise NotReadyError(
                        f"the state of {partition.directory} cannot be read: {error}"
                    ) from None
                table = tables[directory_id] = PartitionTable(region)
            ended.append(_with_end(partition, table, slot))
        return ended


def _with_end(partition: SourcePartition, table: PartitionTable, slot: int) -> SourcePartition:
    topic_id, number, state, _, _, high_watermark = table.bounds(slot)
    is_own = (topic_id, number) == (partition.topic_id, partition.partition)
    if is_own and state in _OPEN:
        end = high_watermark
    elif is_own and state == SlotState.UNREADABLE:
        raise BackupError(
            f"{partition.directory} could not be opened by the appliance and cannot be backed up. "
            f"Repair its disk and run `tailrace topic online {partition.topic}`, or delete the "
            "topic."
        )
    elif os.path.exists(partition.directory) or partition.is_arriving:
        raise NotReadyError(f"{partition.directory} is not open yet.")
    else:
        end = 0  # decided a moment ago
    return SourcePartition(
        partition.topic, partition.topic_id, partition.partition, partition.directory,
        partition.is_delay_log, end,
    )  # fmt: skip


def _partitions_of(catalog: sqlite3.Connection) -> list[tuple[SourcePartition, str, int]]:
    """(partition, identity of its data directory, slot) of all topics but those that are being
    deleted.
    """
    return [
        (
            SourcePartition(
                name, topic_id, partition, f"{path}/{name}-{partition}", bool(delay_of), None
            ),
            directory_id,
            slot,
        )
        for name, topic_id, delay_of, partition, slot, directory_id, path in catalog.execute(
            "SELECT name, topic_id, delay_of, partition, slot, directory_id, path FROM topics"
            " JOIN partitions USING (topic_id) JOIN data_dirs ON number = data_dir"
            " WHERE state != 'deleting' ORDER BY name, partition"
        )
    ]


@contextmanager
def _opened(path: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=timeout_s)
    try:
        yield connection
    except sqlite3.Error as error:
        if error_kind(error) == sqlite3.SQLITE_BUSY:
            raise NotReadyError(f"{path} is locked by another process.") from error
        raise BackupError(f"{path} cannot be read: {error}.") from error
    finally:
        connection.close()


@contextmanager
def _locked(path: str, timeout_s: float) -> Iterator[None]:
    """Keep writers out of a database during the block. Raises NotReadyError if it is locked for
    longer than `timeout_s`.
    """
    with _opened(path, timeout_s) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
