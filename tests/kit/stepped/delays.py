"""Delayed records in a little world: a real worker, flusher and DelayPartition over simulated
memory and disk, stepped by hand; and what must come of them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from shm.messages.lane_messages import Assignment, LaneKind
from shm.queues.lane import LaneWriter
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.schedule.delays import DUE_COLUMN, TICK_BITS, TICK_US, tick_of
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.format.record_batch.batch_header import ATTRIBUTE_DELAYED, BatchHeader, checksum_seed
from tailrace.format.schema import DEFAULT_SCHEMA, delay_schema, to_message
from tailrace.format.segments.segment import (
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.delays import delay_partition
from workers.delays.delay_log.ingest import Change
from workers.delays.delay_partition import DelayPartition
from workers.delays.delivery import delivered_batches
from workers.delays.store import pending_store
from workers.flush.flusher_settings import FlusherSettings

LOG_ID = bytes(reversed(range(16)))
LOG_SEED = checksum_seed(LOG_ID, 0)
SCHEMA = delay_schema(DEFAULT_SCHEMA)
BEGIN_US = 1_700_000_000_000_000
MS, SECOND = 1_000, 1_000_000
SPANS = (
    0,
    50 * MS,
    2 * SECOND,
    60 * SECOND,
    7_200 * SECOND,
    10 * 86_400 * SECOND,
    900 * 86_400 * SECOND,
)
"""Range in which rows are scheduled ahead, in microseconds."""


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files, batches and intervals so small that a short schedule sees all of them."""
    monkeypatch.setattr(pending_store, "SAVE_BYTES", 4_000)
    monkeypatch.setattr(pending_store, "SAVE_AFTER_NS", 300_000_000)
    monkeypatch.setattr(delivered_batches, "DELIVERY_ROWS", 5)
    monkeypatch.setattr(pending_store, "TIDY_INTERVAL_NS", 200_000_000)


class Killed(BaseException):
    """SIGKILL, in the middle of a file operation or at a crash point."""


@dataclass(slots=True)
class Row:
    """Knowledge about one scheduled row."""

    name: str
    offset: int
    due_us: int
    fate: str = "waits"
    """waits, cancelled, or unknown: its canceller was killed before it heard."""


