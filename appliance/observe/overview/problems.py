"""Problems of a running appliance, the worst first, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.observe.checks.doctor_checks import Check, Level, appliance_checks
from appliance.observe.console.sampling.samples import GroupTotals

LATE_US = 10_000_000
"""Lateness of delayed records from which it is a problem."""
BACKUP_AGE_US = 26 * 3600 * 1_000_000
"""Age of the newest backup from which it is a problem: a day and a timer's delay."""
_ORDER = {Level.PROBLEM: 0, Level.WARNING: 1, Level.OK: 2}


def problems_of(
    cluster: Mapping[str, Any],
    delays: Sequence[Mapping[str, Any]] = (),
    groups: Mapping[str, GroupTotals] | None = None,
    *,
    now_us: int = 0,
) -> list[Check]:
    """Problems by what a front has answered. Empty: there is none. `now_us`: the time; 0: the age
    of backups is not checked.
    """
    found = [
        *(check for check in appliance_checks(dict(cluster)) if check.level is not Level.OK),
        *_late_records(delays),
        *_dead_letters(groups or {}),
        *_memory(cluster.get("memory") or {}),
        *backup_checks(cluster.get("backups", ()), now_us),
        *_audit_log(cluster.get("audit") or {}),
        *_paused_topics(cluster),
    ]
    return sorted(found, key=lambda check: _ORDER[check.level])


def _late_records(delays: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    late = [row for row in delays if row["lateness_us"] > LATE_US and row["pending"]]
    if late:
        names = ", ".join(sorted({str(row["topic"]) for row in late}))
        yield Check(
            "delayed records",
            Level.WARNING,
            f"late by {max(row['lateness_us'] for row in late) / 1e6:.0f} s in {names}; the "
            "scheduler lacks a core, or its disk is slow",
        )


def _dead_letters(groups: Mapping[str, GroupTotals]) -> Iterator[Check]:
    for name, group in sorted(groups.items()):
        if group.dead_letters:
            yield Check(
                "dead letters",
                Level.PROBLEM,
                f"queue {name} cannot write {group.dead_letters} records to its dead-letter topic; "
                "the log of its consumers says why",
            )


def _memory(memory: Mapping[str, Any]) -> Iterator[Check]:
    if memory.get("is_short"):
        yield Check(
            "memory",
            Level.PROBLEM,
            f"memory is short: processes waited for it {memory['stalled_percent']:.0f} % of "
            "the time, so producers get credit for one batch at a time. Give the appliance "
            "more memory, lower ring_bytes or credit_bytes, or move other programs away",
        )


def _audit_log(audit: Mapping[str, Any]) -> Iterator[Check]:
    if audit.get("is_failing"):
        yield Check(
            "audit log",
            Level.PROBLEM,
            f"the audit log in {audit['directory']} cannot be written: administration is "
            "refused. Free space there, or repair what the log's audit_not_written names",
        )


def _paused_topics(cluster: Mapping[str, Any]) -> Iterator[Check]:
    if cluster.get("paused"):
        left = cluster["paused_count"] - len(cluster["paused"])
        more = f" and {left:,} more" if left > 0 else ""
        yield Check(
            "delivery paused",
            Level.WARNING,
            f"delivery to groups is paused: {', '.join(cluster['paused'])}{more}; to resume: "
            "tailrace topic alter TOPIC --config delivery.paused=false",
        )


def backup_checks(results: Sequence[Mapping[str, Any]], now_us: int) -> list[Check]:
    """Problems of backups, by the last result at each target."""
    found = []
    for result in results:
        target, point_us = result["target"], result["point_us"]
        newest = (
            f"the newest backup there is {result['backup_id']}" if point_us else "none is there"
        )
        if result["error"]:
            found.append(
                Check(
                    "backup",
                    Level.PROBLEM,
                    f"the last backup to {target} failed: {result['error']} ({newest})",
                )
            )
        elif now_us and now_us - point_us > BACKUP_AGE_US:
            found.append(
                Check(
                    "backup",
                    Level.WARNING,
                    f"the newest backup at {target} is {_duration(now_us - point_us)} old; look at "
                    "what makes it (systemctl list-timers tailrace-backup.timer), or run: tailrace "
                    f"backup {target}",
                )
            )
    return found


def _duration(us: int) -> str:
    hours = us // 3_600_000_000
    return f"{hours // 24} days" if hours >= 48 else f"{hours} hours"
