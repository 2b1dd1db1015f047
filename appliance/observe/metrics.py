"""What the appliance's state looks like to Prometheus: from what ADMIN calls answer to metric families.

Names begin with `tailrace_` and end with their unit, as Prometheus asks. Pure: no I/O, no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from appliance.group_metrics import ObservedGroups, group_families
from shm.layout import Role
from shm.runtime.process import process_name

_DUE_WITHIN_S = {"1m": "60", "1h": "3600", "1d": "86400", "later": "+Inf"}
"""Names in `describe_delays` -> seconds, for the label `within_seconds` (`le` is a histogram's)."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process, as the control region shows it."""

    role: Role
    index: int
    is_live: bool
    is_ready: bool
    starts: int
    resident_bytes: int
    internal_errors: int

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a scrape has found. The rest is empty when no front answers."""

    processes: Sequence[ProcessState]
    version: str
    answers: bool = False
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Of `Admin.describe_cluster`."""
    partitions: Sequence[Mapping[str, Any]] = ()
    """Of `Admin.offsets`, "latest"."""
    delays: Sequence[Mapping[str, Any]] = ()
    """Of `Admin.describe_delays`."""
    groups: ObservedGroups | None = None
    """None: no process of groups runs, or it does not answer."""


def families(observed: Observed) -> Iterator[Metric]:
    """Every metric family, once."""
    yield InfoMetricFamily("tailrace_build", "The version that runs.", value={"version": observed.version})
    yield _gauge("tailrace_answers", "Whether a front answers requests, 0 or 1.", {(): float(observed.answers)})
    yield from _of_processes(observed.processes)
    if observed.answers:
        yield InfoMetricFamily("tailrace_cluster", "Which appliance this is.", value={"id": str(observed.cluster["cluster_id"])})
        yield from _of_directories(observed.cluster["data_dirs"])
        yield from _of_partitions(observed.partitions)
        yield from _of_delays(observed.delays)
    if observed.groups is not None:
        yield from group_families(observed.groups)


def _gauge(name: str, doc: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, doc: str, values: Mapping[Any, float], labels: Sequence[str]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _of_processes(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    labels = ("process",)
    yield _gauge("tailrace_process_live", "Whether the process runs, 0 or 1.", {(p.name,): p.is_live for p in processes}, labels)
    yield _counter(
        "tailrace_process_restarts", "How often it was started anew.", {(p.name,): max(0, p.starts - 1) for p in processes}, labels
    )
    yield _counter(
        "tailrace_process_internal_errors",
        "Messages whose handling failed in a way that it should not; the log has the reason of each.",
        {(p.name,): p.internal_errors for p in processes},
        labels,
    )
    yield _gauge(
        "tailrace_process_resident_memory_bytes", "Its resident memory; shared memory counts in each process that touched it.",
        {(p.name,): p.resident_bytes for p in processes}, labels,
    )  # fmt: skip


def _of_directories(directories: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("path",)
    of = {(str(d["path"]),): d for d in directories}
    yield _gauge("tailrace_data_dir_free_bytes", "Room on its disk.", {key: d["free_bytes"] for key, d in of.items()}, labels)
    yield _gauge("tailrace_data_dir_size_bytes", "Size of its disk.", {key: d["total_bytes"] for key, d in of.items()}, labels)
    yield _gauge("tailrace_data_dir_ok", "Whether it takes writes, 0 or 1.", {key: d["state"] == "OK" for key, d in of.items()}, labels)


def _of_partitions(partitions: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("topic", "partition")
    of = {(str(p["topic"]), str(p["partition"])): p for p in partitions if not p["code"]}
    yield _gauge("tailrace_partition_log_start_offset", "Its first offset.", {key: p["beginning"] for key, p in of.items()}, labels)
    yield _gauge(
        "tailrace_partition_high_watermark_offset",
        "The offset behind the last one that consumers see.",
        {key: p["end"] for key, p in of.items()},
        labels,
    )
    yield _gauge("tailrace_partition_size_bytes", "Its segments.", {key: p["size_bytes"] for key, p in of.items()}, labels)
    yield _gauge(
        "tailrace_partition_online", "Whether it takes writes, 0 or 1.", {key: p["state"] == "ONLINE" for key, p in of.items()}, labels
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
    yield _gauge("tailrace_delays_pending_records", "Delayed records that wait.", {key: d["pending"] for key, d in of.items()}, labels)
    yield _gauge("tailrace_delays_due_records", "Of them, those due within so many seconds.", due, (*labels, "within_seconds"))
    yield _gauge("tailrace_delays_recurring_records", "Records that recur.", {key: d["recurring"] for key, d in of.items()}, labels)
    yield _gauge(
        "tailrace_delays_next_due_timestamp_seconds", "When the next one is due, at the earliest.",
        {key: d["next_due_us"] / 1e6 for key, d in of.items() if d["next_due_us"] is not None}, labels,
    )  # fmt: skip
    yield _gauge(
        "tailrace_delays_lateness_seconds",
        "How late the last delivery was sent.",
        {key: d["lateness_us"] / 1e6 for key, d in of.items()},
        labels,
    )
    for name, doc in (("delivered", "Delivered"), ("cancelled", "Cancelled"), ("lost", "Lost, in damaged bucket files or refused")):
        values = {key: d["lost_rows" if name == "lost" else name] for key, d in of.items()}
        yield _counter(f"tailrace_delays_{name}_records", f"{doc}, since the scheduler started.", values, labels)
