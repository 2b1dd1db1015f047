"""Java's measuring and verifying clients, unchanged: transactions, and groups of all kinds."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from typing import Any

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import Program, engine_jars, java_command
from tests.kit.peers.raw_kafka import kill_gateway
from tests.kit.processes import children, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("each tool starts a Java machine"),
]
TOOLS = "org.apache.kafka.tools"
COUNT = 3000


@pytest.fixture
def topic(appliance: EmbeddedAppliance, request: pytest.FixtureRequest) -> str:
    name = "".join(each for each in request.node.name if each.isalnum())
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, 3)])
    return name


class Tools:
    """Starts tools of one gateway and topic."""

    def __init__(self, gateway: str, topic: str, directory: pathlib.Path) -> None:
        self.gateway, self.topic, self._directory = gateway, topic, directory
        self._jars = engine_jars()

    def start(self, name: str, *arguments: str) -> Program:
        command = java_command(
            self._jars, f"{TOOLS}.{name}", "--bootstrap-server", self.gateway, "--topic",
            self.topic, *arguments,
        )  # fmt: skip
        return Program(command, self._directory)

    def run(self, name: str, *arguments: str) -> str:
        with self.start(name, *arguments) as program:
            return program.result()

    def fill(self, count: int = COUNT) -> None:
        rows = events(self.run("VerifiableProducer", "--max-messages", str(count)))
        assert len(named(rows, "producer_send_success")) == count

    def properties(self, **values: object) -> str:
        path = self._directory / "client.properties"
        path.write_text("".join(f"{key.replace('_', '.')}={value}\n"
                                for key, value in values.items()))  # fmt: skip
        return str(path)


@pytest.fixture
def tools(gateway: str, topic: str, tmp_path: pathlib.Path) -> Tools:
    return Tools(gateway, topic, tmp_path)


def events(output: str) -> list[dict[str, Any]]:
    """The JSON lines of a verifying tool."""
    whole = output.rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def named(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["name"] == name]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_verifiable_consumers_share_a_topic(tools: Tools, protocol: str) -> None:
    tools.fill()
    more: tuple[str, ...] = (
        "--group-protocol", protocol, "--group-id", f"verifiable-{protocol}", "--verbose",
        "--reset-policy", "earliest",
    )  # fmt: skip
    if protocol == "classic":
        more += ("--session-timeout", "6000")
    with (
        tools.start("VerifiableConsumer", *more) as one,
        tools.start("VerifiableConsumer", *more) as two,
    ):

        def read() -> list[dict[str, Any]]:
            return [row for each in (one, two) for row in named(events(each.output), "record_data")]

        wait_until(lambda: len(read()) >= COUNT, "all is read")
        wait_until(
            lambda: all(named(events(each.output), "partitions_assigned") for each in (one, two)),
            "both have partitions",
        )
        two.stop()
        tools.fill()
        wait_until(lambda: len(read()) >= 2 * COUNT, "the first one reads on")
        one.stop()
        places = {(row["partition"], row["offset"]) for row in read()}
        assert len(places) == 2 * COUNT
        committed = named(events(one.output), "offsets_committed")
        assert committed
        assert all(row["success"] for row in committed)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_topic_that_was_made_again_is_read_from_its_first_record(
    appliance: EmbeddedAppliance, tools: Tools, protocol: str
) -> None:
    """The gateway that knew what the consumer had read is dead: leader epochs tell the topics
    apart.
    """

    def send(first: int, count: int) -> None:
        with Producer(appliance.address) as producer:
            for number in range(first, first + count):
                producer.send(tools.topic, b"%d" % number, partition=0)

    send(0, 10)
    with tools.start(
        "VerifiableConsumer", "--group-protocol", protocol, "--group-id", f"again-{protocol}",
        "--verbose", "--reset-policy", "earliest",
    ) as program:  # fmt: skip

        def read() -> list[int]:
            return [int(row["value"]) for row in named(events(program.output), "record_data")]

        wait_until(lambda: read() == list(range(10)), "the first topic is read")
        read_s = int(time.time())
        wait_until(lambda: int(time.time()) > read_s, "the topics differ by a second")
        os.kill(
            children(appliance)["tr-kafka-0"], signal.SIGSTOP
        )  # no fetch comes before the new one
        with Admin(appliance.address) as admin:
            admin.delete_topics([tools.topic])
            admin.create_topics([NewTopic(tools.topic, 3)])
        send(100, 30)
        kill_gateway(appliance)
        wait_until(lambda: 129 in read(), "the second topic is read")
        assert read()[10:] == list(range(100, 130))


@pytest.mark.parametrize("mode", ["auto", "sync", "async"])
def test_a_verifiable_share_consumer(appliance: EmbeddedAppliance, tools: Tools, mode: str) -> None:
    with tools.start(
        "VerifiableShareConsumer", "--group-id", f"sharers-{mode}", "--acknowledgement-mode", mode,
        "--verbose", "--max-messages", str(COUNT),
    ) as program:  # fmt: skip
        with Admin(appliance.address) as admin:
            wait_until(lambda: f"sharers-{mode}" in admin.list_groups(), "it has joined")
        tools.fill()
        rows = events(program.result())
    acknowledged = sum(row["count"] for row in named(rows, "offsets_acknowledged"))
    assert acknowledged >= COUNT
    failed = [row for row in named(rows, "offsets_acknowledged") if not row["success"]]
    assert not failed


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_perf_tools(tools: Tools, codec: str) -> None:
    tools.run(
        "ProducerPerformance", "--record-size", "100", "--throughput", "-1",
        "--num-records", str(COUNT),
        "--command-property", f"compression.type={codec}", "acks=all",
    )  # fmt: skip
    read = tools.run(
        "ConsumerPerformance", "--num-records", str(COUNT), "--group", f"perf-{codec}",
    )  # fmt: skip
    assert f", {COUNT}," in read


def test_transactional_perf_and_console_producers(tools: Tools) -> None:
    tools.run(
        "ProducerPerformance", "--record-size", "100", "--throughput", "-1",
        "--num-records", str(COUNT), "--transactional-id", "perf",
        "--transaction-duration-ms", "30",
    )  # fmt: skip
    config = tools.properties(isolation_level="read_committed", auto_offset_reset="earliest")
    read = tools.run("ConsumerPerformance", "--num-records", str(COUNT), "--command-config", config)
    assert f", {COUNT}," in read


def test_the_share_consumer_perf_tool(appliance: EmbeddedAppliance, tools: Tools) -> None:
    with tools.start(
        "ShareConsumerPerformance", "--num-records", str(COUNT), "--group", "share-perf",
        "--threads", "2", "--timeout", "120000",
    ) as program:  # fmt: skip
        with Admin(appliance.address) as admin:
            wait_until(lambda: "share-perf" in admin.list_groups(), "it has joined")
        tools.fill(2 * COUNT)
        assert "," in program.result()


def test_the_latency_tool(gateway: str, topic: str, tmp_path: pathlib.Path) -> None:
    command = java_command(
        engine_jars(), f"{TOOLS}.EndToEndLatency", "--bootstrap-server", gateway, "--topic", topic,
        "--num-records", "300", "--producer-acks", "all", "--record-size", "100",
    )  # fmt: skip
    with Program(command, tmp_path) as program:
        assert "Avg latency" in program.result()
