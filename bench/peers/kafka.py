"""Apache Kafka 4.3: one KRaft node with 1 GiB of heap, its own Java tools, and
confluent-kafka-python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measure import paced, percentile
from bench.peers.servers import Missing, Server, free_port, in_child

CACHE = os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tailrace-bench"
)
NODE = ("kafka-4.3.0", "pom.xml")
SPARK_CONNECTOR = ("spark-kafka-4.2.0", "spark_connector.xml")
"""A file to fetch: the name of its directory in CACHE, with its version, and its list of jars."""
TOOL_TIMEOUT_S = 240
FETCH_TIMEOUT_S = 300
SYNCED = {"flush.messages": "1"}
"""Topic settings with which every batch is fsync'd before it is acknowledged."""
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={directory}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def fetch_jars(name: str, pom: str) -> str:
    """The directory of the jars; fetched once. Raises Missing."""
    if shutil.which("java") is None:
        raise Missing("java is missing (Debian: apt-get install openjdk-17-jre-headless)")
    directory = f"{CACHE}/{name}/libs"
    if not os.path.isdir(directory):
        if shutil.which("mvn") is None:
            raise Missing("mvn, which fetches Kafka, is missing (Debian: apt-get install maven)")
        pom = os.path.join(os.path.dirname(__file__), pom)
        try:
            fetched = subprocess.run(
                ["mvn", "-q", "-B", "-Dstyle.color=never", "-f", pom,
                "dependency:copy-dependencies", f"-DoutputDirectory={directory}.part"],
                check=False, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Missing(f"mvn could not fetch {name} in {FETCH_TIMEOUT_S} s") from None
        if fetched.returncode:
            said = next(
                (line for line in fetched.stdout.splitlines() if "[ERROR]" in line),
                "no reason given",
            )
            raise Missing(
                f"mvn could not fetch {name}: "
                f"{said.partition('[ERROR] ')[2].partition(' -> ')[0] or said}"
            )
        os.rename(f"{directory}.part", directory)
    return directory


class KafkaClients:
    """Clients of one node: Kafka, or whatever speaks its protocol."""

    def __init__(self, bootstrap: str) -> None:
        """Raises Missing, without Kafka's tools."""
        self.bootstrap = bootstrap
        self._class_path = f"{fetch_jars(*NODE)}/*"
        self._made = 0

    def java(self, main: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["java", "-XX:-UsePerfData", "-cp", self._class_path, main, *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S
        )

    def topic(self, partitions: int = 1, configs: dict[str, str] | None = None) -> str:
        """A new one. Raises RuntimeError when it cannot be made."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient, NewTopic

        self._made += 1
        name = f"t{self._made}"
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})
        try:
            for future in admin.create_topics(
                [NewTopic(name, partitions, 1, config=configs or {})]
            ).values():
                future.result(30)
        except KafkaException as error:
            raise RuntimeError(f"no topic with {partitions} partitions: {error}") from error
        return name

    def java_topic(self, name: str, partitions: int) -> None:
        """A new one, by Kafka's own tool: without a client for Python."""
        self.java(
            "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", self.bootstrap, "--create",
            "--topic", name, "--partitions",
            str(partitions),
        )  # fmt: skip

    # ---- its own tools ---------------------------------------------------------------------------

    def java_produce(
        self,
        size: int,
        count: int,
        acks: int | str,
        configs: dict[str, str] | None = None,
        topic: str = "",
    ) -> float:
        """Records a second as ProducerPerformance counts them."""
        topic = topic or self.topic(configs=configs)
        said = self.java(
            "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records",
            str(count), "--record-size", str(size),
            "--throughput", "-1", "--producer-props", f"bootstrap.servers={self.bootstrap}",
            f"acks={acks}", "batch.size=262144", "linger.ms=5",
            "buffer.memory=67108864",
        ).stdout  # fmt: skip
        rates = re.findall(r"([\d.]+) records/sec", said)
        return float(rates[-1])

    def java_consume(self, topic: str, count: int) -> float:
        """Records a second of fetching, as ConsumerPerformance counts them (fetch.nMsg.sec: joining
        the group is left out).
        """
        said = self.java(
            "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", self.bootstrap,
            "--topic", topic, "--num-records", str(count),
        ).stdout  # fmt: skip
        return float(said.strip().splitlines()[-1].split(",")[-1])

    # ---- librdkafka under Python -----------------------------------------------------------------

    def produce(
        self,
        size: int,
        count: int,
        acks: int | str,
        configs: dict[str, str] | None = None,
        partition: int | None = None,
    ) -> float:
        """Records a second; `partition`: given with each, beside its key."""
        return float(
            in_child(
                _produce, self.bootstrap, self.topic(configs=configs), size, count, acks, partition
            )
        )

    def consume(self, topic: str, count: int) -> float:
        return float(in_child(_consume, self.bootstrap, topic, count))

    def latency(
        self, count: int, acks: int | str, configs: dict[str, str] | None = None
    ) -> list[float]:
        found: list[float] = in_child(
            _latency, self.bootstrap, self.topic(configs=configs), count, acks
        )
        return found

    def end_to_end(self, rate: int, seconds: float, size: int) -> list[float]:
        found: list[float] = in_child(
            _end_to_end, self.bootstrap, self.topic(), rate, seconds, size
        )
        return found


class Kafka(KafkaClients):
    """A running node."""

    name = "Apache Kafka"

    def __init__(
        self,
        directory: str,
        properties: Mapping[str, object] | None = None,
        java_options: Sequence[str] = (),
    ) -> None:
        """Format a directory and start. `properties` are the broker's, beside those above. Raises
        Missing.
        """
        self._directory = directory
        self._java_options = java_options
        self._port = free_port()
        super().__init__(f"127.0.0.1:{self._port}")
        self._config = f"{directory}/server.properties"
        with open(self._config, "w", encoding="utf-8") as file:
            file.write(
                _PROPERTIES.format(port=self._port, controller=free_port(), directory=directory)
            )
            file.writelines(f"{name}={value}\n" for name, value in (properties or {}).items())
        cluster = self.java("kafka.tools.StorageTool", "random-uuid").stdout.strip()
        self.java("kafka.tools.StorageTool", "format", "-t", cluster, "-c", self._config)
        self.server = self.start()

    def start(self) -> Server:
        options = ["-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:-UsePerfData", *self._java_options]
        self.server = Server(
            ["java", *options, "-cp", self._class_path, "kafka.Kafka", self._config],
            self._port,
            f"{self._directory}/log.txt",
        )
        return self.server

    def stop(self) -> None:
        self.server.stop()


def producer_of(bootstrap: str, acks: int | str, **settings: Any) -> Any:
    """librdkafka's, with batches, linger (5 ms) and memory as ours have them."""
    from confluent_kafka import Producer

    given = {
        "bootstrap.servers": bootstrap, "acks": str(acks), "batch.size": 262144, "linger.ms": 5,
        "queue.buffering.max.messages": 1_000_000,
        "queue.buffering.max.kbytes": 65536, "enable.idempotence": False,
    }  # fmt: skip
    return Producer({**given, **settings})


def _produce(
    bootstrap: str, topic: str, size: int, count: int, acks: int | str, partition: int | None
) -> float:
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    keys = [b"k%d" % number for number in range(64)]
    producer = producer_of(bootstrap, acks)
    producer.produce(topic, payload)
    producer.flush(30)
    given = {} if partition is None else {"partition": partition}
    begun = time.perf_counter()
    for number in range(count):
        while True:
            try:
                producer.produce(topic, payload, keys[number & 63], **given)
                break
            except BufferError:
                producer.poll(0.01)
        if not number & 1023:
            producer.poll(0)
    producer.flush(120)
    return count / (time.perf_counter() - begun)


def _assigned(bootstrap: str, topic: str, **settings: Any) -> Any:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    return consumer


def _consume(bootstrap: str, topic: str, count: int) -> float:
    consumer = _assigned(bootstrap, topic)
    begun, seen = 0.0, 0
    while seen < count:
        records = consumer.consume(10_000, 10)
        if not begun:  # connecting is left out, as it is of ConsumerPerformance's
            begun, count = time.perf_counter(), count - len(records)
            continue
        seen += sum(1 for record in records if record.value() is not None and record.offset() >= 0)
    return count / (time.perf_counter() - begun)


def _latency(bootstrap: str, topic: str, count: int, acks: int | str) -> list[float]:
    payload = os.urandom(100)
    producer = producer_of(bootstrap, acks, **{"linger.ms": 0})
    found = []
    for number in range(count + 200):
        done: list[object] = []
        begun = time.perf_counter()
        producer.produce(topic, payload, on_delivery=lambda error, message: done.append(error))  # noqa: B023
        while not done:
            producer.poll(1)
        if number >= 200:
            found.append((time.perf_counter() - begun) * 1e6)
    return found


def _end_to_end(bootstrap: str, topic: str, rate: int, seconds: float, size: int) -> list[float]:
    import multiprocessing

    sender = multiprocessing.get_context("spawn").Process(
        target=_send_at, args=(bootstrap, topic, rate, int(rate * seconds), size)
    )
    consumer = _assigned(bootstrap, topic, **{"fetch.wait.max.ms": 100})
    sender.start()
    times: list[float] = []
    count = int(rate * seconds)
    while len(times) < count:
        records = consumer.consume(10_000, 0.001)
        now_ns = time.perf_counter_ns()
        times += [
            (now_ns - int.from_bytes(record.value()[:8], "big")) / 1e6
            for record in records
            if record.error() is None
        ]
    sender.join()
    return times[count // 10 :]


def _send_at(bootstrap: str, topic: str, rate: int, count: int, size: int) -> None:
    producer = producer_of(bootstrap, 1, **{"linger.ms": 1})
    producer.list_topics(topic)
    filler = b"x" * (size - 8)
    for number, due in enumerate(paced(rate, count)):
        producer.produce(topic, due.to_bytes(8, "big") + filler)
        if not number & 255:
            producer.poll(0)
    producer.flush(60)


def quantiles(times: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(times, 0.5),
        "p99": percentile(times, 0.99),
        "p99.9": percentile(times, 0.999),
    }
