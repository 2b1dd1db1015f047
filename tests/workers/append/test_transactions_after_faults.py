"""Transactions at a worker that is killed, restarted, fed again, or whose partitions come and go.

The coordinator is the test: its rows and registrations outlive everything
(`tests.kit.stepped.coordinator`).
"""

from __future__ import annotations

import dataclasses
import errno
import random

import pytest

from shm.crash_points import armed
from shm.memory.layout import SlotState
from shm.messages.transaction_messages import (
    DecidedTransaction,
    Decision,
    Outcome,
    RegisteredProducer,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import checksum_seed
from tests.kit.batches import TOPIC_ID, make_batch
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.matrices import short
from tests.kit.stepped.coordinator import (
    ABORT,
    COMMIT,
    FENCED,
    NOT_YET,
    PID,
    SEALED,
    Coordinator,
    ends_of,
    make_bench,
    results,
    transactional,
)
from workers.append import partitions
from workers.append.decision_progress import SETTLED_AFTER_NS
from workers.append.transactions import RETRY_NS
from workers.append.worker import EPOCHS_INTERVAL_NS
from workers.flush.flusher_settings import FlusherSettings


class Killed(BaseException):
    """The process is gone."""


def kill() -> None:
    raise Killed


def registered(bench: Bench, *epochs: int) -> Coordinator:
    """A coordinator that has registered transactional id n with producer id PID + n."""
    made = Coordinator(bench)
    for n, epoch in enumerate(epochs or (0,)):
        made.decide(n + 1, [], [(PID + n, epoch)], is_sent=False)
    made.feed()
    made.settle()
    return made


def progress(coordinator: Coordinator) -> tuple[int, list[int]]:
    """Progress that the worker reports: the ordinal, and what is unfinished."""
    return coordinator.settled.ordinal, list(coordinator.settled.unfinished)


def restart_worker(coordinator: Coordinator, *, is_fed: bool = True) -> None:
    coordinator.bench.kill_worker()
    coordinator.settle()
    if is_fed:
        coordinator.feed()
        coordinator.settle()


def restart_all(coordinator: Coordinator, run: str, *, power: bool = False) -> Bench:
    """Kill everything, or pull the plug: then the rings are lost too."""
    bench = coordinator.bench
    if power:
        assert isinstance(bench.files, SimFiles)
        disk = bench.files.disk.lose_power(random.Random(run))
        made = Bench(
            bench.directory, simulated_regions(), SimFiles(disk), bench.settings,
            assignments=bench.assignments, run=run, lost_memory=True, now_us=bench.now_us,
        )  # fmt: skip
    else:
        made = bench.restarted(run)
    coordinator.bench = made
    coordinator.attach()
    made.settle()
    coordinator.read()
    return made


# ---- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["worker.after_marker", "worker.after_publish"])
@pytest.mark.parametrize("visit", [1, 2, 3])
def test_a_worker_killed_among_the_markers_of_a_decision_ends_each_once(
    where: str, visit: int
) -> None:
    it = make_bench(3)
    coordinator = registered(it)
    for partition in range(3):
        results(it, transactional(partition=partition), slot=partition)
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.send(transactional(epoch=1, partition=2), slot=2)
    with armed(where, kill, visit):
        try:
            it.step_worker()
        except Killed:
            restart_worker(coordinator)
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [])
    for partition in range(3):
        assert ends_of(it, partition) == [(0, 0, 1)]
    both = [transactional(epoch=1, sequence=sequence, partition=2) for sequence in (0, 2)]
    assert results(it, *both, slot=2) == [0, 0], "the first one was taken, or is repeated"
    assert it.table.read(2).high_watermark == 7


def test_a_worker_killed_before_it_reports_reports_after_its_feed() -> None:
    it = make_bench()
    coordinator = registered(it)
    results(it, transactional())
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.step_worker()
    it.step_flusher()
    it.step_worker()
    it.now_ns += SETTLED_AFTER_NS
    with armed("worker.before_settled", kill), pytest.raises(Killed):
        it.step_worker()
    coordinator.read()
    assert coordinator.settled.ordinal < ordinal
    restart_worker(coordinator)
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it) == [(0, 0, 1)]


