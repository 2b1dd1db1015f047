"""Prometheus metrics of durations, requests and errors, from the measurements in shared memory.

Pure: no I/O, no time. Histograms are classic ones, whose bounds are powers of two (see
`shm.tables.measurements`): native histograms need a scraper that takes protocol buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Exemplar as MetricExemplar

from appliance.observe.process_states import ProcessState
from shm.memory.layout import Measure
from shm.tables.measurements import BOUNDS_NS, Exemplar, HistogramValues
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

NS_PER_S = 1e9
US_PER_S = 1e6
_HISTOGRAMS = {
    Measure.PRODUCE: ("produce", "From the receipt of a PRODUCE request to its response."),
    Measure.FETCH: (
        "fetch",
        "From the receipt of a FETCH request to its response, with the wait for records.",
    ),
    Measure.DELIVERY: (
        "delivery",
        "From the append of the newest record to the response of a fetch that waited for it.",
    ),
    Measure.SYNC: ("sync", "Write and sync of a group of batches."),
    Measure.COMMIT: ("commit", "Commits of the database of groups and transactions."),
}


def measurement_families(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    """Every family of measurements, once."""
    yield from _durations(processes)
    yield from _requests(processes)
    yield from _clients([process for process in processes if Measure.PRODUCE in process.durations])


def _durations(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    for measure, (name, doc) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(
            f"tailrace_{name}_duration_seconds", doc, labels=("process",)
        )
        for process in processes:
            if measure in process.durations:
                values = process.durations[measure]
                exemplars = process.exemplars if measure is Measure.PRODUCE else {}
                family.add_metric(
                    (process.name,),
                    with_exemplars(cumulated(values), exemplars),
                    sum_value=values.sum_ns / NS_PER_S,
                )
        yield family


def _requests(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "tailrace_requests", "Requests that fronts received, by API.", labels=("process", "api")
    )
    errors = CounterMetricFamily(
        "tailrace_request_errors",
        "Requests, or parts of them, that fronts refused, by error code.",
        labels=("process", "code"),
    )
    for process in processes:
        for number, count in process.requests.items():
            requests.add_metric((process.name, _name_of(Api, number)), count)
        for number, count in process.errors.items():
            errors.add_metric((process.name, _name_of(ErrorCode, number)), count)
    yield requests
    yield errors


def _clients(fronts: Sequence[ProcessState]) -> Iterator[Metric]:
    """Connections, credit and quotas."""
    connections = GaugeMetricFamily(
        "tailrace_connections", "Open connections of clients.", labels=("process",)
    )
    sent = CounterMetricFamily(
        "tailrace_fetch_response_bytes", "Bytes of responses to fetches.", labels=("process",)
    )
    used = GaugeMetricFamily(
        "tailrace_credit_used_bytes",
        "Bytes that producers may send, or have sent and no worker has yet.",
        labels=("process",),
    )
    budget = GaugeMetricFamily(
        "tailrace_credit_size_bytes", "Credit of a front for all producers.", labels=("process",)
    )
    waiting = GaugeMetricFamily(
        "tailrace_credit_waiting_connections",
        "Connections that wait for credit.",
        labels=("process",),
    )
    waits = CounterMetricFamily(
        "tailrace_quota_waits",
        "Waits of connections and requests for a quota.",
        labels=("process",),
    )
    throttled = CounterMetricFamily(
        "tailrace_quota_throttled_seconds",
        "Time that connections and requests have waited for a quota.",
        labels=("process", "quota"),
    )
    for front in fronts:
        waited_count, waited_us = front.throttles
        waits.add_metric((front.name,), waited_count)
        for quota, microseconds in waited_us.items():
            throttled.add_metric((front.name, quota), microseconds / 1e6)
        if front.credit is not None:
            used.add_metric((front.name,), front.credit.used_bytes)
            budget.add_metric((front.name,), front.credit.budget_bytes)
            waiting.add_metric((front.name,), front.credit.waiting)
        connections.add_metric((front.name,), front.sessions)
        sent.add_metric((front.name,), front.sent_bytes)
    yield connections
    yield sent
    yield used
    yield budget
    yield waiting
    yield waits
    yield throttled


def cumulated(values: HistogramValues) -> list[tuple[str, float]]:
    """Cumulated buckets: (upper bound in seconds, count)."""
    buckets, total = [], 0
    for bound_ns, count in zip((*BOUNDS_NS, None), values.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound_ns is None else repr(bound_ns / NS_PER_S), float(total)))
    return buckets


def with_exemplars(
    buckets: Sequence[tuple[str, float]], exemplars: Mapping[int, Exemplar]
) -> list[Any]:
    """The buckets, with a trace for those that have one. Only OpenMetrics shows it."""
    return [
        (bound, count)
        if (found := exemplars.get(number)) is None
        else (
            bound,
            count,
            MetricExemplar(
                {"trace_id": found.trace_id.hex()},
                found.duration_ns / NS_PER_S,
                found.time_us / US_PER_S,
            ),
        )
        for number, (bound, count) in enumerate(buckets)
    ]


def _name_of(kind: type[Api] | type[ErrorCode], number: int) -> str:
    try:
        return kind(number).name
    except ValueError:
        return "other"
