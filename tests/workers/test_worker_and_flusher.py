"""Worker and flusher, stepped by hand over real memory and files: what a killed one leaves, its
successor puts right.
"""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pytest

from shm.memory.layout import SlotState, Verdict
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tests.kit.batches import SEED, make_batch, with_wild_buffer
from tests.kit.log_files.logs import Bench, assignment, bench
from tests.kit.matrices import short
from workers.flush.flusher_settings import FlusherSettings
from workers.segment.files import DiskFiles


def read_values(b: Bench) -> list[bytes]:
    """Every value in the partition's segments, through pyarrow alone."""
    values: list[bytes] = []
    for path in b.segment_paths():
        with pa.OSFile(path) as file:
            values += pa.ipc.open_stream(file).read_all().column("value").to_pylist()
    return values


def expected(*counts: int) -> list[bytes]:
    return [b"value-%d" % n for count in counts for n in range(count)]


MS = 1_000_000


def test_batches_get_dense_offsets_and_lie_in_the_file_as_arrow(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        for count in (3, 1, 5):
            b.send(make_batch(count))
        b.settle()
        assert b.answers() == [(0, 0), (0, 3), (0, 4)]
        assert read_values(b) == expected(3, 1, 5)
        state = b.table.read(0)
        assert (state.high_watermark, state.log_end_offset, state.state) == (9, 9, SlotState.ONLINE)


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (with_wild_buffer(make_batch(50)), ErrorCode.UNSAFE_BATCH),
        (make_batch(3)[:-8] + b"damaged!", ErrorCode.CORRUPT_BATCH),
        (b"garbage " * 40, ErrorCode.UNSUPPORTED_BATCH),
        (make_batch(3, schema_id=9), ErrorCode.SCHEMA_MISMATCH),
        (make_batch(3, seed=SEED + 1), ErrorCode.CORRUPT_BATCH),
        (make_batch(3, producer_id=5, sequence=7), ErrorCode.UNKNOWN_SEQUENCE),
    ],
)
def test_bad_batches_are_refused_with_a_code_and_good_ones_go_on(
    tmp_path: pathlib.Path, batch: bytes, code: ErrorCode
) -> None:
    with bench(str(tmp_path)) as b:
        b.send(make_batch(2))
        b.send(batch)
        b.send(make_batch(2))
        b.settle()
        assert b.answers() == [(0, 0), (code, 2), (0, 2)]
        assert read_values(b) == expected(2, 2)


