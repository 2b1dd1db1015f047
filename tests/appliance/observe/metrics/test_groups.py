"""Metrics of groups: a bounded number of series, and what is left out is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from appliance.observe.metrics import groups as group_metrics
from appliance.observe.metrics.groups import ObservedGroups, group_families, observe_groups
from tailrace import Admin
from tailrace.core.errors import UnknownGroupError


class FakeAdmin(Admin):
    """Groups g0, g1, ...: those with odd numbers have a member; each reads two partitions, and lags
    5 behind in one.
    """

    count = 0
    gone = ""
    totals: ClassVar[dict[str, Any]] = {}

    def list_groups(self) -> dict[str, dict[str, Any]]:
        return {
            f"g{n}": {
                "group": f"g{n}",
                "kind": "consumer",
                "state": "STABLE" if n % 2 else "EMPTY",
                "members": n % 2,
            }
            for n in range(self.count)
        }

    def describe_groups(
        self, groups: Any = None, *, members: bool = True, lag_seconds: bool = True
    ) -> dict[str, dict[str, Any]]:
        assert not members
        if groups == self.gone:
            raise UnknownGroupError(groups)
        rows: list[dict[str, Any]] = [
            {"topic": "t", "partition": n, "lag": (5, None)[n]} for n in range(2)
        ]
        if lag_seconds:
            rows[0]["lag_seconds"] = 1.5
            rows[1]["lag_seconds"] = None
        return {
            groups: {
                **self.list_groups()[groups],
                "member_count": 1,
                "rebalances": 3,
                "partitions": rows,
            }
        }

    def transaction_totals(self) -> dict[str, Any]:
        return dict(self.totals)


@pytest.fixture
def fake() -> Iterator[Callable[..., ObservedGroups]]:
    with FakeAdmin("localhost:1") as admin:

        def look(count: int, gone: str = "") -> ObservedGroups:
            FakeAdmin.count, FakeAdmin.gone = count, gone
            return observe_groups(admin, 7)

        yield look


def samples(observed: ObservedGroups) -> dict[str, float]:
    return {
        f"{s.name} {' '.join(s.labels.values())}".strip(): s.value
        for family in group_families(observed)
        for s in family.samples
    }


def test_transactions_are_shown_where_there_are_ids(fake: Callable[..., ObservedGroups]) -> None:
    assert not [name for name in samples(fake(0)) if "transaction" in name]
    totals = {
        "ids": 3, "open": 2, "oldest_ms": 1_500, "unsettled": 1, "commits": 7, "aborts": 5,
        "fenced": 4, "decision_seconds": 0.25,
    }  # fmt: skip
    FakeAdmin.totals = totals
    found = {name: value for name, value in samples(fake(0)).items() if "transaction" in name}
    FakeAdmin.totals = {}
    assert found == {
        "tailrace_transactional_ids": 3, "tailrace_transactions_open": 2,
        "tailrace_transactions_oldest_seconds": 1.5, "tailrace_transactions_unsettled": 1,
        "tailrace_transaction_commits_total": 7, "tailrace_transaction_aborts_total": 5,
        "tailrace_transaction_fenced_total": 4, "tailrace_transaction_decision_seconds_total": 0.25,
    }  # fmt: skip


def test_lag_members_rebalances_and_states_are_shown(fake: Callable[..., ObservedGroups]) -> None:
    assert samples(fake(3, gone="g2")) == {
        "tailrace_groups consumer EMPTY": 2, "tailrace_groups consumer STABLE": 1,
        "tailrace_groups_truncated": 1, "tailrace_group_commits_total": 7,
        "tailrace_group_members g0": 1, "tailrace_group_members g1": 1,
        "tailrace_group_rebalances_total g0": 3, "tailrace_group_rebalances_total g1": 3,
        "tailrace_group_lag_records g0 t 0": 5, "tailrace_group_lag_records g1 t 0": 5,
        "tailrace_group_lag_seconds g0 t 0": 1.5, "tailrace_group_lag_seconds g1 t 0": 1.5,
    }  # fmt: skip


def test_lag_in_seconds_which_costs_a_read_is_asked_for_a_bounded_number_of_partitions(
    fake: Callable[..., ObservedGroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_metrics, "LAG_SECONDS_PARTITIONS_MAX", 3)
    named = [name for name in samples(fake(9)) if "lag_seconds" in name]
    assert len(named) == 2


def test_records_that_cannot_be_written_to_a_dead_letter_topic_are_shown(
    fake: Callable[..., ObservedGroups],
) -> None:
    observed = fake(1)
    for row in observed.described[0]["partitions"]:
        row["at_delivery_limit"] = row["partition"] + 2
    found = samples(observed)
    name = "tailrace_group_at_delivery_limit_records g0 t"
    assert (found[f"{name} 0"], found[f"{name} 1"]) == (2, 3)


def test_there_are_as_many_series_as_there_may_be_and_groups_with_members_come_first(
    fake: Callable[..., ObservedGroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_metrics, "GROUPS_SHOWN_MAX", 6)
    observed = fake(9)
    assert [group["group"] for group in observed.described] == ["g1", "g3", "g5", "g7", "g0", "g2"]
    assert observed.not_shown == 3
    monkeypatch.setattr(group_metrics, "PARTITIONS_SHOWN_MAX", 5)
    observed = fake(9)
    assert [group["group"] for group in observed.described] == ["g1", "g3"]
    assert (observed.not_shown, sum(observed.by_kind_and_state.values())) == (7, 9)
    monkeypatch.setattr(group_metrics, "PARTITIONS_SHOWN_MAX", 1)
    assert len(fake(9).described) == 1, "a large one is shown rather than none"
