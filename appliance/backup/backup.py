"""One backup: reads a data directory at one point and writes it to a target.

The order (docs/adr/0040):

    1  segments that never change any more, of all partitions: the bulk, at leisure
    2  pending delayed records
    3  the point: both databases and the end of each log
    4  each log up to its end
    5  the manifest

Owner: holds the target's lock.

Invariants:
- The manifest is written last, when everything that it names is durable.
- Delayed records are taken before the point, their logs after it: of what was delivered meanwhile
  the topic's log knows, of what came in the delay log.

Crash: a backup that was killed is objects that no manifest names, which the next one uses or
`keep` removes. Earlier backups are as they were.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from appliance.backup.errors import BackupError, NotReadyError
from appliance.backup.manifest import Manifest, Part, PartitionEntry, SegmentEntry
from appliance.backup.recorded import recorded
from appliance.backup.reusable import reusable
from appliance.backup.source.damage import damage_of
from appliance.backup.source.delay_files import PendingRecords, pending_records
from appliance.backup.source.log_files import (
    read_metadata,
    segments_to,
    small_file,
    whole_segments,
)
from appliance.backup.source.point import Point, Source, SourcePartition
from appliance.backup.target.object_store import ObjectStore
from appliance.backup.writer import BackupWriter
from shm.crash_points import crash_point
from tailrace import __version__
from tailrace.format.directory import checked_json
from tailrace.format.directory.partition_metadata import PartitionMetadata

READY_TIMEOUT_S = 30.0
READY_RETRY_S = 0.1
CHECKPOINTS = ("checkpoint.0", "checkpoint.1")

Key = tuple[bytes, int]


def make_backup(
    source: Source,
    store: ObjectStore,
    previous: Manifest | None,
    *,
    may_share: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> Manifest:
    """Make a backup. The target is locked, and `store.begin` was called. `previous` is its newest
    backup. Raises BackupError, OSError.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        writer = BackupWriter(store, previous, may_share=may_share)
        try:
            return _Backup(source, store, previous, writer, _Patience(deadline_s, sleep)).run()
        except NotReadyError:
            if time.monotonic() > deadline_s:
                raise
        finally:
            writer.close()
        sleep(READY_RETRY_S)


class _Patience(NamedTuple):
    """Repeats the point until a deadline: what was read before it is still good."""

    deadline_s: float
    sleep: Callable[[float], None]

    def point(self, source: Source, scratch: str) -> Point:
        """The point. Raises NotReadyError at the deadline, BackupError, OSError."""
        while True:
            try:
                return source.point(scratch)
            except NotReadyError:
                if time.monotonic() > self.deadline_s:
                    raise
            self.sleep(READY_RETRY_S)


