"""Processes killed at each named place: what was acknowledged is there, once, in order, and
watermarks never go back.

Worker, flusher and recovery are stepped in this process, so that every visit of every name can be
the last one; controller and supervisor are killed as real processes (test_killed_processes).
"""

from __future__ import annotations

import dataclasses
import errno
import random
from collections.abc import Callable

import pytest

from shm.crash_points import CRASH_POINTS, armed
from tailrace.format.segments.segment import OLD_SEGMENT_SUFFIX, SEGMENT_SUFFIX
from tests.kit.checker import check
from tests.kit.log_files.simdisk import SimDisk
from tests.kit.log_files.workload import Workload, boot

OF_TRANSACTIONS = ("worker.after_marker", "worker.before_settled")
"""Visited by `tests/workers/append/test_transactions_after_faults.py`, which has a coordinator."""
OF_THE_BIN = ("flusher.in_bin", "flusher.in_undelete", "flusher.in_purge")
"""Visited by `tests/system/topics/test_undelete.py`."""
OF_COMPACTION = "_swap"
"""Part of the names that `tests/workers/clean/test_model.py` visits, which has a cleaner."""
STEPPED = [
    name
    for name in CRASH_POINTS
    if name.partition(".")[0] in ("worker", "flusher", "recovery")
    and name not in (*OF_TRANSACTIONS, *OF_THE_BIN)
    and OF_COMPACTION not in name
]
PARTITIONS = 6


class Killed(BaseException):
    """The process is gone."""


def kill() -> None:
    raise Killed


def _delete_records(workload: Workload) -> None:
    item = workload.bench.assignments[1]
    high_watermark = workload.bench.table.read(item.slot).high_watermark
    workload.bench.assign(
        dataclasses.replace(item, version=item.version + 1, delete_before=high_watermark - 1)
    )


def _drop(workload: Workload) -> None:
    item = workload.bench.assignments[-1]
    workload.producers = [p for p in workload.producers if p.partition != item.partition]
    workload.bench.assign(dataclasses.replace(item, version=item.version + 1, dropped=True))
    workload.bench.assignments.pop()


def _fail_one_sync(workload: Workload) -> None:
    disk = workload.bench.files.disk  # type: ignore[attr-defined]

    def hook(operation: str, path: str) -> None:
        if operation == "sync" and path.endswith(".arrows"):
            disk.hook = None
            raise OSError(errno.EIO, "once", path)

    disk.hook = hook


def _tear_a_tail(workload: Workload) -> None:
    """Everything is killed while a batch is half written."""
    disk = workload.bench.files.disk  # type: ignore[attr-defined]
    path = next(
        name
        for name in sorted(disk.names, reverse=True)
        if "t-0/" in name and name.endswith(".arrows")
    )
    disk.names[path].data += b"\xff\xff\xff\xff torn"
    workload.bench = workload.bench.restarted("again")


def _restart_with_old_names(workload: Workload) -> None:
    """An older build has written the directory."""
    disk = workload.bench.files.disk  # type: ignore[attr-defined]
    for path in [name for name in disk.names if name.endswith(SEGMENT_SUFFIX)]:
        for names in (disk.names, disk.durable_names):
            if path in names:
                names[path.removesuffix(SEGMENT_SUFFIX) + OLD_SEGMENT_SUFFIX] = names.pop(path)
    workload.bench = workload.bench.restarted("again")


def _restart(workload: Workload) -> None:
    workload.bench = workload.bench.restarted("again")


PROVOKED: dict[str, Callable[[Workload], None]] = {
    "flusher.in_retention": _delete_records,
    "flusher.in_delete": _drop,
    "flusher.in_rewrite": _fail_one_sync,
    "recovery.before_cut": _tear_a_tail,
    "recovery.after_cut": _tear_a_tail,
    "recovery.in_suffix_change": _restart_with_old_names,
    "recovery.after_journal": _restart,
    "recovery.before_ready": _restart,
}
"""Settings and faults that lead to places which the ordinary course does not visit."""


def run_killed(name: str, visit: int, *, everything: bool, seed: int) -> bool:
    """One schedule with a kill at the `visit`-th visit of `name`. Answers whether it came to
    that.
    """
    rng = random.Random(seed)
    workload = Workload(boot(SimDisk(), 0, PARTITIONS), rng, partitions=PARTITIONS)
    workload.settle()
    for _ in range(120):
        workload.step()
    killed = False
    with armed(name, kill, visit):
        try:
            if name in PROVOKED:
                PROVOKED[name](workload)
                if not workload.bench.is_running:
                    workload.go_on(workload.bench)
            for _ in range(160):
                workload.step()
            workload.settle()
        except Killed:
            killed = True
    workload.bench.files.disk.hook = None  # type: ignore[attr-defined]
    if killed and everything:
        workload.bench = workload.bench.restarted("after")
    elif killed and name.startswith("worker."):
        workload.bench.kill_worker()
    elif killed:
        workload.bench.kill_flusher()
    workload.go_on(workload.bench)
    workload.settle()
    readable = workload.readable()
    if name == "flusher.in_retention":
        forget_deleted(workload)
    check(workload.history, readable)
    return killed


def forget_deleted(workload: Workload) -> None:
    """Records below a log start offset are gone because somebody wanted it."""
    starts = {
        item.partition: workload.bench.table.read(item.slot).log_start_offset
        for item in workload.bench.assignments
    }
    known = workload.history.acknowledged
    workload.history.acknowledged = {
        key: offset for key, offset in known.items() if offset >= starts[key[0]]
    }


@pytest.mark.parametrize("name", STEPPED)
def test_a_kill_at_a_named_place_loses_and_repeats_nothing(name: str) -> None:
    visited = 0
    for everything in (False, True):
        for visit in (1, 2, 5):
            visited += run_killed(name, visit, everything=everything, seed=visit)
    assert visited >= 2, f"{name} is not visited by this test"
