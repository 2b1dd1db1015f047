"""One partition's delayed records: from its delay log into memory and bucket files, and from there, when due, to the partition itself, exactly once.

How (ARCHITECTURE, section 7): to deliver what is due at a tick, the scheduler has the worker append a mark to the delay log that closes all ordinals up to
that tick. Rows behind the mark count as due later than it, whatever they ask for. So, having read the mark, the scheduler knows every row up to there, and
their order (ordinal, offset) is the same whenever the log is read again. A delivered batch carries the key of its last row and the key that was delivered
before its first; the worker refuses what does not follow, what is not closed, and what is not due by its clock; one batch at a time is under way. So
whichever process is killed, what comes next is what was not delivered.

When the wall clock is set back, a mark begins another epoch, counted in an ordinal's upper bits, and says what was delivered before: what was closed and is
not due any more waits again.

What clients write can be anything. A batch or a row of the log that cannot be handled is set aside with its place, said, counted and stepped over: its
neighbours are delivered. What only the disk or memory refuses is no such thing: the partition is closed then, and begun anew.

Owner: the scheduler.
Invariants: a mark is asked for only when everything due below it is in memory and everything released before is delivered; the manifest's cursor moves only
    over rows that are delivered, cancelled or in the files that it names; files are removed after the manifest has forgotten them.
Crash: begin with the manifest, read the delay log from its cursor; what was delivered is known from the partition table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shm.catalog_messages import Assignment
from shm.crash_points import crash_point
from shm.partition_table import PartitionState
from tailrace.delays import NONE_DELIVERED, TICK_BITS, TICK_MASK, TICK_US
from tailrace.formats.batch_header import BatchHeader, checksum_seed, insert_header
from workers.delays.array_wheel import NEVER, Rows, no_rows
from workers.delays.bucket_files import is_above
from workers.delays.delivery import Deliveries
from workers.delays.intake import Intake
from workers.delays.listing import listed_rows
from workers.delays.log_batches import LogBatch, LogBatches, ticks_of
from workers.delays.log_follower import LogFollower
from workers.delays.marks import RETRY_NS, TRY_AGAIN_NS, Marks
from workers.delays.pending_store import PendingStore
from workers.delays.recurring_rows import RecurringRows
from workers.delays.set_aside import SetAside
from workers.files import Files

logger = logging.getLogger(__name__)

GATHERED_BYTES = 8 << 20
"""So much of the log, unpacked, is taken in at a time."""
STUCK_TRIES = 10
LEAD_TICKS = 10
"""Ticks are closed so much before they come: the mark's way to the disk and back is not part of the lateness then."""
SET_BACK_TICKS = 1_000
"""A wall clock so far behind what is closed was set back."""
_SPANS_S = {"1m": 60, "1h": 3_600, "1d": 86_400}

Send = Callable[[Assignment, Any], bool]
"""(partition, batch) -> whether it is in the lane to its worker."""


@dataclass(slots=True)
class Sent:
    """A batch on its way to the partition."""

    key: tuple[int, int]
    """Of its last row."""
    previous: tuple[int, int]
    """The key that it follows."""
    data: bytearray
    rows: Rows
    at_ns: int
    tries: int = 1


