"""Commits and aborts of the transaction coordinator: what workers, offsets and owners get."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.groups.transactions.step import WAIT_NS
from tailrace.core.errors import (
    TailraceError,
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
