"""Owners that any process of a name is, and the metadata of commits: joined, replaced, repeated,
over kills and failed commits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.transactions.ids.shared_owner import REPLACED_MAX
from tailrace.core.errors import DiskFullError, InvalidRequestError, ProducerFencedError
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import Owner, World


def shared(world: World, name: str, **more: Any) -> Owner:
    return Owner(world, attempt=name, shared=True, **more)


def metadata(world: World) -> str:
    answer = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
    return str(answer["metadata"])


# ---- owners --------------------------------------------------------------------------------------


def test_processes_of_one_name_are_one_owner_also_after_commits_and_kills(world: World) -> None:
    first = shared(world, "run-1")
    for _ in range(3):
        first.end()
        world.settle()
        world.kill()
        joined = shared(world, "run-1")
        assert (joined.owner, joined.current) == (first.owner, first.current)


def test_a_name_that_was_replaced_is_refused_for_good(world: World) -> None:
    old = shared(world, "run-1")
    for number in range(2, 6):
        new = shared(world, f"run-{number}")
        assert new.owner > old.owner
        world.kill()
    for number in range(1, 5):
        with pytest.raises(ProducerFencedError, match=rf"'run-{number}' .* was replaced"):
            shared(world, f"run-{number}")
        with pytest.raises(ProducerFencedError):
            Owner(world, attempt=f"run-{number}")  # and not as a plain one either
    assert shared(world, "run-5").owner == new.owner


def test_a_plain_owner_replaces_a_shared_one_for_good(world: World) -> None:
    shared(world, "run-1")
    Owner(world, attempt="plain")
    with pytest.raises(ProducerFencedError):
        shared(world, "run-1")
    shared(world, "run-2")
    with pytest.raises(ProducerFencedError):
        Owner(world, attempt="plain")


def test_the_names_that_are_kept_have_a_bound(world: World) -> None:
    for number in range(REPLACED_MAX + 3):
        shared(world, f"run-{number}")
    (text,) = world.store.read("SELECT replaced FROM transactional_ids")[0]
    assert len(text) < 20 * REPLACED_MAX
    with pytest.raises(ProducerFencedError):
        shared(world, f"run-{REPLACED_MAX}")


def test_an_init_that_could_not_be_committed_replaces_nobody(world: World) -> None:
    old = shared(world, "run-1")
    request: dict[str, Any] = {"transactional_id": "billing", "timeout_ms": 1_000, "shared": True}
    number = world.send(Api.INIT_TRANSACTIONS, attempt="run-2", **request)
    world.step(DiskFullError("full"))
    with pytest.raises(DiskFullError):
        world.answer(number)
    assert shared(world, "run-1").owner == old.owner


def test_plain_owners_keep_no_names(world: World) -> None:
    for name in ("a", "b", "a"):
        Owner(world, attempt=name)
    assert world.store.read("SELECT replaced FROM transactional_ids") == [("",)]


def test_a_shared_owner_needs_a_name(world: World) -> None:
    with pytest.raises(InvalidRequestError, match="attempt is missing"):
        Owner(world, shared=True)


# ---- metadata ------------------------------------------------------------------------------------


def test_metadata_goes_with_its_commit_and_stays_until_another_replaces_it(world: World) -> None:
    owner = shared(world, "run-1")
    owner.write()
    owner.end(metadata="batch 7")
    assert metadata(world) == "batch 7"
    for outcome in ("abort", "commit"):
        world.settle()
        owner.write()
        owner.end(outcome)
    world.settle()
    world.kill()
    answer = world.ask(
        Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1_000, attempt="run-2",
        shared=True,
    )  # fmt: skip
    assert answer["metadata"] == "batch 7"
    owner = shared(world, "run-2")
    owner.end(metadata="")
    assert metadata(world) == ""


def test_metadata_of_a_commit_that_failed_or_was_refused_is_not_kept(world: World) -> None:
    owner = shared(world, "run-1")
    owner.end(metadata="batch 1")
    world.settle()
    world.send(Api.END_TRANSACTION, **owner.request(metadata="batch 2"))
    world.step(DiskFullError("full"))
    assert metadata(world) == "batch 1"
    late = owner.request(metadata="batch 2")
    shared(world, "run-2")
    with pytest.raises(ProducerFencedError):
        world.ask(Api.END_TRANSACTION, **late)
    assert metadata(world) == "batch 1"


def test_a_repeated_commit_does_not_bring_old_metadata_back(world: World) -> None:
    owner = shared(world, "run-1")
    first = owner.request(metadata="batch 1")
    owner.end(metadata="batch 1")
    owner.end(metadata="batch 2")
    world.settle()
    world.ask(Api.END_TRANSACTION, **first)
    assert metadata(world) == "batch 2"


def test_an_id_with_metadata_is_not_forgotten_and_joined_again_it_takes_batches(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, limits=TransactionLimits(id_expiration_ms=7_200_000))
    owner = shared(world, "run-1")
    Owner(world, "other")
    owner.end(metadata="batch 1")
    for _ in range(3):
        world.wait(2 * 7_200)
        world.settle()
    world.kill()
    listed = world.ask(Api.LIST_TRANSACTIONS)["transactions"]
    assert [one["transactional_id"] for one in listed] == ["billing"]
    joined = shared(world, "run-1")
    assert joined.owner == owner.owner
    joined.write()
    joined.end(metadata="")
    for _ in range(3):
        world.wait(2 * 7_200)
        world.settle()
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"] == []


@pytest.mark.parametrize("text", ["x" * 1_025, "a\nb", 7])
def test_metadata_that_is_no_short_text_is_refused_and_decides_nothing(
    world: World, text: object
) -> None:
    owner = shared(world, "run-1")
    owner.write()
    with pytest.raises(InvalidRequestError, match="metadata is"):
        world.ask(Api.END_TRANSACTION, **owner.request(metadata=text))
    with pytest.raises(InvalidRequestError, match="an abort takes no metadata"):
        world.ask(Api.END_TRANSACTION, **owner.request("abort", metadata="batch 1"))
    owner.end(metadata="x" * 1_024)
    assert metadata(world) == "x" * 1_024
