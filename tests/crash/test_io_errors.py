"""Every call to the disk refused once, with each error: what was acknowledged stays, the process
lives, and what went offline comes back.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import random

import pytest

from shm.memory.layout import SlotState, Verdict
from tests.kit.checker import check
from tests.kit.log_files.simdisk import SimDisk, fail_at
from tests.kit.log_files.workload import Workload, boot
from tests.kit.matrices import short

OPERATIONS = range(150)
EVEN, ODD = OPERATIONS[::2], OPERATIONS[1::2]
STEPS = 160


def run_with_failure(
    number: int, error: int, partitions: int, *, seed: int = 1
) -> tuple[Workload, int]:
    """One schedule during which the `number`-th operation of the disk fails. Answers the workload,
    settled, and how many partitions went offline.
    """
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
    offline = [
        item
        for item in workload.bench.assignments
        if workload.bench.table.read(item.slot).state is SlotState.OFFLINE_FOR_WRITES
    ]
    for item in offline:
        workload.bench.assign(dataclasses.replace(item, version=item.version + 1, revive=True))
    workload.settle()
    for producer in workload.producers:
        workload.send(producer)
    workload.settle()
    return workload, len(offline)


@pytest.mark.parametrize(
    ("error", "partitions", "operations"),
    short(
        [
            (errno.EIO, 6, EVEN), (errno.ENOSPC, 6, ODD), (errno.EMFILE, 6, OPERATIONS[::15]),
            (errno.EIO, 6, ODD), (errno.ENOSPC, 6, EVEN), (errno.EMFILE, 6, OPERATIONS),
            *itertools.product((errno.EIO, errno.ENOSPC, errno.EMFILE), (1,), (OPERATIONS,)),
        ],
        0, 1, 2,
    ),
)  # fmt: skip
def test_every_operation_refused_once_loses_nothing_acknowledged(
    error: int, partitions: int, operations: range
) -> None:
    refused = offline = 0
    for number in operations:
        workload, its_offline = run_with_failure(number, error, partitions)
        check(workload.history, workload.readable())
        refused += workload.refusals
        offline += its_offline
        for item in workload.bench.assignments:
            assert workload.bench.table.read(item.slot).state is SlotState.ONLINE
        assert all(not producer.unacknowledged for producer in workload.producers)
    if error != errno.EIO:
        assert offline == 0, (
            "a full disk, too few descriptors, too little memory: none is a broken disk"
        )


def test_a_failed_sync_without_descriptors_for_a_new_file_waits_for_them() -> None:
    """A second sync of the same pages would succeed and mean nothing: the group waits for its new
    file, and the partition stays online.
    """
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(3), producers=1)
    workload.send()
    workload.settle()
    producer = workload.producers[0]
    seen: list[str] = []

    def short(operation: str, path: str) -> None:
        seen.append(operation)
        if "sync" in operation and path.endswith(".arrows") and seen.count("failed") == 0:
            seen.append("failed")
            raise OSError(errno.EIO, "broken", path)
        if operation == "create":
            raise OSError(errno.EMFILE, "too many", path)

    disk.hook = short
    workload.send(producer)
    for _ in range(3):
        workload.settle()
        workload.bench.now_ns += 300_000_000
    assert "failed" in seen
    assert producer.unacknowledged, "nothing may be acknowledged yet"
    disk.hook = None
    workload.settle()
    assert not producer.unacknowledged
    assert workload.bench.table.read(0).state is SlotState.ONLINE
    workload.go_on(boot(disk.lose_power(random.Random(1)), 1, 1))
    workload.settle()
    check(workload.history, workload.readable())


def test_a_partition_that_is_offline_stays_so_over_a_restart_and_reads_go_on() -> None:
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(3))
    workload.send()
    workload.settle()
    acknowledged = dict(workload.history.acknowledged)

    def broken(operation: str, path: str) -> None:
        if ".arrows" in path and operation != "read":
            raise OSError(errno.EIO, "broken", path)

    disk.hook = broken
    workload.send()
    workload.settle()
    assert workload.refusals
    assert workload.bench.table.read(0).state is SlotState.OFFLINE_FOR_WRITES
    disk.hook = None
    workload.go_on(boot(disk, 0, 1))
    workload.settle()
    assert workload.bench.table.read(0).state is SlotState.OFFLINE_FOR_WRITES, (
        "a restart alone does not make the disk good"
    )
    assert len(workload.readable()[0]) == len(acknowledged)
    workload.bench.assign(
        dataclasses.replace(workload.bench.assignments[0], version=2, revive=True)
    )
    workload.settle()
    workload.send()
    workload.settle()
    assert workload.bench.table.read(0).leader_epoch == 1, (
        "what was appended under the old epoch above the watermark does not count"
    )
    check(workload.history, workload.readable())


def _break(disk: SimDisk, name: str) -> None:
    """Nothing can be written to segments whose path has `name` in it."""

    def broken(operation: str, path: str) -> None:
        if name in path and ".arrows" in path and operation != "read":
            raise OSError(errno.EIO, "broken", path)

    disk.hook = broken


def test_a_second_copy_of_a_batch_whose_disk_failed_is_not_acknowledged() -> None:
    """Both lie in one group: the copy is judged as its original is."""
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(3), producers=1)
    workload.send()
    workload.settle()
    producer = workload.producers[0]
    _break(disk, "t-0/")
    workload.send(producer)
    sent = producer.unacknowledged[-1]
    workload._post(producer, sent)
    workload.bench.step_worker()
    workload.settle()
    ring = workload.bench.ring
    last = [ring.descriptor(number) for number in range(ring.producer_position.load())][-2:]
    assert [(d.is_duplicate, d.result) for d in last] == [(False, 0), (True, 0)]
    assert [ring.outcome(d.ordinal - 1).verdict for d in last] == [Verdict.FAILED, Verdict.FAILED]
    check(workload.history, workload.readable())


def test_what_only_the_journal_holds_of_a_log_that_is_offline_stays_there_until_it_is_on_the_disk() -> (  # noqa: E501
    None
):
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 3), random.Random(5), producers=1, partitions=3)
    workload.settle()
    first, *others = workload.producers
    for producer in workload.producers:
        workload.send(producer)
    workload.settle()  # one frame of the journal
    assert not first.unacknowledged
    _break(disk, "t-0/")
    workload.send(first)
    workload.settle()
    assert workload.bench.table.read(0).state is SlotState.OFFLINE_FOR_WRITES
    for _ in range(60):  # far more than the journal takes
        for producer in others:
            workload.send(producer)
        workload.settle()
    disk.hook = None
    disk = disk.lose_power(random.Random(1))
    workload.go_on(boot(disk, 1, 3))
    workload.settle()
    check(workload.history, workload.readable())
    assert workload.readable()[0], "it was acknowledged"
    workload.bench.assign(
        dataclasses.replace(workload.bench.assignments[0], version=2, revive=True)
    )
    workload.settle()
    workload.go_on(boot(disk.lose_power(random.Random(2)), 2, 3))
    workload.settle()
    check(workload.history, workload.readable())


def test_a_revived_log_has_on_its_disk_what_only_the_journal_held() -> None:
    """Pages whose sync failed look clean: without being written again they are gone with the
    power.
    """
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 3), random.Random(5), producers=1, partitions=3)
    workload.settle()
    for producer in workload.producers:
        workload.send(producer)
    workload.settle()
    _break(disk, "t-0/")
    workload.send(workload.producers[0])
    workload.settle()
    disk.hook = None
    workload.bench.assign(
        dataclasses.replace(workload.bench.assignments[0], version=2, revive=True)
    )
    for _ in range(60):
        for producer in workload.producers:
            workload.send(producer)
        workload.settle()
    workload.go_on(boot(disk.lose_power(random.Random(2)), 1, 3))
    workload.settle()
    check(workload.history, workload.readable())


@pytest.mark.parametrize("opening", ["not tried", "fails", "succeeds"])
def test_a_disk_that_could_not_even_keep_the_refusal_begins_an_epoch_when_it_is_good_again(
    opening: str,
) -> None:
    """The worker has appended above the log's end, and was told nothing of an epoch since: without
    a new one its next batch would leave a gap. `opening`: what a flusher's successor meets.
    """
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(3))
    workload.send()
    workload.settle()

    def broken(operation: str, path: str) -> None:
        if operation != "read":
            raise OSError(errno.EIO, "broken", path)

    def unreadable(operation: str, path: str) -> None:
        if path.endswith(".arrows"):
            raise OSError(errno.EIO, "broken", path)

    disk.hook = broken
    workload.send()
    workload.settle()
    told = workload.bench.table.read(0)
    assert (told.state, told.leader_epoch) == (SlotState.OFFLINE_FOR_WRITES, 1)
    workload.send()
    workload.bench.step_worker()  # takes the epoch up
    if opening == "fails":
        disk.hook = unreadable
        workload.bench.kill_flusher()
        workload.settle()
    disk.hook = None
    if opening == "succeeds":
        workload.bench.kill_flusher()
        workload.settle()
    workload.bench.assign(
        dataclasses.replace(workload.bench.assignments[0], version=2, revive=True)
    )
    workload.settle()
    revived = workload.bench.table.read(0)
    assert revived.state is SlotState.ONLINE
    assert revived.leader_epoch > told.leader_epoch
    acknowledged = len(workload.history.acknowledged)
    workload.send()
    workload.settle()
    assert workload.bench.table.read(0).state is SlotState.ONLINE
    assert len(workload.history.acknowledged) > acknowledged
    check(workload.history, workload.readable())
