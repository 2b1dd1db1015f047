"""Delay partition: moves a partition's delayed records from its delay log to memory and bucket
files, and delivers each exactly once when due.

Before it delivers the rows due at a tick, the scheduler has the worker append a mark to the delay
log (ARCHITECTURE, section 7). The mark closes all ordinals up to that tick. Rows behind it count as
due later. Having read the mark, the scheduler knows every row up to there, and their order
(ordinal, offset) is the same whenever the log is read. A delivered batch carries the key of its
last row and the key delivered before its first. The worker refuses a batch that does not follow, is
not closed, or is not due by its clock. One batch at a time is in flight. Whichever process is
killed, the next delivery is the first row not delivered.

When the wall clock is set back, a mark begins another epoch, counted in an ordinal's upper bits,
with the last delivered key. Rows that were closed and are not due any more wait again.

Clients may write anything. A batch or row of the log that cannot be handled is set aside with its
place, logged, counted and skipped. Its neighbours are delivered. After an error of disk or memory
the partition is closed and opened again.

When the schema of the topic is altered, so is that of its delay log. Rows stay in the version that
they were written with, and are delivered in the topic's newest one. A batch of the old version that
is on its way is refused, or appended before, by the worker. Its rows are taken back and encoded
again.

Owner: the scheduler.

Invariants:
- A mark is requested only when everything due below it is in memory and everything released before
  is delivered.
- The manifest's cursor moves only over rows that are delivered, cancelled, or in the files that it
  names.
- Files are removed after the manifest has dropped them.
- Rows up to the closed tick are released. So a change behind a mark finds the same rows pending
  whenever the log is read.
- Nothing is delivered while the newest versions of topic and delay log differ.
- The log is read up to the first batch of a version that is not known yet.

Crash: begin with the manifest and read the delay log from its cursor. The partition table has the
last delivered row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.core.schedule.delays import (
    DUE_COLUMN,
    NONE_DELIVERED,
    TICK_BITS,
    TICK_MASK,
    TICK_US,
)
from tailrace.format.record_batch.batch_header import (
    BatchHeader,
    checksum_seed,
)
from workers.delays.changing_transaction import ChangingTransaction
from workers.delays.dead_delays import DeadDelays
from workers.delays.delay_log.batches import LogBatch, LogBatches, ticks_of
from workers.delays.delay_log.change_batches import ChangeBatches
from workers.delays.delay_log.ingest import GATHERED_BYTES, LogIngest
from workers.delays.delay_log.tailer import LogTailer
from workers.delays.delay_log.transactions import LogTransactions
from workers.delays.delivery.delivered_batches import Deliveries
from workers.delays.delivery.delivery_marks import RETRY_INTERVAL_NS, RETRY_NS, DeliveryMarks
from workers.delays.delivery.due_rows import DueRows, Write
from workers.delays.listing import listed_rows
from workers.delays.store.array_wheel import NEVER
from workers.delays.store.log_versions import DUE, LogVersions, UnusableSchemaError
from workers.delays.store.pending_store import PendingStore
from workers.delays.store.recurring_rows import RecurringRows
from workers.segment.files import Files

logger = logging.getLogger(__name__)

COMMITTED_READ_BYTES = 64 << 10
LEAD_TICKS = 10
"""Ticks are closed this long in advance, so that the mark's write to disk adds no lateness."""
AWAIT_VERSION_NS = 10_000_000_000
"""A worker may have an altered schema this long before the scheduler."""
SET_BACK_TICKS = 1_000
"""A wall clock this far behind the closed tick was set back."""
_SPANS_S = {"1m": 60, "1h": 3_600, "1d": 86_400}


