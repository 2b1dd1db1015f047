"""Staged texts: they stay with their transaction, over kills, and go with its end."""

from __future__ import annotations

import pytest

from appliance.groups.transactions import describe
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    TransactionAbortedError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import Owner, World


def stage(owner: Owner, text: str, **fields: int) -> None:
    request = {**owner.request("stage", staged=text), **fields}
    answer = owner.world.ask(Api.END_TRANSACTION, **request)
    assert answer == {
        "outcome": "stage", "producer_id": owner.producer_id, "producer_epoch": owner.epoch,
    }  # fmt: skip


def staged(world: World) -> str:
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")["staged"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_staged_text_outlives_a_kill_and_ends_with_its_transaction(
    world: World, outcome: str
) -> None:
    owner = Owner(world)
    assert staged(world) == ""
    owner.write()
    stage(owner, "first")
    stage(owner, "second")
    world.kill()
    assert staged(world) == "second"
    owner.end(outcome)
    assert staged(world) == ""
    world.kill()
    assert staged(world) == ""


def test_only_the_owner_stages_and_only_with_its_current_transaction(world: World) -> None:
    former = Owner(world)
    owner = Owner(world)
    with pytest.raises(ProducerFencedError):
        stage(former, "late")
    owner.write()
    past = owner.epoch
    owner.end("abort")
    world.settle()
    with pytest.raises(TransactionAbortedError):
        stage(owner, "late", producer_epoch=past)
    with pytest.raises(InvalidTransactionError):
        stage(owner, "unknown", producer_epoch=30_000)
    with pytest.raises(InvalidRequestError):
        stage(owner, "x" * 65_537)
    owner.write()
    world.ask(Api.END_TRANSACTION, **owner.request("prepare", tag=""))
    with pytest.raises(InvalidTransactionError):
        stage(owner, "prepared")
    assert staged(world) == ""


def test_ids_with_a_staged_text_are_listed_with_it_page_by_page(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "STAGED_PAGE", 2)
    for name in ("a", "b", "c", "d"):
        owner = Owner(world, name)
        if name != "b":
            stage(owner, f"text of {name}")
    found: dict[str, str] = {}
    following = None
    while True:
        page = world.ask(Api.LIST_TRANSACTIONS, staged=True, next=following)
        found |= {one["transactional_id"]: one["staged"] for one in page["transactions"]}
        following = page["next"]
        if following is None:
            break
    assert found == {"a": "text of a", "c": "text of c", "d": "text of d"}