class _Backup:
    """One try of one backup."""

    def __init__(
        self,
        source: Source,
        store: ObjectStore,
        previous: Manifest | None,
        writer: BackupWriter,
        patience: _Patience,
    ) -> None:
        self._source = source
        self._store = store
        self._writer = writer
        self._patience = patience
        self._suspects: set[tuple[str, int, int]] = set()
        """Segments whose objects are damaged: in a directory these may be the same file."""
        self._number = previous.number + 1 if previous is not None else 1
        if previous is not None:
            previous, self._suspects = reusable(previous, store.is_sound)
        self._previous = previous
        entries = previous.partitions if previous is not None else []
        self._known = {(bytes.fromhex(e.topic_id), e.partition): e for e in entries}
        self._before: dict[Key, list[SegmentEntry]] = {}
        self._pending: dict[Key, PendingRecords] = {}
        self._starts: dict[Key, int] = {}
        """Log start offsets of delay logs, read before their pending records were."""

    def run(self) -> Manifest:
        for partition in self._source.partitions():
            self._take_whole(partition)
        with tempfile.TemporaryDirectory(prefix="tailrace-backup-") as scratch:
            point = self._patience.point(self._source, scratch)
            crash_point("backup.after_point")
            return self._take_point(point)

    def _take_whole(self, partition: SourcePartition) -> None:
        key = partition.topic_id, partition.partition
        try:
            found = read_metadata(partition.directory, partition.topic_id)
            if found is None:
                return
            self._before[key] = whole_segments(
                partition.directory, found[1], self._known.get(key), self._writer
            )
            crash_point("backup.after_segments")
            if partition.is_delay_log:
                self._starts[key] = found[1].log_start_offset
                pending = pending_records(partition.directory, self._known.get(key), self._writer)
                if pending is not None:
                    self._pending[key] = pending
        except FileNotFoundError:  # deleted: the point says whether its topic is
            self._before.pop(key, None)

    def _take_point(self, point: Point) -> Manifest:
        previous = self._previous
        number = self._number
        moment = datetime.fromtimestamp(point.point_us / 1e6, UTC)
        manifest = Manifest(
            f"{number:08d}-{moment:%Y%m%dT%H%M%S.%fZ}", number, __version__,
            self._source.instance, point.began_us, point.point_us,
        )  # fmt: skip
        for partition in sorted(point.partitions, key=lambda each: not each.is_delay_log):
            entry = self._entry(partition)
            if entry is None:
                manifest.gone.append(partition.topic_id.hex())
            else:
                manifest.partitions.append(entry)
        manifest.partitions.sort(key=lambda entry: (entry.topic, entry.partition))
        for name, path in point.databases.items():
            with open(path, "rb") as file:
                data = file.read()
            known = previous.databases.get(name) if previous is not None else None
            manifest.databases[name] = self._writer.add_small(data, known)
        self._writer.finish()
        manifest.objects = self._writer.objects
        manifest.sent_bytes = self._writer.sent_bytes
        manifest.warnings = self._damage(manifest)
        crash_point("backup.before_manifest")
        self._store.put_manifest(manifest)
        crash_point("backup.after_manifest")
        return manifest

    def _damage(self, manifest: Manifest) -> list[str]:
        """Damage of segments that are sent again, in the files of the source."""
        directories = {
            (each.topic_id.hex(), each.partition): each.directory
            for each in (self._source.partitions() if self._suspects else [])
        }
        return [
            sentence
            for entry in manifest.partitions
            for segment in entry.segments
            if (*entry.key, segment.base) in self._suspects
            and (directory := directories.get(entry.key)) is not None
            and (sentence := damage_of(directory, segment.base))
        ]

    def _entry(self, partition: SourcePartition) -> PartitionEntry | None:
        """The entry of a partition. None if its topic was deleted since the point."""
        key = partition.topic_id, partition.partition
        empty = PartitionEntry(
            partition.topic, partition.topic_id.hex(), partition.partition, 0, 0, [], None, []
        )
        try:
            found = read_metadata(partition.directory, partition.topic_id)
            if found is not None:
                return self._filled(empty, partition, key, *found)
            if not partition.end and not partition.is_arriving:
                return empty
        except FileNotFoundError:
            pass
        data_dir = os.path.dirname(partition.directory)
        if not os.path.isdir(data_dir):
            raise BackupError(
                f"{data_dir} cannot be read: mount its disk again, or move its partitions' topics "
                "away. Earlier backups have what was there (`tailrace restore --topic`)."
            )
        if partition.topic_id in {each.topic_id for each in self._source.partitions()}:
            raise NotReadyError(f"{partition.directory} changed while it was read.")
        return None

    def _filled(
        self,
        empty: PartitionEntry,
        partition: SourcePartition,
        key: Key,
        data: bytes,
        metadata: PartitionMetadata,
    ) -> PartitionEntry:
        directory, known = partition.directory, self._known.get(key)
        pending = self._pending.get(key)
        kept_from = self._starts.get(key, metadata.log_start_offset)
        if pending is not None:
            kept_from = pending.kept_from
        segments, end = segments_to(
            directory, metadata, partition.end, known, self._before.get(key, []), kept_from,
            self._writer,
        )  # fmt: skip
        end = max(end, partition.end or 0)
        has_gap = kept_from < end and (not segments or segments[0].base > kept_from)
        if (partition.is_delay_log and has_gap) or (pending is not None and pending.cursor > end):
            raise NotReadyError(f"{directory} changed while it was read.")
        writer = self._writer
        return empty._replace(
            start=min(kept_from, end),
            end=end,
            epochs=[list(epoch) for epoch in metadata.epochs if epoch.start < end],
            metadata=writer.add_small(data, known.metadata if known is not None else None),
            segments=segments,
            checkpoint=None if segments else self._checkpoint(directory, end, known),
            pending=None if pending is None else pending.pending,
            buckets=[] if pending is None else pending.buckets,
        )

    def _checkpoint(self, directory: str, end: int, known: PartitionEntry | None) -> Part | None:
        """The checkpoint of a log without segments: it alone has the producers' state."""
        newest: tuple[int, bytes] | None = None
        for name in CHECKPOINTS:
            data = small_file(directory, name)
            fields = checked_json.decode(data) if data is not None else None
            if (
                data is not None
                and isinstance(fields, dict)
                and fields.get("segment_base") == -1
                and fields.get("next_offset") == end
                and (newest is None or fields["number"] > newest[0])
            ):
                newest = fields["number"], data
        if newest is None:
            return None
        return self._writer.add_small(newest[1], known.checkpoint if known is not None else None)


def locked_backup(
    source: Source, store: ObjectStore, *, may_share: bool = True, keep: int | None = None
) -> tuple[Manifest, int]:
    """Lock the target, make one backup and remove old ones. Returns it, and the number of backups
    removed. Raises BackupError, OSError.
    """
    with recorded(source.data_dir, str(store.target)) as attempt:
        store.target.lock()
        try:
            store.begin(source.instance)
            attempt.made = make_backup(source, store, store.newest(), may_share=may_share)
            return attempt.made, store.keep(keep) if keep is not None else 0
        finally:
            store.target.unlock()