def test_a_successor_reports_a_marker_of_its_predecessor_only_when_it_is_durable() -> None:
    it = make_bench()
    coordinator = registered(it)
    results(it, transactional())
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.step_worker()
    it.kill_worker()
    coordinator.feed()
    for _ in range(5):
        it.step_worker()
    coordinator.read()
    assert ordinal in coordinator.rows, "the marker is in the ring only: power could be lost"
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it) == [(0, 0, 1)]


def test_a_decision_read_again_from_the_lane_ends_nothing_more() -> None:
    """Killed when its markers are published, and its lane's message is not consumed."""
    it = make_bench()
    coordinator = registered(it)
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.send(transactional(epoch=1))
    with armed("worker.after_publish", kill), pytest.raises(Killed):
        it.step_worker()
    restart_worker(coordinator)
    assert results(it, transactional(epoch=1, sequence=2)) == [0]
    assert ends_of(it) == [(0, 0, 1)]


def test_a_successor_takes_nothing_before_its_own_feed_and_knows_what_is_open() -> None:
    it = make_bench()
    coordinator = registered(it)
    results(it, transactional(), transactional(sequence=2))
    restart_worker(coordinator, is_fed=False)
    assert results(it, transactional(sequence=4), make_batch(1)) == [NOT_YET, 0]
    coordinator.feed(coordinator.generation - 1)
    assert results(it, transactional(sequence=4)) == [NOT_YET]
    coordinator.opened.clear()
    coordinator.feed()
    coordinator.settle()
    assert coordinator.connected[-1] == coordinator.generation
    assert coordinator.opened == [(PID, 0)], "what is open is reported again"
    assert results(it, transactional(sequence=2), transactional(sequence=4)) == [0, 0]
    assert it.table.read(0).high_watermark == 7


@pytest.mark.parametrize("way", ["worker", "all", "power"])
@pytest.mark.parametrize("outcome", [COMMIT, ABORT])
def test_what_was_decided_before_a_restart_is_carried_out_by_the_feed(
    way: str, outcome: int
) -> None:
    it = make_bench(2)
    coordinator = registered(it)
    for partition in range(2):
        results(it, transactional(partition=partition), slot=partition)
    ordinal = coordinator.decide(1, [(PID, 0, outcome)], [(PID, 1)], is_sent=False)  # type: ignore[list-item]
    if way == "worker":
        it.kill_worker()
        it.settle()
    else:
        it = restart_all(coordinator, "second", power=way == "power")
    assert results(it, transactional(epoch=1)) == [NOT_YET]
    coordinator.feed()
    assert results(it, transactional(epoch=1)) == [0]
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [])
    assert [ends_of(it, n) for n in range(2)] == [[(0, 0, outcome)]] * 2


@pytest.mark.parametrize("outcome", [COMMIT, ABORT])
@pytest.mark.parametrize("way", ["worker", "all", "power"])
def test_what_is_open_and_registered_goes_on_after_a_restart_and_the_rest_ends_as_it_was_decided(
    way: str, outcome: Outcome
) -> None:
    it = make_bench()
    coordinator = registered(it, 5, 7, 9)
    for n, epoch in enumerate((5, 7, 9)):
        assert results(it, transactional(PID + n, epoch)) == [0]
    del coordinator.registered[2]
    coordinator.registered[3] = 3, [(PID + 2, 9, SEALED)]  # type: ignore[list-item]
    if way == "worker":
        it.kill_worker()
        it.settle()
    else:
        it = restart_all(coordinator, "second", power=way == "power")
    coordinator.feed()
    assert results(it, transactional(PID, 5, 2)) == [0]
    coordinator.read()
    assert coordinator.asked == [(PID + 1, 7)], "it has a row no more, but perhaps an end"
    assert ends_of(it) == []
    coordinator.answer((PID + 1, 7, outcome))
    it.settle()
    assert ends_of(it) == [(1, 7, outcome)]
    coordinator.decide(3, [(PID + 2, 9, COMMIT)], [(PID + 2, 10)])
    coordinator.decide(1, [(PID, 5, COMMIT)], [(PID, 6)])
    it.settle()
    assert ends_of(it) == [(1, 7, outcome), (2, 9, 1), (0, 5, 1)]


