"""Every call to the disk refused once, with each error: what was acknowledged stays, the process lives, and what went offline comes back."""

from __future__ import annotations

import dataclasses
import errno
import random

import pytest

from shm.layout import SlotState
from tests.crash.test_power_loss import boot
from tests.kit.checker import check
from tests.kit.simdisk import SimDisk, fail_at
from tests.kit.workload import Workload

OPERATIONS = 150
STEPS = 160


def run_with_failure(number: int, error: int, partitions: int, *, seed: int = 1) -> tuple[Workload, int]:
    """One schedule during which the `number`-th operation of the disk fails. Answers the workload, settled, and how many partitions went offline."""
    rng = random.Random(seed)
    disk = SimDisk()
    workload = Workload(boot(disk, 0, partitions), rng, partitions=partitions)
    workload.settle()
    disk.hook = fail_at(number, error)
    for _ in range(STEPS):
        workload.step()
        workload.bench.now_ns += 300_000_000  # a full disk is tried again
    workload.settle()
    disk.hook = None
    offline = [item for item in workload.bench.assignments if workload.bench.table.read(item.slot).state is SlotState.OFFLINE_FOR_WRITES]
    for item in offline:
        workload.bench.assign(dataclasses.replace(item, version=item.version + 1, revive=True))
    workload.settle()
    for producer in workload.producers:
        workload.send(producer)
    workload.settle()
    return workload, len(offline)


@pytest.mark.parametrize("partitions", [1, 6])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_operation_refused_once_loses_nothing_acknowledged(error: int, partitions: int) -> None:
    refused = offline = 0
    for number in range(OPERATIONS):
        workload, its_offline = run_with_failure(number, error, partitions)
        check(workload.history, workload.readable())
        refused += workload.refusals
        offline += its_offline
        for item in workload.bench.assignments:
            assert workload.bench.table.read(item.slot).state is SlotState.ONLINE
        assert all(not producer.unacknowledged for producer in workload.producers)
    if error == errno.ENOSPC:
        assert offline == 0, "a full disk is no broken disk"


def test_a_partition_that_is_offline_stays_so_over_a_restart_and_reads_go_on() -> None:
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(3))
    workload.send()
    workload.settle()
    acknowledged = dict(workload.history.acknowledged)

    def broken(operation: str, path: str) -> None:
        if ".arrow" in path and operation != "read":
            raise OSError(errno.EIO, "broken", path)

    disk.hook = broken
    workload.send()
    workload.settle()
    assert workload.refusals
    assert workload.bench.table.read(0).state is SlotState.OFFLINE_FOR_WRITES
    disk.hook = None
    workload.go_on(boot(disk, 0, 1))
    workload.settle()
    assert workload.bench.table.read(0).state is SlotState.OFFLINE_FOR_WRITES, "a restart alone does not make the disk good"
    assert len(workload.readable()[0]) == len(acknowledged)
    workload.bench.assign(dataclasses.replace(workload.bench.assignments[0], version=2, revive=True))
    workload.settle()
    workload.send()
    workload.settle()
    assert workload.bench.table.read(0).leader_epoch == 1, "what was appended under the old epoch above the watermark does not count"
    check(workload.history, workload.readable())
