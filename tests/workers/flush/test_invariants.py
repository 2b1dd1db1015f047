"""The invariant checks find what they are for: each is broken once, in memory, between two steps;
and what they have found.
"""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable

import pytest

from shm.tables.invariants import InvariantError
from tailrace.format.directory.partition_metadata import DamagedRange, Epoch
from tailrace.format.segments.segment import SEGMENT_SUFFIX, file_name
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import Bench, assignment, bench, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.flush.flusher_settings import FlusherSettings
from workers.flush.invariants import check_flusher, check_worker
from workers.log.files.active_segment import ActiveSegment
from workers.log.partition_log import PartitionLog


def log_of(it: Bench) -> PartitionLog:
    log = it.flusher._logs.get(0)
    assert log is not None
    return log


def live_of(it: Bench) -> ActiveSegment:
    live = log_of(it).live
    assert live is not None
    return live


def check_both(it: Bench) -> None:
    check_flusher(it.flusher)
    check_worker(it.worker)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda it: setattr(log_of(it), "high_watermark", 9), "high watermark 9"),
        (lambda it: setattr(log_of(it).file, "log_start_offset", 9), "start 9"),
        (lambda it: setattr(live_of(it), "synced_end", live_of(it).end + 1), "synced to"),
        (lambda it: setattr(live_of(it), "base", 9), "segment 9 is live"),
        (lambda it: setattr(log_of(it).file, "epochs", [Epoch(1, 5), Epoch(0, 0)]), "epochs"),
        (
            lambda it: setattr(
                log_of(it).file,
                "damage",
                [DamagedRange(0, 0, 0, 0, 3), DamagedRange(0, 0, 0, 2, 4)],
            ),
            "damage",
        ),
        (lambda it: log_of(it).producers.record(7, 0, 0, 1, 40, 42, 1), "producer 7"),
        (lambda it: setattr(it.flusher._followers[0], "cursor", 99), "cursor 99"),
        (lambda it: it.worker._partitions[0].producers.record(7, 0, 0, 1, 40, 42, 1), "producer 7"),
    ],
)
def test_a_broken_invariant_is_found(
    tmp_path: pathlib.Path, break_it: Callable[[Bench], None], said: str
) -> None:
    with bench(str(tmp_path)) as it:
        it.send(make_batch(3, producer_id=1))
        it.settle()
        check_both(it)
        break_it(it)
        with pytest.raises(InvariantError, match=said):
            check_both(it)


def test_retention_keeps_the_segment_that_took_the_place_of_an_empty_one() -> None:
    """A sync fails when a segment is to be closed: the empty one that is written anew begins where
    the next one does.
    """
    disk = SimDisk(("/data",))
    item = assignment(durability="memory", segment_bytes=65536)
    it = Bench(
        "/data",
        simulated_regions(),
        SimFiles(disk),
        FlusherSettings(journal_bytes=1 << 20),
        assignments=[item],
    )
    it.settle()
    failed: list[str] = []

    def refuse_once(operation: str, path: str) -> None:
        if (
            operation == "sync"
            and path.endswith(SEGMENT_SUFFIX)
            and not failed
            and log_of(it).next_offset
        ):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    disk.hook = refuse_once
    while not failed:
        it.send(make_batch(200))
        it.settle()
    base = live_of(it).base
    assert base > 0
    check_both(it)
    log_of(it).advance_start(base)
    assert list(log_of(it).sealed) == []
    assert disk.names[f"/data/t-0/{file_name(base)}"] is not None
    assert it.table.read(0).log_end_offset == log_of(it).next_offset > base
