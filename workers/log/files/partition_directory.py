"""Partition directory and its `partition.json`: found or created, updated, removed.

Owner: the flusher.

Invariants:
- A served directory belongs to its topic. Another topic's directory is moved aside, never used.
- Until a partition has a segment, nothing here is synced. A power loss may take all of it, and it
  is created again as it was (docs/adr/0017).
- A partition of a deleted topic is moved to the bin and back by one rename (docs/adr/0041).

Crash: `partition.json` is the old or the new one. A directory is renamed before it is removed, so
that a kill halfway cannot confuse it with a live one. A directory is in its place or in the bin.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

from shm.crash_points import crash_point
from shm.messages.lane_messages import Assignment
from tailrace.format.directory.data_dir import BIN_DIRECTORY, bin_name
from tailrace.format.directory.partition_metadata import (
    PARTITION_FILE,
    DamagedRange,
    Decision,
    PartitionMetadata,
)
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    PRODUCERS_SUFFIX,
    SEGMENT_SUFFIX,
    file_name,
    segment_bases,
)
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX
from workers.log.files.active_segment import UNFINISHED_SUFFIX
from workers.segment.files import Files, read_whole, remove_tree, write_durably
from workers.segment.migrate_suffix import rename_segments
from workers.segment.segment_reader import first_batch_is_of

logger = logging.getLogger(__name__)


class PartitionDirectory:
    """Directory of one partition.

    `file` is the current content of `partition.json`, saved or not.
    """

    def __init__(self, files: Files, data_dir: str, assignment: Assignment) -> None:
        self._files = files
        self._data_dir = data_dir
        self._assignment = assignment
        self.path = f"{data_dir}/{assignment.directory_name}"
        self._bin = f"{data_dir}/{BIN_DIRECTORY}"
        self._path_in_bin = f"{self._bin}/{bin_name(assignment.topic_id, assignment.partition)}"
        self.file = self._new_file()
        self.saved_schemas: frozenset[int] = frozenset()
        """Ids of the schemas in the saved `partition.json`. No segment has another one."""

    def _new_file(self) -> PartitionMetadata:
        a = self._assignment
        return PartitionMetadata(
            a.topic, a.partition, a.topic_id, _schemas_of(a), decision=_decision_of(a)
        )

    def open(self, run: str) -> bool:
        """Find or create the directory and its file. Raises OSError.

        Return True if segments of an older format were renamed. The file must then be saved.
        """
        files, path = self._files, f"{self.path}/{PARTITION_FILE}"
        found: PartitionMetadata | None = None
        was_renamed = False
        if files.exists(self.path):
            was_renamed = rename_segments(files, self.path) > 0
            if files.exists(path):
                found = PartitionMetadata.decode(read_whole(files, path))
                if found is None and self._bases():
                    logger.error(
                        "partition_file_damaged path=%s recreated=yes lost=%r",
                        path,
                        "log start offset, epochs, known damage",
                    )
            if (found is not None and found.topic_id != self._assignment.topic_id) or (
                found is None and self._is_of_another_topic()
            ):
                aside = self._aside(found.topic_id.hex() if found else "unknown", "old")
                logger.warning("directory_of_another_topic path=%s moved_to=%s", self.path, aside)
                files.rename(self.path, aside)
                found = None
        if not files.exists(self.path):
            if files.exists(self._path_in_bin):
                self._take_out_of_bin()
                return self.open(run)
            if self._assignment.undeleted:
                raise FileNotFoundError(errno.ENOENT, "it is not in the bin", self._path_in_bin)
            files.make_directory(self.path)
        for name in [name for name in files.list(self.path) if name.endswith(UNFINISHED_SUFFIX)]:
            files.unlink(f"{self.path}/{name}")
        if found is None:
            self.file = self._new_file()
            self.file.run = run
            bases = self._bases()
            self.file.log_start_offset = bases[0] if bases else 0
            self.save(sync=bool(bases))
        else:
            self.file = found
            self.saved_schemas = frozenset(found.schemas)
        return was_renamed

    def note_decision(self, assignment: Assignment) -> bool:
        """Apply the topic's settings from `assignment`. Return True if the file must be saved."""
        self._assignment = assignment
        decision = _decision_of(assignment)
        schemas = _schemas_of(assignment)
        if self.file.decision == decision and schemas.keys() <= self.file.schemas.keys():
            return False
        self.file.decision = decision
        self.file.schemas.update(schemas)
        return True

    def save(self, *, sync: bool = True) -> None:
        """Save `partition.json`.

        Raises OSError. `sync` is False for a partition without a segment.
        """
        write_durably(self._files, self.path, PARTITION_FILE, self.file.encode(), sync=sync)
        self.saved_schemas = frozenset(self.file.schemas)

    def try_save_decision(self, *, sync: bool) -> None:
        """Save the topic's settings. If the file cannot be written now, its next save has them."""
        try:
            self.save(sync=sync)
        except OSError as error:
            logger.warning(
                "decision_not_written directory=%s version=%d error=%r",
                self.path,
                self._assignment.version,
                str(error),
            )

    def begin_run(self, run: str, start: int) -> None:
        """Begin the leader epoch of a run at offset `start`, durably. Raises OSError."""
        self.file.begin_epoch(start)
        self.file.run = run
        self.save()

    def begin_epoch(self, start: int, above: int) -> None:
        """Begin a leader epoch at offset `start`, durably. Raises OSError."""
        self.file.begin_epoch(start, above=above)
        self.save()

    def go_offline(self, reason: str, end: int) -> None:
        """Note that the log takes no writes, and ends at `end`. A failure is logged."""
        self.file.begin_epoch(end)
        self.file.offline = reason
        try:
            self.save()
        except OSError as error:
            logger.error("offline_not_persisted directory=%s error=%r", self.path, str(error))

    def advance_start(self, offset: int) -> None:
        """Move the log start offset up to `offset`, durably. Raises OSError."""
        self.file.log_start_offset = offset
        self.file.damage = [damage for damage in self.file.damage if damage.end > offset]
        self.save()

    def note_damage(self, damage: Sequence[DamagedRange]) -> None:
        """Add damaged ranges to the file. The caller saves it."""
        self.file.damage = sorted([*self.file.damage, *damage])

    def sync_beginning(self) -> None:
        """Sync what `save` left unsynced, before the first segment. The directory's own entries are
        not synced. Raises OSError.
        """
        fd = self._files.open_for_write(f"{self.path}/{PARTITION_FILE}")
        try:
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self._files.sync_directory(self._data_dir)

    def remove_segment(self, base: int) -> None:
        """Remove a segment and its derived files, as far as they exist. Raises OSError."""
        for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX, PRODUCERS_SUFFIX):
            path = f"{self.path}/{file_name(base, suffix)}"
            if self._files.exists(path):
                self._files.unlink(path)

    def remove(self) -> None:
        """Remove the directory with its content, in the bin too. Raises OSError."""
        files, topic_id = self._files, self._assignment.topic_id.hex()
        gone = self._aside(topic_id, "deleted")
        if files.exists(self.path) and not self._is_taken():
            files.rename(self.path, gone)
            files.sync_directory(self._data_dir)
        elif files.exists(self._path_in_bin):  # it was to come back, and had not yet
            files.rename(self._path_in_bin, gone)
            files.sync_directory(self._bin)
            files.sync_directory(self._data_dir)
        crash_point("flusher.in_delete")
        remove_tree(files, gone)
        # name given by earlier versions that were killed here
        remove_tree(files, f"{self.path}.{topic_id[:8]}.deleted")

    def put_in_bin(self) -> None:
        """Move the directory to the bin, durably. It may be there already. Raises OSError."""
        files = self._files
        if files.exists(self.path) and not self._is_taken():
            if not files.exists(self._bin):
                files.make_directory(self._bin)
            files.rename(self.path, self._path_in_bin)
        if files.exists(self._bin):
            files.sync_directory(self._bin)
        files.sync_directory(self._data_dir)
        crash_point("flusher.in_bin")

    def _take_out_of_bin(self) -> None:
        """Move the directory out of the bin, durably. Its metadata gets the topic's present name
        first, so that it names its directory at every moment. Raises OSError.
        """
        files, path = self._files, self._path_in_bin
        file = self._read_file(path)
        if file is not None and file.topic != self._assignment.topic:
            file.topic = self._assignment.topic
            write_durably(files, path, PARTITION_FILE, file.encode())
        crash_point("flusher.in_undelete")
        files.rename(path, self.path)
        files.sync_directory(self._bin)
        files.sync_directory(self._data_dir)

    def _is_taken(self) -> bool:
        """True if the directory belongs to another topic, which has the name now."""
        file = self._read_file(self.path)
        return file is not None and file.topic_id != self._assignment.topic_id

    def _read_file(self, directory: str) -> PartitionMetadata | None:
        """The metadata of a directory; None if it is missing or damaged. Raises OSError."""
        path = f"{directory}/{PARTITION_FILE}"
        if not self._files.exists(path):
            return None
        return PartitionMetadata.decode(read_whole(self._files, path))

    def _aside(self, owner: str, context: str) -> str:
        """Return a name for a directory that belongs to no served topic. The topic's name is left
        out, since it may be as long as a file name can be.
        """
        partition, topic_id = self._assignment.partition, self._assignment.topic_id.hex()
        return f"{self._data_dir}/{owner}-{partition}.{topic_id[:8]}.{context}"

    def _bases(self) -> list[int]:
        return segment_bases(self._files.list(self.path))

    def _is_of_another_topic(self) -> bool:
        """True if a directory without partition.json has batches but no segment that begins with
        this topic's.

        A directory created a moment before a kill belongs to this topic.
        """
        matching = [
            first_batch_is_of(self._files, self.path, base, self.file.seed)
            for base in self._bases()
        ]
        return False in matching and True not in matching


def _schemas_of(a: Assignment) -> dict[int, bytes]:
    return {**a.older_schemas, a.schema_id: a.schema}


def _decision_of(a: Assignment) -> Decision:
    return Decision(
        a.version,
        a.partition_count,
        a.schema_id,
        a.typed,
        a.created_us,
        a.delay_of,
        a.given,
        a.slot_counts,
    )
