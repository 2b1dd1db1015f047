"""Kafka's own producers while processes of the appliance are killed: nothing acknowledged is lost,
twice, or out of order.
"""

from __future__ import annotations

import collections
import json
import pathlib
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaException, Message, Producer

from tailrace import Admin, Consumer, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import Program, engine_jars, java_command
from tests.kit.checker import History, check, value_of
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until

PARTITIONS = 3
UNACKNOWLEDGED_MAX = 300
RECORDS = 600
"""Records between two kills."""
VICTIMS = ("tr-kafka", "tr-worker", "tr-flusher")
TOOLS = "org.apache.kafka.tools"
JAVA = [pytest.mark.long, pytest.mark.slow_because("Java machines start, and what dies times out")]


def kill(appliance: EmbeddedAppliance, prefix: str) -> None:
    """Kill the process whose name begins so, and wait for its successor."""
    names = [name for name in children(appliance) if name.startswith(prefix)]
    if names:  # the process of groups starts when it is needed
        kill_and_wait_for_successor(appliance, names[0])


def make(appliance: EmbeddedAppliance, *topics: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS) for topic in topics])


def end_of(appliance: EmbeddedAppliance, topic: str) -> int:
    with Admin(appliance.address) as admin:
        found = admin.describe_topics(topic)[topic]["partitions"]
        return sum(each["end_offset"] for each in found)


def committed(
    appliance: EmbeddedAppliance, topic: str, count: int
) -> dict[int, list[tuple[int, bytes]]]:
    """(offset, value) of all records that a reader may see, which are `count`, by partition."""
    found: dict[int, list[tuple[int, bytes]]] = {each: [] for each in range(PARTITIONS)}
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while sum(map(len, found.values())) < count:
            some = consumer.poll(timeout_ms=60_000)
            assert some, {each: len(rows) for each, rows in found.items()}
            for record in some:
                found[record.partition].append((record.offset, bytes(record.value)))
        assert not consumer.poll(timeout_ms=300)
    return found


class IdempotentProducer:
    """A librdkafka producer in a thread, with its history."""

    def __init__(self, gateway: str, topic: str, seed: int) -> None:
        self.history = History()
        self.failed: list[Any] = []
        self.topic = topic
        self._numbers = random.Random(seed)
        self._stops = threading.Event()
        self._producer = Producer({
            "bootstrap.servers": gateway, "enable.idempotence": True, "linger.ms": 2,
            "reconnect.backoff.max.ms": 100, "message.timeout.ms": 180_000,
            "batch.num.messages": 50,
        })  # fmt: skip
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stops.is_set():
            for partition in range(PARTITIONS):
                value = value_of("rdkafka", number, b"x" * self._numbers.randint(0, 200))
                self.history.send(partition, value)
                self._producer.produce(
                    self.topic, value, partition=partition, on_delivery=self._note
                )
            number += 1
            self._producer.poll(0.0005)
            while (
                not self._stops.is_set()
                and len(self.history.sent) > self.acknowledged + UNACKNOWLEDGED_MAX
            ):
                self._producer.poll(0.01)

    def _note(self, error: Any, message: Message) -> None:
        value, partition, offset = message.value(), message.partition(), message.offset()
        if error is not None:
            self.failed.append(error)
        else:
            assert isinstance(value, bytes)
            assert partition is not None
            assert offset is not None
            self.history.acknowledge(partition, value, offset)

    @property
    def acknowledged(self) -> int:
        return len(self.history.acknowledged)

    def finish(self) -> None:
        self._stops.set()
        self._thread.join()
        assert self._producer.flush(HANG_LIMIT_S) == 0


def produce_through(appliance: EmbeddedAppliance, topic: str, victims: Sequence[str]) -> None:
    make(appliance, topic)
    producer = IdempotentProducer(appliance.kafka_addresses[0], topic, len(victims))
    try:
        for victim in victims:
            before = producer.acknowledged
            wait_until(lambda at=before: producer.acknowledged > at + RECORDS, "records go on")  # type: ignore[misc]
            kill(appliance, victim)
        before = producer.acknowledged
        wait_until(lambda: producer.acknowledged > before + RECORDS, "records go on")
    finally:
        producer.finish()
    assert not producer.failed
    history = producer.history
    assert len(history.acknowledged) == len(history.sent)
    assert check(history, committed(appliance, topic, len(history.sent))) == len(history.sent)


