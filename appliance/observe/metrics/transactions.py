"""Prometheus metrics of transactions, from the group coordinator's totals. An appliance without a
transactional id has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def transaction_families(totals: Mapping[str, Any]) -> Iterator[Metric]:
    """Every metric family of transactions, once. `totals`: of `Admin.transaction_totals`."""
    yield GaugeMetricFamily(
        "tailrace_transactional_ids", "Known transactional ids.", value=totals["ids"]
    )
    yield GaugeMetricFamily(
        "tailrace_transactions_open", "Transactions with records, not ended.", value=totals["open"]
    )
    yield GaugeMetricFamily(
        "tailrace_transactions_oldest_seconds",
        "Age of the oldest open transaction.",
        value=totals["oldest_ms"] / 1000,
    )
    yield GaugeMetricFamily(
        "tailrace_transactions_unsettled",
        "Decisions that some worker has not carried out yet.",
        value=totals["unsettled"],
    )
    yield CounterMetricFamily(
        "tailrace_transaction_commits",
        "Committed transactions since the process of groups started.",
        value=totals["commits"],
    )
    yield CounterMetricFamily(
        "tailrace_transaction_aborts",
        "Aborted transactions since the process of groups started.",
        value=totals["aborts"],
    )
    yield CounterMetricFamily(
        "tailrace_transaction_fenced",
        "Refused requests of producers whose transactional id another one has.",
        value=totals["fenced"],
    )
    yield CounterMetricFamily(
        "tailrace_transaction_decision_seconds",
        "Time from a decision to the end of its commit, summed.",
        value=totals["decision_seconds"],
    )
