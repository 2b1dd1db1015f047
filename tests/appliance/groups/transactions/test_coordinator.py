"""The transaction coordinator against late, lost and repeated requests, kills between any two
stores, and commits that fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import orjson
import pytest

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.transactions.decider import UNSETTLED_MAX
from appliance.groups.transactions.ids.numbers import EPOCH_MAX
from appliance.groups.transactions.step import WAIT_NS
from shm.messages.transaction_messages import ProducerEpoch, Settled
from tailrace.core.errors import (
    ConcurrentTransactionsError,
    DiskFullError,
    FencedMemberError,
    InvalidGroupError,
    InvalidRequestError,
    InvalidTransactionError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    StorageError,
    TailraceError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.protocol.frame import JSON_MAX_BYTES, Api
from tests.appliance.groups.transactions.kit import SECOND_NS, Fenced, NotYet, Owner, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def markers(world: World) -> list[list[str]]:
    """The markers of each worker's log."""
    return [[one[0] for one in w.log if one[0] != "data"] for w in world.workers.workers]


def offsets(world: World, group: str = "g") -> int:
    body = world.ask(Api.FETCH_OFFSETS, group=group, partitions=[["orders", 0]])
    return int(body["offsets"][0][2])


def commit_of(group: str = "g", offset: int = 5, **more: Any) -> dict[str, Any]:
    return {"group": group, "entries": [["orders", 0, offset]], **more}


# ---- the plain case ------------------------------------------------------------------------------


def test_a_commit_ends_the_transaction_with_every_worker_and_gives_the_next_epoch(
    world: World,
) -> None:
    a = Owner(world)
    first = a.current
    a.write()
    body = a.end()
    assert body == {"outcome": "commit", "producer_id": first[0], "producer_epoch": first[1] + 1}
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    a.write()
    a.end("abort")
    world.settle()
    assert markers(world) == [["commit", "abort"]] * 2


def test_offsets_are_committed_with_the_outputs_and_not_with_an_abort(world: World) -> None:
    a = Owner(world)
    a.end("abort", offsets=[commit_of(offset=3)])
    assert offsets(world) == -1
    a.end(offsets=[commit_of(offset=5), commit_of("h", 7)])
    assert (offsets(world), offsets(world, "h")) == (5, 7)


def test_without_a_transactional_id_there_is_no_lane_no_row_and_no_timer(world: World) -> None:
    assert not world.workers.is_requested
    assert not world.coordinator.is_used
    assert world.coordinator.next_deadline_ns() is None
    world.wait(300)
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"] == []


def test_fifty_commits_of_a_step_are_one_commit_of_the_database(world: World) -> None:
    owners = [Owner(world, f"id-{number}") for number in range(50)]
    commits = []
    world.store.after_commit.append(lambda: commits.append(1))
    numbers = [world.send(Api.END_TRANSACTION, **owner.request()) for owner in owners]
    world.step()
    assert len(commits) == 1
    assert all(world.answer(number)["outcome"] == "commit" for number in numbers)
    decisions = [one for one in world.workers.workers[0].lane if one[0] == "decisions"]
    assert len(decisions) == 1, "the decisions of a step are one message"


def test_an_init_waits_for_producer_ids_and_is_refused_when_none_come(tmp_path: Path) -> None:
    world = World(tmp_path, has_block=False)
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="a", timeout_ms=1)
    world.step()
    assert world.workers.is_requested
    assert number not in world.answers
    world.add_block()
    world.step()
    world.settle()
    assert world.answer(number)["producer_epoch"] == 0
    (tmp_path / "other").mkdir()
    late = World(tmp_path / "other", has_block=False)
    number = late.send(Api.INIT_TRANSACTIONS, transactional_id="a", timeout_ms=1)
    late.wait(WAIT_NS / SECOND_NS)
    with pytest.raises(TailraceError, match="has not sent producer ids"):
        late.answer(number)


# ---- repeated requests ---------------------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_is_answered_again_and_decides_nothing(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    request = a.request(offsets=[commit_of()])
    first = world.ask(Api.END_TRANSACTION, **request)
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.kill()
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_a_repeated_commit_does_not_end_the_transaction_after_it(world: World) -> None:
    a = Owner(world)
    a.write()
    request = a.request()
    a.end()
    world.settle()
    a.write()  # the next transaction has begun
    assert world.ask(Api.END_TRANSACTION, **request)["producer_epoch"] == a.epoch
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    assert world.workers.workers[0].open_in() == {a.producer_id: a.epoch}
    a.end("abort")
    with pytest.raises(InvalidTransactionError, match="committed before"):
        world.ask(Api.END_TRANSACTION, **{**request, "outcome": "abort"})


