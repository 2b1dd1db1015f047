"""Advice of `tailrace group advise`: arrival rate, drain rate, and the consumers needed to drain
the lag.

Pure: `advise(samples, by_s)`. A sample is a time and what `Admin.describe_groups` returned then.

Rates:
- Arrival: the movement of the end offsets between the first and the last sample.
- Drain: consumers commit every auto_commit_interval_ms, so committed offsets move in steps. The
  records between two commits were drained in the time between them. The first and the last commit
  of each partition count. The first is taken to be no further before the second than the time of
  the measurement, so that a consumer that was idle before does not seem slow.

Need: to be without lag after `by_s` seconds a group drains (arrival + lag / by_s) records a second.
The rate of one consumer is the group's rate divided by the consumers that have partitions with lag.
A partition of a consumer group has one consumer at a time, so as many partitions as consumers are
needed. A partition of a share group has any number of consumers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from appliance.cli.output import counted
from tailrace.admin.groups import NO_OFFSET, first_unread

SHARE = "share"


class Sample(NamedTuple):
    """A group at one moment."""

    at_s: float
    group: Mapping[str, Any]


@dataclass(slots=True)
class Advice:
    """Result of a measurement; `sentences` renders it."""

    seconds: float
    arrival_per_s: float = 0.0
    drain_per_s: float = 0.0
    lag: int = 0
    lag_seconds: float | None = None
    partitions_without_commit: int = 0
    """Partitions with records; their lag is unknown."""
    consumers: int = 0
    partitions: int = 0
    by_s: float = 0.0
    drained_in_s: float | None = None
    """Time to drain the lag with the current consumers; None: never, or unknown."""
    consumers_needed: int | None = None
    """Consumers needed to be without lag after `by_s`; None: unknown."""
    partitions_needed: int | None = None
    idle: list[str] = field(default_factory=list)
    """Members that have no partition."""
    sentences: list[str] = field(default_factory=list)


def idle_members(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Members of a consumer group with an empty target, while others have partitions."""
    members = group["members"]
    if group["kind"] == SHARE or not any(partition_count(member["target"]) for member in members):
        return []
    return [
        member
        for member in members
        if not partition_count(member["target"]) and not member.get("is_shortened")
    ]


