"""Two appliances, one of which Kafka's clients can read, and what is in their topics."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit import cli
from tests.kit.processes import HANG_LIMIT_S, wait_until

Row = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


class Houses:
    """The source and the target."""

    def __init__(self, source: EmbeddedAppliance, target: EmbeddedAppliance, name: str) -> None:
        self.source, self.target, self.name = source, target, name

    @property
    def address(self) -> str:
        return f"kafka:{self.source.kafka_addresses[0]}"

    def migrate(self, *arguments: str, status: int | None = 0) -> str:
        """Run `tailrace migrate --from SOURCE`; its standard error."""
        done = cli.run(
            self.target, "migrate", "--from", self.address, "--name", self.name, *arguments,
            status=status,
        )  # fmt: skip
        return done.stderr.decode() + done.stdout.decode()

    def switch(self, *arguments: str, status: int = 0) -> str:
        done = cli.run(
            self.target, "migrate", "switch", "--name", self.name, *arguments, status=status,

        )  # fmt: skip
        return done.stderr.decode()

    def killed_at(self, point: str, *arguments: str) -> None:
        """Run it with a crash point armed, which kills it if it comes there."""
        environment = {
            **os.environ,
            "TAILRACE_BOOTSTRAP": self.target.address,
            "TAILRACE_CRASH_POINT": point,
        }
        command = [cli.TAILRACE, "migrate", *arguments, "--name", self.name]
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=HANG_LIMIT_S, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    def create(self, topic: str, partitions: int = 1, **configs: object) -> None:
        with Admin(self.source.address) as admin:
            given = {name.replace("_", "."): value for name, value in configs.items()}
            admin.create_topics([NewTopic(topic, partitions, configs=given)])

    def produce(self, topic: str, numbers: Iterable[int], partitions: int = 1) -> None:
        """Records of all kinds: with and without key, value, headers."""
        with Producer(self.source.address, batch_size=4_096) as producer:
            for n in numbers:
                producer.send(
                    topic,
                    None if n % 7 == 3 else b"value %d" % n,
                    key=None if n % 5 == 1 else b"key %d" % (n % 50),
                    headers=[("n", b"%d" % n), ("n", b"")] if n % 3 == 0 else None,
                    partition=n % partitions,
                    timestamp=1_700_000_000_000 + n,
                )

    def transactions(self, topic: str, count: int, size: int = 20, first: int = 0) -> None:
        """Every third one is aborted."""
        with Producer(self.source.address, transactional_id=f"{topic}-writer") as producer:
            for n in range(first, first + count):
                producer.begin_transaction()
                for each in range(size):
                    producer.send(topic, b"%d of %d" % (each, n), partition=0)
                if n % 3 == 2:
                    producer.abort_transaction()
                else:
                    producer.commit_transaction()
        whole = size * len([n for n in range(first + count) if n % 3 != 2])
        wait_until(
            lambda: len(rows(self.source.address, topic)[0]) == whole, "the commits are readable"
        )

    def same(self, topic: str, partitions: int = 1) -> bool:
        """True if both have the same records at the same offsets."""
        return rows(self.source.address, topic, partitions) == rows(
            self.target.address, topic, partitions
        )

    def same_records(self, topic: str, partitions: int = 1) -> bool:
        """True if both have the same records in the same order, at whatever offsets."""
        here, there = (
            [[row[1:] for row in part] for part in rows(address, topic, partitions)]
            for address in (self.source.address, self.target.address)
        )
        return here == there


def rows(address: str, topic: str, partitions: int = 1) -> list[list[Row]]:
    """The committed records of each partition."""
    found = []
    with Consumer(bootstrap=address) as consumer:
        for number in range(partitions):
            partition = TopicPartition(topic, number)
            consumer.assign([partition])
            consumer.seek_to_beginning(partition)
            end = consumer.end_offsets([partition])[partition]
            part: list[Row] = []
            while consumer.position(partition) < end:
                part += [
                    (r.offset, r.timestamp, r.key, r.value, tuple(r.headers or ()))
                    for r in consumer.poll(timeout_ms=1_000)
                ]
            found.append(part)
    return found
