"""Flink copies a topic exactly once (KafkaSource, KafkaSink), through kills of both sides."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import time

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from bench.peers.kafka import fetch_jars
from bench.peers.servers import Missing
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import SOURCES, Program, java_command
from tests.kit.peers.raw_kafka import kill_gateway
from tests.kit.processes import HANG_LIMIT_S, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Java machines start, and a job takes up its checkpoint"),
]
FROM, TO = "flink-in", "flink-out"
OPEN = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("util", "lang")]
RECORDS = 1000


def flink_jars() -> str:
    """The directory of Flink's jars. Skips without them."""
    if shutil.which("javac") is None:
        pytest.skip("a Java compiler is missing (Debian: apt-get install openjdk-17-jdk-headless)")
    try:
        return fetch_jars("flink-2.2.0", str(SOURCES / "flink" / "pom.xml"))
    except Missing as error:
        pytest.skip(str(error))


class Copied:
    """Reads the committed records of the copy."""

    def __init__(self, gateway: str) -> None:
        self._consumer = Consumer({
            "bootstrap.servers": gateway, "group.id": "flink-reader", "enable.auto.commit": False,
            "isolation.level": "read_committed",
        })  # fmt: skip
        self._consumer.assign([TopicPartition(TO, 0, OFFSET_BEGINNING)])
        self.numbers: list[int] = []

    def read(self, total: int) -> None:
        """Read until so many are there: the numbers 0, 1, 2 and so on."""
        until = time.monotonic() + HANG_LIMIT_S
        while len(self.numbers) < total:
            assert time.monotonic() < until, f"{len(self.numbers)} of {total} came"
            message = self._consumer.poll(1)
            if message is not None:
                assert not message.error(), message.error()
                value = message.value()
                assert isinstance(value, bytes)
                self.numbers.append(int(value))
        assert self.numbers == list(range(total))

    def close(self) -> None:
        self._consumer.close()


def test_a_topic_is_copied_exactly_once_through_kills(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    jars, written = flink_jars(), 0
    checkpoints = tmp_path / "checkpoints"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(FROM, 1), NewTopic(TO, 1)])

    def write() -> int:
        nonlocal written
        producer = Producer({"bootstrap.servers": gateway, "enable.idempotence": True})
        for number in range(written, written + RECORDS):
            producer.produce(FROM, b"%d" % number)
        assert producer.flush(HANG_LIMIT_S) == 0
        written += RECORDS
        return written

    def start(*checkpoint: str) -> Program:
        source = str(SOURCES / "flink" / "FlinkCopy.java")
        command = java_command(
            jars, *OPEN, source, gateway, FROM, TO, str(checkpoints), *checkpoint, heap="600m"
        )
        return Program(command, tmp_path)

    def latest() -> str:
        found: list[str] = []

        def is_there() -> bool:
            found[:] = glob.glob(f"{checkpoints}/*/chk-*/_metadata")
            return bool(found)

        wait_until(is_there, "a checkpoint is complete")
        return os.path.dirname(max(found, key=os.path.getmtime))

    copied = Copied(gateway)
    with start():
        copied.read(write())
        kill_gateway(appliance)
        copied.read(write())
        write()
    with start(latest()):
        copied.read(write())
    copied.close()