def test_an_idempotent_producer_through_a_kill_of_each_process(
    appliance: EmbeddedAppliance,
) -> None:
    produce_through(appliance, "killed", VICTIMS)


@pytest.mark.long
@pytest.mark.slow_because("many kills")
@pytest.mark.parametrize("seed", range(3))
def test_an_idempotent_producer_through_many_kills(appliance: EmbeddedAppliance, seed: int) -> None:
    victims = random.Random(seed).choices(VICTIMS, k=25)
    produce_through(appliance, f"killed-{seed}", victims)


class JavaProducers:
    """Reads the lines of Kafka's VerifiableProducer, which is idempotent."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @property
    def acknowledged(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._program.output.splitlines()[:-1]
                if line.startswith("{")]  # fmt: skip
        failed = [row for row in rows if row["name"] == "producer_send_error"]
        assert not failed, failed[:3]
        return [row for row in rows if row["name"] == "producer_send_success"]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=JAVA) for seed in range(2)])
def test_javas_verifiable_producer_through_kills(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path, seed: int
) -> None:
    jars, topic, count = engine_jars(), f"verifiable-{seed}", 20_000
    make(appliance, topic)
    settings = tmp_path / "producer.properties"
    settings.write_text(
        "linger.ms=1\nreconnect.backoff.max.ms=100\nbatch.size=2000\n"
        "retries=2147483647\nenable.idempotence=true\n"  # the tool does not retry by itself
    )
    command = java_command(
        jars, f"{TOOLS}.VerifiableProducer", "--bootstrap-server", gateway, "--topic", topic,
        "--max-messages", str(count), "--throughput", "2000", "--acks", "-1",
        "--command-config", str(settings), "--value-prefix", "7",
    )  # fmt: skip
    with Program(command, tmp_path) as program:
        producers = JavaProducers(program)
        for number, victim in enumerate(random.Random(seed).choices(VICTIMS, k=8)):
            least = (number + 1) * count // 10
            wait_until(lambda at=least: len(producers.acknowledged) >= at, "records go on")  # type: ignore[misc]
            kill(appliance, victim)
        program.result()
        acknowledged = producers.acknowledged
    assert len(acknowledged) == count
    found = committed(appliance, topic, count)
    for partition, rows in found.items():
        assert [offset for offset, _ in rows] == list(range(len(rows)))
        numbers = [int(value.partition(b".")[2]) for _, value in rows]
        assert numbers == sorted(set(numbers)), f"partition {partition} is out of order"
    for row in acknowledged:
        assert found[row["partition"]][row["offset"]][1] == row["value"].encode()


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=JAVA) for seed in range(2)])
def test_javas_transactional_copier_through_kills(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path, seed: int
) -> None:
    # Kafka's own loop: it reads a partition, writes in transactions, some of which it aborts
    jars, source, copies, count = engine_jars(), f"copier-{seed}", f"copies-{seed}", 3000
    make(appliance, source, copies)
    producer = Producer({"bootstrap.servers": gateway})
    for number in range(count):
        producer.produce(source, b"%d" % number, partition=0)
    producer.flush()
    command = java_command(
        jars, f"{TOOLS}.TransactionalMessageCopier", "--broker-list", gateway,
        "--input-topic", source, "--input-partition", "0", "--output-topic", copies,
        "--max-messages", "-1", "--consumer-group", f"copiers-{seed}",
        "--transactional-id", f"copier-{seed}", "--transaction-size", "20",
        "--transaction-timeout", "20000", "--enable-random-aborts", "--group-mode",
    )  # fmt: skip
    numbers = random.Random(seed)
    for life in range(1, 4):
        with Program(command, tmp_path) as program:
            for step in range(3):
                least = (life * 3 + step) * count // 15
                wait_until(lambda at=least: end_of(appliance, copies) >= at, "it copies")  # type: ignore[misc]
                kill(appliance, numbers.choice((*VICTIMS, "tr-groups")))
            if life < 3:
                program.kill()
            else:
                wait_until(lambda: 'remaining":0' in program.output, "all is copied")
    found = collections.Counter(
        value for rows in committed(appliance, copies, count).values() for _, value in rows
    )
    assert found == collections.Counter(b"%d" % number for number in range(count))


class TransactionalCopier:
    """A librdkafka program that reads a group's topic and writes it in transactions with offsets.

    As its documentation says: what is fatal makes a new producer, what aborts begins again behind
    the last commit.
    """

    def __init__(self, gateway: str, source: str, target: str) -> None:
        self._gateway, self._source, self._target = gateway, source, target
        self._stops = threading.Event()
        self.fatal = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stops.is_set():
            consumer = KafkaConsumer({
                "bootstrap.servers": self._gateway, "group.id": self._target,
                "auto.offset.reset": "earliest", "enable.auto.commit": False,
                "isolation.level": "read_committed", "reconnect.backoff.max.ms": 100,
                "session.timeout.ms": 6000, "heartbeat.interval.ms": 500,
            })  # fmt: skip
            producer = Producer({
                "bootstrap.servers": self._gateway, "transactional.id": self._target,
                "reconnect.backoff.max.ms": 100, "transaction.timeout.ms": 20_000,
                # The default, rebootstrap, forgets the only broker while it is down, and keeps that
                # dead one as the group's coordinator for ten minutes (librdkafka 2.16).
                "metadata.recovery.strategy": "none",
            })  # fmt: skip
            try:
                self._copy(consumer, producer)
            except KafkaException:
                self.fatal += 1
            finally:
                consumer.close()

    def _copy(self, consumer: KafkaConsumer, producer: Producer) -> None:
        """Copy until it stops. Raises KafkaException when the producer is fenced."""
        self._again(producer.init_transactions)
        consumer.subscribe([self._source])
        while not self._stops.is_set():
            messages = [each for each in consumer.consume(20, 0.2) if not each.error()]
            if not messages:
                continue
            producer.begin_transaction()
            try:
                for message in messages:
                    producer.produce(self._target, message.value())
                places = consumer.position(consumer.assignment())
                metadata = consumer.consumer_group_metadata()
                self._again(partial(producer.send_offsets_to_transaction, places, metadata))
                self._again(producer.commit_transaction)
            except KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    raise
                self._again(producer.abort_transaction)
                return  # a new consumer begins behind the last commit

    def _again(self, call: Callable[[], Any]) -> None:
        """Repeat what may be repeated."""
        while True:
            try:
                call()
                return
            except KafkaException as error:
                if not error.args[0].retriable() or self._stops.is_set():
                    raise

    def finish(self) -> None:
        self._stops.set()
        self._thread.join()


@pytest.mark.long
@pytest.mark.slow_because("many kills")
@pytest.mark.parametrize("seed", range(2))
def test_a_transactional_copy_of_librdkafka_through_kills(
    appliance: EmbeddedAppliance, gateway: str, seed: int
) -> None:
    source, target, count = f"loop-{seed}", f"looped-{seed}", 6000
    make(appliance, source, target)
    producer = Producer({"bootstrap.servers": gateway})
    for number in range(count):
        producer.produce(source, b"%d" % number)
    producer.flush()
    copier = TransactionalCopier(gateway, source, target)
    try:
        for number, victim in enumerate(
            random.Random(seed).choices((*VICTIMS, "tr-groups"), k=10), 1
        ):
            least = number * count // 12
            wait_until(lambda at=least: end_of(appliance, target) >= at, "it copies")  # type: ignore[misc]
            kill(appliance, victim)
        wait_until(lambda: copied_count(appliance, target) >= count, "all is copied")
    finally:
        copier.finish()
    found = collections.Counter(
        value for rows in committed(appliance, target, count).values() for _, value in rows
    )
    assert found == collections.Counter(b"%d" % number for number in range(count))


def copied_count(appliance: EmbeddedAppliance, group: str) -> int:
    """The records whose offsets a group has committed."""
    with Admin(appliance.address) as admin:
        found = admin.list_group_offsets(group)
    return sum(each.offset for each in found.values() if each is not None)
