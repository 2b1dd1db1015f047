"""A compacted log, its cleaner, and a dictionary of what it should hold; stepped by hand."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pyarrow as pa

from shm.memory.layout import ProcessWord, Role
from shm.tables.control import Control
from tailrace.batch import arrow_codec
from tailrace.format.record_batch.batch_header import CONTROL_ABORT, CONTROL_COMMIT, verify_batch
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.record_batch.sparse_batch import decode_sparse_batch
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.format.segments.segment import file_name, schema_message_length, segment_bases
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import SEED, TIME_US
from tests.kit.log_files.logs import Bench, assignment
from tests.kit.transactional.transactions import RingFiller, producer
from workers.clean.cleaner import Cleaner

SWAP_POINTS = (
    "flusher.before_swap",
    "flusher.after_swap_intent",
    "flusher.in_swap",
    "flusher.after_swap",
    "flusher.before_swap_end",
)
CLEANER_POINTS = ("cleaner.in_segment", "cleaner.before_report")


class Killed(BaseException):
    """The process died."""


def die() -> None:
    raise Killed


def compacted(**settings: Any) -> Any:
    made = assignment()
    made.settings.update(
        {
            "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.0,
            "min.compaction.lag.ms": 0, "max.compaction.lag.ms": 1 << 60,
            "delete.retention.ms": 86_400_000, "key.column": "", "segment.bytes": 8_192,
            "retention.ms": -1, **settings,
        }
    )  # fmt: skip
    return made


def encoded(keys: list[bytes | None], values: list[bytes | None], compression: str) -> bytearray:
    times = [TIME_US + n for n in range(len(keys))]
    return arrow_codec.encode(
        default_rows(times, keys, values, None), schema_id=1, seed=SEED, compression=compression,
        first_timestamp_us=times[0], max_timestamp_us=times[-1],
    )  # fmt: skip


def _piece(data: memoryview, length: int, position: int) -> bytes:
    return bytes(data[position : position + length])


class World:
    """A compacted log, its cleaner, and what it should hold."""

    def __init__(self, b: Bench, rng: random.Random, of: Any = None) -> None:
        """`of`: the assignment, by default of a compacted topic."""
        self.b = b
        self.rng = rng
        b.assignments = [of or compacted()]
        b.flusher = b._new_flusher()
        self.filler = RingFiller(b.regions["ring"])
        self.cleaner = self.new_cleaner()
        self.records: dict[int, tuple[bytes | None, bytes | None]] = {}
        """Committed records by offset."""
        self.pending: dict[int, dict[int, tuple[bytes | None, bytes | None]]] = {}
        """Records of open transactions."""
        self.epochs: dict[int, int] = {}

    def new_cleaner(self) -> Cleaner:
        control = Control(self.b.regions["control"])
        return Cleaner(
            files=self.b.files, data_dir=self.b.directory,
            flusher=control.process(Role.FLUSHER, 0), slot=control.process(Role.CLEANER, 0),
            flusher_bell=self.b.bell, on_ready=lambda: None, now_us=lambda: self.b.now_us,
        )  # fmt: skip

    def end(self, who: int, *, commits: bool) -> None:
        """End a transaction."""
        records = self.pending.pop(who)
        epoch = self.epochs.get(who, 0)
        self.filler.marker(who, epoch, CONTROL_COMMIT if commits else CONTROL_ABORT)
        self.epochs[who] = epoch + 1
        if commits:
            self.records.update(records)

    def settle(self) -> None:
        while self.b.step_flusher() or not self.b.is_running:
            pass
        self.b.ring.cursors[0].store(self.b.ring.settled.load())

    def clean(self) -> None:
        """Let compaction do all that it can."""
        slot = Control(self.b.regions["control"]).process(Role.FLUSHER, 0)
        for _ in range(4):
            self.b.now_ns += 70_000_000_000
            self.settle()
            for _ in range(1_000):
                if not slot.load(ProcessWord.CLEANING):
                    break
                while self.cleaner.step(self.b.now_ns):
                    pass
                self.b.now_ns += 1_000
                self.settle()
        self.cleaner.step(self.b.now_ns)

    def work_on(self) -> None:
        """Clean and append in turns."""
        for _ in range(4):
            self.clean()
            batches(self, 40)
            self.settle()

    def stored(self) -> tuple[dict[int, tuple[bytes | None, bytes | None]], int]:
        """Records of committed batches by offset, as the files have them; and the log's end."""
        directory, files = f"{self.b.directory}/t-0", self.b.files
        bases = segment_bases(files.list(directory))
        found: dict[int, tuple[bytes | None, bytes | None]] = {}
        batches: list[tuple[Any, Any]] = []
        following = self.b.table.read(0).log_start_offset
        for number, base in enumerate(bases):
            end = bases[number + 1] if number + 1 < len(bases) else 1 << 62
            fd = files.open_for_read(f"{directory}/{file_name(base)}")
            data = memoryview(files.read_at(fd, files.size(fd), 0))
            at = schema_message_length(partial(_piece, data))
            files.close(fd)
            while at < len(data) and (frame := frame_at(data, at, len(data))) and frame[0]:
                header = verify_batch(data[at : at + frame[0]], SEED)
                assert header.base_offset == following, "the ranges touch"
                if header.base_offset >= end:
                    break
                following = header.next_offset
                batches.append((header, bytes(data[at : at + frame[0]])))
                at += frame[0]
            assert end == 1 << 62 or following == end
        outcome: dict[tuple[int, int], int] = {}
        for header, _ in batches:
            if header.is_marker:
                outcome[header.producer_id, header.producer_epoch] = header.control_type
        for header, data in batches:
            if header.is_control:
                continue
            key = (header.producer_id, header.producer_epoch)
            if header.is_transactional and outcome.get(key) != CONTROL_COMMIT:
                continue
            if header.is_sparse:
                rows, offsets = decode_sparse_batch(data, header, DEFAULT_SCHEMA)
                numbers = offsets.to_pylist()
            else:
                message = pa.ipc.read_message(pa.py_buffer(data))
                rows = pa.ipc.read_record_batch(message, DEFAULT_SCHEMA)
                numbers = list(range(header.base_offset, header.next_offset))
            keys, values = rows.column("key").to_pylist(), rows.column("value").to_pylist()
            found.update(zip(numbers, zip(keys, values, strict=True), strict=True))
        return found, following

    def check(self, *, cleaned: bool = False) -> None:
        """Check that the stored records are a part of the committed ones, with the latest of each
        key.
        """
        found, end = self.stored()
        assert end == self.b.table.read(0).log_end_offset
        latest = {key: offset for offset, (key, _) in sorted(self.records.items())}
        for offset, record in found.items():
            assert self.records[offset] == record
        for key, offset in latest.items():
            assert offset in found or self.records[offset][1] is None, (key, offset)
        if cleaned:
            below = self.b.table.read(0).cleaned_below
            keys = [key for offset, (key, _) in found.items() if offset < below]
            assert len(keys) == len(set(keys))
            stable = self.b.table.read(0).last_stable_offset
            bases = segment_bases(self.b.files.list(f"{self.b.directory}/t-0"))
            assert below >= max(base for base in bases if base <= stable), "all was cleaned"


def batches(world: World, count: int, keys: int = 12) -> None:
    """Append random batches, some of transactions."""
    rng, filler = world.rng, world.filler
    for _ in range(count):
        size = rng.randint(1, 12)
        made_keys: list[bytes | None] = [b"k%d" % rng.randrange(keys) for _ in range(size)]
        values = [
            None if rng.random() < 0.15 else rng.randbytes(rng.randint(0, 60)) for _ in range(size)
        ]
        who = rng.choice([-1, -1, 7, producer(1), producer(2)])
        epoch = world.epochs.get(who, 0)
        batch = encoded(made_keys, values, rng.choice(["none", "lz4", "zstd"]))
        base = filler.batch(batch, size, who, epoch)
        records = dict(enumerate(zip(made_keys, values, strict=True), base))
        if who < producer(1):
            world.records.update(records)
        else:
            world.pending.setdefault(who, {}).update(records)
        for who in list(world.pending):
            if rng.random() < 0.3:
                world.end(who, commits=rng.random() < 0.6)
        if rng.random() < 0.2:
            world.settle()
