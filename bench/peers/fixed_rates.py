"""Single sends at fixed rates: how long until each record is acknowledged, from the moment at which
it was to be sent.

A sender that falls behind its plan shows it: a record's latency counts from the plan, not from when
the program came to it (Gil Tene's "coordinated omission"), and how late the calls of `send` were
stands beside it. Kafka's own tool counts from its call of `send`, so its figures leave that out.
The first fifth of each run is left out: buffers grow, code is compiled.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.measure import paced, percentile
from bench.peers.servers import in_child

if TYPE_CHECKING:
    from bench.peers.kafka import Kafka
    from bench.peers.tailrace_itself import Tailrace

RATES = (2_000, 10_000, 50_000)
PARTITIONS = 3
SECONDS = 2.0
JAVA_SECONDS = 3.0
JAVA_WARM_UP = 0.5
"""Share of the records that Kafka's tool leaves out: its virtual machine compiles for longer."""
GIVEN_UP_MS = 30_000
"""A record that is not acknowledged by then counts with that latency, and as undelivered."""
SAMPLED_PER_S = 10_000
"""Latencies taken a second at most: a callback costs the sender as much as a record."""
WARM_UP = 0.2


def named(rate: int, found: dict[str, float]) -> dict[str, float]:
    """Labels with their rate."""
    return {f"{rate:,}/s {label}": value for label, value in found.items()}


def ours(server: Tailrace, acks: int | str, linger_ms: int | None) -> dict[str, float]:
    """Figures of all rates, each on a topic of its own: p50 and p99, and how late the sender was
    (p99).
    """
    found: dict[str, float] = {}
    for rate in RATES:
        with server.throwaway("disk", PARTITIONS) as topic:
            found |= named(rate, in_child(_ours, server.address, topic, rate, acks, linger_ms))
    return found


def librdkafka(
    kafka: Kafka, acks: int | str, linger_ms: int | None, configs: dict[str, str] | None
) -> dict[str, float]:
    """The same."""
    found: dict[str, float] = {}
    for rate in RATES:
        found |= named(
            rate,
            in_child(
                _librdkafka,
                kafka.bootstrap,
                kafka.topic(PARTITIONS, configs),
                rate,
                acks,
                linger_ms,
            ),
        )
    return found


def java(kafka: Kafka, acks: int | str, configs: dict[str, str] | None) -> dict[str, float]:
    """Kafka's tool, linger 0; it prints whole milliseconds."""
    found: dict[str, float] = {}
    for rate in RATES:
        count = int(rate * JAVA_SECONDS)
        said = kafka.java(
            "org.apache.kafka.tools.ProducerPerformance", "--topic",
            kafka.topic(PARTITIONS, configs), "--num-records", str(count), "--record-size", "100",
            "--throughput", str(rate), "--warmup-records", str(int(count * JAVA_WARM_UP)),
            "--command-property", f"bootstrap.servers={kafka.bootstrap}",
            f"acks={acks}", "linger.ms=0", f"delivery.timeout.ms={GIVEN_UP_MS}",
            "request.timeout.ms=20000",
        ).stdout  # fmt: skip
        found |= named(rate, parsed(said))
    return found


def parsed(said: str) -> dict[str, float]:
    """p50 and p99 of the last summary that ProducerPerformance printed. Raises ValueError."""
    summaries = re.findall(r"([\d.]+) ms 50th, [\d.]+ ms 95th, ([\d.]+) ms 99th", said)
    if not summaries:
        raise ValueError(f"no percentiles in what Kafka's tool printed: {said[-300:]!r}")
    p50, p99 = summaries[-1]
    return {"p50": float(p50), "p99": float(p99)}


def summary(latencies_ms: Any, lateness_ms: Any, undelivered: int) -> dict[str, float]:
    """Summary of one run."""
    latencies = list(latencies_ms)
    return {
        "p50": percentile(latencies, 0.5), "p99": percentile(latencies, 0.99),
        "sender late p99": percentile(list(lateness_ms), 0.99),
        "undelivered": float(undelivered),
    }  # fmt: skip


def _ours(
    address: str, topic: str, rate: int, acks: int | str, linger_ms: int | None
) -> dict[str, float]:
    from tailrace import Producer

    latencies, lateness, failed = array("d"), array("d"), []

    def ended(due_ns: int, metadata: object, error: object) -> None:
        del metadata
        latencies.append((time.perf_counter_ns() - due_ns) / 1e6)
        if error is not None:
            failed.append(error)

    settings: dict[str, Any] = {"delivery_timeout_ms": GIVEN_UP_MS} | (
        {} if linger_ms is None else {"linger_ms": linger_ms}
    )
    payload, count, sample = os.urandom(100), int(rate * SECONDS), max(1, rate // SAMPLED_PER_S)
    with Producer(address, acks=acks, **settings) as producer:
        for partition in range(PARTITIONS):
            producer.send(topic, payload, partition=partition).result(30)
        for number, due_ns in enumerate(paced(rate, count)):
            if number % sample or number < count * WARM_UP:
                producer.send(topic, payload)
            else:
                lateness.append((time.perf_counter_ns() - due_ns) / 1e6)
                producer.send(topic, payload, on_delivery=partial(ended, due_ns))
        producer.flush(120)
    return summary(latencies, lateness, len(failed))


def _librdkafka(
    bootstrap: str, topic: str, rate: int, acks: int | str, linger_ms: int | None
) -> dict[str, float]:
    import threading

    from bench.peers.kafka import producer_of

    latencies, lateness, failed = array("d"), array("d"), []

    def ended(due_ns: int, error: object, message: object) -> None:
        del message
        latencies.append((time.perf_counter_ns() - due_ns) / 1e6)
        if error is not None:
            failed.append(error)

    payload, count, sample = os.urandom(100), int(rate * SECONDS), max(1, rate // SAMPLED_PER_S)
    # Idempotent, as ours is: five requests under way. Without it librdkafka has any number, one for
    # each record, and they time out.
    settings = (
        {"enable.idempotence": True}
        if acks == "all"
        else {"max.in.flight.requests.per.connection": 5}
    )
    linger = {} if linger_ms is None else {"linger.ms": linger_ms}
    producer = producer_of(
        bootstrap, acks, **settings, **linger, **{"message.timeout.ms": GIVEN_UP_MS, "log_level": 2}
    )
    producer.list_topics(topic)
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            producer.poll(0.1)

    poller = threading.Thread(
        target=poll
    )  # callbacks come at once, as ours do; polling from the sender would wait for its next turn
    poller.start()
    for number, due_ns in enumerate(paced(rate, count)):
        if number % sample or number < count * WARM_UP:
            producer.produce(topic, payload)
        else:
            lateness.append((time.perf_counter_ns() - due_ns) / 1e6)
            producer.produce(topic, payload, on_delivery=partial(ended, due_ns))
    producer.flush(120)
    is_over.set()
    poller.join()
    return summary(latencies, lateness, len(failed))
