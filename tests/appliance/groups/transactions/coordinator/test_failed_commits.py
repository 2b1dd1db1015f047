"""Commits of the database that fail: memory is as before."""

from __future__ import annotations

import pytest

from tailrace.core.errors import (
    DiskFullError,
    StorageError,
    UnknownTransactionalIdError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    SECOND_NS,
    Owner,
    World,
    commit_of,
    markers,
    offsets,
)


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
