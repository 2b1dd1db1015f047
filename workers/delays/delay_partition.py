"""One partition's delayed records: from its delay log into memory and bucket files, and from there, when due, to the partition itself, exactly once.

How (ARCHITECTURE, section 7): to deliver what is due at a tick, the scheduler has the worker append a mark to the delay log that closes all ordinals up to
that tick. Rows behind the mark count as due later than it, whatever they ask for. So, having read the mark, the scheduler knows every row up to there, and
their order (ordinal, offset) is the same whenever the log is read again. A delivered batch carries the key of its last row and the key that was delivered
before its first; the worker refuses what does not follow, what is not closed, and what is not due by its clock; one batch at a time is under way. So whoever
is killed, what comes next is what was not delivered.

When the wall clock is set back, a mark begins another epoch, counted in an ordinal's upper bits, and says what was delivered before: what was closed and is
not due any more waits again.

Owner: the scheduler.
Invariants: a mark is asked for only when everything due below it is in memory and everything released before is delivered; the manifest's cursor moves only
    over rows that are delivered, cancelled or in the files that it names; files are removed after the manifest has forgotten them.
Crash: begin with the manifest, read the delay log from its cursor; what was delivered is known from the partition table.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from shm.assignments import Assignment
from shm.crash_points import crash_point
from shm.partition_table import PartitionState
from tailrace import arrow_batch
from tailrace.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    BatchHeader,
    checksum_seed,
    insert_header,
)
from tailrace.delays import DELAY_COLUMNS, DUE_COLUMN, ORIGIN_COLUMN, REPEAT_COLUMN, TICK_BITS, TICK_MASK, TICK_US, tick_of
from tailrace.recurrence import Recurrence, RecurrenceError
from tailrace.schema import from_message
from workers.delays.array_wheel import NEVER, Rows, no_rows, split
from workers.delays.bucket_files import (
    BUCKET_SUFFIX,
    KIND_CANCELLED,
    KIND_ROWS,
    BucketDamagedError,
    BucketFile,
    buckets_of,
    is_above,
    width_of,
)
from workers.delays.log_follower import LogFollower
from workers.delays.manifest import FileEntry, load_manifest, save_manifest
from workers.delays.pending_rows import PendingRows, one_batch
from workers.files import Files

logger = logging.getLogger(__name__)

SAVE_BYTES = 16 << 20
"""So much in memory that only the delay log has is saved to bucket files."""
SAVE_AFTER_NS = 10_000_000_000
UNSAVED_MAX_BYTES = 64 << 20
"""Beyond this the delay log is not read on."""
DELIVERY_BYTES = 256 << 10
DELIVERY_ROWS = 4_096
RETRY_NS = 1_000_000_000
"""How soon a mark or a batch that is not seen settled is sent again: it was refused (a full disk), or lost with a worker."""
LOAD_AHEAD_TICKS = 200
TIDY_INTERVAL_NS = 5_000_000_000
SET_BACK_TICKS = 100
"""A wall clock so far behind what is closed was set back."""
DUE_TICK_MAX = TICK_MASK >> 1
RECURRING = "recurring"

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


@dataclass(slots=True)
class Recurring:
    """A recurring row, and its next occurrence."""

    recurrence: Recurrence
    due_us: int
    row: pa.RecordBatch


@dataclass(slots=True)
class Change:
    """A request's batch in the delay log; `outcomes` are known when it has been read there: row -> the new row's (offset, due) or None, or an error."""

    outcomes: list[tuple[int, int] | bool | None] | None = None


@dataclass(slots=True)
class Counters:
    delivered: int = 0
    cancelled: int = 0
    lateness_us: int = 0
    """Of the last delivered batch's first row."""
    lost_files: int = 0


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
        now_ns: int,
        wall_us: int,
    ) -> None:
        """`directory`: the delay log's. Raises OSError, ManifestDamagedError."""
        self._files = files
        self._directory = directory
        self.log = log
        self.topic = topic
        self._log_state = log_state
        self._delivered = delivered
        self._send = send
        self._schema = from_message(log.schema)
        self._columns = [name for name in self._schema.names if name not in DELAY_COLUMNS]
        self._log_seed = checksum_seed(log.topic_id, log.partition)
        self._topic_seed = checksum_seed(topic.topic_id, topic.partition)
        self.counters = Counters()
        self.changes: dict[int, Change] = {}
        """Requests that wait for their batch to be read, by its token."""
        self._manifest = load_manifest(files, directory, log.topic_id)
        self._bucket_files = [BucketFile(files, directory, entry) for entry in self._manifest.files]
        self._remove_strangers()
        self._closed = self._manifest.closed
        """The ordinal below which everything is closed, by the last mark that was read."""
        self._released = -1
        """The tick up to which rows were handed out in this life, in the epoch of the clock that is now."""
        self._pending = PendingRows(0)
        self._recurring: dict[int, Recurring] = {}
        for item in self._manifest.recurring:
            self._restore_recurring(item)
        self._follower = LogFollower(files, directory, self._log_seed, self._manifest.cursor)
        self._held: BatchHeader | None = None
        """A mark of a new epoch of the clock that waits for what is under way."""
        self._ready = no_rows()
        self._sent: Sent | None = None
        self._seen_delivered = (0, 0)
        self._asked: tuple[int, int] | None = None
        """(ordinal, when) of the mark that was asked for and not read yet."""
        self._is_fenced = False
        """Whether a mark of this life was read: then nothing that a predecessor sent is still on its way to the delay log."""
        self._job: Iterator[None] | None = None
        self._saving: dict[BucketFile, int] = {}
        """Files to which what is in memory is being saved, and from where on."""
        self._saved_ns = now_ns
        self._tidied_ns = now_ns
        self._now_ns = now_ns
        self._wall_us = wall_us
        if self._closed:
            self._release((self._closed & TICK_MASK) - 1)

    def close(self) -> None:
        self._follower.close()

    def _remove_strangers(self) -> None:
        """What a kill left of files that no manifest names."""
        named = {file.name for file in self._bucket_files}
        for name in self._files.list(self._directory):
            if name.endswith(BUCKET_SUFFIX) and name not in named:
                self._files.unlink(f"{self._directory}/{name}")

    # ---- stepping --------------------------------------------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        return self._closed >> TICK_BITS

    @property
    def _now_tick(self) -> int:
        return self._wall_us // TICK_US

    def step(self, now_ns: int, wall_us: int) -> int:
        """Do some of what can be done now. Raises OSError."""
        self._now_ns, self._wall_us = now_ns, wall_us
        work = self._see_delivered()
        work += self._read_log()
        work += self._come_near()
        work += self._deliver()
        work += self._ask_for_mark()
        if not work or self._pending.unsaved_bytes > UNSAVED_MAX_BYTES // 2:
            work += self._tidy()
        return work

    def next_due_us(self) -> int | None:
        """When there is something to do by the wall clock; None: nothing is pending."""
        tick = self._pending.wheel.earliest()
        for file in self._bucket_files:
            if file.is_to_load:
                lead = LOAD_AHEAD_TICKS + (width_of(file.entry.level - 1) if file.entry.level > 1 else 0)
                tick = min(tick, file.entry.start - lead)
        return None if tick >= NEVER else tick * TICK_US

    def next_deadline_ns(self) -> int | None:
        """When there is something to do by the monotonic clock."""
        deadlines = []
        if self._sent is not None:
            deadlines.append(self._sent.at_ns + RETRY_NS)
        if self._asked is not None:
            deadlines.append(self._asked[1] + RETRY_NS)
        if self._follower.next_offset > self._manifest.cursor:
            deadlines.append(self._saved_ns + SAVE_AFTER_NS)
        if any(self._is_finished(file) for file in self._bucket_files):
            deadlines.append(self._tidied_ns + TIDY_INTERVAL_NS)
        return min(deadlines, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was released is delivered."""
        return self._sent is None and not len(self._ready)

    # ---- the delay log ---------------------------------------------------------------------------------------------------------------

    def _read_log(self) -> int:
        if self._held is not None:
            if self._sent is not None:
                return 0
            self._begin_epoch(self._held.min_tick, (self._held.due_us, self._held.delay_position))
            self._held = None
            return 1
        if self._pending.unsaved_bytes > UNSAVED_MAX_BYTES:
            return 0
        gathered: list[tuple[BatchHeader, pa.RecordBatch]] = []
        count = 0
        for header, batch in self._follower.read(self._log_state()):
            if self._manifest.cursor == header.base_offset:
                self._saved_ns = self._now_ns  # the first that is not saved
            count += 1
            if header.is_control:
                self._add(gathered)
                gathered = []
                if not self._see_mark(header):
                    break
            else:
                rows = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(batch)), self._schema)
                gathered.append((header, rows))
        self._add(gathered)
        return count

    def catch_up(self) -> None:
        """Read what is settled now, for a request that may be about it. Raises OSError."""
        while self._read_log():
            pass

    def has_read(self, offset: int) -> bool:
        return offset < self._follower.next_offset

    def _see_mark(self, header: BatchHeader) -> bool:
        """False: nothing more is to be read for now."""
        ordinal = header.min_tick
        if self._asked is not None and ordinal >= self._asked[0]:
            self._asked = None
            self._is_fenced = True
        if ordinal >> TICK_BITS > self._epoch:
            self._held = header
            return False
        self._closed = max(self._closed, ordinal)
        self._release((self._closed & TICK_MASK) - 1)
        return True

    def _begin_epoch(self, ordinal: int, delivered: tuple[int, int]) -> None:
        """The clock was set back, when rows up to `delivered` were. Those behind wait again, though they were released: they are not due any more. What
        only the log has is placed anew, by when it was asked for; the rest keeps the tick that it was saved with.
        """
        ready, self._ready = self._ready, no_rows()
        was = is_above(ready[:, 0], ready[:, 1], delivered)
        self._pending.done(ready[~was])
        self._pending.put_back(ready[was])
        for file in [file for file in self._bucket_files if file.entry.start <= self._released and file.is_to_load]:
            self._load(file, delivered)
        for file in self._bucket_files:
            file.entry.delivered_tick, file.entry.delivered_offset = max(
                (file.entry.delivered_tick, file.entry.delivered_offset), delivered
            )
        self._closed = ordinal
        self._released = tick = (ordinal & TICK_MASK) - 1
        self._pending.set_back(tick, lambda rows: self._ticks_of(rows.column(DUE_COLUMN), ordinal))
        logger.warning("clock_set_back topic=%s partition=%d epoch=%d", self.topic.topic, self.topic.partition, ordinal >> TICK_BITS)

    @staticmethod
    def _ticks_of(dues: pa.Array, min_ordinal: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tick at which each row counts as due."""
        due_us = dues.fill_null(0).to_numpy()
        ticks: np.ndarray[Any, np.dtype[np.int64]] = np.clip(-(-due_us // TICK_US), min_ordinal & TICK_MASK, DUE_TICK_MAX)
        return ticks

    def _add(self, gathered: list[tuple[BatchHeader, pa.RecordBatch]]) -> None:
        """Take in batches of the log, in order; plain rows of batches that follow each other become one run."""
        plain: list[tuple[BatchHeader, pa.RecordBatch]] = []
        for header, rows in gathered:
            due, origin, repeat = (rows.column(name) for name in DELAY_COLUMNS)
            if not due.null_count and origin.null_count == len(origin) and repeat.null_count == len(repeat):
                plain.append((header, rows))
                continue
            self._add_plain(plain)
            plain = []
            self._add_special(header, rows)
        self._add_plain(plain)

    def _add_plain(self, batches: list[tuple[BatchHeader, pa.RecordBatch]]) -> None:
        if not batches:
            return
        rows = batches[0][1] if len(batches) == 1 else one_batch(pa.Table.from_batches([rows for _, rows in batches]))
        offsets = np.concatenate([np.arange(header.base_offset, header.next_offset) for header, _ in batches])
        ticks = np.concatenate([self._ticks_of(rows.column(DUE_COLUMN), header.min_tick) for header, rows in batches])
        self._pending.add(offsets, ticks, rows)

    def _add_special(self, header: BatchHeader, rows: pa.RecordBatch) -> None:
        """Rows that cancel or replace others, or recur, one after the other; an answer may be waited for."""
        outcomes: list[tuple[int, int] | bool | None] = []
        columns = [rows.column(name).to_pylist() for name in DELAY_COLUMNS]
        for row, (due_us, origin, repeat) in enumerate(zip(*columns, strict=True)):
            offset = header.base_offset + row
            was_pending = origin is None or self._cancel(origin)
            if not was_pending or (due_us is None and origin is None):
                outcomes.append(False)
                continue
            if due_us is None:
                outcomes.append(None)
                self.counters.cancelled += 1
                continue
            outcomes.append((offset, due_us))
            one = rows.slice(row, 1)
            if repeat is None:
                self._pending.add(np.array([offset]), self._ticks_of(one.column(DUE_COLUMN), header.min_tick), one)
            else:
                self._add_recurring(offset, repeat, due_us, one, header.min_tick)
        change = self.changes.get(header.due_us)
        if change is not None:
            change.outcomes = outcomes

    # ---- recurring rows --------------------------------------------------------------------------------------------------------------

    def _add_recurring(self, offset: int, text: str, due_us: int, row: pa.RecordBatch, min_ordinal: int) -> None:
        try:
            recurrence = Recurrence.from_json(text)
        except RecurrenceError as error:
            logger.error("recurrence_dropped topic=%s offset=%d reason=%r", self.topic.topic, offset, str(error))
            return
        due_us = max(due_us, ((min_ordinal & TICK_MASK) - 1) * TICK_US + 1)
        self._recurring[offset] = Recurring(recurrence, due_us, one_batch(pa.Table.from_batches([row])))
        self._place_recurring(offset)

    def _place_recurring(self, offset: int) -> None:
        item = self._recurring[offset]
        self._pending.add(np.array([offset]), np.array([min(tick_of(item.due_us), DUE_TICK_MAX)]), item.row, RECURRING)

    def _expand_recurring(self, rows: Rows, tick: int) -> Rows:
        """In the place of each recurring row its occurrences; the next is placed."""
        found = []
        for row in rows[np.isin(rows[:, 1], np.fromiter(self._recurring, np.int64, len(self._recurring)))]:
            offset, reference = int(row[1]), int(row[2])
            item = self._recurring[offset]
            due, upcoming = item.recurrence.due_until(item.due_us, tick)
            found += [(tick_of(each), offset, reference) for each in due]
            self._pending.expect(reference, len(due))
            if upcoming is None:
                del self._recurring[offset]
            else:
                item.due_us = upcoming
                self._place_recurring(offset)
        if not found and not len(rows):
            return rows
        others = rows[~np.isin(rows[:, 2], [reference for _, _, reference in found])] if found else rows
        others = others[~self._pending.are_from(others, RECURRING)]
        merged = np.concatenate([others, np.array(found, np.int64).reshape(-1, 3)])
        return merged[np.lexsort((merged[:, 1], merged[:, 0]))]

    def _describe_recurring(self) -> list[dict[str, Any]]:
        return [
            {
                "offset": offset,
                "repeat": item.recurrence.to_json(),
                "due_us": item.due_us,
                "row": base64.b64encode(item.row.serialize()).decode(),
            }
            for offset, item in self._recurring.items()
        ]

    def _restore_recurring(self, item: dict[str, Any]) -> None:
        row = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(base64.b64decode(item["row"]))), self._schema)
        self._recurring[item["offset"]] = Recurring(Recurrence.from_json(item["repeat"]), item["due_us"], row)
        self._place_recurring(item["offset"])

    # ---- cancelling ------------------------------------------------------------------------------------------------------------------

    def _cancel(self, offset: int) -> bool:
        """Whether the row was pending, and is not any more."""
        if offset in self._recurring:
            del self._recurring[offset]
            place = self._pending.find(offset)
            if place is not None:
                self._pending.cancel(place)
            return True
        found = False
        place = self._pending.find(offset)
        if place is not None:
            self._pending.cancel(place)
            found = True
            if not self._pending.source_at(place) and self._job is None:
                return True
        for file, _, _ in self._places_on_disk(offset):
            if not file.is_loaded or found:
                file.unsaved_cancels.add(offset)
                found = True
        return found

    def _places_on_disk(self, offset: int) -> Iterator[tuple[BucketFile, Any, int]]:
        """(file, chunk, row) of a row, wherever it is pending."""
        for file in self._bucket_files:
            try:
                place = file.find(offset, self._released)
            except BucketDamagedError as error:
                logger.error("bucket_damaged reason=%r", str(error))
                continue
            if place is not None:
                yield file, *place

    def row_of(self, offset: int) -> pa.RecordBatch | None:
        """A pending row, as a batch of one of the delay log's schema; None: it is not pending. Raises OSError."""
        if offset in self._recurring:
            return self._recurring[offset].row
        place = self._pending.find(offset)
        if place is not None:
            return self._pending.row_at(place)
        for file, chunk, row in self._places_on_disk(offset):
            if file.is_to_load:
                return file.read_rows(chunk, self._schema)[2].slice(row, 1)
        return None

    # ---- what is due -----------------------------------------------------------------------------------------------------------------

    def _release(self, tick: int) -> None:
        """Everything up to `tick` is closed: it is to be delivered, but for what was before."""
        self._load_until(tick)
        rows = self._pending.release(tick)
        if self._recurring and len(rows):
            rows = self._expand_recurring(rows, tick)
        self._released = max(self._released, tick)
        self._ready = np.concatenate([self._ready, rows]) if len(self._ready) else rows
        self._drop_delivered(self._delivered())

    def _see_delivered(self) -> int:
        sent = self._sent
        if sent is None or (delivered := self._delivered()) == sent.previous:
            return 0
        self._sent = None
        if delivered == sent.key:
            self._pending.done(sent.rows)
            self.counters.delivered += len(sent.rows)
            return 1
        self._ready = np.concatenate([sent.rows, self._ready])  # a predecessor's batch was on its way, and ours was refused
        return 1

    def _drop_delivered(self, delivered: tuple[int, int]) -> None:
        """Of what is ready, what a predecessor had sent."""
        if delivered[0] >> TICK_BITS == self._epoch and len(self._ready):
            left = is_above(self._ready[:, 0], self._ready[:, 1], (delivered[0] & TICK_MASK, delivered[1]))
            self._pending.done(self._ready[~left])
            self._ready = self._ready[left]

    def _deliver(self) -> int:
        if self._sent is not None:
            return self._send_again(self._sent)
        previous = self._delivered()
        if previous != self._seen_delivered:
            self._drop_delivered(previous)
            self._seen_delivered = previous
        if not len(self._ready) or self._ready[0, 0] > self._now_tick or previous[0] >> TICK_BITS > self._epoch:
            return 0  # nothing is; it is not due any more; an epoch is being read again
        if not self._is_fenced or self._asks_for_epoch:
            return 0  # a mark of a new epoch, which says what was delivered, may be on its way
        count = min(int(np.searchsorted(self._ready[:, 0], self._now_tick, "right")), DELIVERY_ROWS)
        while True:
            rows = self._ready[:count]
            batch = self._pending.columns_of(rows).select(self._columns)
            if count == 1 or batch.nbytes <= DELIVERY_BYTES:
                break
            count = max(1, min(count // 2, count * DELIVERY_BYTES // batch.nbytes))
        key = (self._epoch << TICK_BITS | int(rows[-1, 0]), int(rows[-1, 1]))
        data = self._encode(batch, key, previous)
        if not self._send(self.topic, data):
            return 0
        crash_point("scheduler.after_delivery")
        self.counters.lateness_us = self._wall_us - int(rows[0, 0]) * TICK_US
        self._sent = Sent(key, previous, data, rows, self._now_ns)
        self._ready = self._ready[count:]
        return 1

    def _send_again(self, sent: Sent) -> int:
        """It is not seen settled: it was refused, or is lost with a worker. Or it is not due any more."""
        if self._now_ns - sent.at_ns < RETRY_NS:
            return 0
        if sent.rows[-1, 0] > self._now_tick:
            self._ready = np.concatenate([sent.rows, self._ready])
            self._sent = None
        elif not self._send(self.topic, sent.data):
            return 0
        sent.at_ns = self._now_ns
        return 1

    def _encode(self, batch: pa.RecordBatch, key: tuple[int, int], previous: tuple[int, int]) -> bytearray:
        first, largest = arrow_batch.timestamp_range(batch, self._wall_us)
        header = BatchHeader(
            attributes=ATTRIBUTE_DELAYED, record_count=batch.num_rows, last_offset_delta=batch.num_rows - 1, first_timestamp_us=first,
            max_timestamp_us=largest, schema_id=self.topic.schema_id, min_tick=key[0], delay_position=key[1],
            due_us=previous[0], previous_position=previous[1],
        )  # fmt: skip
        return arrow_batch.encode_as(batch, header, self._topic_seed, str(self.topic.settings["compression.type"]))

    # ---- marks -----------------------------------------------------------------------------------------------------------------------

    @property
    def _asks_for_epoch(self) -> bool:
        return self._asked is not None and self._asked[0] >> TICK_BITS > self._epoch

    def _ask_for_mark(self) -> int:
        """Have everything that is due now closed, when it is all at hand and what was closed before is delivered."""
        if self._asked is not None:
            if self._now_ns - self._asked[1] < RETRY_NS:
                return 0
        elif self._sent is not None or self._held is not None:
            return 0
        now_tick = self._now_tick
        closed_tick = (self._closed & TICK_MASK) - 1
        delivered = self._delivered()
        done = (-1, -1)
        if self._asks_for_epoch or (self._closed and now_tick < closed_tick - SET_BACK_TICKS):
            ordinal = max(self._epoch, delivered[0] >> TICK_BITS) + 1 << TICK_BITS | (now_tick + 1)
            if delivered[0] >> TICK_BITS == self._epoch:
                done = delivered[0] & TICK_MASK, delivered[1]
        elif len(self._ready) and self._is_fenced:
            return 0
        elif (
            min([self._pending.wheel.earliest(), *self._ready[:1, 0].tolist()]) <= now_tick
            and now_tick > closed_tick
            and not self._is_late_on_disk(now_tick)
        ):
            ordinal = self._epoch << TICK_BITS | (now_tick + 1)
        else:
            self._asked = None
            return 0
        if not self._send(self.log, self._mark(ordinal, done)):
            return 0
        self._asked = ordinal, self._now_ns
        return 1

    def _mark(self, ordinal: int, delivered: tuple[int, int]) -> bytearray:
        """A control batch: no rows, one offset. `delivered`: what was, when the mark begins a new epoch of the clock."""
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        header = BatchHeader(
            attributes=ATTRIBUTE_CONTROL, record_count=0, last_offset_delta=0, first_timestamp_us=self._wall_us, max_timestamp_us=self._wall_us,
            schema_id=self.log.schema_id, min_tick=ordinal, due_us=delivered[0], delay_position=delivered[1],
        )  # fmt: skip
        return insert_header(empty.serialize(), header, self._log_seed)

    def change_batch(self, rows: pa.RecordBatch, token: int) -> bytearray:
        """Rows that cancel or replace others, as a batch of the delay log; `token` is found in it when it is read."""
        header = BatchHeader(
            record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1, first_timestamp_us=self._wall_us, max_timestamp_us=self._wall_us,
            schema_id=self.log.schema_id, due_us=token,
        )  # fmt: skip
        return insert_header(rows.serialize(), header, self._log_seed)

    # ---- from the disk into memory ---------------------------------------------------------------------------------------------------

    def _is_late_on_disk(self, tick: int) -> bool:
        return any(file.entry.start <= tick and file.is_to_load for file in self._bucket_files)

    def _come_near(self) -> int:
        """Load what is due soon; move what is due later than that, but not by much, to lower buckets."""
        horizon = self._now_tick + LOAD_AHEAD_TICKS
        for file in sorted(self._bucket_files, key=lambda file: (file.entry.start, file.entry.level)):
            if not file.is_to_load or file.entry.start > horizon + width_of(file.entry.level - 1):
                continue
            if file.entry.level == 1:
                if file.entry.start <= horizon and self._job is None:
                    self._load(file)
                    return 1
            elif self._job is None:
                self._job = self._move_down(file)
                return self._go_on()
        return 0

    def _load(self, file: BucketFile, behind: tuple[int, int] | None = None, begin: int = 0) -> None:
        """All rows of a file, from a position on, into memory that come behind (tick, offset), else those that were not handed out in this life. What is
        being saved is in memory.
        """
        end = self._saving.get(file, file.entry.end)
        floor = (self._released, NEVER) if behind is None else behind
        try:
            for chunk in [chunk for chunk in file.row_chunks() if begin <= chunk.position < end]:
                ticks, offsets, rows = file.read_rows(chunk, self._schema)
                wanted = file.left(ticks, offsets) & is_above(ticks, offsets, floor)
                if not wanted.all():
                    ticks, offsets, rows = ticks[wanted], offsets[wanted], rows.filter(pa.array(wanted))
                self._pending.add(offsets, ticks, rows, file.name)
        except BucketDamagedError as error:
            self._give_up(file, error)
        file.is_loaded = True

    def _load_until(self, tick: int) -> None:
        """Whatever is on the disk and due by then. In its time it is all there already; after a restart it may not be."""
        for file in [file for file in self._bucket_files if file.entry.start <= tick and file.is_to_load]:
            self._load(file)

    def _give_up(self, file: BucketFile, error: BucketDamagedError) -> None:
        self.counters.lost_files += 1
        logger.error(
            "delays_lost topic=%s partition=%d rows=%d reason=%r", self.topic.topic, self.topic.partition, file.entry.rows, str(error)
        )
        if self._files.exists(file.path):
            self._files.rename(file.path, f"{file.path}.damaged")

    def _move_down(self, file: BucketFile) -> Iterator[None]:
        """Rows of a bucket to lower ones, a chunk at a time; or, where most of it is cancelled, to a new file of the same bucket."""
        to_lower = file.entry.start <= self._now_tick + LOAD_AHEAD_TICKS + width_of(file.entry.level - 1)
        try:
            for chunk in list(file.row_chunks()):
                ticks, offsets, rows = file.read_rows(chunk, self._schema)
                # What is cancelled behind the cursor moves along: read again, what replaces it must find it.
                left = file.left(ticks, offsets, as_saved=True)
                ticks, offsets, rows = ticks[left], offsets[left], rows.filter(pa.array(left))
                touched = set()
                labels = (
                    _labels(ticks, max(self._now_tick, file.entry.start))
                    if to_lower
                    else np.full(len(ticks), _label(file.entry.level, file.entry.start))
                )
                places = np.stack((ticks, offsets, np.arange(len(ticks))), axis=1) if len(ticks) else no_rows()
                for label, piece in split(places, labels):
                    target = self._append(label, piece[:, 0], piece[:, 1], rows.take(pa.array(piece[:, 2])), but=file)
                    target.unsaved_cancels |= file.unsaved_cancels.intersection(piece[:, 1].tolist())
                    touched.add(target)
                    yield
                for target in touched:
                    target.sync()
                    yield
                self._files.sync_directory(self._directory)
                file.entry.rows -= chunk.rows
                file.forget_chunks_before(chunk.end)
                self._save_manifest()
                crash_point("scheduler.after_move")
        except BucketDamagedError as error:
            self._give_up(file, error)
        self._remove([file])

    def _append(
        self, label: int, ticks: Any, offsets: Any, rows: pa.RecordBatch, but: BucketFile | None = None, is_saving: bool = False
    ) -> BucketFile:
        """A chunk at the end of the bucket's file; of a new one where there is none that takes more. `is_saving`: the rows are in memory too, until what is
        saved counts: the chunk is not to be loaded before.
        """
        level, start = label >> 56, label & ((1 << 56) - 1)
        open_files = [f for f in self._bucket_files if f.entry.level == level and f.entry.start == start and f.takes_rows and f is not but]
        if open_files:
            file = open_files[-1]
        else:
            file = BucketFile(self._files, self._directory, FileEntry(level, start, self._manifest.next_number, 0, 0, 0, 0))
            self._manifest.next_number += 1
            file.is_making = is_saving
            self._bucket_files.append(file)
        if is_saving:
            self._saving.setdefault(file, file.entry.end)
        body = arrow_batch.cut_out(rows, 0, rows.num_rows).serialize()
        file.append(KIND_ROWS, np.ascontiguousarray(ticks), np.ascontiguousarray(offsets), memoryview(body))
        return file

    # ---- from memory to the disk -----------------------------------------------------------------------------------------------------

    def _tidy(self) -> int:
        """When there is nothing else to do: save, move, clean up. A little at a time."""
        if self._job is not None:
            return self._go_on()
        is_behind = self._follower.next_offset > self._manifest.cursor
        is_time = self._pending.unsaved_bytes > SAVE_BYTES or self._now_ns - self._saved_ns >= SAVE_AFTER_NS
        if self.is_settled and self._held is None and is_behind and is_time:
            self._job = self._save()
            return self._go_on()
        if self.is_settled and self._now_ns - self._tidied_ns >= TIDY_INTERVAL_NS:
            self._tidied_ns = self._now_ns
            return self._clean_up()
        return 0

    def _go_on(self) -> int:
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None
        except OSError:
            self._job = None
            self._forget_appended()
            raise
        return 1

    def _forget_appended(self) -> None:
        """A job failed halfway (a full disk): what it appended does not count."""
        self._saving = {}
        named = {(e.level, e.start, e.number): e for e in self._manifest.files}
        kept = []
        for file in self._bucket_files:
            entry = named.get((file.entry.level, file.entry.start, file.entry.number))
            if entry is None:
                if self._files.exists(file.path):
                    self._files.unlink(file.path)
                continue
            fresh = BucketFile(self._files, self._directory, replace(entry))
            fresh.is_loaded, fresh.unsaved_cancels = file.is_loaded, file.unsaved_cancels
            kept.append(fresh)
        self._bucket_files = kept

    def _save(self) -> Iterator[None]:
        """Everything that only the delay log has into bucket files; then the cursor moves."""
        cursor, closed, recurring = self._follower.next_offset, self._closed, self._describe_recurring()
        runs = self._pending.unsaved_runs()
        rows = self._pending.still_alive(self._pending.rows_of_runs(runs))
        touched = set()
        for file in self._bucket_files:
            cancels = np.array(sorted(file.unsaved_cancels), np.int64)
            if len(cancels):
                file.append(KIND_CANCELLED, np.empty(0, np.int64), cancels, b"")
                file.unsaved_cancels -= set(cancels.tolist())
                touched.add(file)
        yield
        for label, piece in split(rows, _labels(rows[:, 0], self._now_tick)) if len(rows) else []:
            # What is cancelled since is saved as it was at the cursor: read again, what replaces it must find it.
            kept = self._pending.still_there(piece)
            if len(kept):
                target = self._append(label, kept[:, 0], kept[:, 1], self._pending.columns_of(kept), is_saving=True)
                target.unsaved_cancels.update(self._pending.cancelled_among(kept))
                touched.add(target)
            yield
        for file in touched:
            file.sync()
            yield
        self._files.sync_directory(self._directory)
        crash_point("scheduler.before_manifest")
        self._save_manifest(cursor, closed, recurring)
        crash_point("scheduler.after_manifest")
        self._pending.saved(runs)
        saving, self._saving = self._saving, {}
        for file, begin in saving.items():
            file.is_making = False
            if file.is_loaded:  # while it was written
                self._load(file, begin=begin)
        self._saved_ns = self._now_ns

    def _save_manifest(self, cursor: int | None = None, closed: int = 0, recurring: list[dict[str, Any]] | None = None) -> None:
        """Raises OSError."""
        manifest = replace(self._manifest, files=[replace(file.entry) for file in self._bucket_files])
        if cursor is not None:
            manifest.cursor, manifest.closed, manifest.recurring = cursor, closed, recurring or []
        save_manifest(self._files, self._directory, manifest)
        self._manifest = manifest

    def _is_finished(self, file: BucketFile) -> bool:
        """Whether nothing in it is needed any more. What is cancelled behind the cursor is: read again, what replaces it must find it."""
        entry = file.entry
        if file.unsaved_cancels:
            return False
        return (file.is_loaded and not self._pending.has_run_of(file.name)) or (entry.rows <= entry.cancelled and not file.is_loaded)

    def _clean_up(self) -> int:
        finished = [file for file in self._bucket_files if self._is_finished(file)]
        if finished:
            self._remove(finished)
            return 1
        for file in self._bucket_files:
            entry = file.entry
            if not file.is_loaded and entry.level > 1 and entry.cancelled * 2 > entry.rows and entry.end - entry.begin > SAVE_BYTES // 16:
                self._job = self._move_down(file)
                return self._go_on()
        return 0

    def _remove(self, gone: list[BucketFile]) -> None:
        """The manifest forgets them first. Raises OSError."""
        self._bucket_files = [file for file in self._bucket_files if file not in gone]
        self._save_manifest()
        for file in gone:
            if self._files.exists(file.path):
                self._files.unlink(file.path)

    # ---- showing ---------------------------------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        on_disk = sum(file.entry.rows - file.entry.cancelled - len(file.unsaved_cancels) for file in self._bucket_files if file.is_to_load)
        return len(self._pending) + on_disk

    def describe(self) -> dict[str, Any]:
        due_us = self.next_due_us()
        counts = dict.fromkeys(("1m", "1h", "1d", "later"), 0)
        for file in self._bucket_files:
            if file.is_to_load:
                ahead_us = file.entry.start * TICK_US - self._wall_us
                name = "1m" if ahead_us < 60e6 else "1h" if ahead_us < 3600e6 else "1d" if ahead_us < 86400e6 else "later"
                counts[name] += file.entry.rows - file.entry.cancelled
        for row in self._pending.still_alive(self._pending.wheel.look(lambda piece: np.ones(len(piece), bool)))[:, 0].tolist():
            ahead_us = row * TICK_US - self._wall_us
            counts["1m" if ahead_us < 60e6 else "1h" if ahead_us < 3600e6 else "1d" if ahead_us < 86400e6 else "later"] += 1
        return {
            "topic": self.topic.topic, "partition": self.topic.partition, "pending": self.pending_count(), "due_within": counts, "next_due_us": due_us,
            "recurring": len(self._recurring), "delivered": self.counters.delivered, "cancelled": self.counters.cancelled,
            "lateness_us": self.counters.lateness_us, "lost_files": self.counters.lost_files, "memory_bytes": self._pending.nbytes,
            "files": len(self._bucket_files), "cursor": self._follower.next_offset, "saved_cursor": self._manifest.cursor,
        }  # fmt: skip

    def listed(self, begin: tuple[int, int], end_tick: int, limit: int, key: bytes | None) -> list[dict[str, Any]]:
        """Up to `limit` pending rows with (tick, offset) >= `begin` and tick < `end_tick`, in that order. Raises OSError."""
        found: list[tuple[int, int, pa.RecordBatch | None, Any, int]] = []

        def within(ticks: Any, offsets: Any) -> Any:
            return ((ticks > begin[0]) | ((ticks == begin[0]) & (offsets >= begin[1]))) & (ticks < end_tick)

        rows = self._pending.wheel.look(lambda piece: within(piece[:, 0], piece[:, 1]))
        rows = self._pending.still_alive(rows)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        rows = rows if key is not None else rows[:limit]
        if len(rows):
            columns = self._pending.columns_of(rows)
            found += [(int(t), int(o), columns, None, n) for n, (t, o, _) in enumerate(rows)]
        for file in sorted(self._bucket_files, key=lambda file: file.entry.start):
            if not file.is_to_load or file.last_tick < begin[0] or file.entry.start >= end_tick:
                continue
            if key is None and len(found) >= limit and file.entry.start > sorted(item[:2] for item in found)[limit - 1][0]:
                continue
            try:
                for chunk in list(file.row_chunks()):
                    ticks, offsets = file.keys_of(chunk)
                    wanted = np.flatnonzero(within(ticks, offsets) & file.left(ticks, offsets))
                    if not len(wanted):
                        continue
                    wanted = wanted[np.lexsort((offsets[wanted], ticks[wanted]))]
                    wanted = wanted if key is not None else wanted[:limit]
                    columns = file.read_rows(chunk, self._schema)[2]
                    found += [(int(ticks[n]), int(offsets[n]), columns, file, int(n)) for n in wanted]
            except BucketDamagedError as error:
                logger.error("bucket_damaged reason=%r", str(error))
        found.sort(key=lambda item: item[:2])
        result: list[dict[str, Any]] = []
        last = (-1, -1)
        for tick, offset, columns, _, row in found:
            if len(result) >= limit:
                break
            if (tick, offset) == last:
                continue  # it is being saved: in memory, and on the disk already
            last = tick, offset
            assert columns is not None
            described = self._describe_row(tick, offset, columns, row)
            if key is None or described.pop("raw_key") == key:
                described.pop("raw_key", None)
                result.append(described)
        return result

    def _describe_row(self, tick: int, offset: int, columns: pa.RecordBatch, row: int) -> dict[str, Any]:
        raw = columns.column("key")[row].as_py() if "key" in self._columns and not self.topic.typed else None
        item = self._recurring.get(offset)
        due_us = item.due_us if item is not None else columns.column(DUE_COLUMN)[row].as_py()
        return {
            "tick": tick, "offset": offset, "due_us": due_us, "key": None if raw is None else base64.b64encode(raw).decode(), "raw_key": raw,
            "repeat": None if item is None else orjson.loads(item.recurrence.to_json()),
        }  # fmt: skip

    def replacement(self, row: pa.RecordBatch, due_us: int | None, origin: int) -> pa.RecordBatch:
        """A row of the delay log that cancels `origin` (no due time), or has it delivered at another."""
        values: dict[str, Any] = {DUE_COLUMN: due_us, ORIGIN_COLUMN: origin}
        if due_us is None:
            values[REPEAT_COLUMN] = None
        columns = []
        for field_ in self._schema:
            if field_.name in values:
                columns.append(pa.array([values[field_.name]], field_.type))
            elif due_us is None:
                columns.append(pa.nulls(1, field_.type))
            else:
                columns.append(row.column(field_.name))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _label(level: int, start: int) -> int:
    return level << 56 | start


def _labels(ticks: Any, current: int) -> Any:
    """The bucket of each tick, as one number."""
    levels, starts = buckets_of(ticks, current)
    return levels << 56 | starts
