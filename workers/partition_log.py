"""One partition's log as its flusher sees it: which segment is live, where the next batch goes, what is known of the rest.

Owner: the flusher. Nobody else writes these files.
Invariants: log_start_offset <= high_watermark <= next_offset; next_offset and the live segment's end move only by `place`; a sealed segment is synced, ends
    with the end-of-stream mark and never changes; a checkpoint is written only of what is synced.
Crash: between any two steps recovery finds a torn tail of the live segment, a segment without its schema, or a segment without its end mark, and mends each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shm.assignments import Assignment
from shm.crash_points import crash_point
from tailrace import segment_index as index_format
from tailrace.batch_header import END_OF_STREAM, BatchFormatError, verify_batch
from tailrace.checksum import Readable
from tailrace.partition_file import PARTITION_FILE, Damage, Decision, PartitionFile
from tailrace.segment import INDEX_SUFFIX, PRODUCERS_SUFFIX, SEGMENT_SUFFIX, file_name, segment_bases
from tailrace.segment_index import INDEX_ENTRY, INDEX_HEADER, IndexEntry
from workers.checkpoint import Checkpoint, SealedSegment, write_checkpoint
from workers.files import Files, is_shortage, read_whole, remove_tree, replace_file, write_durably
from workers.producer_state import ProducerTable
from workers.recovery import (
    Hints,
    RecoveredLog,
    encode_producers,
    first_batch_is_of,
    index_is_right,
    open_index,
    rebuild_index,
    record_producer,
    recover_log,
)
from workers.segment_suffix import rename_segments

logger = logging.getLogger(__name__)

UNFINISHED_SUFFIX = ".new"
"""Of a segment that is being written anew and has no name yet; what a kill leaves of it is removed at the next start."""


class LogGapError(RuntimeError):
    """A batch does not begin where the log ends: writing it would leave a hole or overwrite."""


class PendingBatch(NamedTuple):
    """A batch that is placed, and whose group is not settled: its bytes are still in the ring."""

    base_offset: int
    next_offset: int
    max_timestamp_us: int
    append_time_us: int
    data: Readable


class LiveSegment:
    """The segment that is being written."""

    __slots__ = (
        "base",
        "batch_count",
        "end",
        "fd",
        "first_append_us",
        "index_fd",
        "max_timestamp_us",
        "new_entries",
        "synced_end",
        "synced_next",
    )

    def __init__(self, base: int, fd: int, index_fd: int, end: int, next_offset: int, batch_count: int) -> None:
        self.base = base
        self.fd = fd
        self.index_fd = index_fd
        self.end = end
        """File position behind the last batch placed."""
        self.synced_end = end
        self.synced_next = next_offset
        """Up to here, in bytes and in offsets, the file was synced."""
        self.batch_count = batch_count
        """Entries that the index file has."""
        self.max_timestamp_us = 0
        self.first_append_us = 0
        """When its first batch was appended, 0 while it is empty."""
        self.new_entries: list[IndexEntry] = []


class PartitionLog:
    """The files of one partition."""

    def __init__(self, files: Files, data_dir: str, assignment: Assignment, producer_expiration_us: int = 1 << 62) -> None:
        self._producer_expiration_us = producer_expiration_us
        self._files = files
        self._data_dir = data_dir
        self.directory = f"{data_dir}/{assignment.directory_name}"
        self.assignment = assignment
        self.file = self._new_file()
        self.sealed: dict[int, SealedSegment] = {}
        self.live: LiveSegment | None = None
        self.next_offset = 0
        self.high_watermark = 0
        self.delivered = (0, 0)
        """Of the last delayed row below the high watermark (see `ProducerTable.delivered`)."""
        self.max_timestamp_us = 0
        self.last_append_us = 0
        self.producers = ProducerTable()
        self.refusal = ""
        """Why writes are refused, where they are."""
        self.is_open = False
        """Whether what is known of the log is what its files say."""
        self._has_segments = False
        """Since the first segment the directory's name and partition.json are durable; before, there is nothing that the catalog does not know."""
        self.since_checkpoint_bytes = 0
        self.unscrubbed: list[int] = []
        """Segments whose indexes nobody has looked at since the start."""
        self.group: list[PendingBatch] = []
        """What was placed since the last settling."""
        self._written_count = 0
        self._group_position = 0
        self._checkpoint_number = 0

    def _new_file(self) -> PartitionFile:
        a = self.assignment
        return PartitionFile(a.topic, a.partition, a.topic_id, {a.schema_id: a.schema}, decision=_decision_of(a))

    @property
    def files(self) -> Files:
        return self._files

    @property
    def key(self) -> tuple[bytes, int]:
        return self.assignment.topic_id, self.assignment.partition

    @property
    def is_durable(self) -> bool:
        """Whether this topic promises the disk."""
        return bool(self.assignment.settings["durability"] == "disk")

    @property
    def is_unsynced(self) -> bool:
        return self.live is not None and self.live.synced_end != self.live.end

    @property
    def log_start_offset(self) -> int:
        return self.file.log_start_offset

    @property
    def newest_base(self) -> int:
        """The base of the segment that was written last, 0 when there is none."""
        return self.live.base if self.live is not None else max(self.sealed, default=0)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.sealed.values()) + (self.live.end if self.live is not None else 0)

    # ---- opening ---------------------------------------------------------------------------------------------------------------------

    def open(self, run: str, *, hints: Hints | None = None, revive: bool = False) -> RecoveredLog:
        """Make the directory, or recover what is in it. Raises OSError.

        `run` names this run of the appliance. `revive`: whoever asks says that the disk is good again.
        """
        files, hints = self._files, hints or Hints()
        was_renamed = self._find_file(run)
        if self.file.offline:
            hints = replace(hints, durable_below=0, end_limit=self._offline_end())
        recovered = recover_log(files, self.directory, self.file, hints)
        self.sealed = recovered.sealed
        self.unscrubbed = sorted(self.sealed)
        self.next_offset = self.high_watermark = recovered.next_offset
        self.max_timestamp_us = recovered.max_timestamp_us
        self.last_append_us = recovered.last_append_us
        self.producers = recovered.producers
        self.delivered = self.producers.delivered
        self._checkpoint_number = recovered.checkpoint_number
        self._has_segments = bool(self.sealed) or recovered.live_base >= 0
        if recovered.live_base >= 0:
            self._reopen_live(recovered)
            self.unscrubbed.append(recovered.live_base)
        changed = bool(recovered.damage) or was_renamed
        self.file.damage = sorted([*self.file.damage, *recovered.damage])
        if self.file.offline and revive:
            self.file.offline = ""
            changed = True
        if self._note_decision() or changed:
            self._save_file()
        self.refusal = self.file.offline
        self.is_open = True
        return recovered

    def _note_decision(self) -> bool:
        """Whether partition.json has to be saved for what its topic is now."""
        a, decision = self.assignment, _decision_of(self.assignment)
        if self.file.decision == decision and a.schema_id in self.file.schemas:
            return False
        self.file.decision = decision
        self.file.schemas[a.schema_id] = a.schema
        return True

    def change(self, assignment: Assignment) -> None:
        """The topic has other settings. What the file could not be told now, it is told with its next change."""
        self.assignment = assignment
        if self._note_decision() and self.is_open and not self.refusal:
            try:
                self._save_file(sync=self._has_segments)
            except OSError as error:
                logger.warning("decision_not_written directory=%s version=%d error=%r", self.directory, assignment.version, str(error))

    def give_up_opening(self) -> None:
        """What the files say is not all that there is, and the rest could not be added: as if it had not been opened."""
        self.settled()
        if self.live is not None:
            self._files.close(self.live.fd)
            self._files.close(self.live.index_fd)
            self.live = None
        self.is_open = False

    def begin_epoch(self, run: str) -> None:
        """This run began after a stop that may have lost what was not synced: from here on the log may have other records than some reader has seen.
        When everything that was left is found, once a run. Raises OSError.
        """
        if self.file.run != run:
            self.file.begin_epoch(self.next_offset)
            self.file.run = run
            self._save_file()

    def begin_anew(self) -> None:
        """It takes writes again: what its worker appended while it could not be opened was refused, and the new epoch says so. Raises OSError."""
        self.file.begin_epoch(self.next_offset)
        self._save_file()

    def _find_file(self, run: str) -> bool:
        """Read partition.json, or begin it. What belongs to another topic is moved aside. Returns whether an older format's segments were renamed."""
        files, path = self._files, f"{self.directory}/{PARTITION_FILE}"
        found: PartitionFile | None = None
        was_renamed = False
        if files.exists(self.directory):
            was_renamed = rename_segments(files, self.directory) > 0
            if files.exists(path):
                found = PartitionFile.decode(read_whole(files, path))
                if found is None and self._bases_on_disk():
                    logger.error("partition_file_damaged path=%s made_again=yes lost=%r", path, "log start offset, epochs, known damage")
            if (found is not None and found.topic_id != self.assignment.topic_id) or (found is None and self._is_of_another_topic()):
                aside = self._aside(found.topic_id.hex() if found else "unknown", "old")
                logger.warning("directory_of_another_topic path=%s moved_to=%s", self.directory, aside)
                files.rename(self.directory, aside)
                found = None
        if not files.exists(self.directory):
            files.make_directory(self.directory)
        for name in [name for name in files.list(self.directory) if name.endswith(UNFINISHED_SUFFIX)]:
            files.unlink(f"{self.directory}/{name}")
        if found is None:
            self.file = self._new_file()
            self.file.run = run
            bases = self._bases_on_disk()
            self.file.log_start_offset = bases[0] if bases else 0
            self._save_file(sync=bool(bases))
        else:
            self.file = found
        return was_renamed

    def _aside(self, whose: str, what: str) -> str:
        """A name for a directory that is none of a topic any more. Without the topic's name, which may be as long as a file's."""
        return f"{self._data_dir}/{whose}-{self.assignment.partition}.{self.assignment.topic_id.hex()[:8]}.{what}"

    def _bases_on_disk(self) -> list[int]:
        return segment_bases(self._files.list(self.directory))

    def _is_of_another_topic(self) -> bool:
        """Without partition.json: whether there are batches, and none that begins a segment is ours. One directory made a moment before a kill is."""
        looks = [first_batch_is_of(self._files, self.directory, base, self.file.seed) for base in self._bases_on_disk()]
        return False in looks and True not in looks

    def _offline_end(self) -> int:
        """Where the log ended when its disk failed: the start of the epoch that began then."""
        return self.file.epochs[-1].start

    def _save_file(self, *, sync: bool = True) -> None:
        """Raises OSError. `sync`: not for a partition without a segment, of which a loss of power may take everything: it is made again as it was."""
        replace_file(self._files, self.directory, PARTITION_FILE, self.file.encode(), sync=sync)

    def _sync_beginning(self) -> None:
        """Before the first segment: what `_save_file` has left unsynced, but for the directory's own entries. Raises OSError."""
        fd = self._files.open_for_write(f"{self.directory}/{PARTITION_FILE}")
        try:
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self._files.sync_directory(self._data_dir)

    def _reopen_live(self, recovered: RecoveredLog) -> None:
        base, files = recovered.live_base, self._files
        fd = files.open_for_write(f"{self.directory}/{file_name(base)}")
        try:
            index_fd = open_index(files, f"{self.directory}/{file_name(base, INDEX_SUFFIX)}")
        except OSError:
            files.close(fd)
            raise
        self.live = LiveSegment(base, fd, index_fd, recovered.valid_end, recovered.next_offset, recovered.batch_count)
        self.live.max_timestamp_us = recovered.max_timestamp_us
        self.live.first_append_us = recovered.first_append_us

    # ---- appending -------------------------------------------------------------------------------------------------------------------

    def needs_roll(self, length: int, append_time_us: int) -> bool:
        """Whether a batch of `length` bytes must go to a new segment."""
        live = self.live
        if live is None:
            return True
        if not live.first_append_us:
            return False
        return live.end + length > int(self.assignment.settings["segment.bytes"]) or self.is_old(append_time_us)

    def is_old(self, now_us: int) -> bool:
        """Whether the live segment holds something and is older than segment.ms."""
        live = self.live
        return (
            live is not None
            and bool(live.first_append_us)
            and now_us - live.first_append_us >= int(self.assignment.settings["segment.ms"]) * 1000
        )

    def place(self, batch: PendingBatch) -> tuple[int, int]:
        """Decide where the next batch goes: (segment base, file position). The segment must have room. Raises LogGapError."""
        if batch.base_offset != self.next_offset:
            raise LogGapError(f"batch of offset {batch.base_offset} where {self.next_offset} belongs in {self.directory}")
        live = self.live
        assert live is not None
        if not live.first_append_us:
            live.first_append_us = batch.append_time_us
        position, length = live.end, len(batch.data)
        if not self.group:
            self._group_position = position
        self.group.append(batch)
        live.max_timestamp_us = max(live.max_timestamp_us, batch.max_timestamp_us)
        live.new_entries.append(IndexEntry(batch.base_offset, position, live.max_timestamp_us, length))
        live.end += length
        self.max_timestamp_us = max(self.max_timestamp_us, live.max_timestamp_us)
        self.last_append_us = max(self.last_append_us, batch.append_time_us)
        self.next_offset = batch.next_offset
        self.since_checkpoint_bytes += length
        return live.base, position

    def write_pending(self) -> None:
        """One gathered write of everything placed since the last one, then the index entries. Raises OSError; then nothing is forgotten."""
        live = self.live
        pending = self.group[self._written_count :]
        if live is None or not pending:
            return
        position = live.end - sum(len(batch.data) for batch in pending)
        self._files.write_at(live.fd, [batch.data for batch in pending], position)
        self._written_count = len(self.group)
        self._write_index_entries(live)

    def _write_index_entries(self, live: LiveSegment) -> None:
        entries = index_format.encode_entries(live.new_entries)
        self._files.write_at(live.index_fd, [entries], INDEX_HEADER.size + live.batch_count * INDEX_ENTRY.size)
        live.batch_count += len(live.new_entries)
        live.new_entries = []

    def write_again(self, base_offset: int, segment_base: int, position: int, data: Readable) -> bool:
        """Bytes that recovery found in the file already: they were not known to be synced, and a sync that failed leaves pages that look clean, so
        they are made dirty anew. False: their segment is sealed, which was synced. Raises OSError, and LogGapError when other bytes are there.
        """
        live = self.live
        if live is None or live.base != segment_base or position + len(data) > live.end:
            return False
        if self._files.read_at(live.fd, len(data), position) != data:
            raise LogGapError(f"segment {segment_base} has another batch at {position} than the ring has for offset {base_offset}")
        self._files.write_at(live.fd, [data], position)
        live.synced_end, live.synced_next = min(live.synced_end, position), min(live.synced_next, base_offset)
        return True

    def remember(self, data: Readable) -> None:
        """Add what a batch says of its producer to the flusher's copy. Raises BatchFormatError."""
        record_producer(self.producers, verify_batch(memoryview(data), self.file.seed))

    def raise_watermark(self) -> None:
        """Everything placed is as safe as the topic promises."""
        self.high_watermark = self.next_offset
        self.delivered = self.producers.delivered

    def settled(self) -> None:
        """The group has its verdicts: its bytes may leave the ring."""
        self.group = []
        self._written_count = 0

    def sync(self) -> None:
        """Make everything written durable. Raises OSError; then the file's unsynced pages must not be trusted (`rewrite`)."""
        live = self.live
        if live is not None and live.synced_end != live.end:
            self._files.sync_data(live.fd)
            live.synced_end, live.synced_next = live.end, self.next_offset

    def lose_until(self, end: int) -> None:
        """What was durable once is nowhere: say so, and go on behind it in a segment of its own. Nothing may be pending. Raises OSError."""
        start = self.next_offset
        self.sync()
        self.seal()
        logger.error(
            "corruption topic=%s partition=%d offsets=%d-%d damaged_ranges=1 reason=%r", self.assignment.topic, self.assignment.partition,
            start, end - 1, "a segment's file is missing or damaged, and the journal has only a part of it",
        )  # fmt: skip
        self.file.damage = sorted([*self.file.damage, Damage(self.newest_base, 0, 0, start, end)])
        self.next_offset = self.high_watermark = end
        self._save_file()
        self.checkpoint(sync=True)

    # ---- rolling ---------------------------------------------------------------------------------------------------------------------

    def roll(self) -> None:
        """Seal the live segment, if there is one, and begin the next at `next_offset`. Everything must be synced. Raises OSError."""
        try:
            self.seal()
        except OSError as error:
            if is_shortage(error):
                raise
            logger.warning("segment_not_sealed directory=%s base=%d error=%r", self.directory, self.newest_base, str(error))
            self.give_up_segment()
        if len(self.producers):
            snapshot = file_name(self.next_offset, PRODUCERS_SUFFIX)
            write_durably(self._files, self.directory, snapshot, encode_producers(self.producers))
        self._begin_segment(self.next_offset)
        try:
            self.checkpoint(sync=True)
        except OSError as error:  # the one before it holds; recovery reads more
            logger.warning("checkpoint_not_written directory=%s error=%r", self.directory, str(error))

    def _begin_segment(self, base: int) -> None:
        files, schema = self._files, self.assignment.schema
        fd = files.open_for_write(f"{self.directory}/{file_name(base)}")
        index_fd = -1
        try:
            crash_point("flusher.in_roll")
            index_fd = open_index(files, f"{self.directory}/{file_name(base, INDEX_SUFFIX)}")
            files.truncate(fd, 0)
            files.truncate(index_fd, 0)
            files.write_at(fd, [schema], 0)
            files.write_at(index_fd, [index_format.encode_header(base)], 0)
            files.sync_data(fd)
            files.sync_data(index_fd)  # an older one of this name may have had entries
            if not self._has_segments:
                self._sync_beginning()
            files.sync_directory(self.directory)
            self._has_segments = True
        except BaseException:
            files.close(fd)
            if index_fd >= 0:
                files.close(index_fd)
            raise
        self.live = LiveSegment(base, fd, index_fd, len(schema), base, 0)

    def seal(self) -> None:
        """Finish the live segment with the end-of-stream mark. Nothing may be pending. Raises OSError."""
        live = self.live
        if live is None:
            return
        self._files.write_at(live.fd, [END_OF_STREAM], live.end)
        self._files.sync_data(live.fd)
        self._close_live(live.end + len(END_OF_STREAM))
        crash_point("flusher.after_seal")

    def give_up_segment(self) -> None:
        """Leave the live segment as it is, without an end mark: it ends where the next one begins."""
        if self.live is not None:
            self._close_live(self.live.end)

    def _close_live(self, size: int) -> None:
        live = self.live
        assert live is not None
        self._files.close(live.fd)
        self._files.close(live.index_fd)
        self.sealed[live.base] = SealedSegment(live.base, size, live.batch_count, live.max_timestamp_us, self.last_append_us)
        self.live = None

    def rewrite(self, earlier: Sequence[PendingBatch]) -> list[tuple[int, int]]:
        """After a write or a sync that failed: put `earlier` (from the journal) and the group into a new segment in a new file, durably. Answers the
        new places of the group. Raises OSError; then the old file is where it was, and can be read.

        What the old file holds behind its last sync is not trusted any more; it ends where the new one begins.
        """
        batches = [*earlier, *self.group]
        start = batches[0].base_offset if batches else self.next_offset
        fd, index_fd = self._write_anew(start, batches)
        live = self.live
        if live is not None and live.base == start:
            self._files.close(live.fd)
            self._files.close(live.index_fd)
        elif live is not None:
            live.end = self._group_position if not earlier else live.synced_end
            self.give_up_segment()
        self.live = LiveSegment(start, fd, index_fd, len(self.assignment.schema), start, 0)
        self.next_offset = start
        self.group = []
        places = [self.place(batch) for batch in batches]
        self.live.synced_end, self.live.synced_next = self.live.end, self.next_offset
        self.group = batches[len(earlier) :]
        self._written_count = len(self.group)
        self._files.truncate(index_fd, 0)
        self._files.write_at(index_fd, [index_format.encode_header(start)], 0)
        self._write_index_entries(self.live)
        self._files.sync_data(index_fd)
        return places[len(earlier) :]

    def _write_anew(self, start: int, batches: Sequence[PendingBatch]) -> tuple[int, int]:
        """A segment with these batches, durable before it has its name. Answers its descriptor and its index's. Raises OSError."""
        files, path = self._files, f"{self.directory}/{file_name(start)}"
        temporary = f"{path}{UNFINISHED_SUFFIX}"
        opened = [files.open_for_write(temporary)]
        try:
            files.truncate(opened[0], 0)
            files.write_at(opened[0], [self.assignment.schema, *(batch.data for batch in batches)], 0)
            files.sync_data(opened[0])
            crash_point("flusher.in_rewrite")
            opened.append(open_index(files, f"{self.directory}/{file_name(start, INDEX_SUFFIX)}"))
            files.rename(temporary, path)
            files.sync_directory(self.directory)
        except OSError:
            for fd in opened:
                files.close(fd)
            try:
                files.unlink(temporary)
            except OSError:
                pass  # it has no segment's name: nobody takes it for one
            raise
        return opened[0], opened[1]

    # ---- going offline ---------------------------------------------------------------------------------------------------------------

    def go_offline(self, reason: str) -> None:
        """Refuse writes from now on, over restarts too; forget what was placed above the high watermark. Reads go on."""
        self.refusal = reason
        if self.live is not None:
            self._files.close(self.live.fd)
            self._files.close(self.live.index_fd)
            live, self.live = self.live, None
            self.sealed[live.base] = SealedSegment(live.base, live.end, -1, live.max_timestamp_us, self.last_append_us)
        self.settled()
        self.next_offset = self.high_watermark
        self.file.begin_epoch(self.next_offset)
        self.file.offline = reason
        try:
            self._save_file()
        except OSError as error:
            logger.error("offline_not_persisted directory=%s error=%r", self.directory, str(error))

    # ---- checkpoints -----------------------------------------------------------------------------------------------------------------

    def checkpoint(self, *, sync: bool) -> None:
        """Write down what need not be read again. Everything must be synced. Raises OSError."""
        live = self.live
        self.producers.expire(self.last_append_us - self._producer_expiration_us)
        self._checkpoint_number += 1
        checkpoint = Checkpoint(
            number=self._checkpoint_number,
            topic_id=self.assignment.topic_id.hex(),
            segment_base=live.base if live else -1,
            valid_end=live.end if live else 0,
            batch_count=live.batch_count if live else 0,
            next_offset=self.next_offset,
            max_timestamp_us=self.max_timestamp_us,
            first_append_us=live.first_append_us if live else 0,
            last_append_us=self.last_append_us,
            sealed=[self.sealed[base] for base in sorted(self.sealed)],
            producers=self.producers.to_snapshot(),
        )
        write_checkpoint(self._files, self.directory, checkpoint, sync=sync)
        self.since_checkpoint_bytes = 0

    # ---- deleting --------------------------------------------------------------------------------------------------------------------

    def closed_segments(self) -> list[SealedSegment]:
        """Segments that may be removed, oldest first."""
        return [self.sealed[base] for base in sorted(self.sealed)]

    def advance_start(self, offset: int) -> int:
        """Move the log start offset up to `offset`, durably, then remove the segments that lie wholly below it. Answers how many. Raises OSError."""
        offset = min(offset, self.high_watermark)
        if offset > self.file.log_start_offset:
            self.file.log_start_offset = offset
            self.file.damage = [damage for damage in self.file.damage if damage.end > offset]
            self._save_file()
            crash_point("flusher.in_retention")
        removed = 0
        for segment, following in self._with_following():
            if following > self.file.log_start_offset:
                break
            for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, PRODUCERS_SUFFIX):
                path = f"{self.directory}/{file_name(segment.base, suffix)}"
                if self._files.exists(path):
                    self._files.unlink(path)
            del self.sealed[segment.base]
            removed += 1
        return removed

    def _with_following(self) -> list[tuple[SealedSegment, int]]:
        """Closed segments with the offset at which the next begins."""
        segments = self.closed_segments()
        ends = [segment.base for segment in segments[1:]] + [self.live.base if self.live is not None else self.next_offset]
        return list(zip(segments, ends, strict=False))  # no segments: the one end is nobody's

    def following_base(self, base: int) -> int:
        """Where the segment behind the closed segment `base` begins."""
        return next((following for segment, following in self._with_following() if segment.base == base), self.next_offset)

    def scrub_one_index(self) -> None:
        """Look at one index that an earlier run left, and make it again if it is missing, short or wrong. Not while a group is placed. Raises
        OSError.
        """
        base, live = self.unscrubbed.pop(), self.live
        if live is not None and live.base == base:
            if not index_is_right(self._files, self.directory, base, live.batch_count):
                live.batch_count, _ = rebuild_index(self._files, self.directory, self.file, base, live.end)
            return
        segment = self.sealed.get(base)
        if segment is None or index_is_right(self._files, self.directory, base, segment.batch_count):
            return
        count, _ = rebuild_index(self._files, self.directory, self.file, base)
        entries = index_format.decode(read_whole(self._files, f"{self.directory}/{file_name(base, INDEX_SUFFIX)}"), base) or []
        if entries:
            self.max_timestamp_us = max(self.max_timestamp_us, entries[-1].max_timestamp_us)
            self.sealed[base] = segment._replace(batch_count=count, max_timestamp_us=entries[-1].max_timestamp_us)

    def close(self) -> None:
        """Write a last checkpoint of what is synced and close the files; the live segment stays live for the next start. Raises OSError."""
        if self.since_checkpoint_bytes and not self.refusal:
            self.checkpoint(sync=True)
        if self.live is not None:
            self._files.close(self.live.fd)
            self._files.close(self.live.index_fd)
            self.live = None

    def delete(self) -> None:
        """Remove the directory with everything in it, in a way that a kill halfway cannot confuse: it is renamed first. Raises OSError."""
        self.settled()
        files = self._files
        if self.live is not None:
            files.close(self.live.fd)
            files.close(self.live.index_fd)
            self.live = None
        gone = self._aside(self.assignment.topic_id.hex(), "deleted")
        if files.exists(self.directory):
            files.rename(self.directory, gone)
            files.sync_directory(self._data_dir)
        crash_point("flusher.in_delete")
        remove_tree(files, gone)
        remove_tree(files, f"{self.directory}.{self.assignment.topic_id.hex()[:8]}.deleted")  # of a build that called it so, and was killed


def _decision_of(a: Assignment) -> Decision:
    return Decision(a.version, a.partition_count, a.schema_id, a.typed, a.created_us, a.delay_of, a.given)


def pending_from_bytes(data: Readable, seed: int) -> PendingBatch | None:
    """A batch as the journal held it, or None when it is not intact."""
    view = memoryview(data)
    try:
        header = verify_batch(view, seed)
    except BatchFormatError:
        return None
    return PendingBatch(header.base_offset, header.next_offset, header.max_timestamp_us, header.append_time_us, view)