@dataclass(slots=True)
class RecurringRow:
    """One that comes again and again, with missed="all"."""

    name: str
    offset: int
    first_us: int
    every_us: int

    def count_until(self, wall_us: int) -> int:
        """Number of occurrences that are due by then, in ticks."""
        return max(0, (wall_us // TICK_US * TICK_US - self.first_us) // self.every_us + 1)


class DelayWorld:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimDisk()
        self.disk.hook = self._count_down
        self._doom: int | None = None
        self.is_full = False
        """True if nothing can be written for the scheduler."""
        self._is_inside = False
        """True if the scheduler is being stepped: no other process is killed here."""
        self.rows: dict[str, Row] = {}
        self.recurring: dict[str, RecurringRow] = {}
        self.takes_foreign = False
        """True if rows are expected that this world did not send."""
        self.runs = self.lives = 0
        self.restarts = 0
        """Number of times that the scheduler was killed inside a step, or the disk refused it."""
        self.wall_us = self.latest_us = BEGIN_US
        """`latest_us`: the latest that the wall clock ever showed."""
        self.now_ns = 1_000_000_000
        self.topic, self.log = self._assignments()
        self.bench = self._start(None)
        self.partition = self._open()
        self.token = 0

    def _assignments(self) -> tuple[Assignment, Assignment]:
        """Those of the topic and its delay log."""
        topic = replace(assignment(retention_ms=-1), delay_log=LOG_ID.hex())
        log = Assignment(
            topic="t@delay", topic_id=LOG_ID, partition=0, partition_count=1, slot=1, version=1,
            worker=0, front=0, data_dir=0, schema_id=1,
            schema=to_message(SCHEMA), typed=False, delay_of=TOPIC_ID.hex(),
            settings=topic.settings,
        )  # fmt: skip
        return topic, log

    # ---- processes -------------------------------------------------------------------------------

    def _start(self, old: Bench | None, *, power: bool = False) -> Bench:
        self.runs += 1
        bench = Bench(
            "/data", simulated_regions(), SimFiles(self.disk),
            FlusherSettings(journal_bytes=1 << 16, checkpoint_bytes=1 << 15),
            assignments=[self.topic, self.log], run=f"run{self.runs}", lost_memory=power,
            now_us=self.wall_us,
            old=[] if old is None or power else [*old.old, old.regions],
        )  # fmt: skip
        bench.now_ns = self.now_ns
        bench.settle()
        return bench

    def _open(self) -> DelayPartition:
        bench = self.bench
        self.lives += 1
        lane = LaneWriter(bench.regions["scheduler>worker"])

        def send(target: Assignment, data: Any) -> bool:
            written = lane.try_write(LaneKind.PRODUCE, target.slot, 0, 0, 0, 0, (data,))
            lane.commit()
            return written

        return DelayPartition(
            SimFiles(self.disk), "/data/t@delay-0", self.log, self.topic,
            lambda: bench.table.read(1), lambda: bench.table.delivered(0), send,
            self.lives, self.now_ns, self.wall_us, lane.payload_max,
        )  # fmt: skip

    def _count_down(self, operation: str, path: str) -> None:
        if self.is_full and self._is_inside and operation == "write":
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if self._doom is not None and self._is_inside and "pending" in path:
            self._doom -= 1
            if self._doom < 0:
                self._doom = None
                raise Killed

    def kill_scheduler_soon(self) -> None:
        self._doom = self.rng.randint(0, 12)

    def restart_scheduler(self) -> None:
        self._doom = None
        for row in self.rows.values():
            row.fate = "unknown" if row.fate.startswith("asked") else row.fate
        self.partition = self._open()

    def restart_everything(self, *, power: bool) -> None:
        self._doom = None
        if power:
            self.disk = self.disk.lose_power(self.rng)
            self.disk.hook = self._count_down
        self.bench = self._start(self.bench, power=power)
        self.restart_scheduler()

    # ---- acting ----------------------------------------------------------------------------------

    def settle(self) -> None:
        self.bench.now_us, self.bench.now_ns = self.wall_us, self.now_ns
        self.bench.settle()

    def step(self) -> int:
        if self.rng.random() < 0.8:
            self.settle()
        self._is_inside = True
        try:
            work = self.partition.step(self.now_ns, self.wall_us)
        except (Killed, OSError):
            self.restart_scheduler()
            self.restarts += 1
            work = 1
        self._is_inside = False
        self._check_invariants()
        deadline_ns = self.partition.next_deadline_ns()
        assert work or deadline_ns is None or deadline_ns > self.now_ns, (
            "nothing to do, and a deadline that has passed: it would spin"
        )
        if self.rng.random() < 0.5:
            self.settle()
        elif self.rng.random() < 0.5:
            self.bench.step_worker()
        return work

    def _check_invariants(self) -> None:
        """Check the invariants of the scheduler's modules between two steps."""
        partition = self.partition
        store, marks, ready = partition._store, partition._marks, partition._due.ready
        assert store.cursor <= partition._follower.next_offset, (
            "the cursor is ahead of what was read"
        )
        assert (
            store.closed <= marks.closed or store.closed >> TICK_BITS < marks.closed >> TICK_BITS
        ), "closed ordinals were opened again"
        assert len(ready) < 2 or bool(
            (
                (ready[1:, 0] > ready[:-1, 0])
                | ((ready[1:, 0] == ready[:-1, 0]) & (ready[1:, 1] > ready[:-1, 1]))
            ).all()
        ), "not in due order"
        if partition._due.sent is not None:
            assert partition._due.sent.previous < partition._due.sent.key, (
                "a delivery that does not follow the last"
            )

    def pass_time(self, microseconds: int, jump_us: int = 0) -> None:
        """`jump_us`: by how much the wall clock is set besides."""
        self.now_ns += microseconds * 1000
        self.wall_us += microseconds
        self.latest_us = max(self.latest_us, self.wall_us)
        self.wall_us += jump_us
        self.latest_us = max(self.latest_us, self.wall_us)

    def _append(self, rows: pa.RecordBatch, token: int = -1) -> int:
        """Rows into the delay log, acknowledged; answers the first one's offset."""
        self.settle()
        offset = self.bench.table.read(1).high_watermark
        header = BatchHeader(
            record_count=rows.num_rows,
            last_offset_delta=rows.num_rows - 1,
            schema_id=self.log.schema_id,
            due_us=token,
        )
        data = arrow_batch.encode_as(rows, header, LOG_SEED, "none")
        if token > 0:  # a change: the worker takes it from the scheduler only
            assert self.partition._send(self.log, data)
        else:
            self.bench.send(data, slot=1)
        self.settle()
        assert self.bench.table.read(1).high_watermark == offset + rows.num_rows
        return offset

    def _rows(
        self, names: list[str], dues: list[int], repeats: list[str | None] | None
    ) -> pa.RecordBatch:
        """Rows of the delay log that are named by their values."""
        plain = default_rows(
            [1] * len(names), [None] * len(names), [name.encode() for name in names], None
        )
        return arrow_batch.with_delays(plain, SCHEMA, dues, repeats)

    def schedule(self, delays_us: list[int]) -> None:
        names = [f"r{len(self.rows) + n}" for n in range(len(delays_us))]
        dues = [self.wall_us + delay for delay in delays_us]
        offset = self._append(self._rows(names, dues, None))
        for n, (name, due) in enumerate(zip(names, dues, strict=True)):
            self.rows[name] = Row(name, offset + n, due)

    def schedule_recurring(self, delay_us: int, every_us: int) -> None:
        """The first after `delay_us`, which is more than a mark reaches ahead: else its phase would
        be the mark's.
        """
        name = f"again{len(self.recurring)}"
        repeat = Recurrence(every_us=every_us).to_json()
        first_us = self.latest_us + delay_us
        offset = self._append(self._rows([name], [first_us], [repeat]))
        self.recurring[name] = RecurringRow(name, offset, first_us, every_us)

    def change(self, row: Row, due_us: int | None) -> None:
        """Cancel or reschedule as the scheduler does it for a client."""
        try:
            self.partition.catch_up()
            pending = self.partition.row_of(row.offset)
            if pending is None:
                return
            assert pending.column("value")[0].as_py() == row.name.encode()
            assert pending.column(DUE_COLUMN)[0].as_py() == row.due_us
            self.token += 1
            self.partition.changes[self.token] = Change()
            data = (
                self.partition.cancellation(row.offset)
                if due_us is None
                else self.partition.replacement(pending, due_us, row.offset)
            )
            row.fate = "asked"
            self._append(data, self.token)
            self.partition.catch_up()
        except Killed:
            self.restart_scheduler()
            return
        outcomes = self.partition.changes.pop(self.token).outcomes
        if outcomes is None:  # a mark of a new epoch is in the way
            row.fate = "unknown"
            return
        (found,) = outcomes
        row.fate = "waits"
        if found is None:
            row.fate = "cancelled"
        elif isinstance(found, tuple):
            row.offset, row.due_us = found

    # ---- checking --------------------------------------------------------------------------------

    def delivered(self) -> list[tuple[str, BatchHeader]]:
        """Records of the partition's log, in order."""
        return [(name, header) for batch, header in self._batches() for name in _names(batch)]

    def _batches(self) -> Iterator[tuple[pa.RecordBatch, BatchHeader]]:
        files = SimFiles(self.disk)
        for base in segment_bases(files.list("/data/t-0")):
            fd = files.open_for_read(f"/data/t-0/{file_name(base)}")

            def read_at(length: int, position: int, fd: int = fd) -> bytes:
                return files.read_at(fd, length, position)

            walk = Walk(schema_message_length(read_at), base)
            for position, header in walk_batches(
                read_at, files.size(fd), walk, checksum_seed(TOPIC_ID, 0)
            ):
                data = memoryview(read_at(header.batch_length, position))
                yield (
                    pa.ipc.read_record_batch(
                        pa.ipc.read_message(pa.py_buffer(data)), self._schema_of(header)
                    ),
                    header,
                )

    def _schema_of(self, header: BatchHeader) -> pa.Schema:
        """The schema of a batch of the topic."""
        return DEFAULT_SCHEMA

    def stamps(self) -> list[tuple[str, int]]:
        """(name, timestamp in microseconds) of each record of the partition's log, in order."""
        found: list[tuple[str, int]] = []
        for batch, _ in self._batches():
            stamps = batch.column("timestamp").view(pa.int64()).to_pylist()
            found += zip(_names(batch), stamps, strict=True)
        return found

    def check(self) -> None:
        """Everything that was scheduled and not cancelled is there once, none early, in the order
        of keys.
        """
        found = self.delivered()
        keys = [(header.min_tick, header.delay_position) for _, header in found]
        unknown = [
            name for name, _ in found if name not in self.rows and name not in self.recurring
        ]
        assert self.takes_foreign or not unknown, f"nobody sent {unknown[:5]}"
        found = [
            (name, header)
            for name, header in found
            if name in self.rows and name not in self.recurring
        ]
        names = [name for name, _ in found]
        assert len(names) == len(set(names)), (
            f"twice: {sorted(n for n in names if names.count(n) > 1)[:5]}"
        )
        assert keys == sorted(keys)
        for name, header in found:
            row = self.rows[name]
            assert row.fate != "cancelled", f"{name} was cancelled"
            assert header.attributes & ATTRIBUTE_DELAYED
            if row.fate == "waits":
                assert header.append_time_us >= row.due_us, (
                    f"{name} came {row.due_us - header.append_time_us} us early"
                )
        missing = [
            row for row in self.rows.values() if row.fate == "waits" and row.name not in set(names)
        ]
        assert not missing, f"never came: {missing[:5]} of {len(missing)}"

    def _end_recurring(self) -> None:
        """Let every occurrence come that was ever due, count them, and cancel what recurs."""
        self.pass_time(self.latest_us - self.wall_us + 1_000_000)
        quiet = 0
        while quiet < 20:
            quiet = 0 if self.step() else quiet + 1
            self.now_ns += 100_000_000  # what is sent again is; nothing more becomes due
        delivered = self.stamps()
        names = [name for name, _ in delivered]
        for row in self.recurring.values():
            stamps = [stamp for name, stamp in delivered if name == row.name]
            times = [
                tick_of(row.first_us + number * row.every_us) * TICK_US
                for number in range(len(stamps))
            ]
            assert stamps == times, f"{row} came with other timestamps than its occurrences'"
            early = row.count_until(self.wall_us + 1000 * delay_partition.LEAD_TICKS)
            assert row.count_until(self.wall_us) <= names.count(row.name) <= early, (
                f"{row} came {names.count(row.name)} times"
            )
            self.partition.catch_up()
            self.token += 1
            self.partition.changes[self.token] = Change()
            self._append(self.partition.cancellation(row.offset), self.token)
            self.partition.catch_up()
            assert self.partition.changes.pop(self.token).outcomes == [None]

    def finish(self) -> None:
        """No more faults: time passes until nothing waits."""
        self._doom = None
        if self.recurring:
            self._end_recurring()
        for _ in range(100_000):
            if self.step():
                continue
            if not self.partition.pending_count() and self.partition.is_settled:
                break
            due_us, deadline_ns = self.partition.next_due_us(), self.partition.next_deadline_ns()
            waits = [due_us - self.wall_us] if due_us is not None else []
            waits += [(deadline_ns - self.now_ns) // 1000 + 1] if deadline_ns is not None else []
            assert waits, f"{self.partition.pending_count()} wait, and nobody for them"
            self.pass_time(
                max(
                    1_000,
                    min(wait for wait in waits if wait > 0)
                    if any(wait > 0 for wait in waits)
                    else 10_000,
                )
            )
        self.check()


def _names(batch: pa.RecordBatch) -> list[str]:
    return [(value or b"").decode(errors="replace") for value in batch.column("value").to_pylist()]


__all__ = ["DelayWorld", "Killed", "Row", "tick_of"]