def test_a_repeated_commit_is_answered_as_one_after_an_operator_has_aborted_the_next(
    world: World,
) -> None:
    a = Owner(world)
    request = a.request()
    world.ask(Api.END_TRANSACTION, **request)
    world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
    body = world.ask(Api.END_TRANSACTION, **request)
    assert (body["outcome"], body["producer_epoch"]) == ("commit", 2)


def test_a_request_that_waited_too_long_is_answered_once_when_its_step_is_undone(
    world: World,
) -> None:
    Owner(world)
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
    world.now_ns += 2 * WAIT_NS
    world.step(DiskFullError("the disk is full"))
    assert number in world.answers


def test_an_epoch_that_nobody_was_given_is_refused(world: World) -> None:
    a = Owner(world)
    a.epoch += 1
    with pytest.raises(InvalidTransactionError):
        a.end()
    a.owner += 1
    with pytest.raises(ProducerFencedError):
        a.end()
    with pytest.raises(UnknownTransactionalIdError):
        world.ask(Api.END_TRANSACTION, **{**a.request(), "transactional_id": "other"})


# ---- owners --------------------------------------------------------------------------------------


def test_a_second_owner_aborts_what_is_open_and_fences_the_first(world: World) -> None:
    a = Owner(world)
    a.write()
    b = Owner(world, client_id="b")
    assert markers(world) == [["abort"], ["abort"]]
    assert b.epoch == a.epoch + 1
    with pytest.raises(ProducerFencedError, match="'b' has taken over") as caught:
        a.end()
    assert "the transaction was aborted" in str(caught.value)
    with pytest.raises(Fenced):
        a.write()
    with pytest.raises(ProducerFencedError):
        world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    b.write()
    b.end()


def test_a_fenced_owner_learns_that_its_commit_was_made(world: World) -> None:
    a = Owner(world)
    a.write()
    request = a.request()
    world.ask(Api.END_TRANSACTION, **request)  # its answer was lost
    Owner(world, client_id="b")
    with pytest.raises(ProducerFencedError, match="the transaction was committed"):
        world.ask(Api.END_TRANSACTION, **request)


def test_a_fenced_owner_that_asks_about_its_transaction_learns_how_it_ended(world: World) -> None:
    a = Owner(world)
    a.end()
    world.settle()
    a.write()
    asked: dict[str, Any] = {"transactional_id": a.name, "owner": a.owner}
    mine = {"producer_id": a.producer_id, "producer_epoch": a.epoch}
    b = Owner(world, client_id="b")
    for about, outcome in (
        (mine, "was aborted at"),
        ({**mine, "producer_epoch": a.epoch - 1}, "was committed at"),
        ({"producer_id": b.producer_id, "producer_epoch": b.epoch}, "is not known here"),
        ({}, "is not known here"),
    ):
        with pytest.raises(ProducerFencedError, match=outcome):
            world.ask(Api.DESCRIBE_TRANSACTION, **asked, **about)
    b.end()  # the outcome of another owner's transaction is not told
    other = {"producer_id": b.producer_id, "producer_epoch": b.epoch - 1}
    with pytest.raises(ProducerFencedError, match="is not known here"):
        world.ask(Api.DESCRIBE_TRANSACTION, **asked, **other)
    with pytest.raises(InvalidRequestError):
        world.ask(Api.DESCRIBE_TRANSACTION, **asked, producer_id="x", producer_epoch=0)


def test_two_owners_that_alternate_never_write_under_each_others_epoch(world: World) -> None:
    a = Owner(world)
    for _ in range(5):
        b = Owner(world, client_id="b")
        with pytest.raises(ProducerFencedError):
            a.end()
        with pytest.raises(Fenced):
            a.write(0)
        a = Owner(world, client_id="a")
        with pytest.raises(ProducerFencedError):
            b.end()
        a.write()
        a.end()
        world.settle()
    assert markers(world) == [["commit"] * 5] * 2


