"""Families of one metric, from a mapping of labels to values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(name: str, doc: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def counter(name: str, doc: str, values: Mapping[Any, float], labels: Sequence[str]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