class DelayPartition:
    """See the module's docstring."""

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
        """`directory`: the delay log's. `incarnation`: no other DelayPartition has or had this number. `payload_max`: bytes that `send` carries at once. Raises
        OSError, PendingDamagedError, UnusableSchemaError.
        """
        self.log = log
        self.topic = topic
        self._log_state = log_state
        self._delivered = delivered
        self._send = send
        self.batches = LogBatches(log.schema, topic.schema)
        self.payload_max = payload_max
        self._log_seed = checksum_seed(log.topic_id, log.partition)
        self._deliveries = Deliveries(self.batches.columns, topic.schema, payload_max)
        self._aside = SetAside(files, directory, log.schema)
        self._failure: Exception | None = None
        """What ended a request in the midst of reading the log: this is to be closed."""
        self._store = PendingStore(files, directory, log.topic_id, self.batches.schema, now_ns)
        empty = pa.RecordBatch.from_pylist([], schema=self.batches.schema).serialize()
        self._marks = Marks(empty, self._log_seed, self._store.closed, incarnation)
        self._recurring = RecurringRows(self._store.rows, self.batches.schema, self._store.recurring, self._aside.keep_row)
        self.intake = Intake(self._store, self._recurring, self.batches, self._aside)
        self.counters = self.intake.counters
        self.changes = self.intake.changes
        self._follower = LogFollower(files, directory, self._log_seed, self._store.cursor)
        self._read_again_until = log_state().high_watermark
        """What lies below was there when this incarnation began, and may begin an epoch of the clock."""
        self._held: BatchHeader | None = None
        """A mark of a new epoch of the clock that waits for what is under way."""
        self._ready = no_rows()
        self._sent: Sent | None = None
        self._is_lane_full = False
        """Whether the lane to the worker did not take what this step had for it."""
        self._seen_delivered = (0, 0)
        self._now_ns = now_ns
        self._wall_us = wall_us
        if self._marks.closed:
            self._release(self._marks.closed_tick)

    def close(self) -> None:
        self._follower.close()

    # ---- stepping --------------------------------------------------------------------------------------------------------------------

    @property
    def _now_tick(self) -> int:
        return self._wall_us // TICK_US

    def step(self, now_ns: int, wall_us: int) -> int:
        """Do some of what can be done now. Raises OSError; whatever it raises, this is to be closed."""
        if self._failure is not None:
            raise self._failure
        self._now_ns, self._wall_us = now_ns, wall_us
        self._store.set_time(now_ns, self._now_tick)
        self._is_lane_full = False
        work = self._see_delivered()
        work += self._read_log()
        work += self._store.load_due_soon()
        work += self._deliver()
        work += self._ask_for_mark()
        if not work or self._store.is_crowded or self._store.is_behind:
            is_settled = self.is_settled and self._held is None
            work += self._store.tidy(self._follower.next_offset, self._marks.closed, self._recurring.describe, is_settled=is_settled)
        return work

    def next_due_us(self) -> int | None:
        """When, behind the time of this step, there is something to do by the wall clock; None: nothing is, before something else happens."""
        ticks = [self._store.next_file_tick()]
        if self._sent is None and len(self._ready):
            ticks.append(int(self._ready[0, 0]))
        if self._sent is None and not self._marks.is_asked and not (len(self._ready) and self._marks.is_fenced):
            ticks.append(max(self._first_waiting(), self._marks.closed_tick + 1) - LEAD_TICKS)  # no mark closes what is closed
        ahead = [tick * TICK_US for tick in ticks if self._wall_us < tick * TICK_US < (NEVER - LEAD_TICKS)]
        return min(ahead, default=None)

    def next_deadline_ns(self) -> int | None:
        """When there is something to do by the monotonic clock: behind this step, if it had nothing to do. What waits for something else has no deadline of
        its own: one that has passed would have the scheduler run without a pause until the other thing ends.
        """
        if self._is_lane_full:
            return self._now_ns + TRY_AGAIN_NS
        deadlines = [self._store.next_deadline_ns(self._follower.next_offset, is_settled=self.is_settled and self._held is None)]
        if self._sent is not None:
            deadlines.append(self._sent.at_ns + RETRY_NS)
        if self._may_ask_for_mark:
            deadlines.append(self._marks.retry_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was released is delivered."""
        return self._sent is None and not len(self._ready)

    # ---- the delay log ---------------------------------------------------------------------------------------------------------------

    def _read_log(self) -> int:
        if self._held is not None:
            if self._sent is not None or self._store.is_busy:
                return 0
            self._begin_epoch(self._held.min_tick, (self._held.due_us, self._held.delay_position))
            self._held = None
            return 1
        if self._store.is_full():
            return 0
        gathered: list[LogBatch] = []
        byte_count = count = 0
        for header, data in self._follower.read(self._log_state()):
            if self._store.cursor == header.base_offset:
                self._store.note_first_unsaved(self._wall_us - header.append_time_us)
            count += 1
            if header.is_control:
                self.intake.add(gathered)
                gathered = []
                if header.is_delay_mark and not self._see_mark(header):
                    break
                continue
            batch = self.intake.proven(header, data, int(self.log.settings["max.message.bytes"]))
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

    def catch_up(self) -> None:
        """Read what is settled now, for a request that may be about it. Raises OSError; whatever it raises, this is to be closed."""
        try:
            while self._read_log():
                pass
        except Exception as error:
            self._failure = error
            raise

    def has_read(self, offset: int) -> bool:
        return offset < self._follower.next_offset

    def _see_mark(self, header: BatchHeader) -> bool:
        """False: nothing more is to be read for now."""
        if not self._marks.see(header):
            self._held = header
            return False
        self._release(self._marks.closed_tick)
        return True

    def _begin_epoch(self, ordinal: int, delivered: tuple[int, int]) -> None:
        """The clock was set back, when rows up to `delivered` were: what is not due any more waits again."""
        ready, self._ready = self._recurring.take_back(self._ready, delivered), no_rows()
        self._store.set_back(
            (ordinal & TICK_MASK) - 1, delivered, ready, lambda rows: ticks_of(rows.column(self.batches.due), ordinal & TICK_MASK)
        )
        self._marks.begin_epoch(ordinal)
        logger.warning("clock_set_back topic=%s partition=%d epoch=%d", self.topic.topic, self.topic.partition, ordinal >> TICK_BITS)

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def waits(self, offset: int) -> bool:
        """Whether this row is pending. Raises OSError."""
        return self.intake.waits(offset)

    def row_of(self, offset: int) -> pa.RecordBatch | None:
        """A pending row, as a batch of one of the delay log's schema; None: it is not pending. Raises OSError."""
        return self.intake.row_of(offset)

    def change_batch(self, rows: pa.RecordBatch, token: int) -> bytearray:
        """Rows that cancel or replace others, as a batch of the delay log. `token`, more than 0, says that the appliance wrote it, since the worker takes such
        a batch from the scheduler only; by it the request is found when the batch is read.
        """
        header = BatchHeader(
            record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1, first_timestamp_us=self._wall_us, max_timestamp_us=self._wall_us,
            schema_id=self.log.schema_id, due_us=token,
        )  # fmt: skip
        return insert_header(rows.serialize(), header, self._log_seed)

    def replacement(self, row: pa.RecordBatch, due_us: int, origin: int) -> pa.RecordBatch:
        """See `LogBatches`."""
        return self.batches.replacement(row, due_us, origin)

    def cancellation(self, origin: int) -> pa.RecordBatch:
        """See `LogBatches`."""
        return self.batches.cancellation(origin)

    # ---- what is due -----------------------------------------------------------------------------------------------------------------

    def _release(self, tick: int) -> None:
        """Everything up to `tick` is closed: it is to be delivered, but for what was before."""
        rows = self._store.release(tick)
        if self._recurring and len(rows):
            rows = self._recurring.expand(rows, tick)
        self._ready = np.concatenate([self._ready, rows]) if len(self._ready) else rows
        self._drop_delivered(self._delivered())

    def _see_delivered(self) -> int:
        sent = self._sent
        if sent is None or (delivered := self._delivered()) == sent.previous:
            return 0
        self._sent = None
        if delivered == sent.key:
            self._seen_delivered = delivered
            self._store.rows.done(sent.rows)
            self.counters.delivered += len(sent.rows)
            return 1
        self._ready = np.concatenate([sent.rows, self._ready])  # a predecessor's batch was on its way, and ours was refused
        return 1

    def _drop_delivered(self, delivered: tuple[int, int]) -> None:
        """Of what is ready, what a predecessor had sent."""
        if delivered[0] >> TICK_BITS == self._marks.epoch and len(self._ready):
            left = is_above(self._ready[:, 0], self._ready[:, 1], (delivered[0] & TICK_MASK, delivered[1]))
            self._store.rows.done(self._ready[~left])
            self._ready = self._ready[left]

    def _deliver(self) -> int:
        if self._sent is not None:
            return self._send_again(self._sent)
        previous = self._delivered()
        if previous != self._seen_delivered:
            self._drop_delivered(previous)
            self._seen_delivered = previous
        if not len(self._ready) or self._ready[0, 0] > self._now_tick or previous[0] >> TICK_BITS > self._marks.epoch:
            return 0  # nothing is; it is not due any more; an epoch is being read again
        if not self._marks.is_fenced or self._marks.asks_for_epoch or self._held is not None:
            return 0  # a mark of a new epoch, which says what was delivered, may be on its way, or is there
        due = self._ready[: int(np.searchsorted(self._ready[:, 0], self._now_tick, "right"))]
        epoch_bits = self._marks.epoch << TICK_BITS
        rows, data, reason = self._deliveries.next_of(due, self._store.rows, self.topic, epoch_bits, previous, self._wall_us)
        if data is None:
            self._aside.keep_row(int(rows[0, 1]), self._store.rows.columns_of(rows), reason)
            self._store.rows.done(rows)
            self._ready = self._ready[1:]
            return 1
        if not self._write(self.topic, data):
            return 0
        crash_point("scheduler.after_delivery")
        self.counters.lateness_us = self._wall_us - int(rows[0, 0]) * TICK_US
        self._sent = Sent((epoch_bits | int(rows[-1, 0]), int(rows[-1, 1])), previous, data, rows, self._now_ns)
        self._ready = self._ready[len(rows) :]
        return 1

    def _send_again(self, sent: Sent) -> int:
        """It is not seen settled: it was refused, or is lost with a worker. Or it is not due any more."""
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
                "delivery_refused topic=%s partition=%d tries=%d rows=%d advice=%r", self.topic.topic, self.topic.partition, sent.tries,
                len(sent.rows), "look at `tailrace status`: a full or broken disk, or max.message.bytes below what was delayed",
            )  # fmt: skip
        return 1

    def _write(self, target: Assignment, data: Any) -> bool:
        """Into the lane to the worker. False: it is full, and this is tried again a little later."""
        written = self._send(target, data)
        self._is_lane_full = self._is_lane_full or not written
        return written

    # ---- marks -----------------------------------------------------------------------------------------------------------------------

    def _first_waiting(self) -> int:
        """The tick of the row in memory that is due first; NEVER when there is none."""
        first: int = min([self._store.rows.wheel.earliest(), *self._ready[:1, 0].tolist()])
        return first

    @property
    def _is_set_back(self) -> bool:
        """Whether the wall clock is far behind what is closed, and no mark that is still to be read says so."""
        return self._now_tick < self._marks.closed_tick - SET_BACK_TICKS and self._follower.next_offset >= self._read_again_until

    @property
    def _may_ask_for_mark(self) -> bool:
        """Whether nothing that is under way, or is to be delivered, comes first. Until then a mark that was lost is not asked for again either."""
        if self._sent is not None or self._held is not None:
            return False
        return not (len(self._ready) and self._marks.is_fenced) or self._marks.asks_for_epoch or self._is_set_back

    def _ask_for_mark(self) -> int:
        """Have everything that is due in a moment closed, when it is all at hand and what was closed before is delivered."""
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
            if self._first_waiting() > tick or tick <= marks.closed_tick or self._store.is_late(tick):
                marks.ask_no_more()
                return 0
            ordinal = marks.epoch << TICK_BITS | (tick + 1)
        if not self._write(self.log, marks.encode(ordinal, done, self.log.schema_id, self._wall_us)):
            return 0
        marks.asked(ordinal, self._now_ns)
        return 1

    # ---- showing ---------------------------------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        return len(self._store)

    def describe(self) -> dict[str, Any]:
        """For `status`: numbers."""
        store, now = self._store, self._wall_us // TICK_US
        first_tick = store.first_tick()
        ahead = store.counts_ahead([now + span * 1_000_000 // TICK_US for span in _SPANS_S.values()])
        return {
            "topic": self.topic.topic, "partition": self.topic.partition, "pending": len(store),
            "due_within": dict(zip((*_SPANS_S, "later"), ahead, strict=True)), "recurring": len(self._recurring),
            "next_due_us": first_tick * TICK_US if first_tick < NEVER else None, "is_settled": self.is_settled, "delivered": self.counters.delivered,
            "cancelled": self.counters.cancelled, "lateness_us": self.counters.lateness_us, "lost_rows": store.lost_rows + self._aside.row_count,
            "memory_bytes": store.rows.nbytes, "files": store.file_count, "cursor": self._follower.next_offset, "saved_cursor": store.cursor,
        }  # fmt: skip

    def listed(
        self, begin: tuple[int, int], end_tick: int, limit: int, key: bytes | None
    ) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
        """See `listed_rows`. Raises OSError."""
        places = [self.batches.due] if self.topic.typed else [self.batches.due, self.batches.schema.get_field_index("key")]
        return listed_rows(self._store, self._recurring, places, begin, end_tick, limit, key)