def test_open_transactions_without_a_coordinator_request_one() -> None:
    it = make_bench()
    coordinator = registered(it)
    results(it, transactional())
    assert not it.has_requested_coordinator
    after = it.restarted("second")
    after.settle()
    assert after.has_requested_coordinator
    assert results(after, transactional(sequence=2)) == [NOT_YET]
    coordinator.bench = after
    coordinator.attach()
    coordinator.feed()
    assert results(after, transactional(sequence=2)) == [0]


def test_a_feed_replaces_what_was_registered_also_by_lower_ordinals() -> None:
    """The coordinator's database was lost: it counts from the beginning."""
    it = make_bench()
    coordinator = registered(it)
    for epoch in range(9):
        coordinator.decide(1, [(PID, epoch, COMMIT)], [(PID, epoch + 1)])
    results(it, transactional(epoch=9))
    coordinator.settle()
    lost = Coordinator(it)
    lost.decide(1, [], [(PID + 100, 0)])
    lost.feed()
    assert results(it, transactional(epoch=9, sequence=2)) == [FENCED]
    assert results(it, transactional(PID + 100)) == [0]
    lost.read()
    assert lost.asked == [(PID, 9)]
    lost.answer((PID, 9, ABORT))
    it.settle()
    assert ends_of(it) == [(0, 9, 2)]


def test_a_coordinator_that_dies_within_its_feed_leaves_the_worker_unfed() -> None:
    from shm.messages.lane_messages import LaneKind

    it = make_bench()
    coordinator = registered(it)
    results(it, transactional())
    coordinator.send(LaneKind.TRANSACTIONS_FEED)
    assert results(it, transactional(sequence=2), make_batch(1)) == [NOT_YET, 0]
    assert ends_of(it) == []
    coordinator.feed()
    assert results(it, transactional(sequence=2)) == [0]


# ---- disks and partitions ------------------------------------------------------------------------


def _fail_writes(it: Bench, partition: int) -> None:
    assert isinstance(it.files, SimFiles)

    def hook(operation: str, path: str) -> None:
        if operation in ("write", "sync") and f"/t-{partition}/" in path:
            raise OSError(errno.EIO, "broken", path)

    it.files.disk.hook = hook


def _mend(it: Bench) -> None:
    assert isinstance(it.files, SimFiles)
    it.files.disk.hook = None


def _revive(it: Bench, slot: int) -> None:
    item = dataclasses.replace(
        it.assignments[slot], version=it.assignments[slot].version + 1, revive=True
    )
    it.assign(item)
    it.assignments[slot] = dataclasses.replace(item, revive=False)
    it.settle()


def _pass_time(coordinator: Coordinator) -> None:
    coordinator.bench.now_ns += RETRY_NS
    coordinator.settle()


@pytest.mark.parametrize("kills", [False, True])
def test_a_marker_that_the_disk_refuses_is_written_when_the_partition_is_back(kills: bool) -> None:
    it = make_bench(2)
    coordinator = registered(it)
    for partition in range(2):
        results(it, transactional(partition=partition), slot=partition)
    _fail_writes(it, 1)
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    if kills:
        it.step_worker()
        it.kill_worker()
        coordinator.feed()
    coordinator.settle()
    assert it.table.read(1).state is SlotState.OFFLINE_FOR_WRITES
    assert progress(coordinator) == (ordinal, [ordinal])
    assert results(it, transactional(epoch=1)) == [0], "others go on"
    later = coordinator.decide(1, [(PID, 1, ABORT)], [(PID, 2)])
    _pass_time(coordinator)
    assert progress(coordinator) == (later, [ordinal])
    _mend(it)
    _pass_time(coordinator)
    assert progress(coordinator) == (later, [ordinal])
    _revive(it, 1)
    _pass_time(coordinator)
    assert progress(coordinator) == (later, [])
    assert coordinator.rows == {}
    assert ends_of(it, 0) == [(0, 0, 1), (0, 1, 2)]
    assert ends_of(it, 1) == [(0, 0, 1)]
    assert results(it, transactional(epoch=2, partition=1), slot=1) == [0]


