"""Kafka Streams with exactly_once_v2: killed in the middle, each word is counted exactly once."""

from __future__ import annotations

import collections
import pathlib
import random

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import SOURCES, Program, engine_jars, java_command
from tests.kit.processes import children, kill_and_wait_for_successor

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Java machines start, and groups time out the members that died"),
]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
LINES = 4000
PARTITIONS = 3


def write_lines(gateway: str, topic: str, seed: int) -> collections.Counter[str]:
    """Write lines of random words; their counts."""
    numbers = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    producer = Producer({"bootstrap.servers": gateway, "enable.idempotence": True})
    for _ in range(LINES):
        words = numbers.choices(WORDS, k=3)
        counts.update(words)
        producer.produce(topic, " ".join(words).encode())
    producer.flush()
    return counts


class CountReader:
    """Reads the committed counts; each word's are 1, 2, 3 and so on, without one twice."""

    def __init__(self, gateway: str, topic: str) -> None:
        self._consumer = Consumer({
            "bootstrap.servers": gateway, "group.id": f"reader-{topic}",
            "enable.auto.commit": False, "isolation.level": "read_committed",
        })  # fmt: skip
        self._consumer.assign(
            [TopicPartition(topic, each, OFFSET_BEGINNING) for each in range(PARTITIONS)]
        )
        self.counts: collections.Counter[str] = collections.Counter()

    def read(self, total: int) -> None:
        """Read until so many words are counted."""
        while sum(self.counts.values()) < total:
            message = self._consumer.poll(120)
            assert message is not None, f"nothing came behind {self.counts}"
            assert not message.error(), message.error()
            key, value = message.key(), message.value()
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            self.counts[key.decode()] += 1
            assert int(value) == self.counts[key.decode()], f"{key!r} is {value!r}"

    def close(self) -> None:
        self._consumer.close()


@pytest.mark.parametrize("keeps_state", [True, False])
def test_words_are_counted_exactly_once_through_kills(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path, keeps_state: bool
) -> None:
    jars = engine_jars()
    name = f"words-{keeps_state}".lower()
    lines, counts = f"lines-{name}", f"counts-{name}"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(lines, PARTITIONS), NewTopic(counts, PARTITIONS)])

    def start(state: str) -> Program:
        return Program(
            java_command(jars, str(SOURCES / "java" / "WordCount.java"), gateway,
                         name, lines, counts, str(tmp_path / state)),
            tmp_path,
        )  # fmt: skip

    def name_of(prefix: str) -> str:
        return next(name for name in children(appliance) if name.startswith(prefix))

    reader = CountReader(gateway, counts)
    written = write_lines(gateway, lines, 1)
    with start("first") as program:
        reader.read(sum(written.values()) // 3)
        program.kill()
    with start("first" if keeps_state else "second") as program:
        for seed, victim in enumerate(("tr-kafka", "tr-groups", "tr-worker", "tr-flusher"), 2):
            written += write_lines(gateway, lines, seed)
            total = sum(written.values())
            reader.read(total - LINES * 2)
            kill_and_wait_for_successor(appliance, name_of(victim))
            reader.read(total)
        program.stop()
    assert reader.counts == written
    assert "FAILED" not in program.output
    reader.close()


def test_the_streams_protocol_is_refused_in_words_that_say_so(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("refused-lines", 1), NewTopic("refused-counts", 1)])
    command = java_command(
        engine_jars(), str(SOURCES / "java" / "WordCount.java"), gateway, "refused",
        "refused-lines", "refused-counts", str(tmp_path / "state"), "group.protocol=streams",
    )  # fmt: skip
    with Program(command, tmp_path) as program:
        program.wait_for("FAILED")
        assert "The cluster does not support the STREAMS group protocol" in program.output
