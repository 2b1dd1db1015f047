"""Prometheus metric families of the appliance, made from the answers of Admin calls.

Names begin with `tailrace_` and end with their unit, as Prometheus asks. Pure: no I/O, no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import InfoMetricFamily, Metric

from appliance.observe.metrics.groups import ObservedGroups, group_families
from appliance.observe.metrics.measurements import measurement_families
from appliance.observe.metrics.metric_family import counter, gauge
from appliance.observe.metrics.partitions import partition_families
from appliance.observe.occupancy import Occupancy
from appliance.observe.process_states import CleanerCounts, ProcessState

_DUE_WITHIN_S = {"1m": "60", "1h": "3600", "1d": "86400", "later": "+Inf"}
"""Names in `describe_delays` -> seconds, for the label `within_seconds` (`le` is a histogram's)."""
_RING_DOC = "a worker's ring, which has the batches that its flusher or a front has not passed yet."
_LANE_DOC = "the fullest lane that a process reads."


@dataclass(frozen=True, slots=True)
class Observed:
    """Answers that a scrape collected; all but the first field are empty when no front answers."""

    processes: Sequence[ProcessState]
    version: str
    answers: bool = False
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Answer of `Admin.describe_cluster`."""
    partitions: Sequence[Mapping[str, Any]] = ()
    """Answer of `Admin.offsets`, "latest"."""
    topics_max: int = 1_000
    """Topics with series of their own."""
    delays: Sequence[Mapping[str, Any]] = ()
    """Answer of `Admin.describe_delays`."""
    rings: Mapping[str, Occupancy] = field(default_factory=dict)
    """Worker -> its ring."""
    lanes: Mapping[str, Occupancy] = field(default_factory=dict)
    """Process -> the fullest of its lanes."""
    cleaners: Sequence[CleanerCounts] = ()
    """Counters of the cleaners."""
    groups: ObservedGroups | None = None
    """Groups; None if the group coordinator does not run or does not answer."""
    are_groups_refused: bool = False


def families(observed: Observed) -> Iterator[Metric]:
    """Every metric family, once."""
    yield InfoMetricFamily(
        "tailrace_build", "Version of the appliance.", value={"version": observed.version}
    )
    yield gauge(
        "tailrace_up", "1 if a front answers requests, else 0.", {(): float(observed.answers)}
    )
    yield from _of_processes(observed.processes)
    yield gauge(
        "tailrace_groups_refused",
        "1 while requests of groups and transactions are refused, because groups.db cannot be "
        "used, else 0.",
        {(): float(observed.are_groups_refused)},
    )
    yield from measurement_families(observed.processes)
    if any(process.kafka is not None for process in observed.processes):
        from appliance.observe.metrics.kafka import kafka_families  # with a Kafka gateway alone

        yield from kafka_families(observed.processes)
    yield from _of_cleaners(observed.cleaners)
    yield from _of_occupancy("ring", _RING_DOC, observed.rings)
    yield from _of_occupancy("lane", _LANE_DOC, observed.lanes)
    if observed.answers:
        yield InfoMetricFamily(
            "tailrace_cluster",
            "Identity of the appliance.",
            value={"id": str(observed.cluster["cluster_id"])},
        )
        yield from _of_directories(observed.cluster["data_dirs"])
        yield gauge(
            "tailrace_memory_short",
            "1 while tasks wait for memory for more than memory.pressure.percent of the time, and "
            "producers get credit for one batch at a time, else 0.",
            {(): float(observed.cluster["memory"]["is_short"])},
        )
        yield from _of_bin(observed.cluster["bin"])
        yield from _of_backups(observed.cluster.get("backups", []))
        if observed.cluster.get("audit") is not None:
            yield from _of_audit(observed.cluster["audit"])
        yield from partition_families(observed.partitions, observed.topics_max)
        yield from _of_delays(observed.delays)
    if observed.groups is not None:
        yield from group_families(observed.groups)


def _of_processes(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    labels = ("process",)
    yield gauge(
        "tailrace_process_live",
        "1 if the process runs, else 0.",
        {(p.name,): p.is_live for p in processes},
        labels,
    )
    yield counter(
        "tailrace_process_restarts",
        "Times that the process was started again after it had ended by itself.",
        {(p.name,): p.restarts for p in processes},
        labels,
    )
    yield counter(
        "tailrace_process_errors",
        "Messages whose handling failed by an internal error; the log has each reason. Please "
        "report it.",
        {(p.name,): p.internal_errors for p in processes},
        labels,
    )
    yield gauge(
        "tailrace_process_resident_memory_bytes",
        "Resident memory of the process; shared memory counts in each process that touched it.",
        {(p.name,): p.resident_bytes for p in processes},
        labels,
    )
    yield counter(
        "tailrace_process_cpu_seconds",
        "Processor time of the process.",
        {(p.name,): p.cpu_seconds for p in processes},
        labels,
    )
    yield gauge(
        "tailrace_process_open_fds",
        "Open file descriptors of the process.",
        {(p.name,): p.open_files for p in processes},
        labels,
    )


def _of_occupancy(name: str, doc: str, found: Mapping[str, Occupancy]) -> Iterator[Metric]:
    yield gauge(
        f"tailrace_{name}_used_bytes",
        f"Used bytes of {doc}",
        {(process,): of.used_bytes for process, of in found.items()},
        ("process",),
    )
    yield gauge(
        f"tailrace_{name}_size_bytes",
        f"Size of {doc}",
        {(process,): of.size_bytes for process, of in found.items()},
        ("process",),
    )


def _of_cleaners(cleaners: Sequence[CleanerCounts]) -> Iterator[Metric]:
    for name, doc, count_of in (
        ("read_bytes", "Bytes of segments that a cleaner has cleaned.", "bytes_in"),
        ("written_bytes", "Bytes of cleaned segments.", "bytes_out"),
        ("passes", "Cleanings of a partition that were completed.", "passes"),
        ("throttled_seconds", "Waits for cleaner.io.max.bytes.per.second.", "throttled_seconds"),
    ):
        yield counter(
            f"tailrace_cleaner_{name}",
            doc,
            {(each.name,): getattr(each, count_of) for each in cleaners},
            ("process",),
        )


def _of_bin(kept: Mapping[str, Any]) -> Iterator[Metric]:
    yield gauge(
        "tailrace_bin_topics",
        "Deleted topics that `tailrace topic undelete` brings back.",
        {(): float(kept["topics"])},
    )
    yield gauge(
        "tailrace_bin_size_bytes",
        "Space that they take; `tailrace topic purge` frees it.",
        {(): float(kept["bytes"])},
    )
    yield gauge(
        "tailrace_bin_oldest_deletion_timestamp_seconds",
        "Time of the oldest of these deletions, seconds since 1970; 0 if there is none.",
        {(): (kept["oldest_deleted_us"] or 0) / 1e6},
    )


def _of_backups(results: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("target",)
    of = {(str(result["target"]),): result for result in results}
    yield gauge(
        "tailrace_backup_point_timestamp_seconds",
        "Point of the newest backup at a target, seconds since 1970; 0 if there is none.",
        {key: result["point_us"] / 1e6 for key, result in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_backup_failed",
        "1 if the last backup to a target failed, or found damage, else 0; `tailrace status` has "
        "the reason.",
        {key: float(bool(result["error"])) for key, result in of.items()},
        labels,
    )


def _of_audit(state: Mapping[str, Any]) -> Iterator[Metric]:
    yield gauge(
        "tailrace_audit_failed",
        "1 while the audit log cannot be written and administration is refused, else 0.",
        {(): float(state["is_failing"])},
    )
    yield counter(
        "tailrace_audit_lines",
        "Lines of the audit log that are on the disk, since the controller's start.",
        {(name,): count for name, count in sorted(state["lines"].items())},
        ("event",),
    )
    yield counter(
        "tailrace_audit_dropped_events",
        "Events that fronts dropped because too many waited.",
        {(): state["dropped"]},
        (),
    )
    yield counter(
        "tailrace_audit_failures",
        "Attempts to write to the audit log that failed.",
        {(): state["failures"]},
        (),
    )


def _of_directories(directories: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("path",)
    of = {(str(d["path"]),): d for d in directories}
    yield gauge(
        "tailrace_log_dir_free_bytes",
        "Free space of its disk.",
        {key: d["free_bytes"] for key, d in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_log_dir_size_bytes",
        "Size of its disk.",
        {key: d["total_bytes"] for key, d in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_log_dir_online",
        "1 if it accepts writes, else 0: its disk is full or cannot be read.",
        {key: d["state"] == "OK" for key, d in of.items()},
        labels,
    )


def _of_delays(delays: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("topic", "partition")
    of = {(str(d["topic"]), str(d["partition"])): d for d in delays}
    due = {}
    for key, described in of.items():
        count = 0
        for name, bound in _DUE_WITHIN_S.items():
            count += described["due_within"][name]
            due[*key, bound] = count
    yield gauge(
        "tailrace_delayed_records_pending",
        "Pending delayed records.",
        {key: d["pending"] for key, d in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_delayed_records_due",
        "Pending delayed records that are due within this many seconds.",
        due,
        (*labels, "within_seconds"),
    )
    yield gauge(
        "tailrace_delayed_records_recurring",
        "Records that recur.",
        {key: d["recurring"] for key, d in of.items()},
        labels,
    )
    yield gauge(
        "tailrace_delayed_records_next_due_timestamp_seconds",
        "Earliest time at which the next delayed record is due.",
        {key: d["next_due_us"] / 1e6 for key, d in of.items() if d["next_due_us"] is not None},
        labels,
    )
    yield gauge(
        "tailrace_delayed_records_lateness_seconds",
        "Lateness of the last delivery.",
        {key: d["lateness_us"] / 1e6 for key, d in of.items()},
        labels,
    )
    for name, doc in (
        ("delivered", "Delayed records delivered"),
        ("cancelled", "Delayed records cancelled"),
        ("lost", "Delayed records lost, in damaged bucket files or refused"),
    ):
        values = {key: d["lost_rows" if name == "lost" else name] for key, d in of.items()}
        yield counter(
            f"tailrace_delayed_records_{name}",
            f"{doc}, since the scheduler started.",
            values,
            labels,
        )
