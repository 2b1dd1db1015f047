"""The table of `make bench-peers`: what all contenders do, in which order, and how much of it. Five
rounds of everything take about 20 minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.at_rest.footprint import measure_footprint
from bench.other_tree import ROOT
from bench.peers import fixed_rates
from bench.peers.ceilings import disk_bandwidth, sync_times
from bench.peers.field import Field
from bench.peers.kafka import SYNCED, quantiles
from bench.peers.row import BEHIND, DISK, MEMORY, Entry, Result, Row
from bench.peers.tailrace_itself import Tailrace
from bench.peers.transactional_rows import transactional_rows

LATENCIES = 2_000
IDLE_S = 5.0


class Once:
    """A value that is made when it is first wanted: rows that are not asked for prepare nothing."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._value: str | None = None

    def __call__(self) -> str:
        if self._value is None:
            self._value = self._make()
        return self._value


def rows(field: Field, directory: str) -> Iterator[Row]:
    """All of them."""
    yield from producing(field, 100, 2_000_000)
    yield from producing(field, 1_000, 300_000)
    yield Row(
        "disk",
        "the disk in sequence, one fdatasync",
        "MB/s",
        [Entry("dd", "dd", DISK, partial(disk_bandwidth, directory))],
    )
    yield arrow(field, "arrow-64k", 65, "64 KiB", 600_000)
    yield arrow(
        field, "arrow-1m", 1_020, "1 MiB", 1_200_000
    )  # with offsets, times and nulls just below 1 MiB: one batch, not two halves
    yield batches(field, 100, 4_000_000)
    yield batches(field, 1_000, 800_000)
    yield consuming(field, 100, 3_000_000)
    yield consuming(field, 1_000, 600_000)
    yield from latencies(field, directory)
    for acks in (1, "all"):
        for linger_ms in (0, None):
            yield singles(field, acks, linger_ms)
    yield from transactional_rows(field)
    entries = [Entry("ours", "Tailrace", DISK, spread_of(field.ours.end_to_end, 20_000, 5, 1_000))]
    if kafka := field.kafka:
        entries.append(
            Entry(
                "librdkafka",
                "Kafka librdkafka",
                MEMORY,
                spread_of(kafka.end_to_end, 20_000, 5, 1_000),
            )
        )
    yield Row("end-to-end", "end to end at 20 MB/s of 1,000 B", "ms", entries)
    yield Row(
        "cpu-65k",
        "CPU of a batch of 650 x 100 B, all processes",
        "us",
        [Entry("ours", "Tailrace", BEHIND, cpu_of_a_batch)],
    )
    yield Row(
        "start",
        "start to first ack (acks=all), PSS without shared memory, idle CPU",
        "",
        [Entry("ours", "Tailrace", DISK, start)],
    )


def spread_of(take: Callable[..., list[float]], *arguments: Any) -> Callable[[], dict[str, float]]:
    return lambda: quantiles(take(*arguments))


def producing(field: Field, size: int, count: int) -> Iterator[Row]:
    """One record at a time; slow peers are given fewer records, and are in the rows of 100 B
    alone.
    """
    entries = [*_our_producers(field, size, count), *_kafka_producers(field, size, count)]
    if size == 100:
        entries += _slow_producers(field, size, count)
    yield Row(f"send-{size}", f"produce {size:,} B, a key each, acks=1", "records/s", entries)
    yield Row(
        f"synced-{size}",
        f"produce {size:,} B, a key each, acks=all, synced",
        "records/s",
        list(_synced_producers(field, size, count)),
    )


def _our_producers(field: Field, size: int, count: int) -> Iterator[Entry]:
    send = partial(field.ours.produce, size, count, 1)
    yield Entry("ours", "Tailrace send()", MEMORY, partial(send, "memory"))
    yield Entry("ours-behind", "Tailrace send()", BEHIND, partial(send, "disk"))
    if size == 100:
        given = partial(send, "memory", partition=0)
        yield Entry("ours-partition", "Tailrace send(partition=)", MEMORY, given)


def _kafka_producers(field: Field, size: int, count: int) -> Iterator[Entry]:
    if kafka := field.kafka:
        java, confluent = (
            partial(send, size, count, 1) for send in (kafka.java_produce, kafka.produce)
        )
        yield Entry("kafka", "Kafka ProducerPerformance", MEMORY, java)
        yield Entry("confluent", "Kafka confluent-kafka-python", MEMORY, confluent)
        if size == 100:
            yield Entry(
                "confluent-partition",
                "Kafka confluent-kafka-python, partition=",
                MEMORY,
                partial(confluent, partition=0),
            )


