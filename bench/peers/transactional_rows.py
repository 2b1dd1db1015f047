"""The transactional rows of `make bench-peers`: the same work as `make bench-transactions` has,
beside Apache Kafka with its own way of writing, and with `flush.messages=1`.

The log of Kafka's transaction coordinator is synced in neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.measure import percentile
from bench.peers import kafka_transactions as theirs
from bench.peers.field import Field
from bench.peers.kafka import SYNCED, Kafka
from bench.peers.row import DISK, MEMORY, Entry, Result, Row
from bench.peers.servers import in_child
from bench.peers.tailrace_itself import Tailrace
from bench.transactional import transactional_work as work

SECONDS = 3.0
COMMITS = 300
TRANSFORMED = 60_000
LEAD_S = 5.0
"""Time in which 50 producers of ours have to connect."""


def transactional_rows(field: Field) -> Iterator[Row]:
    """All of them."""
    ours, kafka = field.ours, field.kafka

    def entries(
        mine: Callable[[], Result], other: Callable[[Kafka, dict[str, str] | None], Result]
    ) -> list[Entry]:
        found = [Entry("ours", "Tailrace", DISK, mine)]
        if kafka is not None:
            found += [
                Entry("kafka", "Kafka confluent-kafka-python", MEMORY, partial(other, kafka, None)),
                Entry(
                    "kafka-synced", "Kafka confluent-kafka-python", DISK,
                    partial(other, kafka, SYNCED),
                ),
            ]  # fmt: skip
        return found

    yield Row(
        "transactions-send", "send() 100 B in transactions of 100 ms, 8 partitions", "records/s",
        entries(partial(_produced, ours), lambda kafka, configs: float(
            in_child(theirs.produce, kafka.bootstrap, _topic(kafka, configs), 100, SECONDS, True)
        )),
    )  # fmt: skip
    yield Row(
        "transactions-latency", "a transaction of one record of 100 B", "ms",
        entries(partial(_latency, ours), lambda kafka, configs: _quantiles(
            in_child(theirs.commit_times, kafka.bootstrap, _topic(kafka, configs), COMMITS)
        )),
    )  # fmt: skip
    yield Row(
        "transactions-commits", "commits of 50 producers in threads of one process", "1/s",
        entries(partial(_commits, ours), lambda kafka, configs: float(
            in_child(
                theirs.commits_of_threads, kafka.bootstrap, _topic(kafka, configs), 50, SECONDS
            )
        )),
    )  # fmt: skip
    yield Row(
        "transactions-transform",
        "consume, transform, produce, 1,000 B, exactly once, 100 ms", "records/s",
        entries(partial(_transformed, ours), _transformed_by),
    )  # fmt: skip


def _topic(kafka: Kafka, configs: dict[str, str] | None) -> str:
    return kafka.topic(work.PARTITIONS, configs)


def _produced(ours: Tailrace) -> float:
    with ours.throwaway("disk", work.PARTITIONS) as topic:
        return float(in_child(work.produce, ours.address, topic, 100, SECONDS, True))


def _latency(ours: Tailrace) -> dict[str, float]:
    with ours.throwaway("disk", work.PARTITIONS) as topic:
        return _quantiles(in_child(work.commit_times, ours.address, topic, COMMITS))


def _quantiles(found: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{label} p{share * 100:.0f}": percentile(times, share)
        for label, times in found.items()
        for share in (0.5, 0.99)
    }


def _commits(ours: Tailrace) -> float:
    with ours.throwaway("disk", work.PARTITIONS) as topic:
        arguments: tuple[Any, ...] = (ours.address, topic, 50, SECONDS)
        commits, _ = in_child(work.commits_of_threads, *arguments, time.time() + LEAD_S)
        if commits < 0:
            raise RuntimeError(f"50 producers were not connected within {LEAD_S:g} s")
        return float(commits / SECONDS)


def _transformed(ours: Tailrace) -> float:
    with (
        ours.throwaway("disk", work.PARTITIONS) as source,
        ours.throwaway("disk", work.PARTITIONS) as target,
    ):
        in_child(work.fill, ours.address, source, 1_000, TRANSFORMED)
        return float(in_child(work.transform, ours.address, source, target, TRANSFORMED, True))


def _transformed_by(kafka: Kafka, configs: dict[str, str] | None) -> float:
    source, target = _topic(kafka, None), _topic(kafka, configs)
    in_child(theirs.fill, kafka.bootstrap, source, 1_000, TRANSFORMED)
    return float(in_child(theirs.transform, kafka.bootstrap, source, target, TRANSFORMED))
