"""The worker's quick way (`kernel.fast_append`) against its long one: the same lane history, the
same bytes in ring, lane and memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.crash_points import armed
from shm.memory.layout import ACKS_LEADER, SLOT_MAP_SHIFT, ProcessWord, Role
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneMessage
from shm.tables.control import Control
from tailrace import kernel
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.format.record_batch.arrow_metadata import SchemaLayout, read_schema
from tailrace.format.record_batch.batch_validation import MESSAGE_MAX_BYTES
from tailrace.format.record_batch.header_stamps import stamp_required_end
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.kernel import reference_codec
from tailrace.kernel.batch_shape import shape_of
from tests.fuzz.requests.mutations import mutate_batch
from tests.kit.batches import SEED, TIME_US, make_batch, reseal, with_wild_buffer
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.append import batch_appender
from workers.flush.flusher_settings import FlusherSettings

compiled_only = pytest.mark.skipif(
    kernel.compiled is None, reason="no compiled kernel is used here"
)
WORLD: Any = SimpleNamespace(
    any_target=lambda _: SimpleNamespace(
        info=SimpleNamespace(name="other"),
        partition=1,
        batches=[bytes(make_batch(3, seed=SEED + 1))],
    )
)
NESTED = pa.schema(
    [
        ("a", pa.list_(pa.struct([("x", pa.int32()), ("y", pa.utf8())]))),
        ("b", pa.list_(pa.float64(), 3)),
        ("c", pa.bool_()),
        ("d", pa.null()),
    ]
)


def nested_batch(count: int) -> bytearray:
    rows = pa.RecordBatch.from_pydict(
        {
            "a": [[{"x": n, "y": "t" * n}] * (n % 3) for n in range(count)],
            "b": [[1.0, 2.0, None]] * count,
            "c": [True] * count,
            "d": [None] * count,
        },
        NESTED,
    )
    return arrow_batch.encode(
        rows,
        schema_id=1,
        seed=SEED,
        compression="none",
        first_timestamp_us=TIME_US,
        max_timestamp_us=TIME_US,
    )


def make_bench(directory: str, *, is_checked: bool, **settings: Any) -> Bench:
    made = Bench(
        directory, simulated_regions(1 << 16, 64, is_checked=is_checked),
        SimFiles(SimDisk((directory,))), FlusherSettings(journal_bytes=1 << 20),
        assignments=[assignment(**settings)],
    )  # fmt: skip
    made.settle()
    return made


class Producer:
    """Sends what an idempotent producer may, and may not."""

    def __init__(self, number: int) -> None:
        self.number, self.epoch, self.sequence = number, 0, 0

    def batch(self, count: int, what: str, compression: str) -> bytearray:
        if what == "epoch":
            self.epoch, self.sequence = self.epoch + 1, 0
        sequence = self.sequence + (5 if what == "gap" else -count if what == "again" else 0)
        made = make_batch(
            count,
            producer_id=self.number,
            epoch=self.epoch,
            sequence=max(0, sequence),
            compression=compression,
        )
        if what in ("next", "epoch"):
            self.sequence += count
        return made


STEP = st.tuples(
    st.sampled_from(["next"] * 6 + ["placed"] * 2 + ["again", "gap", "epoch", "bent", "wild",
    "garbage", "slot", "map", "none", "schema", "topic", "settle", "late"]),
    st.integers(1, 60), st.integers(0, 2), st.sampled_from(["none", "none", "lz4", "zstd"]),
    st.integers(0, 2**32),
)  # fmt: skip


def feed(
    benches: list[Bench], producers: dict[int, Producer], step: tuple[str, int, int, str, int]
) -> None:
    what, count, acks, compression, seed = step
    slot, flags = 0, acks
    producer = producers[seed % 3]
    batch: bytes | bytearray = b""
    if what in ("next", "again", "gap", "epoch"):
        batch = producer.batch(count, what, compression)
    elif what == "placed":
        batch = producer.batch(count, "next", compression)
        partition = benches[0].worker._partitions.get(0)
        with memoryview(batch) as view:
            stamp_required_end(view, (partition.next_offset if partition else 0) + seed % 3 // 2)
        reseal(batch)
    elif what == "bent":
        batch = mutate_batch(
            random.Random(seed), bytes(producer.batch(count, "bent", compression)), SEED, WORLD
        )[0]
    elif what == "wild":
        batch = with_wild_buffer(make_batch(count + 20))
    elif what == "garbage":
        batch = random.Random(seed).randbytes(count * 8)
    elif what in ("slot", "map", "none", "topic", "schema"):
        batch = make_batch(
            count, schema_id=9 if what == "schema" else 1, seed=SEED + (what == "topic")
        )
        slot, flags = (
            3 if what == "slot" else 0,
            acks | (1 << SLOT_MAP_SHIFT if what == "map" else 0),
        )
    for each in benches:
        if what == "settle":
            each.settle()
        elif what == "late":
            each.now_us += seed % 200_000_000_000
        elif not each.to_worker.try_write(
            LaneKind.PRODUCE, slot, flags, 1 << 32, seed, 0, (batch,)
        ):
            each.settle()
        if seed % 4 == 0:
            each.to_worker.commit()
            each.step_worker()


def memory_of(bench: Bench) -> dict[str, bytes]:
    return {
        name: bytes(bench.regions[name].bytes)
        for name in ("ring", "front>worker", "controller>worker", "table")
    }


@compiled_only
@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40), st.sampled_from(["CreateTime", "LogAppendTime"]))
def test_both_ways_write_the_same_bytes(steps: list[Any], time_type: str) -> None:
    benches = [
        make_bench("/data", is_checked=is_checked, message_timestamp_type=time_type)
        for is_checked in (False, True)
    ]
    producers = {number: Producer(number) for number in range(3)}
    for step in steps:
        feed(benches, producers, step)
    for each in benches:
        each.to_worker.commit()
        each.step_worker()
    quick, long = map(memory_of, benches)
    assert quick == long
    known = [
        (p.next_offset, p.last_append_us, p.leader_epoch, p.producers.to_snapshot())
        for p in (each.worker._partitions[0] for each in benches)
    ]
    assert known[0] == known[1]
    assert benches[0].worker._appender.refused_count == benches[1].worker._appender.refused_count
    assert benches[0].worker._appender.byte_count == benches[1].worker._appender.byte_count


@compiled_only
def test_ordinary_batches_take_the_quick_way_and_odd_ones_the_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench("/data", is_checked=False)
    scanned: list[int] = []

    def look(_source: int, message: LaneMessage) -> bool:
        scanned.append(message.correlation_id)
        return True

    monkeypatch.setattr(bench.worker._appender, "append", look)
    for number, sequence in enumerate((0, 3, 6)):
        bench.send(make_batch(3, producer_id=7, sequence=sequence), correlation_id=number)
    bench.step_worker()
    assert scanned == [0, 1, 2], (
        "an unknown producer needs thought; `append` is replaced, so it stays unknown"
    )
    monkeypatch.undo()
    for sequence in (0, 3):
        bench.send(make_batch(3, producer_id=7, sequence=sequence))
    bench.step_worker()
    monkeypatch.setattr(bench.worker._appender, "append", look)
    scanned.clear()
    for compression in ("none", "lz4", "zstd"):
        bench.send(make_batch(3, compression=compression), correlation_id=10)
    bench.send(make_batch(3, producer_id=7, sequence=6), correlation_id=11)
    bench.send(make_batch(3, producer_id=7, sequence=20), correlation_id=12)
    bench.step_worker()
    assert scanned == [12]
    bench.send(make_batch(3), correlation_id=13)
    with armed("worker.after_copy", lambda: None):
        bench.step_worker()
    assert scanned == [12, 13], "where a crash point is armed, the code that visits it runs"


@compiled_only
def test_what_a_step_counts_wakes_fronts_as_before() -> None:
    bench = make_bench("/data", is_checked=False)
    bench.send(make_batch(3), acks=2)
    bench.step_worker()
    assert not bench.worker._appender.has_replies
    bench.send(make_batch(3), acks=ACKS_LEADER)
    rung: list[str] = []
    bench.worker._fronts = [SimpleNamespace(ring=lambda: rung.append("front"))]  # type: ignore[list-item]
    bench.step_worker()
    assert rung == ["front"]


@compiled_only
def test_a_quick_way_that_fails_is_left_for_good_and_batches_go_the_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench("/data", is_checked=False)
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise MemoryError("none left")

    monkeypatch.setattr(batch_appender, "fast_append", fail)
    for _ in range(2):
        bench.send(make_batch(3))
        bench.step_worker()
    assert bench.answers() == [(0, 0), (0, 3)]
    assert len(calls) == 1
    assert (
        Control(bench.regions["control"]).process(Role.WORKER, 0).load(ProcessWord.INTERNAL_ERRORS)
        == 1
    )


# ---- hostile batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_good_batches_are_plainly_good(compression: str, count: int) -> None:
    shape = kernel.BatchShape(read_schema(to_message(DEFAULT_SCHEMA)))
    assert kernel.is_valid_batch(make_batch(count, compression=compression), SEED, shape, 1 << 20)
    assert not kernel.is_valid_batch(
        make_batch(count, compression=compression), SEED + 1, shape, 1 << 20
    )


def test_batches_of_nested_columns_are_plainly_good() -> None:
    shape = kernel.BatchShape(read_schema(to_message(NESTED)))
    assert kernel.is_valid_batch(nested_batch(20), SEED, shape, 1 << 20)
    assert not kernel.is_valid_batch(make_batch(20), SEED, shape, 1 << 20)


def test_partitions_of_one_schema_share_its_shape() -> None:
    layout = read_schema(to_message(DEFAULT_SCHEMA))
    assert shape_of(layout) is shape_of(read_schema(to_message(DEFAULT_SCHEMA)))


EDGES = (0, 1, 4, 8, 0x7F, 0xFFFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class GuardedPages:
    """Memory whose last byte lies before a page that nobody may touch: one read behind a batch ends
    the process.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        assert libc.mprotect(ctypes.c_void_p(address + self.size), mmap.PAGESIZE, 0) == 0, (
            ctypes.get_errno()
        )

    def put(self, data: bytes) -> memoryview:
        start = self.size - len(data)
        self.memory[start : self.size] = data
        return memoryview(self.memory)[start : self.size]