def _slow_producers(field: Field, size: int, count: int) -> Iterator[Entry]:
    if redis := field.redis:
        benchmark = partial(redis.benchmark, size, count // 4)
        yield Entry("redis-benchmark", "Redis redis-benchmark", "each second", benchmark)
        send = partial(redis.produce, size, count // 10)
        yield Entry("redis-py", "Redis redis-py", "each second", send)
    if jetstream := field.jetstream:
        send = partial(jetstream.produce, size, count // 20)
        yield Entry("nats-py", "NATS nats-py", MEMORY, send)


def _synced_producers(field: Field, size: int, count: int) -> Iterator[Entry]:
    ours = partial(field.ours.produce, size, count, "all", "disk")
    yield Entry("ours", "Tailrace send()", DISK, ours)
    if kafka := field.kafka:
        java = partial(kafka.java_produce, size, count, "all", SYNCED)
        yield Entry("kafka", "Kafka ProducerPerformance", DISK, java)
    if size == 100 and (redis := field.redis_synced):
        send = partial(redis.produce, size, count // 10)
        yield Entry("redis-py", "Redis redis-py", DISK, send)


def arrow(field: Field, key: str, rows_each: int, label: str, count: int) -> Row:
    """Batches of records of 1,000 bytes against the pipe underneath."""

    def rate(server: Tailrace, durability: str) -> Callable[[], float]:
        return lambda: server.produce_arrow(1_000, rows_each, count, durability) * 1_000 / 1e6

    return Row(
        key,
        f"Arrow batches of {label}",
        "MB/s",
        [
            Entry("ours-tmpfs", "Tailrace on tmpfs", MEMORY, rate(field.ours_in_memory, "memory")),
            Entry("ours", "Tailrace", MEMORY, rate(field.ours, "memory")),
            Entry("ours-behind", "Tailrace", BEHIND, rate(field.ours, "disk")),
            Entry(
                "pipe", "raw pyzmq pipe", "none", partial(field.pipe.bandwidth, rows_each * 1_000)
            ),
        ],
    )


def batches(field: Field, size: int, count: int) -> Row:
    """As Apache Iggy's own benchmark sends them."""
    entries = [
        Entry(
            "ours-tmpfs",
            "Tailrace on tmpfs",
            MEMORY,
            partial(field.ours_in_memory.produce_arrow, size, 1_000, count, "memory"),
        ),
        Entry(
            "ours",
            "Tailrace",
            MEMORY,
            partial(field.ours.produce_arrow, size, 1_000, count, "memory"),
        ),
        Entry(
            "ours-behind",
            "Tailrace",
            BEHIND,
            partial(field.ours.produce_arrow, size, 1_000, count, "disk"),
        ),
    ]
    return Row(
        f"batches-{size}", f"prebuilt batches of 1,000 x {size:,} B, acks=1", "records/s", entries
    )


def consuming(field: Field, size: int, count: int) -> Row:
    """Consume what was written a moment before, from its beginning."""
    ours = field.ours

    def written() -> str:
        topic = ours.topic()
        ours.produce(size, count, 1, "disk", topic)
        return topic

    topic = Once(written)
    entries = [
        Entry(
            "objects", "Tailrace Record", DISK, lambda: ours.consume(topic(), count, arrow=False)
        ),
        Entry("arrow", "Tailrace Arrow", DISK, lambda: ours.consume(topic(), count, arrow=True)),
    ]
    if kafka := field.kafka:

        def theirs_written() -> str:
            topic = kafka.topic()
            kafka.java_produce(size, count, 1, topic=topic)
            return topic

        theirs = Once(theirs_written)
        entries.append(
            Entry(
                "kafka",
                "Kafka ConsumerPerformance",
                MEMORY,
                lambda: kafka.java_consume(theirs(), count),
            )
        )
        entries.append(
            Entry(
                "confluent",
                "Kafka confluent-kafka-python",
                MEMORY,
                lambda: kafka.consume(theirs(), count // 5),
            )
        )
    if redis := field.redis:
        entries.append(
            Entry(
                "redis-py", "Redis redis-py", "each second", partial(redis.consume, size, 100_000)
            )
        )
    return Row(f"consume-{size}", f"consume {size:,} B, warm", "records/s", entries)


def latencies(field: Field, directory: str) -> Iterator[Row]:
    """One record at a time."""
    yield _latency_before_sync(field)
    yield _latency_synced(field, directory)


def _latency_before_sync(field: Field) -> Row:
    ours = field.ours
    entries = [
        Entry("ours", "Tailrace tcp", BEHIND, spread_of(ours.latency, LATENCIES, 1, "disk")),
        Entry(
            "ours-ipc",
            "Tailrace ipc",
            BEHIND,
            spread_of(ours.latency, LATENCIES, 1, "disk", ours.ipc),
        ),
        Entry(
            "pipe",
            "raw pyzmq round trip, tcp",
            "none",
            spread_of(field.pipe.round_trips, LATENCIES),
        ),
        Entry(
            "pipe-ipc",
            "raw pyzmq round trip, ipc",
            "none",
            spread_of(field.local_pipe.round_trips, LATENCIES),
        ),
    ]
    if kafka := field.kafka:
        entries.append(
            Entry("librdkafka", "Kafka librdkafka", MEMORY, spread_of(kafka.latency, LATENCIES, 1))
        )
    if redis := field.redis:
        entries.append(
            Entry("redis-py", "Redis redis-py", "each second", spread_of(redis.latency, LATENCIES))
        )
    if jetstream := field.jetstream:
        entries.append(
            Entry("nats-py", "NATS nats-py", MEMORY, spread_of(jetstream.latency, LATENCIES))
        )
    return Row("ack-1", "ack of one record of 100 B, acks=1", "us", entries)


def _latency_synced(field: Field, directory: str) -> Row:
    ours = field.ours
    entries = [
        Entry("ours", "Tailrace tcp", DISK, spread_of(ours.latency, LATENCIES, "all", "disk")),
        Entry(
            "ours-ipc",
            "Tailrace ipc",
            DISK,
            spread_of(ours.latency, LATENCIES, "all", "disk", ours.ipc),
        ),
        Entry(
            "sync",
            "append of 1,024 B and fdatasync alone",
            DISK,
            spread_of(sync_times, directory, 1024, LATENCIES),
        ),
    ]
    if kafka := field.kafka:
        entries.append(
            Entry(
                "librdkafka",
                "Kafka librdkafka",
                DISK,
                spread_of(kafka.latency, LATENCIES, "all", SYNCED),
            )
        )
    if redis := field.redis_synced:
        entries.append(
            Entry("redis-py", "Redis redis-py", DISK, spread_of(redis.latency, LATENCIES))
        )
    return Row("ack-all", "ack of one record of 100 B, acks=all, synced", "us", entries)


def singles(field: Field, acks: int | str, linger_ms: int | None) -> Row:
    """Single sends at fixed rates; `linger_ms` None: each client's own default (5 ms in all
    three).
    """
    linger = "default" if linger_ms is None else str(linger_ms)
    reached = DISK if acks == "all" else BEHIND
    entries = [
        Entry("ours", "Tailrace", reached, lambda: fixed_rates.ours(field.ours, acks, linger_ms))
    ]
    if kafka := field.kafka:
        configs, theirs = (SYNCED, DISK) if acks == "all" else (None, MEMORY)
        entries.append(
            Entry(
                "librdkafka",
                "Kafka librdkafka",
                theirs,
                lambda: fixed_rates.librdkafka(kafka, acks, linger_ms, configs),
            )
        )
        if linger_ms == 0:
            entries.append(
                Entry(
                    "kafka",
                    "Kafka ProducerPerformance, from send",
                    theirs,
                    lambda: fixed_rates.java(kafka, acks, configs),
                )
            )
    key = f"singles-{acks}-linger-{linger}"
    return Row(
        key,
        f"single sends of 100 B at fixed rates, 3 partitions, linger {linger}, acks={acks}",
        "ms",
        entries,
    )


def cpu_of_a_batch() -> Result:
    """CPU of producer, front, worker, flusher, with their threads (bench/stages/stage_costs.py)."""
    from bench.stages.budget import one_pass

    found = one_pass(ROOT, 1.0, only="65 KiB")
    return {
        "acks=1": found["65 KiB, acks=1"]["cpu_us"]["all"],
        "acks=all": found["65 KiB, acks=all"]["cpu_us"]["all"],
    }


def start() -> Result:
    """The median of three starts; memory and idle CPU of the last."""
    found = [measure_footprint(IDLE_S if number == 2 else 0.0) for number in range(3)]
    return {
        "ms": statistics.median(one.first_ack_ms for one in found),
        "MB": found[-1].pss_mb,
        "% idle": found[-1].idle_percent,
    }
