"""Slot maps in worker and flusher: what an older map has routed is refused at the append point, and
the file says where the log ended then.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from shm.memory.layout import SLOT_MAP_SHIFT
from shm.memory.region import Region
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.partition_metadata import (
    PARTITION_FILE,
    PartitionMetadata,
    SlotMapEnd,
)
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from workers.flush.flusher_settings import FlusherSettings
from workers.segment.files import DiskFiles

OK, STALE = ErrorCode.OK, ErrorCode.STALE_SLOT_MAP


def with_map(version: int, counts: list[int]) -> Assignment:
    return dataclasses.replace(
        assignment(version=version), slot_counts=counts, partition_count=max(counts, default=1)
    )


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    regions: dict[str, Region] = simulated_regions()
    made = Bench(
        str(tmp_path),
        regions,
        DiskFiles(),
        FlusherSettings(journal_bytes=1 << 20),
        assignments=[with_map(1, [2])],
    )
    made.settle()
    yield made
    made.release()


def send(bench: Bench, sequence: int, map_version: int, producer_id: int = 9) -> None:
    bench.send(
        make_batch(2, producer_id=producer_id, sequence=sequence),
        acks=2 | map_version << SLOT_MAP_SHIFT,
    )


def results(bench: Bench) -> list[tuple[ErrorCode, int, bool]]:
    """(code, base offset, whether it was there already) of every batch."""
    descriptors = map(bench.ring.descriptor, range(bench.ring.producer_position.load()))
    return [
        (ErrorCode(d.result), d.base_offset, d.is_duplicate)
        for d in descriptors
        if not d.is_control
    ]


def map_ends(bench: Bench) -> list[SlotMapEnd]:
    file = PartitionMetadata.decode(
        (pathlib.Path(bench.directory) / "t-0" / PARTITION_FILE).read_bytes()
    )
    assert file is not None
    return file.map_ends


def test_what_an_old_map_has_routed_is_refused_from_the_change_on_and_its_sequence_is_given_again(
    bench: Bench,
) -> None:
    send(bench, 0, 1)
    bench.settle()
    bench.assign(with_map(2, [2, 3]))
    bench.step_worker()
    send(bench, 2, 1)  # new: refused, and nothing is remembered of it
    send(bench, 4, 1)
    send(bench, 0, 1)  # a retry of what was appended
    send(bench, 0, 1, producer_id=10)
    send(bench, 2, 2)
    send(bench, 4, 3)
    bench.send(make_batch(2), acks=2)
    bench.send(make_batch(2), acks=2 | 2 << SLOT_MAP_SHIFT)
    bench.settle()
    assert results(bench) == [
        (OK, 0, False), (STALE, 2, False), (STALE, 2, False), (OK, 0, True), (STALE, 2, False),
        (OK, 2, False), (STALE, 4, False), (STALE, 4, False),
        (OK, 4, False),
    ]  # fmt: skip
    assert map_ends(bench) == [SlotMapEnd(2, 2)]


def test_a_topic_without_slots_takes_what_says_nothing_of_a_map(tmp_path: pathlib.Path) -> None:
    bench = Bench(
        str(tmp_path),
        simulated_regions(),
        DiskFiles(),
        FlusherSettings(journal_bytes=1 << 20),
        assignments=[with_map(1, [])],
    )
    bench.settle()
    send(bench, 0, 0)
    bench.assign(with_map(2, []))
    send(bench, 2, 0)
    bench.settle()
    assert [code for code, _, _ in results(bench)] == [OK, OK]
    assert map_ends(bench) == []


@pytest.mark.parametrize("killed", ["worker", "flusher", "both"])
@pytest.mark.parametrize("steps", range(4))
def test_the_file_says_exactly_where_the_log_ended_whoever_is_killed(
    bench: Bench, killed: str, steps: int
) -> None:
    for sequence in range(0, 10, 2):
        send(bench, sequence, 1)
    bench.step_worker()
    bench.assign(with_map(2, [2, 3]))
    send(bench, 10, 1)
    send(bench, 10, 2)
    for step in range(steps):
        bench.step_worker() if step % 2 else bench.step_flusher()
    if killed != "flusher":
        bench.kill_worker()
    if killed != "worker":
        bench.kill_flusher()
    bench.settle()
    codes = [code for code, _, _ in results(bench)]
    assert sorted(codes) == sorted([OK] * 6 + [STALE])
    assert map_ends(bench) == [SlotMapEnd(2, 10)]
    assert bench.table.read(0).log_end_offset == 12
