"""Power loss at every point, over a disk that forgets what was not synced: what acks=all
acknowledged is there, nothing else appears, nothing repeats.
"""

from __future__ import annotations

import random

import pytest

from tests.kit.checker import check
from tests.kit.log_files.simdisk import SimDisk
from tests.kit.log_files.workload import Workload, boot
from tests.kit.matrices import short

PARTITIONS = 7
SEEDS_PER_TEST = 12


class PowerLost(BaseException):
    """The plug is pulled."""


def one_schedule(seed: int, partitions: int) -> int:
    """Power is lost three times at random operations of the disk, in recovery too. Answers how many
    records there are in the end.
    """
    rng = random.Random(seed)
    disk = SimDisk()
    workload = Workload(boot(disk, 0, partitions), rng, partitions=partitions)
    for run in range(1, 4):
        deadline = disk.operations + rng.randint(1, 260)

        def pull(operation: str, path: str, deadline: int = deadline, disk: SimDisk = disk) -> None:
            if disk.operations >= deadline:
                raise PowerLost(f"{operation} {path}")

        disk.hook = pull
        try:
            if run > 1:
                workload.go_on(workload.bench)
            while True:
                workload.step()
        except PowerLost:
            pass
        disk.hook = None
        disk = disk.lose_power(rng)
        workload.bench = boot(disk, run, partitions)
    workload.go_on(workload.bench)
    workload.settle()
    return check(workload.history, workload.readable())


@pytest.mark.parametrize("start", short(range(0, 240, SEEDS_PER_TEST), *range(6)))
def test_power_lost_at_any_operation_loses_nothing_acknowledged(start: int) -> None:
    for seed in range(start, start + SEEDS_PER_TEST):
        try:
            one_schedule(seed, 1 + seed % PARTITIONS)
        except BaseException as error:
            error.add_note(f"replay with one_schedule({seed}, {1 + seed % PARTITIONS})")
            raise
