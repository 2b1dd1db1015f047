"""Kills of the coordinator and of workers between any two stores."""

from __future__ import annotations

import pytest

from shm.messages.transaction_messages import ProducerEpoch, Settled
from tailrace.core.errors import (
    DiskFullError,
    ProducerFencedError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    Fenced,
    NotYet,
    Owner,
    World,
    commit_of,
    markers,
    offsets,
)


def test_a_decision_is_carried_out_after_a_kill_of_the_coordinator(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    for worker in world.workers.workers:
        worker.lane.clear()  # killed before it published its lanes
    decided = world.numbers.last_ordinal
    world.workers.shown.clear()
    world.kill()
    assert world.workers.shown[0][0] == decided > world.workers.shown[0][1]
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_what_was_not_committed_is_not_sent_and_the_owner_goes_on(world: World) -> None:
    a = Owner(world)
    a.write()
    world.send(Api.END_TRANSACTION, **a.request(offsets=[commit_of()]))
    world.kill()  # before the commit
    world.settle()
    assert markers(world) == [[], []]
    assert offsets(world) == -1
    a.end(offsets=[commit_of()])
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    assert offsets(world) == 5


def test_a_marker_that_was_only_in_the_ring_is_written_again_after_a_loss_of_power(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    a.end()
    for worker in world.workers.workers:
        worker.read()  # markers in the ring
    world.workers.workers[0].flush()
    world.coordinator.workers_changed()
    world.step()
    world.lose_power()
    assert markers(world) == [["commit"], []]
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_two_decisions_of_one_id_are_both_carried_out_after_a_loss_of_power(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    world.workers.workers[0].read()
    world.workers.workers[0].flush()
    a.write(0)
    a.end("abort")
    world.lose_power()
    world.settle()
    assert markers(world) == [["commit", "abort"], ["commit"]]


def test_a_killed_worker_takes_nothing_before_its_feed(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    world.workers.workers[0].kill()
    with pytest.raises(NotYet):
        a.write(0)
    world.kill_worker(0)
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    a.write()


def test_without_groups_db_what_is_open_is_aborted_and_no_number_is_given_twice(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    before = a.current, a.owner
    world.lose_database()
    world.workers.request()  # a worker with an open transaction has asked for the lanes
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]
    b = Owner(world)
    assert b.producer_id != before[0][0]
    assert b.owner > before[1]
    with pytest.raises(ProducerFencedError):
        a.end()
    with pytest.raises(Fenced):
        a.write()


def test_a_partition_that_moved_asks_for_its_outcome_and_never_for_nothing(world: World) -> None:
    a = Owner(world)
    a.write(0)
    a.end()
    zero, one = world.workers.workers
    one.log, one.durable, zero.log, zero.durable = zero.log, zero.durable, [], 0  # END meets nobody
    zero.read()
    one.ends = [(world.numbers.last_ordinal, 0)]
    one.lane.clear()  # it read END before it took the partition up
    zero.flush()
    one.flush()
    world.coordinator.workers_changed()
    world.step()
    world.coordinator.asked(1, [ProducerEpoch(a.producer_id, a.epoch - 1)], world.now_ns)
    world.step()
    world.settle()
    assert markers(world) == [[], ["commit"]]


def test_an_answer_of_commit_to_a_worker_is_durable_until_its_marker_is(world: World) -> None:
    a = Owner(world)
    a.write(0)
    epoch = ProducerEpoch(*a.current)
    a.end()
    world.settle()
    zero = world.workers.workers[0]
    zero.log = zero.log[:1]  # a failed write has taken the marker out again
    world.coordinator.asked(0, [epoch], world.now_ns)
    world.step()
    world.wait(10)
    assert world.store.read("SELECT count(*) FROM decisions") == [(1,)]
    world.settle()
    assert markers(world)[0] == ["commit"]
    world.wait(10)
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]


def test_a_marker_that_a_damaged_file_has_lost_is_written_again_with_its_outcome(
    world: World,
) -> None:
    """The row of the decision is gone, and its id knows its newest ends."""
    a = Owner(world)
    epochs = []
    for outcome in ("commit", "abort", "commit"):
        a.write(0)
        epochs.append(ProducerEpoch(*a.current))
        a.end(outcome)
        world.settle()
    world.wait(10)
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]
    world.kill()
    world.settle()
    zero = world.workers.workers[0]
    whole = zero.log
    for epoch, marker in zip(epochs, ["abort", "abort", "commit"], strict=True):
        zero.log = [("data", *epoch)]
        world.coordinator.asked(0, [epoch], world.now_ns)
        world.step()
        world.settle()
        assert markers(world)[0] == [marker], "the oldest is not known any more"
    zero.log = whole


def test_rows_go_when_every_worker_is_done_and_never_while_one_is_unfinished(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    world.settle()
    b = Owner(world, "other")
    b.end()
    unfinished = world.numbers.last_ordinal
    for worker in world.workers.workers:
        worker.settled = Settled(unfinished, (unfinished,) if worker.name == "worker-1" else ())
    world.coordinator.workers_changed()
    world.wait(10)
    rows = world.store.read("SELECT ordinal FROM decisions")
    assert rows == [(unfinished,)]
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="other")
    assert found["state"] == "committing"


def test_readers_are_shown_a_decision_before_its_owner_and_that_it_is_carried_out_behind_all(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    number = world.send(Api.END_TRANSACTION, **a.request())
    world.step(DiskFullError("the disk is full"))
    shown = [*world.workers.shown]
    a.end()
    assert number in world.answers
    decided = world.numbers.last_ordinal
    assert world.workers.shown[-1][0] == decided
    assert world.workers.shown[-1][1] < decided
    assert all(one[0] < decided for one in shown), "it was not durable"
    world.settle()
    assert world.workers.shown[-1] == (decided, decided)
