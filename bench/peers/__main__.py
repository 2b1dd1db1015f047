"""`make bench-peers [ROUNDS=5] [ONLY=text]`: Apache Kafka, Redis Streams, NATS JetStream and ours, the same work on the same cores and disk.

Each row runs its contenders in turn, `ROUNDS` times, beginning with another one each time; what is stated is the median with least and most, and the ratio
to ours. All servers are up, idle while it is not their turn. What cannot be had here is left out with a sentence. Beside each contender stands when an
acknowledged record is on the disk: a peer that does not sync is met with `durability=memory`, and ours with `disk` is shown beside it. The raw pyzmq pipe
and the disk written in sequence are the ceilings. Results go to bench/results.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rich.console import Console

from bench.measure import machine
from bench.peers.ceilings import Pipe, disk_bandwidth, sync_times
from bench.peers.jetstream import JetStream
from bench.peers.kafka import SYNCED, Kafka, quantiles
from bench.peers.redis_streams import Redis
from bench.peers.servers import Missing
from bench.peers.tailrace_itself import Tailrace
from bench.suite import RESULTS

T = TypeVar("T")
MEMORY, BEHIND, DISK = "page cache", "disk behind", "fdatasync"
"""What an acknowledged record has reached: the page cache, a ring whose records are synced a moment later, or the disk."""
LATENCIES = 2_000
console = Console(soft_wrap=True, highlight=False, record=True, width=150)


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender in a row."""

    name: str
    durability: str
    once: Callable[[], float | dict[str, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """What all of them do; the first entry is ours, and what the ratios are to."""

    name: str
    unit: str
    entries: list[Entry]


class Field:
    """Every server that can be had here."""

    def __init__(self, stack: ExitStack, directory: str) -> None:
        self._stack, self._directory = stack, directory
        self.missing: list[str] = []
        self.ours = self._start("ours", Tailrace)
        self.ours_in_memory = self._start("ours-tmpfs", Tailrace, stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.pipe = Pipe("tcp://127.0.0.1:*")
        stack.callback(self.pipe.stop)
        self.local_pipe = Pipe(f"ipc://{directory}/pipe.sock")
        stack.callback(self.local_pipe.stop)
        self.kafka = self._try("Apache Kafka", lambda d: Kafka(d))
        self.redis = self._try("Redis Streams", lambda d: Redis(d, "everysec"))
        self.redis_synced = self._try("Redis Streams, synced", lambda d: Redis(d, "always"))
        self.jetstream = self._try("NATS JetStream", lambda d: JetStream(d))

    def _start(self, name: str, make: Callable[[str], T], directory: str | None = None) -> T:
        directory = directory or os.path.join(self._directory, name.replace(" ", "-"))
        os.makedirs(directory, exist_ok=True)
        server = make(directory)
        self._stack.callback(server.stop)  # type: ignore[attr-defined]
        return server

    def _try(self, name: str, make: Callable[[str], T]) -> T | None:
        try:
            return self._start(name, make)
        except (Missing, OSError) as error:
            self.missing.append(f"{name} is left out: {error}")
            return None


def spread_of(take: Callable[..., list[float]], *arguments: Any) -> Callable[[], dict[str, float]]:
    return lambda: quantiles(take(*arguments))


def rows(field: Field, directory: str) -> Iterator[Row]:
    """The table."""
    for size, count in ((100, 2_000_000), (1_000, 300_000)):
        yield from producing(field, size, count)
    yield Row("the disk in sequence, one fdatasync", "MB/s", [Entry("dd", DISK, partial(disk_bandwidth, directory))])
    for rows_each, label, total in ((65, "64 KiB", 600_000_000), (1_040, "1 MiB", 1_500_000_000)):
        yield arrow(field, rows_each, label, total // 1_000)
    for size, count in ((100, 5_000_000), (1_000, 1_000_000)):
        entries = [
            Entry("Tailrace on tmpfs", MEMORY, partial(field.ours_in_memory.produce_arrow, size, 1_000, count, "memory")),
            Entry("Tailrace", MEMORY, partial(field.ours.produce_arrow, size, 1_000, count, "memory")),
            Entry("Tailrace", BEHIND, partial(field.ours.produce_arrow, size, 1_000, count, "disk")),
        ]
        if kafka := field.kafka:
            entries.append(Entry("Kafka ProducerPerformance", MEMORY, partial(kafka.java_produce, size, count // 3, 1)))
        yield Row(f"prebuilt batches of 1,000 x {size:,} B, acks=1", "records/s", entries)
    for size, count in ((100, 3_000_000), (1_000, 600_000)):
        yield from consuming(field, size, count)
    yield from latencies(field, directory)


def producing(field: Field, size: int, count: int) -> Iterator[Row]:
    """One record at a time; slow peers are given fewer records."""
    ours = field.ours
    entries = [
        Entry("Tailrace send()", MEMORY, partial(ours.produce, size, count, 1, "memory")),
        Entry("Tailrace send()", BEHIND, partial(ours.produce, size, count, 1, "disk")),
    ]
    if kafka := field.kafka:
        entries.append(Entry("Kafka ProducerPerformance", MEMORY, partial(kafka.java_produce, size, count, 1)))
        entries.append(Entry("Kafka confluent-kafka-python", MEMORY, partial(kafka.produce, size, count, 1)))
    if redis := field.redis:
        entries.append(Entry("Redis redis-benchmark", "each second", partial(redis.benchmark, size, count // 4)))
        entries.append(Entry("Redis redis-py", "each second", partial(redis.produce, size, count // 10)))
    if jetstream := field.jetstream:
        entries.append(Entry("NATS nats-py", MEMORY, partial(jetstream.produce, size, count // 20)))
    yield Row(f"produce {size:,} B, a key each, acks=1", "records/s", entries)
    entries = [Entry("Tailrace send()", DISK, partial(ours.produce, size, count, "all", "disk"))]
    if kafka := field.kafka:
        entries.append(Entry("Kafka ProducerPerformance", DISK, partial(kafka.java_produce, size, count, "all", SYNCED)))
    if redis := field.redis_synced:
        entries.append(Entry("Redis redis-py", DISK, partial(redis.produce, size, count // 10)))
    yield Row(f"produce {size:,} B, a key each, acks=all, synced", "records/s", entries)


def arrow(field: Field, rows_each: int, label: str, count: int) -> Row:
    """Batches of records of 1,000 bytes against the pipe underneath."""

    def rate(server: Tailrace, durability: str) -> Callable[[], float]:
        return lambda: server.produce_arrow(1_000, rows_each, count, durability) * 1_000 / 1e6

    return Row(
        f"Arrow batches of {label}",
        "MB/s",
        [
            Entry("Tailrace on tmpfs", MEMORY, rate(field.ours_in_memory, "memory")),
            Entry("Tailrace", MEMORY, rate(field.ours, "memory")),
            Entry("Tailrace", BEHIND, rate(field.ours, "disk")),
            Entry("raw pyzmq pipe", "none", partial(field.pipe.bandwidth, rows_each * 1_000)),
        ],
    )


def consuming(field: Field, size: int, count: int) -> Iterator[Row]:
    """What was written a moment before, from its beginning."""
    ours, topic = field.ours, field.ours.topic()
    ours.produce(size, count, 1, "disk", topic)
    java: list[Entry] = []
    python: list[Entry] = []
    if kafka := field.kafka:
        theirs = kafka.topic()
        kafka.java_produce(size, count, 1, topic=theirs)
        java.append(Entry("Kafka ConsumerPerformance", MEMORY, partial(kafka.java_consume, theirs, count)))
        python.append(Entry("Kafka confluent-kafka-python", MEMORY, partial(kafka.consume, theirs, count // 3)))
    if redis := field.redis:
        python.append(Entry("Redis redis-py", "each second", partial(redis.consume, size, 200_000)))
    mine = Entry("Tailrace Record", DISK, partial(ours.consume, topic, count, arrow=False))
    yield Row(f"consume {size:,} B as objects, warm", "records/s", [mine, *java, *python])
    mine = Entry("Tailrace Arrow", DISK, partial(ours.consume, topic, count, arrow=True))
    yield Row(f"consume {size:,} B as Arrow, warm", "records/s", [mine, *java])


def latencies(field: Field, directory: str) -> Iterator[Row]:
    ours = field.ours
    entries = [
        Entry("Tailrace tcp", BEHIND, spread_of(ours.latency, LATENCIES, 1, "disk")),
        Entry("Tailrace ipc", BEHIND, spread_of(ours.latency, LATENCIES, 1, "disk", ours.ipc)),
        Entry("raw pyzmq round trip, tcp", "none", spread_of(field.pipe.round_trips, LATENCIES)),
        Entry("raw pyzmq round trip, ipc", "none", spread_of(field.local_pipe.round_trips, LATENCIES)),
    ]
    if kafka := field.kafka:
        entries.append(Entry("Kafka librdkafka", MEMORY, spread_of(kafka.latency, LATENCIES, 1)))
    if redis := field.redis:
        entries.append(Entry("Redis redis-py", "each second", spread_of(redis.latency, LATENCIES)))
    if jetstream := field.jetstream:
        entries.append(Entry("NATS nats-py", MEMORY, spread_of(jetstream.latency, LATENCIES)))
    yield Row("ack of one record of 100 B, acks=1", "us", entries)
    entries = [
        Entry("Tailrace tcp", DISK, spread_of(ours.latency, LATENCIES, "all", "disk")),
        Entry("Tailrace ipc", DISK, spread_of(ours.latency, LATENCIES, "all", "disk", ours.ipc)),
        Entry("append of 1,024 B and fdatasync alone", DISK, spread_of(sync_times, directory, 1024, LATENCIES)),
    ]
    if kafka := field.kafka:
        entries.append(Entry("Kafka librdkafka", DISK, spread_of(kafka.latency, LATENCIES, "all", SYNCED)))
    if redis := field.redis_synced:
        entries.append(Entry("Redis redis-py", DISK, spread_of(redis.latency, LATENCIES)))
    yield Row("ack of one record of 100 B, acks=all, synced", "us", entries)
    entries = [Entry("Tailrace", DISK, spread_of(ours.end_to_end, 20_000, 5, 1_000))]
    if kafka := field.kafka:
        entries.append(Entry("Kafka librdkafka", MEMORY, spread_of(kafka.end_to_end, 20_000, 5, 1_000)))
    yield Row("end to end at 20 MB/s of 1,000 B", "ms", entries)


def run(row: Row, rounds: int) -> list[dict[str, Any]]:
    """All contenders in turn; who begins changes with each round."""
    found: list[dict[str, list[float]]] = [{} for _ in row.entries]
    for number in range(rounds):
        for position in range(len(row.entries)):
            index = (position + number) % len(row.entries)
            result = row.entries[index].once()
            for label, value in (result if isinstance(result, dict) else {"": result}).items():
                found[index].setdefault(label, []).append(value)
    lines = []
    for entry, values in zip(row.entries, found, strict=True):
        for label, each in values.items():
            base = statistics.median(found[0][label])
            lines.append({
                "row": row.name, "label": label, "contender": entry.name, "durability": entry.durability, "unit": row.unit,
                "median": statistics.median(each), "min": min(each), "max": max(each), "ours_to_this": base / statistics.median(each), "values": each,
            })  # fmt: skip
    return lines


def main() -> int:
    rounds, only = int(os.environ.get("ROUNDS", "5")), os.environ.get("ONLY", "")
    where, lines = machine(), []
    console.print(
        f"[bold]Tailrace and its peers[/bold] on {where['cpu']}, {where['cores']} cores, commit {where['commit']}, {rounds} rounds"
    )
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-peers-", dir=os.environ.get("TAILRACE_BENCH_DIR")))
        field = Field(stack, directory)
        for sentence in field.missing:
            console.print(sentence)
        for row in rows(field, directory):
            if only not in row.name:
                continue
            console.print(f"\n{row.name}, {row.unit}", style="bold")
            for line in run(row, rounds):
                name = f"{line['contender']} ({line['durability']})"
                ratio = (
                    ""
                    if line["contender"] == row.entries[0].name and line["durability"] == row.entries[0].durability
                    else f"{line['ours_to_this']:.2f}"
                )
                console.print(
                    f"  {name:<52} {line['label']:<6} {line['median']:>12,.1f} {line['min']:>12,.1f} {line['max']:>12,.1f}  {ratio:>7}"
                )
                lines.append(line)
    if only:
        return 0
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"peers-{where['date']}-{where['commit']}.json"
    path.write_text(json.dumps({"command": f"ROUNDS={rounds} make bench-peers", "machine": where, "lines": lines}, indent=1) + "\n")
    console.save_svg(str(path.with_suffix(".svg")), title="make bench-peers")
    console.print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}, drawn in {path.with_suffix('.svg').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