def test_init_is_answered_when_the_markers_are_durable_everywhere(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    number = world.send(
        Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000, client_id="b"
    )
    world.step()
    for worker in world.workers.workers:
        worker.read()
    world.coordinator.workers_changed()
    world.step()
    assert number not in world.answers, "markers in the ring are not durable"
    world.workers.workers[0].flush()
    world.coordinator.workers_changed()
    world.step()
    assert number not in world.answers
    world.workers.workers[1].flush()
    world.coordinator.workers_changed()
    world.step()
    assert world.answer(number)["owner"] > a.owner


def test_an_init_names_the_worker_that_it_waits_for(world: World) -> None:
    Owner(world)
    world.workers.workers[1].is_up = False
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
    world.step()
    world.run_workers()
    world.wait(WAIT_NS / SECOND_NS)
    with pytest.raises(TailraceError, match="carried out by worker-1"):
        world.answer(number)


def test_of_two_inits_that_wait_the_older_one_is_fenced(world: World) -> None:
    Owner(world)
    first, second = (
        world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
        for _ in range(2)
    )
    world.step()
    world.settle()
    with pytest.raises(ProducerFencedError):
        world.answer(first)
    assert world.answer(second)["producer_epoch"] == 2


def test_a_repeat_of_the_newest_init_is_answered_again_and_takes_nothing_over(
    world: World,
) -> None:
    init: dict[str, Any] = {
        "transactional_id": "billing", "timeout_ms": 60_000, "attempt": "ab" * 16,
    }  # fmt: skip
    numbers = [world.send(Api.INIT_TRANSACTIONS, **init) for _ in range(2)]
    world.step()
    world.settle()
    first, second = map(world.answer, numbers)
    assert first == second
    world.kill()
    a = Owner(world, attempt="ab" * 16)
    assert (a.owner, a.epoch) == (first["owner"], 0)
    world.settle()
    a.write()
    assert world.ask(Api.INIT_TRANSACTIONS, **init) == first
    a.end()
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_an_init_of_another_attempt_or_of_none_takes_over(world: World) -> None:
    owners = [Owner(world, attempt=attempt).owner for attempt in ("a", "b", "a", "", "")]
    assert len(set(owners)) == 5


def test_a_repeated_init_of_an_idle_id_registers_it(world: World) -> None:
    Owner(world, attempt="a")
    world.wait(2 * 3_600)
    world.settle()
    Owner(world, attempt="a").write()


def test_a_worker_that_does_not_exist_any_more_is_not_waited_for(world: World) -> None:
    Owner(world)
    world.workers.workers[1].is_up = world.workers.workers[1].exists = False
    assert Owner(world).epoch == 1


# ---- timeouts ------------------------------------------------------------------------------------


def test_a_transaction_is_aborted_when_its_timeout_is_over_and_not_before(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    world.wait(60)  # nothing was sent: nothing times out
    a.write()
    world.run_workers()
    world.wait(4.9)
    assert markers(world) == [[], []]
    world.wait(0.2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]
    with pytest.raises(TransactionAbortedError, match="longer than its timeout, 5000 ms") as caught:
        a.end()
    a.take(caught.value.body)  # type: ignore[attr-defined]
    a.write()
    a.end()


def test_a_commit_that_meets_its_timeout_is_one_of_the_two(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.now_ns += 6 * SECOND_NS
    number = world.send(Api.END_TRANSACTION, **a.request())  # read before timers run
    world.step()
    assert world.answer(number)["outcome"] == "commit"
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    assert world.ask(Api.LIST_TRANSACTIONS)["totals"]["aborts"] == 0


def test_a_timeout_starts_anew_after_a_restart(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.wait(4)
    world.kill()
    world.run_workers()
    world.wait(4)
    assert markers(world) == [[], []]
    world.wait(2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]


def test_a_timeout_that_could_not_be_committed_is_tried_again(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.now_ns += 6 * SECOND_NS
    world.step(DiskFullError("full"))
    world.run_workers()
    assert markers(world) == [[], []]
    world.wait(2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]


def test_an_operator_aborts_and_the_owner_may_go_on(world: World) -> None:
    a = Owner(world)
    a.write()
    assert world.ask(Api.ABORT_TRANSACTION, transactional_id="billing") == {}
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]
    with pytest.raises(TransactionAbortedError, match="by an operator"):
        a.end()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    a.take(found)
    a.write()
    a.end()


# ---- kills ---------------------------------------------------------------------------------------


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


# ---- commits of the database that fail -----------------------------------------------------------


def test_a_failed_commit_undoes_memory_too_and_the_request_may_be_handled_again(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    request = a.request(offsets=[commit_of()])
    numbers = [world.send(Api.END_TRANSACTION, **request) for _ in range(2)]
    world.step(DiskFullError("the disk is full"))
    assert world.undone == numbers, "the second one was answered from what the first had changed"
    world.run_workers()
    assert markers(world) == [[], []]
    assert offsets(world) == -1
    assert world.ask(Api.END_TRANSACTION, **request)["outcome"] == "commit"
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_a_failed_commit_of_an_init_leaves_no_id_and_no_waiter(world: World) -> None:
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="a", timeout_ms=1)
    world.step(DiskFullError("the disk is full"))
    assert world.undone == [number]
    with pytest.raises(UnknownTransactionalIdError):
        world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="a")
    assert Owner(world, "a").epoch == 0


def test_deleted_rows_of_a_failed_commit_are_deleted_later(world: World) -> None:
    Owner(world)
    world.now_ns += 5 * SECOND_NS
    world.step(DiskFullError("the disk is full"))
    assert world.store.read("SELECT count(*) FROM decisions") == [(1,)]
    world.step()
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]
    world.kill()
    assert Owner(world).owner > 1


def test_rows_of_carried_out_decisions_go_with_another_commit_or_late(world: World) -> None:
    def rows() -> int:
        return int(world.store.read("SELECT count(*) FROM decisions")[0][0])

    a = Owner(world)
    a.end()
    world.settle()
    assert rows() == 2
    world.now_ns += 3 * SECOND_NS
    world.step()
    assert rows() == 2, "a commit of their own costs a sync"
    a.end()
    assert rows() == 1, "the decision of this step"
    world.settle()
    world.wait(5)
    assert rows() == 0, "without another commit"


def test_a_row_that_is_stored_twice_in_a_step_is_stored_whole(world: World) -> None:
    """A list of ids stores the rows of its step. What it has stored is not the row before."""
    Owner(world)
    table, rows = world.coordinator._table, world.coordinator._rows
    entry = table.get("billing", world.now_ns)
    assert entry is not None
    before = entry.row
    table.change(entry, before._replace(is_registered=0, client_id="other"))
    rows.change_ids(table.take_changes())
    assert not rows.ids_behind("", 2)[0].is_registered
    table.change(entry, before)
    rows.change_ids(table.take_changes())
    assert rows.ids_behind("", 2) == [before]


def test_a_row_that_another_program_has_removed_fails_the_step(world: World) -> None:
    Owner(world)
    table, rows = world.coordinator._table, world.coordinator._rows
    entry = table.get("billing", world.now_ns)
    assert entry is not None
    table.change(entry, entry.row._replace(epoch=entry.row.epoch + 1))
    rows.delete_ids([entry.row.id_number])
    with pytest.raises(StorageError, match="has 0 of 1 transactional ids"):
        rows.change_ids(table.take_changes())


# ---- bounds --------------------------------------------------------------------------------------


def test_an_id_has_a_bound_of_decisions_that_are_not_carried_out(world: World) -> None:
    a = Owner(world)
    for _ in range(UNSETTLED_MAX):
        a.end()
    with pytest.raises(ConcurrentTransactionsError, match="worker-0, worker-1"):
        a.end()
    world.settle()
    a.end()


def test_an_empty_transaction_costs_no_row_and_moves_the_epoch(world: World) -> None:
    a = Owner(world)
    world.settle()
    world.wait(5)
    for expected in range(1, 2 * UNSETTLED_MAX):
        assert a.end(is_empty=True, offsets=[commit_of(offset=expected)])["producer_epoch"] == (
            expected
        )
    assert offsets(world) == 2 * UNSETTLED_MAX - 1
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]
    world.settle()
    a.write()


def test_epochs_that_are_used_up_give_a_new_producer_id_and_late_batches_are_refused(
    world: World,
) -> None:
    a = Owner(world)
    entry = world.coordinator._table.get("billing", 0)
    assert entry is not None
    world.coordinator._table.change(entry, entry.row._replace(epoch=EPOCH_MAX - 1))
    a.epoch = EPOCH_MAX - 1
    world.kill_worker(0)
    world.kill_worker(1)
    world.settle()
    a.write()
    a.end()
    world.settle()
    assert a.epoch == EPOCH_MAX
    a.write()
    old = a.current
    request = a.request()
    a.end()  # answered when every worker knows the new producer id
    assert a.producer_id != old[0]
    assert a.epoch == 0
    assert world.ask(Api.END_TRANSACTION, **request)["producer_id"] == a.producer_id
    for worker in world.workers.workers:
        with pytest.raises(Fenced):
            worker.produce(*old)
    a.write()
    world.kill()
    a.end()
    world.settle()
    assert markers(world) == [["commit"] * 3] * 2


def test_an_empty_transaction_of_the_last_epoch_is_answered_when_every_worker_has_the_next_id(
    world: World,
) -> None:
    a = Owner(world)
    entry = world.coordinator._table.get("billing", 0)
    assert entry is not None
    world.coordinator._table.change(entry, entry.row._replace(epoch=EPOCH_MAX))
    a.epoch = EPOCH_MAX
    world.settle()
    slow = world.workers.workers[1]
    slow.is_up = False
    number = world.send(Api.END_TRANSACTION, **a.request(is_empty=True))
    world.step()
    world.run_workers()
    assert number not in world.answers, "the batches of the next id would be fenced there"
    slow.is_up = True
    world.settle()
    a.take(world.answer(number))
    assert a.epoch == 0
    a.write()


def test_too_many_ids_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(ids_max=2))
    Owner(world, "a")
    Owner(world, "b")
    with pytest.raises(TailraceError, match=r"transactional\.ids\.max"):
        Owner(world, "c")
    Owner(world, "a")


