"""What consumer groups and share groups look like to Prometheus.

The console asks the process of groups through a front, as operators do, and only while that process runs: an appliance without groups exposes none of this and
pays nothing. Each scrape costs a page or two of names, and for each group that is shown one request or a few.

Bounds: at most GROUPS_SHOWN_MAX groups, those with members first, then by name, and no more when PARTITIONS_SHOWN_MAX partitions are shown. How many are left
out is in `tailrace_groups_not_shown`; groups by state count all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tailrace.admin import Admin
from tailrace.errors import UnknownGroupError

GROUPS_SHOWN_MAX = 200
PARTITIONS_SHOWN_MAX = 10_000


@dataclass(frozen=True, slots=True)
class ObservedGroups:
    """What a scrape has found of groups."""

    by_kind_and_state: Mapping[tuple[str, str], int]
    described: Sequence[Mapping[str, Any]]
    """Those that are shown, of `Admin.describe_groups`."""
    not_shown: int
    commits: int
    """Commits of offsets since the appliance started."""


def observe_groups(admin: Admin, commits: int) -> ObservedGroups:
    """Ask for them. Raises TailraceError."""
    listed = admin.list_groups()
    described: list[Mapping[str, Any]] = []
    partitions = 0
    for name in sorted(listed, key=lambda name: (not listed[name]["members"], name))[:GROUPS_SHOWN_MAX]:
        try:
            group = admin.describe_groups(name, members=False, lag_seconds=False)[name]
        except UnknownGroupError:
            continue  # it was deleted since
        partitions += len(group["partitions"])
        if described and partitions > PARTITIONS_SHOWN_MAX:
            break
        described.append(group)
    states = Counter((str(group["kind"]), str(group["state"])) for group in listed.values())
    return ObservedGroups(states, described, len(listed) - len(described), commits)


def group_families(observed: ObservedGroups) -> Iterator[Metric]:
    """Every metric family of groups, once."""
    groups = GaugeMetricFamily("tailrace_groups", "Consumer groups and share groups, by state.", labels=("kind", "state"))
    for key, count in observed.by_kind_and_state.items():
        groups.add_metric(key, count)
    yield groups
    yield GaugeMetricFamily(
        "tailrace_groups_not_shown", "Groups of which no series are shown here, since there are too many.", value=observed.not_shown
    )
    yield CounterMetricFamily("tailrace_group_commits", "Commits of offsets, since the appliance started.", value=observed.commits)
    members = GaugeMetricFamily("tailrace_group_members", "Members of the group.", labels=("group",))
    rebalances = CounterMetricFamily(
        "tailrace_group_rebalances", "How often partitions of the group were assigned anew.", labels=("group",)
    )
    lag = GaugeMetricFamily(
        "tailrace_group_lag_records", "Records that the group has not consumed yet.", labels=("group", "topic", "partition")
    )
    for group in observed.described:
        members.add_metric((group["group"],), group["member_count"])
        rebalances.add_metric((group["group"],), group["rebalances"])
        for row in group["partitions"]:
            if row["lag"] is not None:
                lag.add_metric((group["group"], row["topic"], str(row["partition"])), row["lag"])
    yield members
    yield rebalances
    yield lag
