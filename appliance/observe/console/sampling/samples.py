"""Samples of the appliance's state, and the rates between two of them.

Owner: the sampler. Pure but for `take`, which asks a front as Admin does.
Invariants:
- A rate is computed from two samples and their distance on the monotonic clock. It is 0 for a
  topic that was made again in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.observe.console.sampling.latencies import Counts, counts_of
from appliance.observe.process_states import ProcessState
from tailrace.admin.admin import Admin
from tailrace.core.errors import StorageError, TailraceError
from tailrace.core.topic_partition import TopicPartition

GROUPS_MAX = 100
"""Groups whose lag is sampled, those with members first."""
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TopicTotals:
    """Sums over a topic's partitions."""

    partitions: int
    records: int
    """Records between the log start offsets and the ends, markers included."""
    end: int
    """Sum of the high watermarks."""
    size_bytes: int
    segments: int
    offline: int
    """Partitions that take no writes."""


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """A group and its lag."""

    kind: str
    state: str
    members: int
    lag: int | None
    """Records; None: not sampled, or without commits."""
    dead_letters: int = 0
    """Records at their delivery limit that are not acknowledged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment."""

    now_ns: int
    """Monotonic."""
    time_ms: int
    topics: Mapping[str, TopicTotals] = field(default_factory=dict)
    groups: Mapping[str, GroupTotals] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    delays: list[Mapping[str, Any]] = field(default_factory=list)
    transactions: Mapping[str, Any] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)
    durations: Counts = field(default_factory=dict)
    error: str = ""
    """The reason why no front answers; empty: one does."""


def take(
    admin: Admin,
    processes: list[ProcessState],
    may_ask_groups: Callable[[], bool],
    groups: Mapping[str, GroupTotals] | None,
) -> Sample:
    """Ask a front. `may_ask_groups`: their process runs (a request would start it). `groups`: a
    former sample's, to be kept; None: sample them now. Where the database of groups cannot be
    used, `cluster` has `groups_error`. Never raises TailraceError.
    """
    now_ns, time_ms = time.monotonic_ns(), time.time_ns() // 1_000_000
    rows = [process_row(process) for process in processes]
    durations = counts_of(processes)
    try:
        partitions = {
            TopicPartition(topic, number): "latest"
            for topic, count in admin.partition_counts(internal=True).items()
            for number in range(count)
        }
        states = list(admin.offsets(partitions).values()) if partitions else []
        cluster = admin.describe_cluster()
        delays = admin.describe_delays()
        transactions: Mapping[str, Any] = {}
        if may_ask_groups():
            try:
                groups = _groups(admin) if groups is None else groups
                transactions = admin.transaction_totals()
            except StorageError as error:  # what does not need groups is served
                cluster["groups_error"] = error.detail
    except TailraceError as error:
        return Sample(now_ns, time_ms, processes=rows, durations=durations, error=str(error))
    return Sample(
        now_ns, time_ms, topic_totals(states), groups or {}, cluster, list(delays), transactions,
        rows, durations,
    )  # fmt: skip


def process_row(process: ProcessState) -> dict[str, Any]:
    """A process as the page shows it."""
    return {
        "name": process.name,
        "pid": process.pid,
        "cores": _cores(process.pid) if process.is_live else "",
        "live": process.is_live,
        "ready": process.is_ready,
        "restarts": process.restarts,
        "errors": process.internal_errors,
        "resident_bytes": process.resident_bytes,
    }


def _cores(pid: int) -> str:
    """The cores on which a process may run, as ranges."""
    try:
        cores = sorted(os.sched_getaffinity(pid))
    except OSError:
        return ""  # it has ended
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def topic_totals(partitions: Sequence[Mapping[str, Any]]) -> dict[str, TopicTotals]:
    """Sum the answers of `Admin.offsets` by topic."""
    sums: dict[str, list[int]] = {}
    for row in partitions:
        if row["code"]:
            continue
        total = sums.setdefault(row["topic"], [0, 0, 0, 0, 0, 0])
        end = row.get("high_watermark", row["end"])
        for place, value in enumerate(
            (1, end - row["beginning"], end, row["size_bytes"], row["segments"],
             row["state"] != "ONLINE")
        ):  # fmt: skip
            total[place] += value
    return {name: TopicTotals(*total) for name, total in sums.items()}


def _groups(admin: Admin) -> dict[str, GroupTotals]:
    listed = admin.list_groups()
    found = {}
    order = sorted(listed, key=lambda name: (not listed[name]["members"], name))
    for place, name in enumerate(order):
        group, lag, dead = listed[name], None, 0
        if place < GROUPS_MAX:
            try:
                described = admin.describe_groups(name, members=False, lag_seconds=False)[name]
            except TailraceError:
                continue  # it was deleted since
            lags = [row["lag"] for row in described["partitions"] if row["lag"] is not None]
            lag = sum(lags) if lags else None
            dead = sum(row.get("at_delivery_limit", 0) for row in described["partitions"])
        found[name] = GroupTotals(group["kind"], group["state"], group["members"], lag, dead)
    return found


def rates(before: Sample | None, after: Sample) -> dict[str, float]:
    """Records a second that were appended to each topic."""
    if before is None or after.now_ns <= before.now_ns:
        return dict.fromkeys(after.topics, 0.0)
    seconds = (after.now_ns - before.now_ns) / NS_PER_S
    found = {}
    for name, total in after.topics.items():
        former = before.topics.get(name)
        found[name] = max(0, total.end - former.end) / seconds if former else 0.0
    return found
