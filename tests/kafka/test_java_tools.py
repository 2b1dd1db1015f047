"""Kafka's own tools, unchanged, if `python -m bench.peers` has fetched them."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess

import pytest

from bench.peers.kafka import CACHE, NODE
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, wait_until

JARS = os.path.join(CACHE, NODE[0], "libs")
TOOLS = "org.apache.kafka.tools"

pytestmark = [
    pytest.mark.skipif(
        shutil.which("java") is None or not glob.glob(f"{JARS}/*.jar"),
        reason="Java or Kafka's jars are not here (`python -m bench.peers` fetches them)",
    ),
    pytest.mark.slow_because("each tool starts a Java machine"),
]


def tool(name: str, gateway: str, *arguments: str) -> str:
    """Run a tool; its output."""
    command = ["java", "-Xmx256m", "-XX:-UsePerfData", "-cp", f"{JARS}/*", name,
               "--bootstrap-server", gateway, *arguments]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_topics_records_and_groups(appliance: EmbeddedAppliance, gateway: str) -> None:
    topic = ("--topic", "java")
    tool(f"{TOOLS}.TopicCommand", gateway, "--create", *topic, "--partitions", "3")
    assert "PartitionCount: 3" in tool(f"{TOOLS}.TopicCommand", gateway, "--describe", *topic)
    perf = ("--record-size", "100", "--throughput", "-1", "--num-records", "5000")
    assert "5000 records sent" in tool(f"{TOOLS}.ProducerPerformance", gateway, *topic, *perf)
    for protocol in ("classic", "consumer"):
        read = tool(
            f"{TOOLS}.consumer.ConsoleConsumer", gateway, *topic, "--from-beginning",
            "--max-messages", "7", "--group", f"java-{protocol}",
            "--consumer-property", f"group.protocol={protocol}",
        )  # fmt: skip
        assert len([line for line in read.splitlines() if len(line) == 100]) == 7
    group = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
    described = tool(group, gateway, "--describe", "--group", "java-classic")
    assert described.count("java-classic") >= 3


def test_transactions_of_version_2(appliance: EmbeddedAppliance, gateway: str) -> None:
    sent = tool(
        f"{TOOLS}.ProducerPerformance", gateway, "--topic", "java-transactions",
        "--record-size", "100", "--throughput", "-1", "--num-records", "5000",
        "--transactional-id", "java", "--transaction-duration-ms", "50",
    )  # fmt: skip
    assert "5000 records sent" in sent
    assert "java" in tool(f"{TOOLS}.TransactionsCommand", gateway, "list")


def test_a_share_consumer(appliance: EmbeddedAppliance, gateway: str) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("java-shared", 2)])
        command = ["java", "-Xmx256m", "-XX:-UsePerfData", "-cp", f"{JARS}/*",
                   f"{TOOLS}.consumer.ConsoleShareConsumer", "--bootstrap-server", gateway,
                   "--topic", "java-shared", "--group", "java-sharers",
                   "--max-messages", "20"]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            wait_until(lambda: "java-sharers" in admin.list_groups(), "it has joined")
            for number in range(30):
                producer.send("java-shared", b"shared-%d" % number)
            out, _ = running.communicate(timeout=HANG_LIMIT_S)
        assert out.count(b"shared-") == 20
