"""`tailrace transaction`: what operators see and type."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.commands.groups import transaction
from appliance.cli.commands.monitoring import status
from appliance.cli.main import tailrace
from tailrace.admin.admin import Admin
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run

ROW: dict[str, Any] = {
    "transactional_id": "billing-1", "state": "ongoing", "producer_id": 1 << 62,
    "producer_epoch": 7, "owner": 9, "client_id": "billing", "timeout_ms": 60_000,
    "open_ms": 75_000,
}  # fmt: skip
HANGING = {**ROW, "transactional_id": None, "workers": ["worker-0"], "reason": "no id has it"}
DESCRIBED = {
    **ROW, "owned_ms": 1_700_000_000_000, "prepared": None, "workers_pending": ["worker-1"],
    "last": {"outcome": "commit", "by": "producer", "wall_ms": 1_700_000_000_000, "owner": 9,
             "producer_id": 1 << 62, "producer_epoch": 6},
}  # fmt: skip


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An appliance with one transaction."""
    made: list[Any] = []

    class FakeAdmin(Admin):
        def list_transactions(self, states: Any = None) -> dict[str, Any]:
            return {} if states and "ongoing" not in states else {"billing-1": ROW}

        def describe_transactions(self, transactional_ids: Any) -> dict[str, Any]:
            return {transactional_ids: DESCRIBED}

        def find_hanging_transactions(self) -> list[Any]:
            return [HANGING]

        def commit_transaction(self, transactional_id: str) -> None:
            made.append(("commit", transactional_id))

        def abort_transaction(self, transactional_id: Any = None, **named: Any) -> None:
            made.append((transactional_id, *named.values()))

    monkeypatch.setattr(transaction, "connect", lambda address: FakeAdmin("localhost:1"))
    return made


def output(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(tailrace, ["transaction", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_transactions_are_listed_described_and_found(aborted: list[Any]) -> None:
    (_, row) = output("list").splitlines()
    assert row.split() == [
        "billing-1", "ongoing", "75.0", "s", "60.0", "s", "billing", str(1 << 62), "7"
    ]  # fmt: skip
    assert json.loads(output("list", "--json")) == [ROW]
    assert "no transactional ids" in output("list", "--state", "prepared")
    shown = output("describe", "billing-1")
    assert "open for 75.0 s" in shown
    assert "commit of epoch 6 by producer, 2023-11-14T22:13:20Z" in shown
    assert "worker-1" in shown
    assert json.loads(output("describe", "billing-1", "--json")) == DESCRIBED
    assert "worker-0" in output("find-hanging")
    assert json.loads(output("find-hanging", "--json")) == [HANGING]


def test_a_prepared_transaction_is_shown_and_committed_by_its_id(
    aborted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = {
        "producer_id": 5, "producer_epoch": 0, "tag": "xid-7", "wall_ms": 1_700_000_000_000
    }  # fmt: skip
    monkeypatch.setitem(DESCRIBED, "prepared", prepared)
    assert "2023-11-14T22:13:20Z, tag xid-7" in output("describe", "billing-1")
    monkeypatch.setitem(DESCRIBED, "prepared", {**prepared, "groups": ["readers"]})
    monkeypatch.setitem(DESCRIBED, "branches", [[9, 2]])
    shown = output("describe", "billing-1")
    assert "tag xid-7, with offsets of readers" in shown
    assert "1 branch (producer id:epoch 9:2)" in shown
    monkeypatch.setitem(DESCRIBED, "branches", [[number, 2] for number in range(20)])
    assert "20 branches (producer id:epoch 0:2, 1:2" in output("describe", "billing-1")
    assert "committed the transaction of billing-1" in output("commit", "billing-1")
    assert json.loads(output("commit", "billing-1", "--json")) == {"committed": "billing-1"}
    assert aborted == [("commit", "billing-1")] * 2
    output("commit", status=2)


def test_a_transaction_is_aborted_by_its_id_or_by_its_producer(aborted: list[Any]) -> None:
    assert "aborted the transaction of billing-1" in output("abort", "billing-1")
    assert json.loads(output("abort", "billing-1", "--json")) == {"aborted": "billing-1"}
    output("abort", "--producer-id", "5", "--producer-epoch", "0")
    assert aborted == [("billing-1", None, None)] * 2 + [(None, 5, 0)]
    output("abort", status=2)
    output("abort", "--producer-id", "5", status=2)
    output("abort", "billing-1", "--producer-id", "5", "--producer-epoch", "0", status=2)


def test_status_names_what_holds_readers_back_also_if_it_is_prepared() -> None:
    prepared = {**ROW, "state": "prepared"}

    class FakeAdmin(Admin):
        def list_transactions(self, states: Any = None) -> dict[str, Any]:
            rows = {"billing-1": ROW, "billing-2": prepared}
            return {name: row for name, row in rows.items() if row["state"] in states}

    admin = FakeAdmin("localhost:1")
    assert status._long_transactions(admin) == [ROW, prepared]
    prepared["open_ms"] = 0
    ROW["open_ms"] = 59_000
    try:
        assert status._long_transactions(admin) == []
    finally:
        ROW["open_ms"] = 75_000


def test_a_real_appliance_without_transactions(appliance: EmbeddedAppliance) -> None:
    done = run(appliance, "transaction", "list")
    assert b"no transactional ids yet" in done.stdout + done.stderr
    assert json.loads(run(appliance, "status", "--json").stdout)["long_transactions"] == []