@pytest.mark.parametrize(
    "request_",
    [
        {"transactional_id": "", "timeout_ms": 1},
        {"transactional_id": "x" * 256, "timeout_ms": 1},
        {"transactional_id": 5, "timeout_ms": 1},
        {"transactional_id": "a"},
        {"transactional_id": "a", "timeout_ms": 0},
        {"transactional_id": "a", "timeout_ms": 900_001},
        {"transactional_id": "a", "timeout_ms": 1, "client_id": "\n"},
    ],
)
def test_a_malformed_init_is_refused(world: World, request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        world.ask(Api.INIT_TRANSACTIONS, **request_)


@pytest.mark.parametrize(
    "change",
    [
        {"owner": None}, {"owner": "x"}, {"producer_id": -1}, {"producer_epoch": 1 << 20},
        {"outcome": "maybe"}, {"outcome": None}, {"offsets": {}}, {"offsets": [1]},
        {"offsets": [commit_of(), commit_of()]}, {"offsets": [{"group": "g"}]}, {"is_empty": 5},
    ],
)  # fmt: skip
def test_a_malformed_end_is_refused_and_decides_nothing(
    world: World, change: dict[str, Any]
) -> None:
    a = Owner(world)
    with pytest.raises(InvalidRequestError):
        world.ask(Api.END_TRANSACTION, **{**a.request(), **change})
    assert a.end()["outcome"] == "commit"


# ---- offsets -------------------------------------------------------------------------------------


def test_offsets_of_a_fenced_member_decide_nothing(world: World) -> None:
    a = Owner(world)
    a.write()
    member: dict[str, Any] = {
        "group": "g",
        "member_id": "m",
        "member_epoch": 0,
        "topics": ["orders"],
    }
    body = world.ask(Api.GROUP_HEARTBEAT, **member)
    epoch = body["member_epoch"]
    with pytest.raises(FencedMemberError):
        a.end(offsets=[commit_of(member_id="m", member_epoch=epoch + 1)])
    with pytest.raises(TailraceError, match="owned by a member"):
        a.end(offsets=[commit_of("h", 3), commit_of()])
    assert (offsets(world), offsets(world, "h")) == (-1, -1)
    world.settle()
    assert markers(world) == [[], []]
    a.end(offsets=[commit_of(member_id="m", member_epoch=epoch)])
    assert offsets(world) == 5


def test_one_wrong_entry_of_any_group_decides_nothing(world: World) -> None:
    a = Owner(world)
    with pytest.raises(OffsetOutOfRangeError, match="nothing of the transaction was decided"):
        a.end(offsets=[commit_of(), commit_of("h", 1_000_000)])
    assert offsets(world) == -1
    a.end("abort")


def test_the_largest_commit_is_kept_whole_by_a_kill_or_not_at_all(world: World) -> None:
    """The offsets of 3 groups, as many as a request has room for."""
    world.topics.create("wide", 4_096)
    a = Owner(world)
    entries = [["wide", number, 0, -1, "m" * 60] for number in range(4_096)]
    request = a.request(
        offsets=[{"group": group, "member_id": None, "entries": entries} for group in "ghi"]
    )
    assert 900_000 < len(orjson.dumps(request)) < JSON_MAX_BYTES
    world.send(Api.END_TRANSACTION, **request)
    world.kill()  # before its commit
    assert [committed_count(world, group) for group in "ghi"] == [0, 0, 0]
    number = world.send(Api.END_TRANSACTION, **request)
    world.step()
    world.kill()
    assert [committed_count(world, group) for group in "ghi"] == [4_096] * 3
    assert world.ask(Api.END_TRANSACTION, **request) == world.answer(number)


def committed_count(world: World, group: str) -> int:
    """The number of partitions of "wide" that a group has committed an offset of."""
    count, left = 0, [["wide", number] for number in range(4_096)]
    while left:
        body = world.ask(Api.FETCH_OFFSETS, group=group, partitions=left)
        count += sum(one[2] >= 0 for one in body["offsets"])
        left = left[len(body["offsets"]) :]
    return count


def test_a_share_group_commits_no_offsets_in_a_transaction(tmp_path: Path) -> None:
    world = World(tmp_path, with_share=True)
    member: dict[str, Any] = {
        "group": "s",
        "member_id": "m",
        "member_epoch": 0,
        "topics": ["orders"],
    }
    world.ask(Api.GROUP_HEARTBEAT, kind="share", **member)
    a = Owner(world)
    with pytest.raises(InvalidGroupError):
        a.end(offsets=[commit_of("s")])


# ---- idle and expired ids ------------------------------------------------------------------------


def test_an_idle_id_is_unregistered_and_its_owner_registers_it_again(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    world.settle()
    world.wait(2 * 3_600)
    world.settle()
    with pytest.raises(Fenced):
        a.write()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    a.take(found)
    a.write()
    a.end()
    world.settle()
    assert markers(world) == [["commit", "commit"]] * 2


def resting(world: World) -> list[Owner]:
    """Three owners without anything open, behind a restart of the coordinator."""
    owners = [Owner(world, name) for name in ("a", "b", "c")]
    for one in owners:
        one.end()
    world.settle()
    world.wait(5)  # the rows of carried-out decisions go
    world.kill()
    world.settle()
    assert len(world.coordinator._table) == 0
    return owners


def test_ids_at_rest_behind_a_restart_are_registered_and_go_on_when_they_are_used(
    world: World,
) -> None:
    a, b, c = resting(world)
    a.write()
    world.settle()
    a.end()
    b.write(1)
    b.end("abort")
    world.kill_worker(0)  # it is fed by loaded and packed ids
    world.settle()
    for one in (a, b, c):
        one.write()
        world.settle()
        one.end()
    world.settle()
    assert markers(world)[0] == ["commit"] * 4
    assert markers(world)[1] == ["commit", "abort", *["commit"] * 3]


def test_ids_at_rest_behind_a_restart_are_unregistered_when_they_are_idle(world: World) -> None:
    a, b, _ = resting(world)
    world.wait(1_800)
    a.end()
    world.wait(1_900)
    world.settle()
    with pytest.raises(Fenced):
        b.write()
    a.write()
    a.end()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="b", owner=b.owner)
    b.take(found)
    b.write()
    b.end()


def test_the_timeout_of_an_id_at_rest_begins_with_its_report_though_it_is_read_only_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is in the database, and a disk fails meanwhile."""
    a, _, _ = resting(world)
    a.write()
    with monkeypatch.context() as patch:
        patch.setattr(world.coordinator._rows, "id_of_number", fails)
        world.settle()
    world.wait(70)
    world.settle()
    assert markers(world) == [["abort"]] * 2


def fails(*_: Any) -> NoReturn:
    raise StorageError("the disk is gone")


def test_an_owner_learns_when_to_ask_before_its_id_is_unregistered(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(id_expiration_ms=60_000))
    body = world.ask(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=60_000)
    a = Owner(world)
    assert body["idle_ms"] == 30_000
    world.wait(body["idle_ms"] / 1_000)
    world.settle()
    a.write()


def test_a_repeated_question_of_an_idle_owner_waits_for_every_worker_too(world: World) -> None:
    a = Owner(world)
    world.wait(2 * 3_600)
    world.settle()
    asked: dict[str, Any] = {"transactional_id": "billing", "owner": a.owner}
    numbers = [world.send(Api.DESCRIBE_TRANSACTION, **asked) for _ in range(2)]
    world.step()
    numbers.append(world.send(Api.DESCRIBE_TRANSACTION, **asked))
    world.step()
    assert not world.answers.keys() & set(numbers)
    world.settle()
    assert {world.answer(number)["producer_epoch"] for number in numbers} == {1}


def test_a_commit_of_an_idle_id_is_answered_with_the_next_epoch(world: World) -> None:
    a = Owner(world)
    world.wait(2 * 3_600)
    world.settle()
    world.kill()
    world.settle()
    with pytest.raises(TransactionAbortedError, match="not used for long") as caught:
        a.end()
    a.take(caught.value.body)  # type: ignore[attr-defined]
    world.settle()
    a.write()
    a.end()


def test_an_unused_id_is_forgotten_and_its_numbers_are_not_given_again(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(id_expiration_ms=7_200_000))
    a = Owner(world)
    world.wait(3_700)
    world.settle()
    world.wait(2 * 7_200)
    world.settle()
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"] == []
    with pytest.raises(UnknownTransactionalIdError):
        a.end()
    world.kill()
    b = Owner(world)
    assert b.producer_id != a.producer_id
    assert b.owner > a.owner
    assert world.store.read("SELECT id_number FROM transactional_ids") == [(2,)]


# ---- lists ---------------------------------------------------------------------------------------


def test_states_are_those_of_the_protocol(world: World) -> None:
    a = Owner(world)

    def state() -> str:
        found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
        return str(found["state"])

    assert state() == "empty"
    a.write()
    world.run_workers()
    assert state() == "ongoing"
    world.now_ns += SECOND_NS
    listed = world.ask(Api.LIST_TRANSACTIONS, states=["ongoing"])
    assert listed["transactions"][0]["open_ms"] == 1_000
    assert listed["totals"]["oldest_ms"] == 1_000
    a.end()
    assert state() == "committing"
    world.settle()
    assert state() == "empty"
    a.end("abort")
    assert state() == "aborting"
    described = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
    assert described["workers_pending"] == ["worker-0", "worker-1"]
    assert described["last"]["outcome"] == "abort"


def test_a_list_of_many_ids_has_pages(world: World) -> None:
    names = [f"id-{number:05}" for number in range(2_500)]
    for name in names:
        world.send(Api.INIT_TRANSACTIONS, transactional_id=name, timeout_ms=1_000)
    world.step()
    world.settle()
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page: dict[str, Any] = world.ask(Api.LIST_TRANSACTIONS, next=after)
        found += [one["transactional_id"] for one in page["transactions"]]
        after = page["next"]
    assert found == names


def test_a_hanging_transaction_is_listed_and_ended(world: World) -> None:
    Owner(world)
    zero = world.workers.workers[0]
    damage = ProducerEpoch((1 << 62) + 5, 3)
    world.workers.unfed = {0}  # nothing reaches it
    zero.log = [("data", *damage)]
    world.coordinator.asked(0, [damage], world.now_ns)
    world.workers.is_requested = False
    world.step()
    world.wait(11)
    listed = world.ask(Api.LIST_TRANSACTIONS, hanging=True)["transactions"]
    assert [(one["producer_id"], one["workers"]) for one in listed] == [
        (damage.producer_id, ["worker-0"])
    ]
    world.workers.is_requested, world.workers.unfed = True, {0}
    fields: dict[str, Any] = {"producer_id": damage.producer_id, "producer_epoch": damage.epoch}
    world.step()
    world.ask(Api.ABORT_TRANSACTION, **fields)
    world.settle()
    assert markers(world)[0] == ["abort"]
    assert world.ask(Api.LIST_TRANSACTIONS, hanging=True)["transactions"] == []
