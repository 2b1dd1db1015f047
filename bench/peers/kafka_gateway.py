"""Kafka's clients against our gateway, and against Apache Kafka: `make bench-kafka`. A table and a
results file.

Both run beside each other, and take turns in each of ROUNDS (5) rounds. Ours is on the disk before
it is acknowledged; Kafka is as it comes, and with `flush.messages=1` where a row says synced.

- `producers`: librdkafka under Python, acks=all, 100 and 1,000 bytes.
- `java`: Kafka's perf tools, 1,000 bytes.
- `acks`: librdkafka, one record at a time, without linger.
- `connections`: memory of the gateway alone, and with 1,000 connections that are silent.
- `start`: of an appliance with a gateway, against one without.
- `members`: one more member of a classic group of 200, until each has its new partitions.
- `migrate`: MB (1000) of records of 1,000 bytes from Kafka, against its consumer tool.

`ONLY=producers,acks` takes a part.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import psutil

from bench.conditions import Conditions
from bench.measure import RESULTS, percentile, private_memory_mb
from bench.peers.kafka import SYNCED, Kafka, KafkaClients
from bench.peers.servers import Missing
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

ROUNDS = int(os.environ.get("ROUNDS", "5"))
RECORDS = int(os.environ.get("RECORDS", "500000"))
ACKS = int(os.environ.get("ACKS", "2000"))
CONNECTIONS = int(os.environ.get("CONNECTIONS", "1000"))
MEMBERS = int(os.environ.get("MEMBERS", "200"))
MEGABYTES = int(os.environ.get("MB", "1000"))
PARTS = ("producers", "java", "acks", "connections", "start", "members", "migrate")
ONLY = os.environ.get("ONLY", ",".join(PARTS)).split(",")
LARGE = 1000
"""Bytes of a large record, of which as many are sent as of small ones, by a fifth."""
HEARTBEAT_MS = 300
SETTINGS = {"kafka.listen": "127.0.0.1:0"}
SETTLED_S = 60.0


class Gateway(KafkaClients):
    """An appliance with a gateway."""

    name = "Tailrace"

    def __init__(self, directory: str) -> None:
        self.appliance = start_embedded(data_dir=f"{directory}/data", settings=SETTINGS)
        super().__init__(self.appliance.kafka_addresses[0])

    def stop(self) -> None:
        self.appliance.stop()


class Figures:
    """Rows of the table and of the results file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, unit: str, values: Iterable[float], goal: str = "") -> None:
        """Print a row and keep it."""
        found = list(values)
        median = statistics.median(found)
        print(
            f"{name:<80} {median:>12,.2f} {min(found):>11,.2f} {max(found):>11,.2f}  {unit:<10} "
            f"{goal}",
            flush=True,
        )
        self.rows.append(
            {"name": name, "unit": unit, "median": median, "goal": goal, "values": found}
        )

    def compare(
        self, name: str, unit: str, ours: list[float], theirs: list[float], goal: str
    ) -> None:
        """Both, and the ratio of each round."""
        self.add(f"{name}: Tailrace", unit, ours)
        self.add(f"{name}: Kafka", unit, theirs)
        pairs = zip(ours, theirs, strict=True)
        self.add(f"{name}: Tailrace / Kafka", "ratio", [one / two for one, two in pairs], goal)