def patched(rng: random.Random, data: bytes) -> bytes:
    """Numbers in a batch's metadata replaced by such as offsets are made of; the checksums are
    right.
    """
    bent = bytearray(data)
    end = 8 + int.from_bytes(bent[4:8], "little")
    for _ in range(rng.choice((1, 1, 2, 5))):
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(8, end - 8)
        value = rng.choice(
            (
                0,
                1,
                4,
                8,
                0x7F,
                0xFFFF,
                1 << 31,
                (1 << 32) - 1,
                (1 << 63) - 1,
                1 << 63,
                (1 << 64) - 1,
                len(data),
                end,
                rng.getrandbits(64),
            )
        )
        bent[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    try:
        return bytes(reseal(bent))
    except Exception:
        return bytes(bent)


def fuzz(seed: int, count: int) -> str:
    """Bent batches, each right before a forbidden page. What the kernel takes, the reference takes.
    Returns what happened.
    """
    rng = random.Random(seed)
    layouts: list[tuple[SchemaLayout, list[bytes]]] = [
        (
            read_schema(to_message(DEFAULT_SCHEMA)),
            [
                bytes(make_batch(n, compression=c))
                for n in (1, 5, 50)
                for c in ("none", "lz4", "zstd")
            ],
        ),
        (read_schema(to_message(NESTED)), [bytes(nested_batch(n)) for n in (1, 20)]),
    ]
    pages = GuardedPages(1 << 16)
    taken = refused = passed_over = 0
    for number in range(count):
        layout, batches = rng.choice(layouts)
        shape, strict = kernel.BatchShape(layout), reference_codec.BatchShape(layout)
        batch = rng.choice(batches)
        limit = rng.choice((256, 1 << 16, 1 << 20, MESSAGE_MAX_BYTES))
        bent = (
            mutate_batch(rng, batch, SEED, WORLD)[0] if rng.random() < 0.5 else patched(rng, batch)
        )
        if rng.random() < 0.1:
            bent = bent[: rng.randrange(len(bent) + 1)]
        data = pages.put(bent)
        is_good = reference_codec.is_valid_batch(data, SEED, strict, limit)
        if kernel.is_valid_batch(data, SEED, shape, limit):
            assert is_good, f"seed {seed}, batch {number}: the kernel takes {bent.hex()}"
            taken += 1
        elif is_good:
            passed_over += 1
        else:
            refused += 1
    return f"{taken} {passed_over} {refused}"


def test_no_bent_batch_is_taken_that_the_reference_refuses_and_none_is_read_beyond_its_end() -> (
    None
):
    """In a process of its own: a read beyond the end kills it."""
    seed = random.randrange(1 << 32)
    code = f"from tests.workers.append.test_fast_append import fuzz; print(fuzz({seed}, 6000))"
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=root,
        env=_environment(root),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"
    taken, passed_over, refused = map(int, done.stdout.split())
    assert taken > 200, "some bends do no harm"
    assert refused > 1000
    assert passed_over < taken, "what is rare is passed over, not what is common"


def _environment(root: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}


def test_the_test_sees_a_read_beyond_the_end() -> None:
    code = (
        "from tests.workers.append.test_fast_append import GuardedPages; import ctypes; view = "
        "GuardedPages(4096).put(b'x' * 8);"
        "print(ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(view)), 9))"
    )
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=root,
        env=_environment(root),
        capture_output=True,
        check=False,
    )
    assert done.returncode < 0
