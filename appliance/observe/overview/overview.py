"""The rows of `tailrace top`: rates, latencies, topics, groups, processes, between two moments.

Pure but for `Watch`, which asks a front as the console does, and reads shared memory where it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from appliance.observe.console.sampling.latencies import Counts, quantile
from appliance.observe.console.sampling.samples import NS_PER_S, Sample, process_row, rates, take
from appliance.observe.overview.problems import problems_of
from appliance.observe.overview.shared_state import SharedState
from appliance.observe.process_states import ProcessState
from tailrace.admin.admin import Admin
from tailrace.protocol.frame import Api

QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
NO_MEASUREMENTS = (
    "no latencies, CPU and memory: run this on the appliance's host, as root or as its user"
)


class Moment(NamedTuple):
    """State at one moment."""

    sample: Sample
    processes: Sequence[ProcessState]
    """With their measurements; empty where shared memory cannot be read."""


class Watch:
    """Takes moments of one appliance."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._cluster = admin.describe_cluster()
        self._shared = SharedState.attach(self._cluster)

    def take(self) -> Moment:
        """Ask now. A front that does not answer is a sample with `error`."""
        processes = [] if self._shared is None else self._shared.states.processes()
        sample = take(self._admin, processes, self._groups_run, None)
        if sample.cluster:
            self._cluster = dict(sample.cluster)
            if self._shared is not None:
                self._shared.follow(self._cluster)
        return Moment(sample, processes)

    def _groups_run(self) -> bool:
        return any(process["name"] == "groups-0" for process in self._cluster["processes"])

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


def overview(before: Moment, after: Moment) -> dict[str, Any]:
    """Summary of two moments, for JSON. Topics by rate, groups by lag, processes as
    they are listed.
    """
    sample = after.sample
    seconds = max(1, sample.now_ns - before.sample.now_ns) / NS_PER_S
    by_topic = rates(before.sample, sample) if not before.sample.error else {}
    problems = (
        []
        if sample.error
        else problems_of(sample.cluster, sample.delays, sample.groups, now_us=sample.time_ms * 1000)
    )
    groups = [
        {"group": name, "kind": group.kind, "state": group.state, "members": group.members,
         "lag": group.lag}
        for name, group in sample.groups.items()
    ]  # fmt: skip
    return {
        "time_ms": sample.time_ms,
        "interval_s": round(seconds, 3),
        "error": sample.error,
        "problems": [
            {"check": check.name, "level": check.level.value, "detail": check.detail}
            for check in problems
        ],
        "rates": {
            "records_per_s": round(sum(by_topic.values()), 1),
            **_request_rates(before.processes, after.processes, seconds),
        },
        "latencies": latencies(before.sample.durations, sample.durations),
        "topics": sorted(
            (
                {"topic": name, "records_per_s": round(by_topic.get(name, 0.0), 1),
                 "partitions": total.partitions, "records": total.records,
                 "bytes": total.size_bytes, "offline": total.offline}
                for name, total in sample.topics.items()
            ),
            key=lambda row: (-row["records_per_s"], row["topic"]),
        ),
        "groups": sorted(groups, key=lambda row: (-(row["lag"] or 0), row["group"])),
        "processes": _process_rows(before, after, seconds),
        "data_dirs": sample.cluster.get("data_dirs", []),
        "note": "" if after.processes else NO_MEASUREMENTS,
    }  # fmt: skip


def latencies(before: Counts, after: Counts) -> dict[str, dict[str, float | None]]:
    """Operation -> count and percentiles in ms of the durations that came in between."""
    found: dict[str, dict[str, float | None]] = {}
    for name, now in after.items():
        then = before.get(name, (0,) * len(now))
        counts = [max(0, count - former) for count, former in zip(now, then, strict=True)]
        found[name] = {"count": sum(counts)}
        for key, part in QUANTILES.items():
            found[name][key] = round(quantile(counts, part) * 1000, 3) if any(counts) else None
    return found


def _request_rates(
    before: Sequence[ProcessState], after: Sequence[ProcessState], seconds: float
) -> dict[str, float | None]:
    """Rates of fronts; None where shared memory cannot be read."""
    names = ("produce_requests_per_s", "fetch_requests_per_s", "refused_per_s",
             "sent_bytes_per_s")  # fmt: skip
    if not before or not after:
        return dict.fromkeys(names)
    first, last = _totals(before), _totals(after)
    return {
        name: round(max(0, new - old) / seconds, 1)
        for name, old, new in zip(names, first, last, strict=True)
    }


def _totals(processes: Sequence[ProcessState]) -> tuple[int, ...]:
    return (
        sum(process.requests.get(Api.PRODUCE, 0) for process in processes),
        sum(process.requests.get(Api.FETCH, 0) for process in processes),
        sum(sum(process.errors.values()) for process in processes),
        sum(process.sent_bytes for process in processes),
    )


def _process_rows(before: Moment, after: Moment, seconds: float) -> list[dict[str, Any]]:
    former = {(process.name, process.pid): process.cpu_seconds for process in before.processes}
    rows = []
    for process in after.processes:
        row = process_row(process)
        used = former.get((process.name, process.pid))
        rows.append(
            {
                "process": row["name"], "pid": row["pid"], "state": _state(row),
                "cores": row["cores"],
                "cpu_percent": None
                if used is None
                else round(100 * max(0.0, process.cpu_seconds - used) / seconds, 1),
                "pss_bytes": pss_bytes(process.pid) if process.is_live else None,
                "restarts": row["restarts"], "errors": row["errors"],
            }
        )  # fmt: skip
    if rows:
        return rows
    return [
        {"process": p["name"], "pid": p["pid"], "state": "live" if p["live"] else "down",
         "cores": None, "cpu_percent": None, "pss_bytes": None,
         "restarts": max(0, p["restarts"]), "errors": p["internal_errors"]}
        for p in after.sample.cluster.get("processes", [])
    ]  # fmt: skip


def _state(row: dict[str, Any]) -> str:
    if not row["live"]:
        return "down"
    return "live" if row["ready"] else "starting"


def pss_bytes(pid: int) -> int | None:
    """Memory of a process, with its share of what others map too; None if it may not be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) << 10 for line in file if line[:4] == "Pss:"), None)
    except (OSError, ValueError):
        return None
