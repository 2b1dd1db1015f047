"""A topic's schema changes under a worker and a flusher: a segment has one schema, and no kill
between the change and the new segment loses or mixes anything.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from shm.messages.lane_messages import Assignment
from tailrace.batch import arrow_codec
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.header_stamps import stamp_producer
from tailrace.format.schema import to_message
from tests.kit.batches import SEED, TIME_US
from tests.kit.log_files.logs import Bench, assignment, bench
from workers.log.partition_log import PartitionLog
from workers.segment.files import DiskFiles

SCHEMAS = {
    1: pa.schema([("a", pa.int32()), ("b", pa.utf8())]),
    2: pa.schema([("b", pa.utf8()), ("a", pa.int32())]),  # as long as the first, in another order
    3: pa.schema([("b", pa.utf8()), ("a", pa.int64()), ("c", pa.float64())]),
}
NO_LIMIT = 1 << 30
LAST = 44
"""Writes and syncs from the change to the last roll, at most."""


def version(number: int, **settings: Any) -> Assignment:
    return replace(
        assignment(version=number, **settings),
        schema_id=number, schema=to_message(SCHEMAS[number]), typed=True,
        older_schemas={older: to_message(SCHEMAS[older]) for older in range(1, number)},
    )  # fmt: skip


def rows_of(number: int, count: int, start: int) -> list[dict[str, Any]]:
    made = [{"a": n, "b": f"v{n}", "c": None} for n in range(start, start + count)]
    return [{name: row[name] for name in SCHEMAS[number].names} for row in made]


def batch_of(number: int, count: int, start: int, *, sequence: int = -1) -> bytearray:
    data = arrow_codec.encode(
        pa.RecordBatch.from_pylist(rows_of(number, count, start), schema=SCHEMAS[number]),
        schema_id=number, seed=SEED, compression="none",
        first_timestamp_us=TIME_US, max_timestamp_us=TIME_US,
    )  # fmt: skip
    if sequence >= 0:
        with memoryview(data) as view:
            stamp_producer(view, producer_id=5, producer_epoch=0, base_sequence=sequence, seed=SEED)
    return data


def segments(b: Bench) -> list[tuple[pa.Schema, list[dict[str, Any]]]]:
    """Schema and rows of each segment with rows, read by pyarrow alone."""
    found = []
    for path in b.segment_paths():
        with pa.OSFile(path) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()
            if len(table):
                found.append((table.schema, table.to_pylist()))
    return found


def begin(b: Bench, first: Assignment) -> None:
    b.assignments = [first]
    b.kill_worker()
    b.kill_flusher()
    b.settle()


def test_each_version_has_segments_of_its_own_that_arrow_opens(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        for number in (1, 2, 3):
            b.assign(version(number))
            for start in (0, 4):
                b.send(batch_of(number, 4, start))
            b.step_worker()
        b.settle()
        assert [code for code, _ in b.answers() if code] == []
        assert segments(b) == [(SCHEMAS[n], rows_of(n, 8, 0)) for n in (1, 2, 3)]
        assert b.table.read(0).high_watermark == 24


def test_a_batch_of_another_version_is_refused_before_and_after_the_change(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        b.send(batch_of(2, 1, 0))
        b.step_worker()
        b.assign(version(2))
        b.send(batch_of(1, 1, 0))
        b.step_worker()
        b.send(batch_of(2, 1, 7))
        b.settle()
        refused = ErrorCode.SCHEMA_MISMATCH
        assert [code for code, _ in b.answers() if code] == [refused, refused]
        assert segments(b) == [(SCHEMAS[2], rows_of(2, 1, 7))]


def test_a_change_without_a_batch_makes_no_segment(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        b.send(batch_of(1, 2, 0))
        b.settle()
        b.assign(version(2))
        b.settle()
        assert len(b.segment_paths()) == 1


class Dying(DiskFiles):
    """A disk under a flusher that is killed at its n-th write, sync or rename."""

    def __init__(self) -> None:
        self.left = NO_LIMIT

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("killed here")

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        if self.left == 0 and pieces:
            whole = b"".join(bytes(piece) for piece in pieces)
            os.pwrite(fd, whole[: len(whole) // 2], position)
        self._count()
        super().write_at(fd, pieces, position)

    def sync_data(self, fd: int) -> None:
        self._count()
        super().sync_data(fd)

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)


@pytest.mark.parametrize(
    "operations",
    [n if n % 4 == 0 else pytest.param(n, marks=pytest.mark.long) for n in range(LAST + 1)],
)
def test_a_flusher_killed_anywhere_between_the_change_and_the_roll_loses_and_mixes_nothing(
    tmp_path: pathlib.Path, operations: int
) -> None:
    files = Dying()
    with bench(str(tmp_path), files) as b:
        begin(b, version(1))
        b.send(batch_of(1, 4, 0, sequence=0))
        b.settle()
        b.send(batch_of(1, 4, 4, sequence=4))  # in the ring when the schema changes
        b.step_worker()
        b.assign(version(2))
        b.send(batch_of(2, 4, 8, sequence=8))
        b.step_worker()
        b.assign(version(3))
        b.send(batch_of(3, 4, 12, sequence=12))
        b.step_worker()
        files.left = operations
        killed = False
        try:
            while b.step_flusher():
                pass
        except KeyboardInterrupt:
            killed = True
            files.left = NO_LIMIT
            b.kill_flusher()  # the catalog's newest version comes before the ring's batches
        files.left = NO_LIMIT
        b.settle()
        assert segments(b) == [
            (SCHEMAS[1], rows_of(1, 8, 0)),
            (SCHEMAS[2], rows_of(2, 4, 8)),
            (SCHEMAS[3], rows_of(3, 4, 12)),
        ]
        assert b.table.read(0).high_watermark == 16
        if operations == LAST:
            assert not killed, "the parameters do not reach past the last operation: raise them"


def test_a_restart_goes_on_in_a_segment_of_the_newest_version(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        b.send(batch_of(1, 4, 0))
        b.settle()
        b.assign(version(2))
        b.settle()
        begin(b, version(2))  # both killed before a batch of the new version
        b.send(batch_of(2, 4, 4))
        b.settle()
        begin(b, version(2))
        b.send(batch_of(2, 4, 8))
        b.settle()
        assert segments(b) == [(SCHEMAS[1], rows_of(1, 4, 0)), (SCHEMAS[2], rows_of(2, 8, 4))]


def test_a_damaged_schema_message_is_restored_as_that_of_its_segments_version(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        for number in (1, 2):
            b.assign(version(number))
            b.send(batch_of(number, 4, 0))
            b.step_worker()
        b.settle()
        before = segments(b)
        with open(b.segment_paths()[-1], "r+b") as file:
            file.write(b"\0" * 64)
        log = PartitionLog(DiskFiles(), str(tmp_path), version(2))
        log.open("again")
        assert log.next_offset == 8
        assert not log.file.damage
        assert segments(b) == before


def test_a_batch_of_a_schema_that_the_log_does_not_have_takes_it_offline(
    tmp_path: pathlib.Path,
) -> None:
    """No build makes one. A segment that no reader can open must not be begun either."""
    with bench(str(tmp_path)) as b:
        begin(b, version(1))
        log = PartitionLog(DiskFiles(), str(tmp_path), version(2))
        log.open("again")
        with pytest.raises(OSError, match="a batch has schema 3; the log has"):
            log.roll(batch_of(3, 1, 0))
        assert b.segment_paths() == []