def test_a_refused_marker_is_written_later_though_its_refusal_is_read_behind_the_new_epoch() -> (
    None
):
    """A batch comes between the flusher's verdict and its notice of it: the worker takes the log up
    as it is, and reads of the refusal afterwards.
    """
    it = make_bench(2)
    coordinator = registered(it)
    results(it, transactional(partition=1), slot=1)
    assert isinstance(it.files, SimFiles)

    def hook(operation: str, path: str) -> None:
        if operation in ("write", "sync") and "/t-1/" in path and ".arrows" in path:
            raise OSError(errno.EIO, "broken", path)

    def append() -> None:
        it.send(make_batch(1, seed=checksum_seed(TOPIC_ID, 1)), slot=1)
        it.step_worker()
        assert it.worker._partitions[1].leader_epoch == it.table.read(1).leader_epoch

    it.files.disk.hook = hook
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.step_worker()
    with armed("flusher.after_verdicts", append):
        it.step_flusher()
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [ordinal])
    _mend(it)
    _revive(it, 1)
    _pass_time(coordinator)
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it, 1) == [(0, 0, 1)]


def test_a_partition_that_is_offline_when_it_is_decided_gets_its_marker_later() -> None:
    it = make_bench(2)
    coordinator = registered(it)
    results(it, transactional(partition=1), slot=1)
    _fail_writes(it, 1)
    results(it, transactional(partition=1, sequence=2), slot=1)
    assert it.table.read(1).state is SlotState.OFFLINE_FOR_WRITES
    ordinal = coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [ordinal])
    _mend(it)
    _revive(it, 1)
    _pass_time(coordinator)
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it, 1) == [(0, 0, 2)]


def test_a_transaction_whose_batches_the_disk_refused_needs_no_marker() -> None:
    it = make_bench(2)
    coordinator = registered(it)
    _fail_writes(it, 1)
    results(it, transactional(partition=1), slot=1)
    ordinal = coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    coordinator.settle()
    assert coordinator.settled.ordinal == ordinal
    _mend(it)
    _revive(it, 1)
    _pass_time(coordinator)
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it, 1) == []


def test_a_refused_batch_that_comes_back_with_a_revived_log_does_not_stay_open() -> None:
    """The disk took the batch, and failed when it was synced, and when the partition's file was to
    say where the log ends. Nothing is appended afterwards.
    """
    it = make_bench(2)
    coordinator = registered(it)
    assert isinstance(it.files, SimFiles)

    def hook(operation: str, path: str) -> None:
        is_data = operation == "write" and path.endswith(".arrows")
        if operation != "read" and not is_data and "/t-1/" in path:
            raise OSError(errno.EIO, "broken", path)

    results(it, make_batch(1, seed=checksum_seed(TOPIC_ID, 1)), slot=1)
    it.files.disk.hook = hook
    results(it, transactional(partition=1), slot=1)
    assert it.table.read(1).log_end_offset == 1, "the batch is refused"
    ordinal = coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [])
    _mend(it)
    _revive(it, 1)
    state = it.table.read(1)
    assert state.last_stable_offset < state.high_watermark, "the batch is there, and open"
    it.now_ns += 2 * EPOCHS_INTERVAL_NS
    _pass_time(coordinator)
    _pass_time(coordinator)
    assert coordinator.asked == [(PID, 0)]
    coordinator.answer((PID, 0, ABORT))
    coordinator.settle()
    assert ends_of(it, 1) == [(0, 0, 2)]
    state = it.table.read(1)
    assert state.last_stable_offset == state.high_watermark


@pytest.mark.parametrize("known", [False, True])
def test_a_partition_that_cannot_be_opened_gets_its_marker_when_it_can(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """`known`: it is decided after the worker's start, else before."""
    it = make_bench(2)
    coordinator = registered(it, 0, 0)
    for partition in range(2):
        results(it, transactional(partition=partition), slot=partition)
    if not known:
        coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)], is_sent=False)
    broken = [True]
    load = partitions.Partitions._take_up

    def take_up(*args: object) -> None:
        if broken and args[1].assignment.partition == 1:  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "broken")
        load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(partitions.Partitions, "_take_up", take_up)
    restart_worker(coordinator)
    if known:
        coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
        coordinator.settle()
    ordinal = coordinator.ordinal
    assert progress(coordinator) == (ordinal, [ordinal])
    coordinator.decide(1, [(PID, 1, ABORT)], [(PID, 2)])
    coordinator.decide(2, [(PID + 1, 0, ABORT)], [(PID + 1, 1)])
    coordinator.settle()
    # what was registered after the feed is not open there
    unfinished = [ordinal, ordinal + 2] if known else [ordinal, ordinal + 1, ordinal + 2]
    assert progress(coordinator) == (coordinator.ordinal, unfinished)
    broken.clear()
    it.now_ns += partitions.OPEN_RETRY_NS
    _pass_time(coordinator)
    _pass_time(coordinator)
    assert progress(coordinator) == (coordinator.ordinal, [])
    assert [ends_of(it, n) for n in range(2)] == [[(0, 0, 1)]] * 2


