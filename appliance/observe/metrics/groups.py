"""Prometheus metrics of consumer groups, share groups and transactions.

The console asks the group coordinator through a front, as Admin does, and only while that process
runs: an appliance without groups has none of these metrics. A scrape costs a page or two of names,
and one or a few requests for each group shown.

Bounds: at most GROUPS_SHOWN_MAX groups, those with members first, then by name, and no more when
PARTITIONS_SHOWN_MAX partitions are shown. `tailrace_groups_truncated` counts the groups left out.
Groups by state count all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.observe.metrics.transactions import transaction_families
from tailrace.admin.admin import Admin
from tailrace.core.errors import UnknownGroupError

GROUPS_SHOWN_MAX = 200
PARTITIONS_SHOWN_MAX = 10_000
LAG_SECONDS_PARTITIONS_MAX = 500
"""Partitions with their lag in seconds, which reads a batch of each that has lag."""


@dataclass(frozen=True, slots=True)
class ObservedGroups:
    """Groups that a scrape found."""

    by_kind_and_state: Mapping[tuple[str, str], int]
    described: Sequence[Mapping[str, Any]]
    """Descriptions of the groups shown, from `Admin.describe_groups`."""
    not_shown: int
    commits: int
    """Commits of offsets since the appliance started."""
    transactions: Mapping[str, Any] | None = None
    """Totals of transactions; None: there is no transactional id."""


def observe_groups(admin: Admin, commits: int) -> ObservedGroups:
    """Ask a front for the groups.

    Raises: TailraceError.
    """
    listed = admin.list_groups()
    described: list[Mapping[str, Any]] = []
    partitions = 0
    for name in sorted(listed, key=lambda name: (not listed[name]["members"], name))[
        :GROUPS_SHOWN_MAX
    ]:
        try:
            group = admin.describe_groups(
                name, members=False, lag_seconds=partitions < LAG_SECONDS_PARTITIONS_MAX
            )[name]
        except UnknownGroupError:
            continue  # it was deleted since
        partitions += len(group["partitions"])
        if described and partitions > PARTITIONS_SHOWN_MAX:
            break
        described.append(group)
    states = Counter((str(group["kind"]), str(group["state"])) for group in listed.values())
    totals = admin.transaction_totals()
    return ObservedGroups(
        states,
        described,
        len(listed) - len(described),
        commits,
        totals if totals.get("ids") else None,
    )


def group_families(observed: ObservedGroups) -> Iterator[Metric]:
    """Every metric family of groups, once."""
    groups = GaugeMetricFamily(
        "tailrace_groups", "Consumer groups and share groups, by state.", labels=("kind", "state")
    )
    for key, count in observed.by_kind_and_state.items():
        groups.add_metric(key, count)
    yield groups
    yield GaugeMetricFamily(
        "tailrace_groups_truncated",
        "Groups without series here, above the limit of groups shown.",
        value=observed.not_shown,
    )
    yield CounterMetricFamily(
        "tailrace_group_commits",
        "Offset commits since the appliance started.",
        value=observed.commits,
    )
    yield from _described_families(observed.described)
    if observed.transactions is not None:
        yield from transaction_families(observed.transactions)


def _described_families(described: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    members = GaugeMetricFamily(
        "tailrace_group_members", "Members of the group.", labels=("group",)
    )
    rebalances = CounterMetricFamily(
        "tailrace_group_rebalances",
        "Rebalances of the group.",
        labels=("group",),
    )
    lag = GaugeMetricFamily(
        "tailrace_group_lag_records",
        "Records between the committed offset and the end of the partition.",
        labels=("group", "topic", "partition"),
    )
    lag_seconds = GaugeMetricFamily(
        "tailrace_group_lag_seconds",
        "Age of the first record behind the committed offset; 0 without lag.",
        labels=("group", "topic", "partition"),
    )
    at_limit = GaugeMetricFamily(
        "tailrace_group_at_delivery_limit_records",
        "Records that a share group has delivered as often as it may, and that are not done: they "
        "cannot be written to the dead-letter topic.",
        labels=("group", "topic", "partition"),
    )
    for group in described:
        members.add_metric((group["group"],), group["member_count"])
        rebalances.add_metric((group["group"],), group["rebalances"])
        for row in group["partitions"]:
            if row["lag"] is not None:
                lag.add_metric((group["group"], row["topic"], str(row["partition"])), row["lag"])
            if row.get("lag_seconds") is not None:
                lag_seconds.add_metric(
                    (group["group"], row["topic"], str(row["partition"])), row["lag_seconds"]
                )
            if "at_delivery_limit" in row:
                at_limit.add_metric(
                    (group["group"], row["topic"], str(row["partition"])), row["at_delivery_limit"]
                )
    yield members
    yield rebalances
    yield lag
    yield lag_seconds
    yield at_limit