def test_a_duplicate_is_answered_with_the_first_offset_and_not_stored(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        first = make_batch(3, producer_id=5, sequence=0)
        b.send(first)
        b.send(make_batch(2, producer_id=5, sequence=3))
        b.send(first)
        b.settle()
        assert b.answers() == [(0, 0), (0, 3), (0, 0)]
        assert b.ring.descriptor(2).is_duplicate
        assert read_values(b) == expected(3, 2)


def test_after_a_gap_everything_is_refused_until_the_missing_batch_comes(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        batches = [make_batch(1, producer_id=5, sequence=n) for n in range(4)]
        for n in (0, 2, 3, 1, 2, 3):
            b.send(batches[n])
        b.settle()
        gap = ErrorCode.OUT_OF_ORDER_SEQUENCE
        assert b.answers() == [(0, 0), (gap, 1), (gap, 1), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("steps_before", range(6))
def test_a_worker_killed_anywhere_neither_loses_nor_repeats(
    tmp_path: pathlib.Path, steps_before: int
) -> None:
    with bench(str(tmp_path)) as b:
        for n in range(4):
            b.send(make_batch(2, producer_id=5, sequence=2 * n))
            if n < steps_before:
                b.step_worker()
            if n % 2:
                b.step_flusher()
        b.kill_worker()
        b.send(make_batch(2, producer_id=5, sequence=8))
        b.send(make_batch(2, producer_id=5, sequence=6))  # a retry: the successor knows it
        b.settle()
        assert [a for a in b.answers() if a[0] == 0][:5] == [(0, 0), (0, 2), (0, 4), (0, 6), (0, 8)]
        assert b.answers()[-1] == (0, 6)
        assert read_values(b) == expected(2, 2, 2, 2, 2)


class Dying(DiskFiles):
    """A disk under a flusher that is killed at its n-th write or sync."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("killed here")

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        if self.left == 0 and pieces:
            # Killed halfway through: part of the bytes is there.
            whole = b"".join(bytes(p) for p in pieces)
            os.pwrite(fd, whole[: len(whole) // 2], position)
        self._count()
        super().write_at(fd, pieces, position)

    def sync_data(self, fd: int) -> None:
        self._count()
        super().sync_data(fd)

    def sync_directory(self, path: str) -> None:
        self._count()
        super().sync_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)


@pytest.mark.parametrize("operations", short(range(60), *range(0, 60, 3)))
def test_a_flusher_killed_at_any_write_or_sync_loses_nothing(
    tmp_path: pathlib.Path, operations: int
) -> None:
    files = Dying(operations)
    with bench(str(tmp_path), files) as b:
        b.assignments = [assignment(segment_bytes=1 << 16)]
        # Feed a new generation with the small segment size, so that rolls happen too.
        b.kill_worker()
        b.kill_flusher()
        sent: list[int] = []
        killed = False
        for n in range(5):
            b.send(make_batch(800, producer_id=5, sequence=800 * n))
            sent.append(800)
            b.step_worker()
            try:
                b.step_flusher()
            except KeyboardInterrupt:
                killed = True
                files.left = 1 << 30
                b.kill_flusher()
        files.left = 1 << 30
        b.settle()
        assert read_values(b) == expected(*sent)
        assert b.table.read(0).high_watermark == 4000
        assert [b.ring.outcome(n).verdict for n in range(5)] == [Verdict.DURABLE] * 5
        if operations >= 59:
            assert not killed, (
                "the parameters no longer reach past the last operation: raise their number"
            )


def test_segments_roll_by_size_seal_with_the_end_mark_and_keep_producers(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        b.assignments = [assignment(segment_bytes=1 << 16)]
        b.kill_worker()
        b.kill_flusher()
        for n in range(4):
            b.send(make_batch(1600, producer_id=5, sequence=1600 * n))
        b.settle()
        paths = b.segment_paths()
        assert [os.path.basename(p)[:20].lstrip("0") or "0" for p in paths] == [
            "0",
            "1600",
            "3200",
            "4800",
        ]
        for path in paths[:-1]:
            assert pathlib.Path(path).read_bytes().endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")
        b.kill_worker()  # knows the first batches from the snapshot and the ring only
        b.send(make_batch(1600, producer_id=5, sequence=1600))
        b.settle()
        assert b.answers()[-1] == (0, 1600)


def test_segments_roll_by_age_also_when_nothing_follows(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.assignments = [assignment(segment_ms=1000)]
        b.kill_worker()
        b.kill_flusher()
        b.send(make_batch(1))
        b.settle()
        assert (
            not pathlib.Path(b.segment_paths()[0])
            .read_bytes()
            .endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")
        )
        b.now_ns += 1_100_000_000
        b.now_us += 1_100_000
        b.settle()
        assert (
            pathlib.Path(b.segment_paths()[0])
            .read_bytes()
            .endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")
        )
        b.send(make_batch(1))
        b.settle()
        assert len(b.segment_paths()) == 2


class Failing(DiskFiles):
    """A disk that refuses one kind of call with one error while `error` is set."""

    def __init__(self) -> None:
        self.error = 0
        self.call = "write"

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        if self.error and self.call == "write":
            raise OSError(self.error, os.strerror(self.error))
        super().write_at(fd, pieces, position)

    def sync_data(self, fd: int) -> None:
        if self.error and self.call == "sync":
            raise OSError(self.error, os.strerror(self.error))
        super().sync_data(fd)


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_disk_error_fails_the_batch_and_takes_the_partition_offline_for_writes(
    tmp_path: pathlib.Path, call: str
) -> None:
    files = Failing()
    files.call = call
    with bench(str(tmp_path), files) as b:
        b.send(make_batch(2))
        b.settle()
        files.error = errno.EIO
        b.send(make_batch(2))
        b.settle()
        assert b.ring.outcome(1).verdict is Verdict.FAILED
        state = b.table.read(0)
        assert (state.state, state.high_watermark) == (SlotState.OFFLINE_FOR_WRITES, 2)
        files.error = 0
        b.send(make_batch(2))
        b.settle()
        assert b.answers()[-1][0] == ErrorCode.PARTITION_OFFLINE


def test_a_full_disk_holds_batches_in_the_ring_and_goes_on_when_there_is_space(
    tmp_path: pathlib.Path,
) -> None:
    files = Failing()
    with bench(str(tmp_path), files) as b:
        b.send(make_batch(2))
        b.settle()
        files.error = errno.ENOSPC
        b.send(make_batch(3))
        b.settle()
        assert b.ring.settled.load() == 1
        files.error = 0
        b.now_ns += 10**9
        b.settle()
        assert b.ring.settled.load() == 2
        assert read_values(b) == expected(2, 3)


def test_deleting_and_creating_a_topic_again_does_not_confuse_the_two(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        b.send(make_batch(2))
        b.settle()
        b.assignments = [assignment(topic_id=b"another topic id")]
        b.kill_worker()
        b.kill_flusher()
        b.send(make_batch(2))
        b.settle()
        assert b.answers()[-1][0] == ErrorCode.CORRUPT_BATCH, "a batch made for the deleted topic"
        assert b.table.read(0).high_watermark == 0


@pytest.mark.parametrize("ends", ["time", "bytes", "stop"])
def test_the_flusher_lingers_for_a_larger_group_until_its_time_its_bytes_or_its_end(
    tmp_path: pathlib.Path, ends: str
) -> None:
    settings = FlusherSettings(journal_bytes=1 << 20, linger_ns=5 * MS, batch_bytes=3_000)
    with bench(str(tmp_path), settings=settings) as it:
        it.settle()
        it.send(make_batch(3))
        it.step_worker()
        assert not it.step_flusher()
        assert it.flusher.next_deadline_ns() == it.now_ns + 5 * MS + (-it.now_ns) % 100_000, (
            "rounded up to the wheel's tick"
        )
        it.now_ns += 4 * MS
        assert not it.step_flusher()
        assert not it.flusher.has_more(), "it sleeps meanwhile"
        assert it.table.read(0).high_watermark == 0
        if ends == "time":
            it.now_ns += 2 * MS
        elif ends == "bytes":
            it.send(make_batch(200))
            it.step_worker()
        else:
            it.flusher.begin_stop()
        it.settle()
        assert it.table.read(0).high_watermark == (203 if ends == "bytes" else 3)
        it.send(make_batch(3))
        it.step_worker()
        assert bool(it.step_flusher()) == (ends == "stop"), "the next group is waited for anew"


class Filling(Dying):
    """A disk that counts as full once it is said to be."""

    is_full = False

    def total_bytes(self, path: str) -> int:
        return 1 << 40

    def free_bytes(self, path: str) -> int:
        return 4 << 20 if self.is_full else 1 << 39  # room for the copy alone


SPLIT_SETTINGS = FlusherSettings(journal_bytes=1 << 20, reserve_bytes=1 << 30)


@pytest.mark.parametrize("operations", short(range(30), *range(0, 30, 3)))
def test_a_flusher_killed_while_it_splits_a_segment_of_a_full_disk_loses_nothing_that_stays(
    tmp_path: pathlib.Path, operations: int
) -> None:
    files = Filling(1 << 30)
    with bench(str(tmp_path), files, SPLIT_SETTINGS) as b:
        sizes = [0]
        for n in range(10):
            b.send(make_batch(800, producer_id=5, sequence=800 * n))
            b.settle()
            sizes.append(b.table.read(0).active_valid_end)
        keep_bytes = sizes[10] - sizes[7]
        files.is_full, files.left = True, operations
        b.assignments = [assignment(version=2, retention_bytes=keep_bytes)]
        killed = False
        try:
            b.now_ns += 10**9
            b.settle()  # the disk is found to be full
            b.assign(b.assignments[0])
            b.settle()
        except KeyboardInterrupt:
            killed = True
        files.left = 1 << 30
        if killed:
            b.kill_flusher()
            b.now_ns += 10**9
            b.settle()
        files.is_full = False
        state = b.table.read(0)
        assert (state.log_start_offset, state.high_watermark, state.log_end_offset) == (
            5_600,
            8_000,
            8_000,
        )
        assert [os.path.basename(path) for path in b.segment_paths()] == [f"{5_600:020}.arrows"]
        assert read_values(b) == expected(800, 800, 800)
        b.now_ns += 10**9
        b.settle()
        b.kill_worker()
        b.send(make_batch(800, producer_id=5, sequence=7_200))  # a duplicate: it is known
        b.send(make_batch(800, producer_id=5, sequence=8_000))
        b.settle()
        assert b.answers()[-2:] == [(0, 7_200), (0, 8_000)]
        b.kill_flusher()
        b.settle()
        assert read_values(b) == expected(800, 800, 800, 800)
        if operations == 29:
            assert not killed, (
                "the parameters no longer reach past the last operation: raise their number"
            )
