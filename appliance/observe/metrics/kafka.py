"""Metrics of the Kafka gateway. Without one there are no such series.

Pure: no I/O, no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from appliance.observe.metrics.measurements import NS_PER_S, cumulated
from appliance.observe.process_states import ProcessState
from shm.messages.kafka_names import API_NAMES, CODE_NAMES


def kafka_families(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    """Every family of the gateway, once."""
    found = next(((one, one.kafka) for one in processes if one.kafka is not None), None)
    if found is None:
        return
    process, values = found
    requests = CounterMetricFamily(
        "tailrace_kafka_requests", "Requests of Kafka clients, by API.", labels=("api",)
    )
    errors = CounterMetricFamily(
        "tailrace_kafka_request_errors",
        "Errors of requests of Kafka clients, or of parts of them, by API.",
        labels=("api",),
    )
    codes = CounterMetricFamily(
        "tailrace_kafka_errors",
        "Errors of requests of Kafka clients, or of parts of them, by Kafka's error code.",
        labels=("code",),
    )
    durations = HistogramMetricFamily(
        "tailrace_kafka_request_duration_seconds",
        "From the receipt of a Kafka client's request to its response, with all that it waits for.",
        labels=("api",),
    )
    for api, count in values.requests.items():
        name = API_NAMES.get(api, str(api))
        requests.add_metric((name,), count)
        errors.add_metric((name,), values.errors.get(api, 0))
        histogram = values.durations[api]
        durations.add_metric((name,), cumulated(histogram), sum_value=histogram.sum_ns / NS_PER_S)
    for code, count in values.codes.items():
        codes.add_metric((CODE_NAMES.get(code, str(code)),), count)
    yield from (requests, errors, codes, durations)
    yield GaugeMetricFamily(
        "tailrace_kafka_connections", "Open connections of Kafka clients.", values.connections
    )
    yield CounterMetricFamily(
        "tailrace_kafka_refused_connections",
        "Connections of Kafka clients that were closed for a limit or for malformed bytes.",
        process.refused,
    )
    yield CounterMetricFamily(
        "tailrace_kafka_received_bytes", "Bytes of requests of Kafka clients.",
        values.received_bytes,
    )  # fmt: skip
    yield CounterMetricFamily(
        "tailrace_kafka_sent_bytes", "Bytes of responses to Kafka clients.", values.sent_bytes
    )
