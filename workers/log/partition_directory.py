"""A partition's directory and its `partition.json`: found or made, kept current, removed.

Owner: the flusher.
Invariants: a directory that is served is its topic's: what belongs to another topic is moved aside, never used. Until a partition has a segment, nothing here
    is synced: a loss of power may take all of it, and it is made again as it was (docs/adr/0017).
Crash: `partition.json` is the old one or the new one; a directory that is removed is renamed first, so that a kill halfway cannot confuse it with a live one.
"""

from __future__ import annotations

import logging

from shm.catalog_messages import Assignment
from shm.crash_points import crash_point
from tailrace.formats.partition_file import PARTITION_FILE, Decision, PartitionFile
from tailrace.formats.segment import INDEX_SUFFIX, PRODUCERS_SUFFIX, SEGMENT_SUFFIX, file_name, segment_bases
from workers.files import Files, read_whole, remove_tree, write_durably
from workers.live_segment import UNFINISHED_SUFFIX
from workers.segment_reader import first_batch_is_of
from workers.segment_suffix import rename_segments

logger = logging.getLogger(__name__)


class PartitionDirectory:
    """Of one partition. `file` is the content of `partition.json`, or what it is to be."""

    def __init__(self, files: Files, data_dir: str, assignment: Assignment) -> None:
        self._files = files
        self._data_dir = data_dir
        self._assignment = assignment
        self.path = f"{data_dir}/{assignment.directory_name}"
        self.file = self._new_file()

    def _new_file(self) -> PartitionFile:
        a = self._assignment
        return PartitionFile(a.topic, a.partition, a.topic_id, {a.schema_id: a.schema}, decision=_decision_of(a))

    def open(self, run: str) -> bool:
        """Find the directory and its file, or make them. Returns whether segments of an older format were renamed: then the file is to be saved.

        Raises OSError.
        """
        files, path = self._files, f"{self.path}/{PARTITION_FILE}"
        found: PartitionFile | None = None
        was_renamed = False
        if files.exists(self.path):
            was_renamed = rename_segments(files, self.path) > 0
            if files.exists(path):
                found = PartitionFile.decode(read_whole(files, path))
                if found is None and self._bases():
                    logger.error("partition_file_damaged path=%s made_again=yes lost=%r", path, "log start offset, epochs, known damage")
            if (found is not None and found.topic_id != self._assignment.topic_id) or (found is None and self._is_of_another_topic()):
                aside = self._aside(found.topic_id.hex() if found else "unknown", "old")
                logger.warning("directory_of_another_topic path=%s moved_to=%s", self.path, aside)
                files.rename(self.path, aside)
                found = None
        if not files.exists(self.path):
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
        return was_renamed

    def note_decision(self, assignment: Assignment) -> bool:
        """The topic is as `assignment` says; returns whether the file has to be saved for it."""
        self._assignment = assignment
        decision = _decision_of(assignment)
        if self.file.decision == decision and assignment.schema_id in self.file.schemas:
            return False
        self.file.decision = decision
        self.file.schemas[assignment.schema_id] = assignment.schema
        return True

    def save(self, *, sync: bool = True) -> None:
        """Raises OSError. `sync`: not for a partition without a segment."""
        write_durably(self._files, self.path, PARTITION_FILE, self.file.encode(), sync=sync)

    def sync_beginning(self) -> None:
        """Before the first segment: make durable what `save` has left unsynced, but for the directory's own entries. Raises OSError."""
        fd = self._files.open_for_write(f"{self.path}/{PARTITION_FILE}")
        try:
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self._files.sync_directory(self._data_dir)

    def remove_segment(self, base: int) -> None:
        """Remove a segment and what lies beside it, as far as it is there. Raises OSError."""
        for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, PRODUCERS_SUFFIX):
            path = f"{self.path}/{file_name(base, suffix)}"
            if self._files.exists(path):
                self._files.unlink(path)

    def remove(self) -> None:
        """Remove the directory with everything in it. Raises OSError."""
        files, topic_id = self._files, self._assignment.topic_id.hex()
        gone = self._aside(topic_id, "deleted")
        if files.exists(self.path):
            files.rename(self.path, gone)
            files.sync_directory(self._data_dir)
        crash_point("flusher.in_delete")
        remove_tree(files, gone)
        remove_tree(files, f"{self.path}.{topic_id[:8]}.deleted")  # of a build that called it so, and was killed

    def _aside(self, owner: str, what: str) -> str:
        """A name for a directory that is none of a topic any more. Without the topic's name, which may be as long as a file's."""
        return f"{self._data_dir}/{owner}-{self._assignment.partition}.{self._assignment.topic_id.hex()[:8]}.{what}"

    def _bases(self) -> list[int]:
        return segment_bases(self._files.list(self.path))

    def _is_of_another_topic(self) -> bool:
        """Without partition.json: whether there are batches, and none that begins a segment is ours. One directory made a moment before a kill is."""
        looks = [first_batch_is_of(self._files, self.path, base, self.file.seed) for base in self._bases()]
        return False in looks and True not in looks


def _decision_of(a: Assignment) -> Decision:
    return Decision(a.version, a.partition_count, a.schema_id, a.typed, a.created_us, a.delay_of, a.given, a.slot_counts)
