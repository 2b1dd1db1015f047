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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shm.crash_points import crash_point
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.core.errors import UnsupportedBatchError
from tailrace.core.schedule.delays import (
    DUE_COLUMN,
    NONE_DELIVERED,
    TICK_BITS,
    TICK_MASK,
    TICK_US,
)
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_TRANSACTIONAL,
    BatchHeader,
    checksum_seed,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import insert_header
from workers.delays.changing_transaction import ChangingTransaction
from workers.delays.dead_delays import DeadDelays
from workers.delays.delay_log.batches import LogBatch, LogBatches, ticks_of
from workers.delays.delay_log.ingest import GATHERED_BYTES, LogIngest
from workers.delays.delay_log.tailer import LogTailer
from workers.delays.delay_log.transactions import LogTransactions
from workers.delays.delivery import Deliveries
from workers.delays.delivery_marks import RETRY_INTERVAL_NS, RETRY_NS, DeliveryMarks
from workers.delays.listing import listed_rows
from workers.delays.store.array_wheel import NEVER, Rows, no_rows
from workers.delays.store.bucket_files import is_above
from workers.delays.store.log_versions import DUE, LogVersions, UnusableSchemaError
from workers.delays.store.pending_store import PendingStore
from workers.delays.store.recurring_rows import RecurringRows
from workers.segment.files import Files

logger = logging.getLogger(__name__)

COMMITTED_READ_BYTES = 64 << 10
STUCK_TRIES = 10
LEAD_TICKS = 10
"""Ticks are closed this long in advance, so that the mark's write to disk adds no lateness."""
AWAIT_VERSION_NS = 10_000_000_000
"""A worker may have an altered schema this long before the scheduler."""
SET_BACK_TICKS = 1_000
"""A wall clock this far behind the closed tick was set back."""
_SPANS_S = {"1m": 60, "1h": 3_600, "1d": 86_400}

Send = Callable[[Assignment, Any], bool]
"""(partition, batch) -> True if the batch was written to its worker's lane."""