def producers(ours: Gateway, kafka: Kafka, found: Figures) -> None:
    """librdkafka, acks=all."""
    for size, goals in ((100, ("1.2x", "3x")), (LARGE, ("1.2x", "3x"))):
        count = RECORDS if size < LARGE else RECORDS // 5
        rates: tuple[list[float], list[float], list[float]] = [], [], []
        for _ in range(ROUNDS):
            rates[0].append(ours.produce(size, count, "all"))
            rates[1].append(kafka.produce(size, count, "all"))
            rates[2].append(kafka.produce(size, count // 10, "all", SYNCED))
        name = f"librdkafka, {size} B, acks=all"
        found.compare(name, "records/s", rates[0], rates[1], goals[0])
        found.compare(f"{name}, Kafka synced", "records/s", rates[0], rates[2], goals[1])


def java(ours: Gateway, kafka: Kafka, found: Figures) -> None:
    """Kafka's perf tools."""
    count = RECORDS // 5
    written: dict[str, list[float]] = {"ours": [], "kafka": []}
    read: dict[str, list[float]] = {"ours": [], "kafka": []}
    nodes: dict[str, KafkaClients] = {"ours": ours, "kafka": kafka}
    for _ in range(ROUNDS):
        for name, node in nodes.items():
            topic = node.topic()
            written[name].append(node.java_produce(LARGE, count, "all", topic=topic))
            read[name].append(node.java_consume(topic, count))
    name = f"Java's perf tool, {LARGE} B"
    found.compare(f"{name}, produced", "records/s", written["ours"], written["kafka"], "1.2x")
    found.compare(f"{name}, consumed", "records/s", read["ours"], read["kafka"], "1x")


def acks(ours: Gateway, kafka: Kafka, found: Figures) -> None:
    """One record at a time, acks=all."""
    times: tuple[list[list[float]], list[list[float]]] = [], []
    for _ in range(ROUNDS):
        for node, kept in zip((ours, kafka), times, strict=True):
            kept.append(node.latency(ACKS, "all"))
    for share, goal in ((0.5, "at most 1.3x"), (0.99, "at most 1x")):
        of_ours, of_kafka = ([percentile(each, share) for each in kept] for kept in times)
        found.compare(f"ack of a record, p{share * 100:.0f}", "us", of_ours, of_kafka, goal)


def gateway_pid(appliance: EmbeddedAppliance) -> int:
    """The process of the gateway."""
    children = psutil.Process(appliance.pid).children(recursive=True)
    return next(each.pid for each in children if each.name() == "tr-kafka-0")


def connections(_ours: Gateway, _kafka: Kafka, found: Figures) -> None:
    """Memory of a fresh gateway, and what silent connections add."""
    asked = struct.pack(">ihhih", 10, 18, 0, 1, -1)
    idle, added = [], []
    for _ in range(ROUNDS):
        with (
            tempfile.TemporaryDirectory(prefix="tailrace-kafka-") as directory,
            ExitStack() as all_,
        ):
            gateway = Gateway(directory)
            all_.callback(gateway.stop)
            pid = gateway_pid(gateway.appliance)
            before = sum(private_memory_mb([pid]))
            host, _, port = gateway.bootstrap.rpartition(":")
            for _ in range(CONNECTIONS):
                client = all_.enter_context(socket.create_connection((host, int(port)), 60))
                client.sendall(asked)
                client.recv(1)
            idle.append(before)
            added.append(sum(private_memory_mb([pid])) - before)
    found.add("memory of the gateway, idle", "MB (PSS)", idle, "35")
    found.add(f"{CONNECTIONS} silent connections, more", "MB (PSS)", added, "20")


def start(_ours: Gateway, _kafka: Kafka, found: Figures) -> None:
    """From the call until the appliance is ready."""
    more = []
    for _ in range(ROUNDS):
        seconds = []
        for settings in ({}, SETTINGS):
            with tempfile.TemporaryDirectory(prefix="tailrace-kafka-") as directory:
                begun = time.perf_counter()
                appliance = start_embedded(data_dir=f"{directory}/data", settings=settings)
                seconds.append(time.perf_counter() - begun)
                appliance.stop()
        more.append((seconds[1] - seconds[0]) * 1e3)
    found.add("start with a gateway, longer", "ms", more, "150")


def members(ours: Gateway, kafka: Kafka, found: Figures) -> None:
    """A member more in a classic group. Members hear of it by their next heartbeat."""
    nodes: dict[str, KafkaClients] = {"ours": ours, "kafka": kafka}
    seconds: dict[str, list[float]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        seconds[name] = _rebalances(node.bootstrap, node.topic(MEMBERS + ROUNDS), ROUNDS)
    found.compare(
        f"a classic group of {MEMBERS}: one more member, until all are assigned", "s",
        seconds["ours"], seconds["kafka"], "1 s of ours",
    )  # fmt: skip


def _rebalances(bootstrap: str, topic: str, rounds: int) -> list[float]:
    from confluent_kafka import Consumer

    assigned: dict[int, int] = {}

    def join(number: int) -> Any:
        consumer = Consumer({
            "bootstrap.servers": bootstrap, "group.id": "many", "enable.auto.commit": False,
            "partition.assignment.strategy": "range", "session.timeout.ms": 30_000,
            "heartbeat.interval.ms": HEARTBEAT_MS,
        })  # fmt: skip

        def given(_: Any, partitions: list[Any]) -> None:
            assigned[number] = len(partitions)

        def taken(_: Any, _partitions: list[Any]) -> None:
            assigned.pop(number, None)

        consumer.subscribe([topic], on_assign=given, on_revoke=taken, on_lost=taken)
        return consumer

    def settle(wished: int) -> None:
        until = time.monotonic() + SETTLED_S
        while len(assigned) < wished or sum(assigned.values()) != MEMBERS + ROUNDS:
            for consumer in consumers:
                consumer.poll(0)
            if time.monotonic() > until:
                raise RuntimeError(f"{len(assigned)} of {wished} members are assigned")

    consumers = [join(number) for number in range(MEMBERS)]
    settle(MEMBERS)
    found = []
    for number in range(MEMBERS, MEMBERS + rounds):
        begun = time.perf_counter()
        consumers.append(join(number))
        settle(number + 1)
        found.append(time.perf_counter() - begun)
    for consumer in consumers:
        consumer.close()
    return found


def migrate(ours: Gateway, kafka: Kafka, found: Figures) -> None:
    """A topic of Kafka to ours by `tailrace migrate`; the starts of both tools count."""
    count = (MEGABYTES << 20) // LARGE
    copied, read = [], []
    for number in range(ROUNDS):
        topic = kafka.topic()
        kafka.java_produce(LARGE, count, 1, topic=topic)
        begun = time.perf_counter()
        subprocess.run(
            [str(pathlib.Path(sys.executable).parent / "tailrace"), "migrate", "--from",
             f"kafka:{kafka.bootstrap}", "--topics", topic, "--name", f"bench-{number}"],
            check=True, env={**os.environ, "TAILRACE_BOOTSTRAP": ours.appliance.address},
            capture_output=True,
        )  # fmt: skip
        copied.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        kafka.java_consume(topic, count)
        read.append(time.perf_counter() - begun)
    found.compare(
        f"{MEGABYTES} MB of {LARGE} B copied, and read by Kafka's tool", "s", copied, read,
        "at most 1x",
    )  # fmt: skip


def main() -> int:
    """See the module's docstring."""
    conditions, found = Conditions(), Figures()
    print(conditions.sentence())
    print(f"{'':<80} {'median':>12} {'least':>11} {'most':>11}  {'':<10} goal", flush=True)
    with tempfile.TemporaryDirectory(prefix="tailrace-kafka-") as directory, ExitStack() as nodes:
        try:
            kafka = Kafka(directory)
        except Missing as error:
            print(f"Kafka, and its clients, are missing: {error}")
            return 0
        nodes.callback(kafka.stop)
        ours = Gateway(directory)
        nodes.callback(ours.stop)
        for part in (producers, java, acks, connections, start, members, migrate):
            if part.__name__ in ONLY:
                part(ours, kafka, found)
    under = conditions.report()
    content = {"command": "make bench-kafka", "machine": under, "figures": found.rows}
    path = RESULTS / f"kafka-clients-{under['date']}-{under['commit'][:8]}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