def test_a_feed_with_several_decisions_of_an_id_keeps_each_for_a_partition_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one's epoch is registered by the first, within the feed and long before it."""
    it = make_bench(2)
    coordinator = registered(it, 0, 0)
    coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    coordinator.settle()
    results(it, transactional(epoch=1, partition=1), slot=1)
    broken = [True]
    load = partitions.Partitions._take_up

    def take_up(*args: object) -> None:
        if broken and args[1].assignment.partition == 1:  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "broken")
        load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(partitions.Partitions, "_take_up", take_up)
    coordinator.decide(1, [(PID, 1, COMMIT)], [(PID, 2)], is_sent=False)
    first, second = coordinator.ordinal - 1, coordinator.ordinal
    coordinator.rows[first] = Decision(
        first, 1, [DecidedTransaction(PID, 0, ABORT)], [RegisteredProducer(PID, 1)]
    )  # not carried out everywhere, as far as the coordinator knows
    restart_worker(coordinator)
    assert progress(coordinator) == (second, [first, second])
    broken.clear()
    it.now_ns += partitions.OPEN_RETRY_NS
    _pass_time(coordinator)
    _pass_time(coordinator)
    assert progress(coordinator) == (second, [])
    assert ends_of(it, 1) == [(0, 1, 1)]


def test_a_partition_that_is_opened_after_the_feed_asks_how_its_transactions_have_ended() -> None:
    """Its assignment was overtaken: it was moved, or its worker was made later."""
    it = make_bench(2)
    coordinator = registered(it, 0, 0, 0)
    for n in range(3):
        results(it, transactional(PID + n, partition=1), slot=1)
    moved = it.assignments.pop()
    it.kill_worker()
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)], is_sent=False)
    coordinator.decide(2, [(PID + 1, 0, ABORT)], [(PID + 1, 1)], is_sent=False)
    coordinator.feed()
    coordinator.settle()
    assert coordinator.rows == {}
    coordinator.opened.clear()
    it.assignments.append(moved)
    it.assign(dataclasses.replace(moved, version=moved.version + 1))
    coordinator.settle()
    assert coordinator.asked == [(PID, 0), (PID + 1, 0)]
    assert coordinator.opened == [(PID + 2, 0)]
    assert results(it, transactional(epoch=1, partition=1), slot=1) == [NOT_YET]
    coordinator.read()
    assert len(coordinator.asked) == 2, "once"
    coordinator.answer((PID, 0, COMMIT), (PID + 1, 0, ABORT))
    assert results(it, transactional(epoch=1, partition=1), slot=1) == [0]
    assert ends_of(it, 1) == [(0, 0, 1), (1, 0, 2)]
    assert results(it, transactional(PID + 2, 0, 2, partition=1), slot=1) == [0]


def test_a_deleted_partition_needs_no_marker_and_its_slot_may_have_another_topic() -> None:
    it = make_bench(2)
    coordinator = registered(it)
    for partition in range(2):
        results(it, transactional(partition=partition), slot=partition)
    item = it.assignments[1]
    it.assign(dataclasses.replace(item, version=2, dropped=True))
    it.settle()
    it.assignments.pop()
    it.assignments.append(assignment(1, slot=1, topic="u", topic_id=bytes(16)))
    it.assign(it.assignments[1])
    it.settle()
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [])
    assert ends_of(it, 0) == [(0, 0, 1)]
    assert it.table.read(1).log_end_offset == 0