@dataclass(slots=True)
class Sent:
    """A batch in flight to the partition."""

    key: tuple[int, int]
    """Key of its last row."""
    previous: tuple[int, int]
    """Key of the row before its first."""
    data: bytearray
    rows: Rows
    at_ns: int
    schema_id: int
    tries: int = 1


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
        send: Send,
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
        self.payload_max = payload_max
        self._log_seed = checksum_seed(log.topic_id, log.partition)
        self._deliveries = Deliveries(self.versions, payload_max)
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
        self._ready = no_rows()
        self._sent: Sent | None = None
        self._is_lane_full = False
        """True if the worker's lane was full in this step."""
        self._applied_delivered = (0, 0)
        self._now_ns = now_ns
        self._wall_us = wall_us
        if self._marks.closed:
            self._release(self._marks.closed_tick)

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
        self._store.set_time(now_ns, self._now_tick)
        self._is_lane_full = False
        if not self._store.is_version_saved and not self._store.is_busy:
            self._store.save_version()
        work = self._apply_delivered()
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
        if self._sent is None and len(self._ready):
            ticks.append(int(self._ready[0, 0]))
        if (
            self._sent is None
            and not self._marks.is_asked
            and not (len(self._ready) and self._marks.is_fenced)
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
        if self._sent is not None:
            deadlines.append(self._sent.at_ns + RETRY_NS)
        if self._awaits_version_ns is not None:
            deadlines.append(self._awaits_version_ns + AWAIT_VERSION_NS)
        if self._may_ask_for_mark:
            deadlines.append(self._marks.retry_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_settled(self) -> bool:
        """True if everything that was released is delivered."""
        return self._sent is None and not len(self._ready)

    # ---- the delay log ---------------------------------------------------------------------------

    def _read_log(self) -> int:
        if self._waiting_mark is not None:
            if self._sent is not None or self._store.is_busy:
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
        self._release(self._marks.closed_tick)
        return True

    def _begin_epoch(self, ordinal: int, delivered: tuple[int, int]) -> None:
        """Begin an epoch after the clock was set back, with rows up to `delivered` delivered. Rows
        that are not due any more wait again. The others stay released: they are closed.
        """
        ready, self._ready = self._recurring.take_back(self._ready, delivered), no_rows()
        self._store.set_back(
            (ordinal & TICK_MASK) - 1,
            delivered,
            ready,
            lambda rows: ticks_of(rows.column(DUE), ordinal & TICK_MASK),
        )
        self._marks.begin_epoch(ordinal)
        self._release(self._marks.closed_tick)
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
        """Encode rows that cancel or replace others as a batch of the delay log.

        `token`, above 0, marks the appliance's batches: the worker accepts it from the scheduler
        only. It identifies the request when the batch is read. Rows of a `transaction` come in
        pairs (see `reservations`). `owner` is that of all rows that it changes.
        """
        header = BatchHeader(
            record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1,
            first_timestamp_us=self._wall_us, max_timestamp_us=self._wall_us,
            schema_id=self.log.schema_id, due_us=token, delay_position=owner or -1,
        )  # fmt: skip
        if transaction is not None:
            header.attributes = ATTRIBUTE_TRANSACTIONAL
            header.producer_id, header.producer_epoch = transaction.key
            header.previous_position = transaction.number
        return insert_header(rows.serialize(), header, self._log_seed)

    def replacement(self, row: pa.RecordBatch, due_us: int, origin: int) -> pa.RecordBatch:
        """See `LogBatches.replacement`. Raises UnsupportedBatchError."""
        return self.batches.replacement(row, due_us, origin)

    def cancellation(self, origin: int) -> pa.RecordBatch:
        """See `LogBatches.cancellation`."""
        return self.batches.cancellation(origin)

    def renewed(self, change: bytearray) -> bytearray:
        """Return a batch of `change_batch` in the log's newest version, or as it is if that cannot
        hold its values or is too long.
        """
        header = verify_batch(memoryview(change), self._log_seed)
        rows = pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(change)), self.versions.schema(header.schema_id)
        )
        try:
            data = self.versions.to_newest(rows).serialize()
        except UnsupportedBatchError:
            return change
        header.schema_id = self.log.schema_id
        made = insert_header(data, header, self._log_seed)
        return made if len(made) <= self.payload_max else change

    # ---- what is due -----------------------------------------------------------------------------

    def _release(self, tick: int) -> None:
        """Release rows up to the closed `tick` for delivery, except those delivered before."""
        rows = self._store.release(tick)
        if self._recurring and len(rows):
            rows = self._recurring.expand(rows, tick)
        self._ready = np.concatenate([self._ready, rows]) if len(self._ready) else rows
        self._drop_delivered(self._delivered())

    def _apply_delivered(self) -> int:
        sent = self._sent
        if sent is None or (delivered := self._delivered()) == sent.previous:
            return 0
        self._sent = None
        if delivered == sent.key:
            self._applied_delivered = delivered
            self._store.rows.done(sent.rows)
            self.counters.delivered += len(sent.rows)
            return 1
        # ours was refused, because a predecessor's batch was in flight
        self._ready = np.concatenate([sent.rows, self._ready])
        return 1

    def _drop_delivered(self, delivered: tuple[int, int]) -> None:
        """Drop ready rows that a predecessor has delivered."""
        if delivered[0] >> TICK_BITS == self._marks.epoch and len(self._ready):
            left = is_above(
                self._ready[:, 0], self._ready[:, 1], (delivered[0] & TICK_MASK, delivered[1])
            )
            self._store.rows.done(self._ready[~left])
            self._ready = self._ready[left]

    def _deliver(self) -> int:
        if self._sent is not None:
            if self._sent.schema_id == self.topic.schema_id:
                return self._resend(self._sent)
            self._ready = np.concatenate([self._sent.rows, self._ready])
            self._sent = None
        if not self._has_topics_schema:
            return 0
        previous = self._delivered()
        if previous != self._applied_delivered:
            self._drop_delivered(previous)
            self._applied_delivered = previous
        if (
            not len(self._ready)
            or self._ready[0, 0] > self._now_tick
            or previous[0] >> TICK_BITS > self._marks.epoch
        ):
            return 0  # none ready; not due any more; or an epoch is being read again
        if (
            not self._marks.is_fenced
            or self._marks.asks_for_epoch
            or self._waiting_mark is not None
        ):
            # A mark of a new epoch, which names the last delivered row, may be in flight or waiting.  # noqa: E501
            return 0
        due = self._ready[: int(np.searchsorted(self._ready[:, 0], self._now_tick, "right"))]
        epoch_bits = self._marks.epoch << TICK_BITS
        rows, data, reason = self._deliveries.next_of(
            due, self._store.rows, self.topic, epoch_bits, previous, self._wall_us
        )
        if data is None:
            self._aside.keep_row(int(rows[0, 1]), self._store.rows.columns_of(rows), reason)
            self._store.rows.done(rows)
            self._ready = self._ready[1:]
            return 1
        if not self._write(self.topic, data):
            return 0
        crash_point("scheduler.after_delivery")
        self.counters.lateness_us = self._wall_us - int(rows[0, 0]) * TICK_US
        self._sent = Sent(
            (epoch_bits | int(rows[-1, 0]), int(rows[-1, 1])), previous, data, rows, self._now_ns,
            self.topic.schema_id,
        )  # fmt: skip
        self._ready = self._ready[len(rows) :]
        return 1

    def _resend(self, sent: Sent) -> int:
        """Resend a batch that is not settled: it was refused, or lost with a worker. Take it back
        if it is not due any more.
        """
        if self._now_ns - sent.at_ns < RETRY_NS:
            return 0
        if sent.rows[-1, 0] > self._now_tick:
            self._ready = np.concatenate([sent.rows, self._ready])
            self._sent = None
        elif not self._write(self.topic, sent.data):
            return 0
        sent.at_ns = self._now_ns
        sent.tries += 1
        if sent.tries % STUCK_TRIES == 0:
            logger.warning(
                "delivery_refused topic=%s partition=%d tries=%d rows=%d advice=%r",
                self.topic.topic, self.topic.partition, sent.tries,
                len(sent.rows), "run `tailrace status`: the disk may be full or broken, or "
                                "max.message.bytes below the record's size",
            )  # fmt: skip
        return 1

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
        first: int = min([self._store.rows.wheel.earliest(), *self._ready[:1, 0].tolist()])
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
        if self._sent is not None or self._waiting_mark is not None:
            return False
        return (
            not (len(self._ready) and self._marks.is_fenced)
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
