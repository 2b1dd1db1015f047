"""Restore: makes a data directory from a backup.

Owner: the directory, which must be empty.

Invariants:
- Each log ends at the backup's point, and begins a leader epoch there: readers of the original
  that were further are told.
- The directory gets an identity of its own, so that nothing (shared memory, leases, lanes) is
  taken for the original's. Producer ids that the original may have given since are not given
  again.
- The identity is written last, when everything else is synced: a start refuses a directory that was
  not restored wholly.

Segments are synced by threads, while the next ones are written: a sync waits for the disk.

Crash: a restore that was killed leaves a directory that neither a start nor a restore takes; it is
removed by hand.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import orjson

from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest, Part, PartitionEntry, SegmentEntry
from appliance.backup.restored_indexes import has_transactions, transactions_below, whole_index
from appliance.backup.target.object_store import ObjectStore
from appliance.catalog.database import SCHEMA_VERSION as CATALOG_VERSION
from appliance.catalog.recovery import PRODUCER_IDS_PER_SECOND
from appliance.groups.store.schema import SCHEMA_VERSION as GROUPS_VERSION
from shm.crash_points import crash_point
from tailrace.core.schedule.delays import DELAY_SUFFIX
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import (
    CATALOG_FILE,
    GROUPS_FILE,
    IDENTITY_COPY_FILE,
    IDENTITY_FILE,
    PARTITION_FILE,
    UNFINISHED_RESTORE_FILE,
    Identity,
)
from tailrace.format.directory.delay_files import PENDING_FILE
from tailrace.format.directory.partition_metadata import PartitionMetadata, SlotMapEnd
from tailrace.format.segments import transaction_index
from tailrace.format.segments.segment import INDEX_SUFFIX, PRODUCERS_SUFFIX, file_name
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX

EPOCHS_ABOVE = 1 << 16
"""The epoch that a restored log begins is so far above the last one, above all that the original
begins after the backup.
"""
CHECKPOINT_FILE = "checkpoint.0"
SYNCS_MAX = 3
"""Segments that are being synced at once: they are all that waits in memory for the disk."""
_VERSIONS = {CATALOG_FILE: CATALOG_VERSION, GROUPS_FILE: GROUPS_VERSION}
_BUCKET = re.compile(r"[0-9]+-[0-9]{16}-[0-9]{8}\.pending")
_MODE = 0o600


def chosen(store: ObjectStore, backup_id: str | None, until_us: int | None) -> Manifest:
    """The backup of this id; else the newest one, whose point is not after `until_us` if that is
    given. Raises BackupError.
    """
    if backup_id is not None:
        return store.manifest(backup_id)
    ids = store.backup_ids()
    for each in reversed(ids):
        if until_us is None:
            return store.manifest(each)
        found = store.manifest(each)
        if found.point_us <= until_us:
            return found
    if not ids:
        raise BackupError(f"there are no backups at {store.target}.")
    raise BackupError(
        f"no backup at {store.target} is so old: the oldest is {ids[0]}. "
        "`tailrace backup list` shows them."
    )


def restore(
    store: ObjectStore, manifest: Manifest, data_dir: str, topics: Collection[str] = ()
) -> int:
    """Make `data_dir` from a backup, with these topics and their delay logs alone if there are
    some. Returns the number of bytes written. Raises BackupError, OSError.
    """
    if topics:
        manifest = _only(manifest, topics)
    path = os.path.abspath(data_dir)
    os.makedirs(path, mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(
                f"{path} is in use by an appliance or another restore; restore into an empty "
                "directory."
            ) from None
        except OSError:  # a network file system that cannot lock a directory
            pass
        _refuse_used(path)
        return _Restore(store, manifest, path).run()
    finally:
        os.close(fd)


def _only(manifest: Manifest, topics: Collection[str]) -> Manifest:
    """The manifest without other topics. Raises BackupError."""
    known = {entry.topic for entry in manifest.partitions}
    missing = sorted(set(topics) - known)
    if missing:
        raise BackupError(
            f"backup {manifest.backup_id} has no topic {missing[0]!r}; it has "
            f"{', '.join(sorted(known)[:20])}."
        )
    kept = {*topics, *(name + DELAY_SUFFIX for name in topics)}
    return replace(
        manifest,
        partitions=[entry for entry in manifest.partitions if entry.topic in kept],
        gone=[
            *manifest.gone,
            *{entry.topic_id for entry in manifest.partitions if entry.topic not in kept},
        ],
    )


def _refuse_used(path: str) -> None:
    names = [name for name in os.listdir(path) if name != "lost+found"]
    if UNFINISHED_RESTORE_FILE in names:
        raise BackupError(
            f"{path} was left by a restore that did not end: remove what is in it, then run this "
            "again."
        )
    if names:
        raise BackupError(
            f"{path} is not empty (it has {sorted(names)[0]}); restore into an empty directory."
        )


class _Restore:
    def __init__(self, store: ObjectStore, manifest: Manifest, path: str) -> None:
        self._store = store
        self._manifest = manifest
        self._path = path
        self._written_bytes = 0
        self._ends = {entry.key: entry.end for entry in manifest.partitions}
        self._instance = os.urandom(16)
        self._syncs: deque[Future[None]] = deque()

    def run(self) -> int:
        with ThreadPoolExecutor(SYNCS_MAX, "restore-sync") as self._syncers:
            self._write_all()
            self._await_syncs(0)
        self._complete()
        return self._written_bytes

    def _write_all(self) -> None:
        self._write(UNFINISHED_RESTORE_FILE, [self._manifest.backup_id.encode()])
        for name in self._manifest.databases:
            self._write_database(name, self._instance)
        counts = self._slot_counts()
        for entry in self._manifest.partitions:
            if entry.topic_id not in self._manifest.gone and entry.metadata is not None:
                self._write_partition(entry, counts.get(entry.topic_id, 0))
            crash_point("restore.in_partitions")

    def _complete(self) -> None:
        crash_point("restore.before_identity")
        _sync(self._path)
        os.unlink(f"{self._path}/{UNFINISHED_RESTORE_FILE}")
        identity = Identity(self._instance, self._instance).encode()
        for name in (IDENTITY_COPY_FILE, IDENTITY_FILE):
            checked_json.replace(f"{self._path}/{name}", identity)

    def _await_syncs(self, count: int) -> None:
        """Wait until at most so many segments are being synced. Raises OSError."""
        while len(self._syncs) > count:
            self._syncs.popleft().result()

    # ---- databases -------------------------------------------------------------------------------

    def _write_database(self, name: str, instance: bytes) -> None:
        if name not in _VERSIONS:
            raise BackupError(f"the manifest names a database {name!r}: it is damaged.")
        path = f"{self._path}/{name}"
        self._write(name, self._read([self._manifest.databases[name]]))
        database = sqlite3.connect(path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=DELETE")
            row = database.execute(
                "SELECT value FROM meta WHERE name = 'schema_version'"
            ).fetchone()
            if row is None or row[0] > _VERSIONS[name]:
                raise BackupError(
                    f"{name} of the backup has version {row and row[0]}, and was made by Tailrace "
                    f"{self._manifest.version}; this version reads {_VERSIONS[name]}. Install that "
                    "version, or a later one."
                )
            if name == CATALOG_FILE:
                database.execute("BEGIN")
                self._adapt_catalog(database, instance)
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise BackupError(f"{name} of the backup cannot be used: {error}.") from error
        finally:
            database.close()
        _sync(path)

    def _adapt_catalog(self, catalog: sqlite3.Connection, instance: bytes) -> None:
        """Make the catalog that of this directory, and of its logs' ends."""
        catalog.execute("DELETE FROM data_dirs")
        catalog.execute("INSERT INTO data_dirs VALUES (0, ?, ?)", (instance.hex(), self._path))
        catalog.execute("UPDATE partitions SET data_dir = 0")
        if catalog.execute("SELECT 1 FROM sqlite_schema WHERE name = 'leases'").fetchone():
            catalog.execute("DELETE FROM leases")
        if catalog.execute("SELECT 1 FROM sqlite_schema WHERE name = 'bin'").fetchone():
            catalog.execute("DELETE FROM bin")  # a backup does not have its files
        if catalog.execute("SELECT 1 FROM sqlite_schema WHERE name = 'moves'").fetchone():
            catalog.execute("DELETE FROM moves")
        for topic_id in self._manifest.gone:
            raw = bytes.fromhex(topic_id)
            catalog.execute("DELETE FROM partitions WHERE topic_id = ?", (raw,))
            catalog.execute("DELETE FROM topics WHERE topic_id = ?", (raw,))
        rows = catalog.execute(
            "SELECT topic_id, partition, delete_before, hand_over FROM partitions"
        ).fetchall()
        for topic_id, partition, delete_before, hand_over in rows:
            ends = [
                [source, min(offset, self._ends.get((topic_id.hex(), source), 0))]
                for source, offset in orjson.loads(hand_over)
            ]
            end = self._ends.get((topic_id.hex(), partition), 0)
            catalog.execute(
                "UPDATE partitions SET delete_before = ?, hand_over = ? WHERE topic_id = ? AND "
                "partition = ?",
                (min(delete_before, end), orjson.dumps(ends).decode(), topic_id, partition),
            )
        (newest,) = catalog.execute(
            "SELECT coalesce(max(producer_id), 0) FROM producers"
        ).fetchone()
        first = max(newest, int(time.time()) * PRODUCER_IDS_PER_SECOND)
        catalog.execute("INSERT OR IGNORE INTO producers VALUES (?, 0)", (first,))

    def _slot_counts(self) -> dict[str, int]:
        """Topic id -> number of its slot maps."""
        database = sqlite3.connect(f"{self._path}/{CATALOG_FILE}", isolation_level=None)
        try:
            rows = database.execute("SELECT topic_id, slot_counts FROM topics").fetchall()
        finally:
            database.close()
        return {topic_id.hex(): len(orjson.loads(counts)) for topic_id, counts in rows}

    # ---- partitions ------------------------------------------------------------------------------

    def _write_partition(self, entry: PartitionEntry, map_count: int) -> None:
        name = f"{entry.topic}-{entry.partition}"
        if "/" in name or "\0" in name or not entry.topic:
            raise BackupError(f"the manifest names a topic {entry.topic!r}: it is damaged.")
        os.mkdir(f"{self._path}/{name}", 0o700)
        assert entry.metadata is not None, "the caller has checked it"
        metadata = PartitionMetadata.decode(b"".join(self._read([entry.metadata])))
        if metadata is None or metadata.topic_id.hex() != entry.topic_id:
            raise BackupError(f"{PARTITION_FILE} of {name} in the backup is damaged.")
        for segment in entry.segments:
            path = f"{name}/{file_name(segment.base)}"
            self._write(path, self._read(segment.parts), waits=False)
            self._write_sidecars(f"{self._path}/{name}", segment, metadata)
        if entry.checkpoint is not None:
            self._write(f"{name}/{CHECKPOINT_FILE}", self._read([entry.checkpoint]))
        for bucket in entry.buckets:
            if not _BUCKET.fullmatch(bucket.name):
                raise BackupError(f"the manifest names a file {bucket.name!r}: it is damaged.")
            self._write(f"{name}/{bucket.name}", self._read(bucket.parts))
        if entry.pending is not None:
            self._write(f"{name}/{PENDING_FILE}", self._read([entry.pending]))
        _adapt_metadata(metadata, entry, map_count)
        self._write(f"{name}/{PARTITION_FILE}", [metadata.encode()])
        _sync(f"{self._path}/{name}")

    def _write_sidecars(
        self, directory: str, segment: SegmentEntry, metadata: PartitionMetadata
    ) -> None:
        """Write the files beside a restored segment."""
        if segment.producers is not None:
            self._write(
                f"{directory}/{file_name(segment.base, PRODUCERS_SUFFIX)}",
                self._read([segment.producers]),
            )
        index = (
            b"".join(self._read([segment.offset_index]))
            if segment.offset_index is not None
            else b""
        )
        index = whole_index(directory, segment, metadata, index)
        self._write(f"{directory}/{file_name(segment.base, INDEX_SUFFIX)}", [index])
        transactions = None
        if segment.transactions is not None:
            raw = b"".join(self._read([segment.transactions]))
            transactions = transactions_below(raw, segment.base, self._end_of(metadata))
        elif has_transactions(directory, segment.base, index):
            # Without a checkpoint the first start makes every index again that is there.
            transactions = transaction_index.encode_header(segment.base)
        if transactions is not None:
            self._write(
                f"{directory}/{file_name(segment.base, TRANSACTION_INDEX_SUFFIX)}", [transactions]
            )

    def _end_of(self, metadata: PartitionMetadata) -> int:
        return self._ends[metadata.topic_id.hex(), metadata.partition]

    def _read(self, parts: list[Part]) -> Iterable[bytes]:
        objects = self._manifest.objects
        for part in parts:
            yield from self._store.read(objects[part.number], part)

    def _write(self, name: str, pieces: Iterable[bytes], *, waits: bool = True) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(self._path, name), flags, _MODE)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                self._written_bytes += len(piece)
            if waits:
                os.fsync(fd)
            else:
                self._await_syncs(SYNCS_MAX - 1)
                self._syncs.append(self._syncers.submit(_sync_and_close, os.dup(fd)))
        finally:
            os.close(fd)


def _adapt_metadata(metadata: PartitionMetadata, entry: PartitionEntry, map_count: int) -> None:
    """Make a partition's metadata that of its log up to the end."""
    end = entry.end
    first = entry.segments[0].base if entry.segments else end
    metadata.log_start_offset = min(max(entry.start, first), end)
    metadata.epochs = [epoch for epoch in metadata.epochs if epoch.start <= end]
    metadata.begin_epoch(end, above=metadata.leader_epoch + EPOCHS_ABOVE)
    metadata.damage = [damage for damage in metadata.damage if damage.start < end]
    metadata.map_ends = [
        SlotMapEnd(each.version, min(each.end, end))
        for each in metadata.map_ends
        if each.version <= map_count
    ]
    metadata.offline = ""


def _sync(path: str) -> None:
    _sync_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
