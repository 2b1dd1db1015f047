"""Partition log: a partition's active and sealed segments, and the place of the next batch.

Owner: the flusher, the only writer of these files.

Invariants:
- log_start_offset <= high_watermark <= next_offset.
- last_stable_offset <= high_watermark. It waits for open transactions, and for the transaction
  indexes.
- next_offset and the active segment's end move only by `place`.
- A segment is sealed when it is synced and ends with the end-of-stream mark
  (`workers.log.files.sealed_segments`).
- A checkpoint covers only what is synced.

Crash: recovery finds and repairs a torn tail of the active segment, a segment without its schema,
or a segment without its end mark.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from shm.crash_points import crash_point
from shm.messages.lane_messages import Assignment
from tailrace.format.crc32c import Readable
from tailrace.format.directory.partition_metadata import DamagedRange
from tailrace.format.record_batch.batch_header import END_OF_STREAM, verify_batch
from tailrace.format.record_batch.header_peek import schema_id_at
from tailrace.format.segments.segment_index import IndexEntry
from workers.log.files.active_segment import (
    ActiveSegment,
    LogGapError,
    PendingBatch,
    begin,
    read_batches,
    reopen,
    write_segment,
)
from workers.log.files.partition_directory import PartitionDirectory
from workers.log.files.sealed_segments import SealedSegments
from workers.log.producers.producer_snapshots import record_producer, write_snapshot
from workers.log.producers.producer_state import ProducerTable
from workers.log.producers.transaction_indexes import TransactionIndexes
from workers.log.producers.transaction_rules import EndedTransaction
from workers.log.recovery.decision import Hints
from workers.log.recovery.log_recovery import RecoveredLog, recover_log
from workers.segment import segment_swap
from workers.segment.checkpoint import Checkpoint, SealedSegment, write_checkpoint
from workers.segment.files import Files, is_shortage
from workers.segment.segment_swap import CleanedRun

logger = logging.getLogger(__name__)


Cleaning = tuple[int, int, int, int, int, int, int]
NOT_CLEANED: Cleaning = (0, 0, 0, 0, 0, 0, 0)


class PartitionLog:
    """The files of one partition."""

    def __init__(
        self,
        files: Files,
        data_dir: str,
        assignment: Assignment,
        moved: Callable[[int], int] | None = None,
    ) -> None:
        """`moved`: see `ProducerTable`; None: the wall clock does not jump."""
        self._moved = moved
        self._files = files
        self._home = PartitionDirectory(files, data_dir, assignment)
        self.directory = self._home.path
        self.file = self._home.file
        """Content of `partition.json`, saved or not."""
        self.assignment = assignment
        self.transaction_indexes = TransactionIndexes(files, self.directory)
        self.sealed = SealedSegments(
            files, self._home, self.transaction_indexes, lambda: self.checkpoint(sync=True)
        )
        self.live: ActiveSegment | None = None
        self.next_offset = 0
        self.appended_batches = self.appended_bytes = 0
        """Placed since construction; the partition table shows them."""
        self.high_watermark = 0
        self.last_stable_offset = 0
        self.delivered = (0, 0)
        """Key of the last delayed row below the high watermark (see `ProducerTable.delivered`)."""
        self.max_timestamp_us = 0
        self.last_append_us = 0
        self.producers = ProducerTable()
        self.refusal = ""
        """Reason why writes are refused, or ""."""
        self.is_open = False
        """True if the log was opened and its state matches its files."""
        self._has_segments = False
        """True once there was a segment. From then on the directory's name and partition.json are
        durable. Before, the catalog knows everything in them.
        """
        self.since_checkpoint_bytes = 0
        self.group: list[PendingBatch] = []
        """Batches placed since the last settling."""
        self._written_count = 0
        self._group_position = 0
        self._ended: list[EndedTransaction] = []
        """Transactions that were ended by batches which may be rewritten to another segment."""
        self._checkpoint_number = 0
        self.cleaning = NOT_CLEANED
        """State of compaction for the partition table (see `PartitionState.cleaned_below`)."""

    @property
    def files(self) -> Files:
        return self._files

    @property
    def key(self) -> tuple[bytes, int]:
        return self.assignment.topic_id, self.assignment.partition

    @property
    def is_durable(self) -> bool:
        """True if the topic has durability=disk."""
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
        return sum(segment.size for segment in self.sealed.values()) + (
            self.live.end if self.live is not None else 0
        )

    # ---- opening ---------------------------------------------------------------------------------

    def open(self, run: str, *, hints: Hints | None = None, revive: bool = False) -> RecoveredLog:
        """Create the directory, or recover its content. Raises OSError.

        `run` is the id of this run. `revive` is True after the operator has repaired the disk.
        """
        files, hints = self._files, hints or Hints()
        was_renamed = self._home.open(run)
        self.file = self._home.file
        if self.file.offline:
            hints = replace(
                hints, durable_below=0, end_limit=self.file.epochs[-1].start
            )  # where it ended when its disk failed
        swap = segment_swap.finish_swap(files, self.directory)
        recovered = recover_log(files, self.directory, self.file, hints, swap)
        self.sealed.take_over(recovered.sealed)
        self.next_offset = recovered.next_offset
        self.max_timestamp_us = recovered.max_timestamp_us
        self.last_append_us = recovered.last_append_us
        self.producers = recovered.producers
        if self._moved is not None:
            self.producers.moved = self._moved
        self._checkpoint_number = recovered.checkpoint_number
        self._has_segments = bool(self.sealed) or recovered.live_base >= 0
        if recovered.live_base >= 0:
            self.live = reopen(files, self.directory, recovered)
            self.sealed.unscrubbed.append(recovered.live_base)
        self._home.note_damage(recovered.damage)  # indexes are repaired around it
        self.transaction_indexes.recover(self._bases(), self.file, recovered.transactions)
        self.raise_watermark()
        changed = bool(recovered.damage) or was_renamed
        if self.file.offline and revive:
            self.file.offline = ""
            changed = True
        if self._home.note_decision(self.assignment) or changed:
            self._home.save()
        if swap is not None:
            self.sealed.end_swap(swap)
        self.refusal = self.file.offline
        self.is_open = True
        return recovered

    def change(self, assignment: Assignment, *, replay: bool) -> None:
        """Apply new settings.

        If they cannot be written to the file now, its next change includes them.
        """
        self.assignment = assignment
        is_noted = (
            self.is_open
            and not replay
            and self.file.note_map(len(assignment.slot_counts), self.next_offset)
        )
        if (
            (self._home.note_decision(self.assignment) or is_noted)
            and self.is_open
            and not self.refusal
        ):
            self._home.try_save_decision(sync=self._has_segments)

    def abandon_opening(self) -> None:
        """Close a log whose recovery could not be completed, as if it had not been opened."""
        self.settled()
        self._drop_live()
        self.is_open = False

    def begin_epoch(self, run: str) -> None:
        """Begin a leader epoch, once a run, after a stop that may have lost unsynced batches.
        Raises OSError.

        Readers may have seen records that the log no longer has. Call it after everything left in
        memory was recovered.
        """
        if self.file.run != run:
            self._home.begin_run(run, self.next_offset)

    def begin_new_log(self, shown_epoch: int) -> None:
        """Begin an epoch when the log takes writes again: batches that its worker appended
        meanwhile were refused.

        `shown_epoch` may be known to readers and worker although the disk could not keep it. Raises
        OSError.
        """
        self._home.begin_epoch(self.next_offset, above=shown_epoch)

    # ---- appending -------------------------------------------------------------------------------

    def needs_roll(self, length: int, append_time_us: int) -> bool:
        """True if a batch of `length` bytes must go to a new segment."""
        live = self.live
        if live is None:
            return True
        if not live.first_append_us:
            return False
        return live.end + length > int(self.assignment.settings["segment.bytes"]) or self.is_old(
            append_time_us
        )

    def has_other_schema(self, data: Readable) -> bool:
        """True if a batch must go to a new segment because the active one has another schema: a
        segment is an Arrow stream, which has one.
        """
        live = self.live
        return (
            live is not None
            and len(self.file.schemas) > 1
            and schema_id_at(data, 0) != live.schema_id
        )

    def is_old(self, now_us: int) -> bool:
        """True if the active segment is not empty and older than segment.ms."""
        live = self.live
        return (
            live is not None
            and bool(live.first_append_us)
            and now_us - live.first_append_us >= int(self.assignment.settings["segment.ms"]) * 1000
        )

    def place(self, batch: PendingBatch) -> tuple[int, int]:
        """Place the next batch at the active segment's end. `write_pending` writes it.

        Return (segment base, file position). The segment must have room. Raises LogGapError.
        """
        if batch.base_offset != self.next_offset:
            raise LogGapError(
                f"a batch has offset {batch.base_offset}; the log in {self.directory} ends at "
                f"{self.next_offset}"
            )
        live = self.live
        assert live is not None
        if not live.first_append_us:
            live.first_append_us = batch.append_time_us
        position, length = live.end, len(batch.data)
        if not self.group:
            self._group_position = position
        self.group.append(batch)
        if batch.max_timestamp_us > live.max_timestamp_us:
            live.max_timestamp_us = batch.max_timestamp_us
        live.new_entries.append(
            IndexEntry(batch.base_offset, position, live.max_timestamp_us, length)
        )
        live.end = position + length
        if live.max_timestamp_us > self.max_timestamp_us:
            self.max_timestamp_us = live.max_timestamp_us
        if batch.append_time_us > self.last_append_us:
            self.last_append_us = batch.append_time_us
        self.next_offset = batch.next_offset
        self.appended_batches += 1
        self.appended_bytes += length
        self.since_checkpoint_bytes += length
        return live.base, position

    def write_pending(self) -> None:
        """Write everything placed since the last write, then its index entries. After an OSError
        nothing is forgotten.
        """
        live = self.live
        pending = [batch.data for batch in self.group[self._written_count :]]
        if live is None or not pending:
            return
        self._files.write_at(live.fd, pending, live.end - sum(map(len, pending)))
        self._written_count = len(self.group)
        live.write_index_entries()

    def rewrite_batch(
        self, base_offset: int, segment_base: int, position: int, data: Readable
    ) -> bool:
        """Rewrite a batch that recovery found in the file, if it is in the active segment (see
        `ActiveSegment.rewrite_batch`). Return False if its segment is sealed, and so synced.
        """
        live = self.live
        if live is None or live.base != segment_base or position + len(data) > live.end:
            return False
        live.rewrite_batch(base_offset, position, data)
        return True

    def remember(self, data: Readable) -> None:
        """Record the producer of the batch that was placed last in the flusher's copy. Raises
        BatchFormatError.
        """
        header = verify_batch(memoryview(data), self.file.seed)
        ended = record_producer(self.producers, header)
        if header.is_transactional:
            self.note_transactional(ended)

    def note_transactional(self, ended: EndedTransaction | None) -> None:
        """Record that the batch that was placed last is transactional, and the transaction that it
        ends.
        """
        self.transaction_indexes.note(self.newest_base, ended)
        if ended is not None:
            self._ended.append(ended)

    def write_transaction_indexes(self) -> None:
        """Write the missing entries of the transaction indexes. The last stable offset waits for
        them. Raises OSError; then nothing is forgotten.
        """
        if self.transaction_indexes.is_behind:
            self.transaction_indexes.write(self._bases(), self.file)

    def _sync_transaction_indexes(self) -> None:
        """Make the transaction indexes complete and durable. Raises OSError."""
        self.write_transaction_indexes()
        self.transaction_indexes.sync()

    def rebuild_transaction_index(self, base: int) -> None:
        """Make a segment's transaction index again from the headers. Raises OSError."""
        self.transaction_indexes.rebuild(base, self._bases(), self.file)

    def _bases(self) -> list[int]:
        """The bases of all segments, ascending."""
        return sorted(self.sealed) + ([self.live.base] if self.live is not None else [])

    def raise_watermark(self) -> None:
        """Raise the high watermark: everything placed is as durable as the topic requires. With it
        the last stable offset, unless an index is behind.
        """
        self.high_watermark = self.next_offset
        self.delivered = self.producers.delivered
        self.raise_stable()

    def raise_stable(self) -> None:
        """Raise the last stable offset up to the oldest open transaction, if the indexes are
        complete. Nothing may be placed above the high watermark.
        """
        if not self.transaction_indexes.is_behind:
            first_open = self.producers.transactions.first_offset
            stable = self.high_watermark if first_open is None else first_open
            self.last_stable_offset = max(
                self.last_stable_offset, min(stable, self.high_watermark), self.log_start_offset
            )

    def settled(self) -> None:
        """Drop the group, which has its verdicts. Its bytes may leave the ring."""
        self.group = []
        self._written_count = 0
        if self._ended:
            live = self.live
            start = live.synced_next if live is not None and self.is_durable else self.next_offset
            self._ended = [ended for ended in self._ended if ended.marker_offset >= start]

    def sync(self) -> None:
        """Make everything written durable. Raises OSError; then the file's unsynced pages must not
        be trusted (`rewrite`).
        """
        live = self.live
        if live is not None and live.synced_end != live.end:
            self._files.sync_data(live.fd)
            live.synced_end, live.synced_next = live.end, self.next_offset

    def lose_until(self, end: int) -> None:
        """Report offsets up to `end` as lost, and continue after them in a new segment. Nothing may
        be pending. Raises OSError.
        """
        start = self.next_offset
        self.sync()
        self.seal()
        logger.error(
            "corruption topic=%s partition=%d offsets=%d-%d damaged_ranges=1 reason=%r",
            self.assignment.topic, self.assignment.partition,
            start, end - 1, "a segment's file is missing or damaged, and the journal has only a "
                            "part of it",
        )  # fmt: skip
        self.next_offset = end
        self.raise_watermark()
        self._home.note_damage([DamagedRange(self.newest_base, 0, 0, start, end)])
        self._home.save()
        self.checkpoint(sync=True)

    # ---- rolling ---------------------------------------------------------------------------------

    def roll(self, first: Readable | None = None) -> None:
        """Seal the active segment, if there is one, and begin the next at `next_offset`, with the
        schema of the batch `first`; None: with the newest. Everything must be synced. Raises
        OSError.
        """
        schema_id = self._schema_id_of(first)
        if schema_id not in self._home.saved_schemas:
            self._home.save()  # recovery knows no other schemas than those in the file
        try:
            self.seal()
        except OSError as error:
            if is_shortage(error):
                raise
            logger.warning(
                "segment_not_sealed directory=%s base=%d error=%r",
                self.directory,
                self.newest_base,
                str(error),
            )
            self.abandon_segment()
        write_snapshot(self._files, self.directory, self.next_offset, self.producers)
        live = begin(
            self._files, self.directory, self.next_offset, self.file.schemas[schema_id], schema_id
        )
        try:
            if not self._has_segments:
                self._home.sync_beginning()
            self._files.sync_directory(self.directory)
        except BaseException:
            live.close()
            raise
        is_empty = not self._has_segments and not self.next_offset and not len(self.producers)
        self._has_segments = True
        self.live = live
        try:
            self.checkpoint(sync=not is_empty)  # of an empty log it tells recovery nothing
        except OSError as error:  # the one before it holds; recovery reads more
            logger.warning(
                "checkpoint_not_written directory=%s error=%r", self.directory, str(error)
            )

    def _schema_id_of(self, data: Readable | None) -> int:
        """The schema of a batch, the newest if it is None. Raises OSError for an unknown schema,
        in which no segment could be opened again.
        """
        if data is None or len(self.file.schemas) == 1:
            return self.assignment.schema_id
        schema_id = schema_id_at(data, 0)
        if schema_id not in self.file.schemas:
            raise OSError(
                errno.EILSEQ,
                f"a batch has schema {schema_id}; the log has {sorted(self.file.schemas)}",
            )
        return schema_id

    def seal(self) -> None:
        """Finish the active segment: write the end-of-stream mark, sync and close. An empty one is
        only closed: the next takes its place. Nothing may be placed. Raises OSError.
        """
        live = self.live
        if live is None or live.base == self.next_offset:
            self._drop_live()
            return
        self._files.write_at(live.fd, [END_OF_STREAM], live.end)
        self._files.sync_data(live.fd)
        self._sync_transaction_indexes()
        self._close_live(live, live.end + len(END_OF_STREAM), live.batch_count)
        crash_point("flusher.after_seal")

    def abandon_segment(self) -> None:
        """Leave the active segment as it is, without an end mark: it ends where the
        next one begins.
        """
        if self.live is not None:
            self._close_live(self.live, self.live.end, self.live.batch_count)

    def _close_live(self, live: ActiveSegment, size: int, batch_count: int) -> None:
        live.close()
        self.sealed[live.base] = SealedSegment(
            live.base, size, batch_count, live.max_timestamp_us, self.last_append_us,
            int(self.transaction_indexes.has(live.base)),
        )  # fmt: skip
        self.live = None

    def rewrite(self, earlier: Sequence[PendingBatch]) -> list[tuple[int, int]]:
        """Write `earlier` (from the journal) and the group durably to a new segment in a new file,
        after a failed write or sync. Returns the new places of the group. Raises OSError; then the
        old file is unchanged and readable.

        Bytes of the old file behind its last sync are not trusted. It ends where the new one
        begins.
        """
        batches = [*earlier, *self.group]
        start = batches[0].base_offset if batches else self.next_offset
        live = self.live
        schema_id = (
            live.schema_id
            if live is not None
            else self._schema_id_of(batches[0].data if batches else None)
        )
        if live is None or live.base != start:
            write_snapshot(self._files, self.directory, start, self.producers, self._ended)
        rewritten = write_segment(
            self._files, self.directory, start, self.file.schemas[schema_id], schema_id, batches
        )
        if live is not None and live.base == start:
            live.close()
        elif live is not None:
            live.end = self._group_position if not earlier else live.synced_end
            self.abandon_segment()
        if live is not None:
            self.transaction_indexes.note_rewritten(live.base, start)
        self.live = rewritten
        self.next_offset = start
        self.group = []
        places = [self.place(batch) for batch in batches]
        rewritten.synced_end, rewritten.synced_next = rewritten.end, self.next_offset
        self.group = batches[len(earlier) :]
        self._written_count = len(self.group)
        rewritten.rewrite_index()
        return places[len(earlier) :]

    def split(self, first: IndexEntry) -> bool:
        """Copy the batches of the active segment from `first` on to a new segment, so that the rest
        can be deleted. Nothing may be placed, and everything must be synced. Returns False, with
        nothing changed, if the file does not match the index. Raises OSError; then nothing has
        changed.

        Crash: the new segment is durable before it has its name. From then on the old one ends
            where the new one begins, although its file is longer.
        """
        live = self.live
        assert live is not None
        assert not self.group
        if first.base_offset <= live.base:
            return False
        batches = read_batches(self._files, live, first, self.file.seed)
        if not batches or batches[-1].next_offset != self.next_offset:
            return False
        self.rewrite(batches)
        self.settled()
        return True

    # ---- going offline ---------------------------------------------------------------------------

    def go_offline(self, reason: str) -> None:
        """Refuse writes from now on, over restarts too; forget what was placed above the high
        watermark. Reads go on.
        """
        self.refusal = reason
        if self.live is not None:
            self._close_live(self.live, self.live.end, -1)
        self.settled()
        self.next_offset = self.high_watermark
        self._home.go_offline(reason, self.next_offset)

    # ---- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, *, sync: bool) -> None:
        """Write a checkpoint. Everything must be synced. Raises OSError."""
        self._sync_transaction_indexes()
        live = self.live
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
            sealed=self.sealed.oldest_first(),
            producers=self.producers.to_snapshot(),
        )
        write_checkpoint(self._files, self.directory, checkpoint, sync=sync)
        self.since_checkpoint_bytes = 0

    # ---- cleaned segments ------------------------------------------------------------------------

    def swap(self, run: CleanedRun) -> bool:
        """Replace a run of sealed segments by the cleaned segment that lies beside them, as one
        durable step. Returns False, with nothing changed, if the segments are not those of the
        run any more. Raises OSError. Once the swap is decided (`sealed.is_swapping`), it belongs
        to the log, and `sealed.finish_swap` finishes it; a call with the same run does so, too.
        """
        decided = self.sealed.finish_swap()
        if decided == run:
            return True
        if self.assignment.departing:
            return False  # its copy has the segments of now
        if (
            not self.sealed.are_replaced_by(run)
            or self.following_base(run.replaced[-1][0]) != run.end
            or run.replaced[-1][0] >= self.newest_base
            or run.end > self.last_stable_offset
        ):
            return False
        self.sealed.decide_swap(run)
        self.sealed.finish_swap()
        return True

    # ---- deleting --------------------------------------------------------------------------------

    def advance_start(self, offset: int) -> int:
        """Move the log start offset up to `offset`, durably, then remove the segments that lie
        wholly below it. Returns how many. Raises OSError.
        """
        offset = min(offset, self.high_watermark)
        if offset > self.file.log_start_offset:
            self._home.advance_start(offset)
            crash_point("flusher.in_retention")
        return self.sealed.remove_below(self.file.log_start_offset, self._end_of_sealed)

    @property
    def _end_of_sealed(self) -> int:
        return self.live.base if self.live is not None else self.next_offset

    def following_base(self, base: int) -> int:
        """Return the base of the segment after the sealed segment `base`."""
        return next(
            (
                following
                for segment, following in self.sealed.with_following(self._end_of_sealed)
                if segment.base == base
            ),
            self.next_offset,
        )

    def close(self) -> None:
        """Write a last checkpoint of what is synced and close the files; the active segment stays
        live for the next start. Raises OSError.
        """
        if self.since_checkpoint_bytes and not self.refusal:
            self.checkpoint(sync=True)
        self._drop_live()

    def _drop_live(self) -> None:
        if self.live is not None:
            self.live.close()
            self.live = None

    def delete(self) -> None:
        """Remove the directory with everything in it (see `PartitionDirectory.remove`).

        Raises OSError.
        """
        self.settled()
        self._drop_live()
        self._home.remove()

    def put_in_bin(self) -> None:
        """Close the log and move its directory to the bin (see `PartitionDirectory.put_in_bin`).
        Everything must be synced. Raises OSError.
        """
        self.settled()
        if self.is_open and not self.refusal:
            self.checkpoint(sync=True)
        self._drop_live()
        self._home.put_in_bin()