class DelayPartition:
    """Delayed records of one partition."""

    def __init__(
        self,
        files: Files,
        directory: str,
        log: Assignment,
        topic: Assignment,
        log_state: Callable[[], PartitionState],
        delivered: Callable[[], tuple[int, int]],
        send: Write,
        incarnation: int,
        now_ns: int,
        wall_us: int,
        payload_max: int,
    ) -> None:
        """`directory` is the delay log's. `incarnation` is unique to this DelayPartition.
        `payload_max` is the largest batch that `send` accepts, in bytes.

        Raises OSError, PendingDamagedError, UnusableSchemaError.
        """
        self.log = log
        self.topic = topic
        self._log_state = log_state
        self._delivered = delivered
        self._send = send
        self.versions = LogVersions(log)
        self.versions.check(topic)
        self._has_topics_schema = True
        """True if rows of the log's newest version are rows of the topic."""
        self._awaits_version_ns: int | None = None
        """Since then a batch in the log has waited for its version to be known."""
        self.batches = LogBatches(self.versions)
        self._log_seed = checksum_seed(log.topic_id, log.partition)
        self.change_batches = ChangeBatches(self.versions, self._log_seed, payload_max)
        self._aside = DeadDelays(files, directory, self.versions)
        self._failure: Exception | None = None
        """Error of a request while it read the log. The partition must then be closed."""
        self._store = PendingStore(files, directory, log.topic_id, self.versions, now_ns)
        self._marks = DeliveryMarks(
            self._empty_message(), self._log_seed, self._store.closed, incarnation
        )
        self._recurring = RecurringRows(
            self._store.rows, self.versions, self._store.recurring, self._aside.keep_row
        )
        self.intake = LogIngest(self._store, self._recurring, self.batches, self._aside)
        self.counters = self.intake.counters
        self.changes = self.intake.changes
        self._follower = LogTailer(files, directory, self._log_seed, self._store.cursor)
        self.transactions = LogTransactions(
            self.intake,
            LogTailer(files, directory, self._log_seed, 0, COMMITTED_READ_BYTES),
            log_state,
            self._max_message_bytes,
            self._store.log,
        )
        self._reread_until = log_state().high_watermark
        """Rows below this offset existed when this incarnation began, and may
        begin an epoch of the clock.
        """
        self._waiting_mark: BatchHeader | None = None
        """A mark of a new epoch that waits for a batch or job in progress."""
        self._due = DueRows(
            self._store, self._recurring, self._marks, Deliveries(self.versions, payload_max),
            self._aside, self.counters, delivered, self._write, now_ns, wall_us,
        )  # fmt: skip
        self._is_lane_full = False
        """True if the worker's lane was full in this step."""
        self._now_ns = now_ns
        self._wall_us = wall_us
        if self._marks.closed:
            self._due.release(self._marks.closed_tick)

    def _max_message_bytes(self) -> int:
        return int(self.log.settings["max.message.bytes"])

    def _empty_message(self) -> pa.Buffer:
        return pa.RecordBatch.from_pylist([], schema=self.versions.newest).serialize()

    def assign(self, assignment: Assignment) -> None:
        """Take a later assignment of the topic or its delay log, with settings and schemas. An
        unusable schema is raised by the next step.
        """
        is_altered = (
            assignment.schema_id != (self.log if assignment.delay_of else self.topic).schema_id
        )
        if assignment.delay_of:
            self.log = assignment
        else:
            self.topic = assignment
        if not is_altered:
            return
        try:
            if assignment.delay_of:
                self.versions.update(assignment)
                self._marks.use(self._empty_message())
            self._has_topics_schema = self.versions.has_schema_of(self.topic)
        except UnusableSchemaError as error:
            self._failure = error

    def close(self) -> None:
        self._follower.close()
        self.transactions.close()

    # ---- stepping --------------------------------------------------------------------------------

    @property
    def _now_tick(self) -> int:
        return self._wall_us // TICK_US

    def step(self, now_ns: int, wall_us: int) -> int:
        """Do some of the work there is.

        Raises OSError. After any exception the partition must be closed.
        """
        if self._failure is not None:
            raise self._failure
        self._now_ns, self._wall_us = now_ns, wall_us
        self._due.set_time(now_ns, wall_us)
        self._store.set_time(now_ns, self._now_tick)
        self._is_lane_full = False
        if not self._store.is_version_saved and not self._store.is_busy:
            self._store.save_version()
        work = self._due.apply_delivered()
        work += self._read_log()
        work += self._store.load_upcoming()
        work += self._deliver()
        work += self._ask_for_mark()
        if not work or self._store.is_crowded or self._store.is_behind:
            is_settled = self.is_settled and self._waiting_mark is None
            work += self._store.tidy(
                self._follower.next_offset,
                self._marks.closed,
                self._recurring.describe,
                self.transactions.describe,
                is_settled=is_settled,
            )
        return work

    def next_due_us(self) -> int | None:
        """Return the next wall-clock time with work after this step, or None."""
        ticks = [self._store.next_file_tick()]
        if self._due.sent is None and len(self._due.ready):
            ticks.append(int(self._due.ready[0, 0]))
        if (
            self._due.sent is None
            and not self._marks.is_asked
            and not (len(self._due.ready) and self._marks.is_fenced)
        ):
            # no mark closes what is closed
            ticks.append(max(self._first_waiting(), self._marks.closed_tick + 1) - LEAD_TICKS)
        ahead = [
            tick * TICK_US
            for tick in ticks
            if self._wall_us < tick * TICK_US < (NEVER - LEAD_TICKS)
        ]
        return min(ahead, default=None)

    def next_deadline_ns(self) -> int | None:
        """Return the next monotonic time with work, after a step without work.

        Work that waits for another event has no deadline. A past deadline would make the scheduler
        spin until that event.
        """
        if self._is_lane_full:
            return self._now_ns + RETRY_INTERVAL_NS
        deadlines = [
            self._store.next_deadline_ns(
                self._follower.next_offset,
                is_settled=self.is_settled and self._waiting_mark is None,
            )
        ]
        if self._due.sent is not None:
            deadlines.append(self._due.sent.at_ns + RETRY_NS)
        if self._awaits_version_ns is not None:
            deadlines.append(self._awaits_version_ns + AWAIT_VERSION_NS)
        if self._may_ask_for_mark:
            deadlines.append(self._marks.retry_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_settled(self) -> bool:
        """True if everything that was released is delivered."""
        return self._due.is_settled

    # ---- the delay log ---------------------------------------------------------------------------

    def _read_log(self) -> int:
        if self._waiting_mark is not None:
            if self._due.sent is not None or self._store.is_busy:
                return 0
            self._begin_epoch(
                self._waiting_mark.min_tick,
                (self._waiting_mark.due_us, self._waiting_mark.delay_position),
            )
            self._waiting_mark = None
            return 1
        if self._store.is_full():
            return 0
        if self.transactions.is_committing:
            return self.transactions.ingest(self._marks.closed)
        gathered: list[LogBatch] = []
        byte_count = count = 0
        for header, data in self._follower.read(self._log_state()):
            if header.schema_id > self.versions.newest_id and not header.is_control:
                self._await_version(header)
                break
            self._awaits_version_ns = None
            if self._store.cursor == header.base_offset:
                self._store.note_first_unsaved(self._wall_us - header.append_time_us)
            count += 1
            if header.is_control:
                self.intake.add(gathered)
                gathered = []
                if header.is_delay_mark and not self._apply_mark(header):
                    break
                if header.is_marker and self.transactions.end(header, self._marks.closed):
                    break  # its rows come before what is behind it
                continue
            if header.is_transactional:
                if header.due_us > 0:  # a change of what was read before
                    self.intake.add(gathered)
                    gathered = []
                self.transactions.add(header, data)
                continue
            batch = self.intake.proven(header, data, self._max_message_bytes())
            if batch is not None:
                gathered.append(batch)
                byte_count += batch.rows.nbytes + len(data)
            if byte_count > GATHERED_BYTES:
                self.intake.add(gathered)
                gathered, byte_count = [], 0
                if self._store.is_full():
                    break
        self.intake.add(gathered)
        return count

    def _await_version(self, header: BatchHeader) -> None:
        """Read on from this batch when the controller has sent its version. Raises
        UnusableSchemaError after AWAIT_VERSION_NS.
        """
        self._follower.seek(header.base_offset)
        if self._awaits_version_ns is None:
            self._awaits_version_ns = self._now_ns
        elif self._now_ns - self._awaits_version_ns >= AWAIT_VERSION_NS:
            raise UnusableSchemaError(
                f"offset {header.base_offset} of the delay log has schema {header.schema_id}, and "
                f"the newest version of the catalog is {self.versions.newest_id}"
            )

    def catch_up(self) -> None:
        """Read what is settled now, for a request. Raises OSError. After any exception the
        partition must be closed.
        """
        try:
            while self._read_log():
                pass
        except Exception as error:
            self._failure = error
            raise

    def has_read(self, offset: int) -> bool:
        return offset < self._follower.next_offset

    def _apply_mark(self, header: BatchHeader) -> bool:
        """Apply a mark. Return False if reading must pause."""
        if not self._marks.apply(header):
            self._waiting_mark = header
            return False
        self._due.release(self._marks.closed_tick)
        return True

    def _begin_epoch(self, ordinal: int, delivered: tuple[int, int]) -> None:
        """Begin an epoch after the clock was set back, with rows up to `delivered` delivered. Rows
        that are not due any more wait again. The others stay released: they are closed.
        """
        self._store.set_back(
            (ordinal & TICK_MASK) - 1,
            delivered,
            self._due.take_back(delivered),
            lambda rows: ticks_of(rows.column(DUE), ordinal & TICK_MASK),
        )
        self._marks.begin_epoch(ordinal)
        self._due.release(self._marks.closed_tick)
        logger.warning(
            "clock_set_back topic=%s partition=%d epoch=%d",
            self.topic.topic,
            self.topic.partition,
            ordinal >> TICK_BITS,
        )

    # ---- requests --------------------------------------------------------------------------------

    def waits(self, offset: int) -> bool:
        """True if this row is pending. Raises OSError."""
        return self.intake.waits(offset)

    def row_of(self, offset: int) -> pa.RecordBatch | None:
        """Return a pending row as a batch of one in the delay log's schema, or None.

        Raises OSError.
        """
        return self.intake.row_of(offset)

    def change_batch(
        self, rows: pa.RecordBatch, token: int, transaction: ChangingTransaction | None = None,
        owner: int = 0,
    ) -> bytearray:  # fmt: skip
        """See `ChangeBatches.encode`."""
        return self.change_batches.encode(
            rows, token, self._wall_us, self.log.schema_id, transaction, owner
        )

    def replacement(self, row: pa.RecordBatch, due_us: int, origin: int) -> pa.RecordBatch:
        """See `LogBatches.replacement`. Raises UnsupportedBatchError."""
        return self.batches.replacement(row, due_us, origin)

    def cancellation(self, origin: int) -> pa.RecordBatch:
        """See `LogBatches.cancellation`."""
        return self.batches.cancellation(origin)

    # ---- delivery --------------------------------------------------------------------------------

    def _deliver(self) -> int:
        self._due.settle_altered(self.topic)
        if self._due.sent is None and not self._has_topics_schema:
            return 0
        return self._due.deliver(self.topic, waits_for_mark=self._waiting_mark is not None)

    def _write(self, target: Assignment, data: Any) -> bool:
        """Write a batch to the worker's lane.

        Return False if the lane is full. It is retried after RETRY_INTERVAL_NS.
        """
        written = self._send(target, data)
        self._is_lane_full = self._is_lane_full or not written
        return written

    # ---- marks -----------------------------------------------------------------------------------

    def _first_waiting(self) -> int:
        """Return the tick of the earliest row in memory, or NEVER."""
        first: int = min([self._store.rows.wheel.earliest(), *self._due.ready[:1, 0].tolist()])
        return first

    @property
    def _is_set_back(self) -> bool:
        """True if the wall clock is far behind the closed tick and no unread mark
        can explain it.
        """
        return (
            self._now_tick < self._marks.closed_tick - SET_BACK_TICKS
            and self._follower.next_offset >= self._reread_until
        )

    @property
    def _may_ask_for_mark(self) -> bool:
        """True if no delivery has to come first.

        Until then a lost mark is not requested again either.
        """
        if self._due.sent is not None or self._waiting_mark is not None:
            return False
        return (
            not (len(self._due.ready) and self._marks.is_fenced)
            or self._marks.asks_for_epoch
            or self._is_set_back
        )

    def _ask_for_mark(self) -> int:
        """Request a mark that closes everything due soon, if all of it is in memory and the earlier
        rows are delivered.
        """
        marks = self._marks
        retry_ns = marks.retry_ns
        if not self._may_ask_for_mark or (retry_ns is not None and self._now_ns < retry_ns):
            return 0
        now_tick = self._now_tick
        delivered = self._delivered()
        done = NONE_DELIVERED
        if marks.asks_for_epoch or self._is_set_back:
            ordinal = max(marks.epoch, delivered[0] >> TICK_BITS) + 1 << TICK_BITS | (now_tick + 1)
            if delivered[0] >> TICK_BITS == marks.epoch:
                done = delivered[0] & TICK_MASK, delivered[1]
        else:
            tick = min(now_tick + LEAD_TICKS, self._recurring.reach())
            if (
                self._first_waiting() > tick
                or tick <= marks.closed_tick
                or self._store.is_late(tick)
            ):
                marks.ask_no_more()
                return 0
            ordinal = marks.epoch << TICK_BITS | (tick + 1)
        if not self._write(
            self.log, marks.encode(ordinal, done, self.log.schema_id, self._wall_us)
        ):
            return 0
        marks.asked(ordinal, self._now_ns)
        return 1

    # ---- showing ---------------------------------------------------------------------------------

    def pending_count(self) -> int:
        return len(self._store) + len(self.transactions.reservations)

    def describe(self) -> dict[str, Any]:
        """Return numbers for `status`. Reserved rows are pending until the commit."""
        store, now = self._store, self._wall_us // TICK_US
        first_tick = store.first_tick()
        ahead = store.counts_ahead(
            [now + span * 1_000_000 // TICK_US for span in _SPANS_S.values()]
        )
        return {
            "topic": self.topic.topic, "partition": self.topic.partition,
            "pending": self.pending_count(),
            "reserved": len(self.transactions.reservations),
            "due_within": dict(zip((*_SPANS_S, "later"), ahead, strict=True)),
            "recurring": len(self._recurring),
            "next_due_us": first_tick * TICK_US if first_tick < NEVER else None,
            "is_settled": self.is_settled, "delivered": self.counters.delivered,
            "cancelled": self.counters.cancelled, "lateness_us": self.counters.lateness_us,
            "lost_rows": store.lost_rows + self._aside.row_count,
            "memory_bytes": store.rows.nbytes, "files": store.file_count,
            "cursor": self._follower.next_offset, "saved_cursor": store.cursor,
        }  # fmt: skip

    def listed(
        self, begin: tuple[int, int], end_tick: int, limit: int, key: bytes | None
    ) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
        """See `listed_rows`. Raises OSError."""
        columns = [DUE_COLUMN] if self.topic.typed else [DUE_COLUMN, "key"]
        return listed_rows(
            self._store,
            self._recurring,
            columns,
            begin,
            end_tick,
            limit,
            key,
            self.transactions.reservations,
        )