def without_commit(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Partitions with records and no committed offset. Their lag depends on where the consumers
    began, which only they know.
    """
    rows = group["partitions"]
    return [
        row
        for row in rows
        if row["lag"] is None
        and first_unread(row) == NO_OFFSET
        and row["end"] > max(0, row["beginning"])
    ]


def lag_of(group: Mapping[str, Any]) -> int | None:
    """Known lag of a group, in records; None: unknown."""
    known = [row["lag"] for row in group["partitions"] if row["lag"] is not None]
    return None if not known and without_commit(group) else sum(known)


def lag_text(group: Mapping[str, Any], lag_seconds: float | None) -> str:
    """Text of the lag, and the age of the oldest record."""
    lag, unknown = lag_of(group), len(without_commit(group))
    if lag is None:
        return "not known: nothing is committed yet"
    oldest = "" if not lag_seconds else f", the oldest {span(lag_seconds)} old"
    more = (
        ""
        if not unknown
        else f"; not known in {counted(unknown, 'partition')} where nothing is committed yet"
    )
    return f"{counted(lag, 'record')}{oldest}{more}"


def member_name(member: Mapping[str, Any]) -> str:
    """The member's instance id, else its client id, followed by its member id."""
    name = member.get("instance_id") or member.get("client_id") or ""
    return f"{name} ({member['member_id']})" if name else str(member["member_id"])


def partition_count(owned: Any) -> int:
    """The number of partitions in a member's `owned` or `target`."""
    return (
        sum(len(numbers) for numbers in owned.values())
        if isinstance(owned, Mapping)
        else len(owned)
    )


def advise(samples: Sequence[Sample], by_s: float) -> Advice:
    """Compute the advice from two or more samples, in order of time."""
    first, last = samples[0], samples[-1]
    seconds = last.at_s - first.at_s
    rows = last.group["partitions"]
    ends = {_key(row): row["end"] for row in first.group["partitions"] if row["end"] >= 0}
    arrived = sum(
        row["end"] - ends[_key(row)] for row in rows if _key(row) in ends and row["end"] >= 0
    )
    drains = _drains_per_s(samples, seconds)
    idle = idle_members(last.group)
    advice = Advice(
        seconds=seconds, arrival_per_s=max(0.0, arrived / seconds),
        drain_per_s=sum(drains.values()), lag=sum(row["lag"] or 0 for row in rows),
        lag_seconds=max((row["lag_seconds"] for row in rows if row.get("lag_seconds") is not None),
        default=None),
        consumers=len(last.group["members"]), partitions=len(rows), by_s=by_s,
        partitions_without_commit=len(without_commit(last.group)),
        idle=[member_name(member) for member in idle],
    )  # fmt: skip
    _find_needs(advice, last.group, drains)
    _sentences(advice, last.group)
    return advice


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["topic"], row["partition"]


def _drains_per_s(samples: Sequence[Sample], seconds: float) -> dict[tuple[str, int], float]:
    """Records drained per second, by partition."""
    seen: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for sample in samples:
        for row in sample.group["partitions"]:
            offset, stored_ms = first_unread(row), row.get("committed_ms")
            commits = seen.setdefault(_key(row), [])
            if offset != NO_OFFSET and (not commits or offset != commits[-1][1]):
                commits.append(
                    (
                        sample.at_s if stored_ms is None or stored_ms <= 0 else stored_ms / 1000,
                        offset,
                    )
                )
    return {key: _rate_of(commits, seconds) for key, commits in seen.items()}


def _rate_of(commits: Sequence[tuple[float, int]], seconds: float) -> float:
    if len(commits) < 2 or commits[-1][1] <= commits[0][1]:
        return 0.0
    (first_s, first), (second_s, _), (last_s, last) = commits[0], commits[1], commits[-1]
    between_s = min(second_s - first_s, seconds) + last_s - second_s
    return (last - first) / (between_s if between_s > 0 else seconds)


def _find_needs(
    advice: Advice, group: Mapping[str, Any], drains: Mapping[tuple[str, int], float]
) -> None:
    surplus = advice.drain_per_s - advice.arrival_per_s
    if not advice.lag:
        advice.drained_in_s = 0.0
    elif surplus > 0:
        advice.drained_in_s = advice.lag / surplus
    busy = {
        row["member_id"]
        for row in group["partitions"]
        if row.get("member_id") is not None and drains[_key(row)] > 0
    }
    workers = len(busy) if group["kind"] != SHARE else advice.consumers
    if not advice.drain_per_s or not workers:
        return
    each_per_s = advice.drain_per_s / workers
    advice.consumers_needed = max(
        1, math.ceil(round((advice.arrival_per_s + advice.lag / advice.by_s) / each_per_s, 6))
    )
    if not advice.lag or (advice.drained_in_s is not None and advice.drained_in_s <= advice.by_s):
        advice.consumers_needed = min(
            advice.consumers_needed, max(1, advice.consumers - len(advice.idle))
        )
    advice.partitions_needed = (
        advice.partitions
        if group["kind"] == SHARE
        else max(advice.partitions, advice.consumers_needed)
    )


def _sentences(advice: Advice, group: Mapping[str, Any]) -> None:
    echo = advice.sentences.append
    working = advice.consumers - len(advice.idle)
    if not advice.partitions:
        echo(
            "The group has no committed offsets and no partitions: there is nothing to advise "
            "on yet."
        )
        return
    unknown = advice.partitions_without_commit
    if not advice.lag and unknown:
        echo(
            f"In {unknown} of {counted(advice.partitions, 'partition')} nothing is committed "
            "yet, so their lag is unknown. The consumers have just begun, or never commit "
            "(enable_auto_commit=False without commit()). Ask again when they have committed."
        )
    elif not advice.lag:
        echo("There is no lag: the consumers keep up.")
    elif not advice.consumers:
        echo(f"No consumer runs, and the lag is {advice.lag:,} records. Start one; then ask again.")
    elif not advice.drain_per_s:
        echo(
            f"Nothing was committed in {advice.seconds:.0f} s, and the lag is {advice.lag:,} "
            "records: the consumers are stuck, or commit less often. Look at `tailrace group "
            "describe`, or ask again with more --seconds."
        )
    elif advice.drained_in_s is None:
        echo(
            f"The lag grows by {advice.arrival_per_s - advice.drain_per_s:,.1f} records/s and "
            "will never be drained with these consumers."
        )
    else:
        echo(f"With these consumers the lag is drained in {span(advice.drained_in_s)}.")
    needed = advice.consumers_needed
    if (
        advice.lag
        and needed is not None
        and (advice.drained_in_s is None or advice.drained_in_s > advice.by_s)
    ):
        if group["kind"] == SHARE or needed <= advice.partitions:
            echo(
                f"To drain it within {span(advice.by_s)}, run {needed} consumers ({working} work "
                "now)."
            )
        else:
            echo(
                f"To drain it within {span(advice.by_s)}, run {needed} consumers on as many "
                f"partitions. There are {advice.partitions}, and a partition has one consumer "
                "at a time. Added partitions take new records only; records that wait stay in "
                "their partitions."
            )
    if advice.idle:
        has = "has" if len(advice.idle) == 1 else "have"
        echo(
            f"{len(advice.idle)} of {advice.consumers} consumers {has} nothing to do, for there "
            f"are {advice.partitions} partitions: {', '.join(advice.idle)}. Stop them, or add "
            "partitions."
        )


def span(seconds: float) -> str:
    """1.5 -> "1.5 s", 90 -> "1m 30s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s" if rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes}m" if minutes else f"{hours}h"
    return f"{hours // 24}d {hours % 24}h"