def test_a_partition_that_is_deleted_while_its_marker_is_missing_is_waited_for_no_more() -> None:
    it = make_bench(2)
    coordinator = registered(it)
    results(it, transactional(partition=1), slot=1)
    _fail_writes(it, 1)
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    coordinator.settle()
    assert progress(coordinator) == (ordinal, [ordinal])
    _mend(it)
    it.assign(dataclasses.replace(it.assignments[1], version=2, dropped=True))
    it.assignments.pop()
    it.settle()
    _pass_time(coordinator)
    assert progress(coordinator) == (ordinal, [])


def test_a_transaction_reaches_partitions_that_were_added_meanwhile() -> None:
    it = make_bench(1)
    coordinator = registered(it)
    results(it, transactional())
    it.assignments.append(assignment(1, slot=1))
    it.assign(it.assignments[1])
    it.settle()
    assert results(it, transactional(partition=1), slot=1) == [0]
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.settle()
    assert [ends_of(it, n) for n in range(2)] == [[(0, 0, 1)]] * 2


# ---- at random -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", short(range(25), *range(8)))
def test_every_transaction_ends_as_it_was_decided_whatever_dies(seed: int) -> None:
    """Random transactions over partitions, with kills of the worker, the flusher, both, and of the
    coordinator, between any two steps and at crash points. At the end the markers in the logs are
    those of the decisions, once each, behind the batches of their epoch.
    """
    rng = random.Random(seed)
    it = Bench(
        "/data", simulated_regions(1 << 16, 32), SimFiles(SimDisk()),
        FlusherSettings(checkpoint_bytes=4 << 10, journal_bytes=64 << 10),
        assignments=[assignment(n, slot=n) for n in range(4)],
    )  # fmt: skip
    it.settle()
    ids = 3
    coordinator = registered(it, *[0] * ids)
    epochs = [0] * ids
    sequences: dict[tuple[int, int], int] = {}
    sent: set[tuple[int, int, int]] = set()
    decided: dict[tuple[int, int], int] = {}

    def recover() -> None:
        restart_worker(coordinator, is_fed=rng.random() < 0.8)

    for _ in range(250):
        what = rng.random()
        n = rng.randrange(ids)
        try:
            with armed(rng.choice(["worker.after_marker", "worker.after_publish"]), kill, 5):
                if what < 0.4:
                    partition = rng.randrange(4)
                    sequence = sequences.get((n, partition), 0)
                    batch = transactional(PID + n, epochs[n], sequence, partition=partition)
                    if results(it, batch, slot=partition) == [0]:
                        sequences[n, partition] = sequence + 2
                        sent.add((n, epochs[n], partition))
                elif what < 0.6:
                    outcome = rng.choice([COMMIT, ABORT])
                    decided[n, epochs[n]] = outcome
                    epochs[n] += 1
                    is_sent = rng.random() < 0.9  # else the coordinator was killed before
                    coordinator.decide(
                        n + 1, [(PID + n, epochs[n] - 1, outcome)], [(PID + n, epochs[n])],
                        is_sent=is_sent,
                    )  # fmt: skip
                    if not is_sent:
                        coordinator.feed()
                    for partition in range(4):
                        sequences.pop((n, partition), None)
                elif what < 0.75:
                    it.step_worker()
                elif what < 0.85:
                    it.step_flusher()
                    it.ring.cursors[0].store(it.ring.settled.load())
                elif what < 0.9:
                    coordinator.feed()
                elif what < 0.93 and coordinator.rows:
                    coordinator.resend(rng.choice(list(coordinator.rows.values())))
                elif what < 0.96:
                    it.kill_flusher()
                    it.settle()
                elif what < 0.98:
                    it.kill_worker()
                else:
                    it = restart_all(coordinator, f"run-{rng.random()}")
                coordinator.read()
        except Killed:
            recover()
        if rng.random() < 0.1:
            coordinator.feed()
            coordinator.settle()
    coordinator.feed()
    coordinator.settle()
    assert coordinator.rows == {}
    for partition in range(4):
        expected = sorted(
            (n, epoch, decided[n, epoch])
            for n, epoch, where in sent
            if where == partition and (n, epoch) in decided
        )
        found = ends_of(it, partition)
        assert set(expected) <= set(found)
        assert len(set(found)) == len(found), "each once"
        assert all(decided[n, epoch] == outcome for n, epoch, outcome in found)
    assert results(it, make_batch(1)) == [0]
    assert ErrorCode.INTERNAL_ERROR not in [result for result, _ in it.answers()]
