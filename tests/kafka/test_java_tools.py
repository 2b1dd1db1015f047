"""Kafka's own tools, unchanged, if `python -m bench.peers` has fetched them."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from bench.peers.kafka import CACHE, NODE
from tailrace import Admin, NewTopic, Producer, ShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.kafka_owners import committed, make
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


def tool(name: str, gateway: str, *arguments: str, lines: str = "") -> str:
    """Run a tool, which reads these lines; its output."""
    command = ["java", "-Xmx256m", "-XX:-UsePerfData", "-cp", f"{JARS}/*", name,
               "--bootstrap-server", gateway, *arguments]  # fmt: skip
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
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
    transactions = f"{TOOLS}.TransactionsCommand"
    assert "java" in tool(transactions, gateway, "list")
    place = ("--topic", "java-transactions", "--partition", "0")
    assert "LastSequence" in tool(transactions, gateway, "describe-producers", *place)


@pytest.mark.long
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
        shares = f"{TOOLS}.consumer.group.ShareGroupCommand"
        described = tool(shares, gateway, "--describe", "--group", "java-sharers", "--offsets")
        assert described.count("java-shared") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (f"{TOOLS}.TransactionsCommand", ["find-hanging", "--topic", "java-tools"], "StartOffset"),
        (f"{TOOLS}.consumer.group.ShareGroupCommand", ["--list"], ""),
        (f"{TOOLS}.MetadataQuorumCommand", ["describe", "--status"], "LeaderId:               0"),
        (f"{TOOLS}.FeatureCommand", ["describe"], "transaction.version"),
        (f"{TOOLS}.LogDirsCommand", ["--describe", "--topic-list", "java-tools"], "java-tools-1"),
        (f"{TOOLS}.GetOffsetShell", ["--topic", "java-tools"], "java-tools:1:0"),
        (
            f"{TOOLS}.LeaderElectionCommand",
            ["--election-type", "unclean", "--topic", "java-tools", "--partition", "0"],
            "Valid replica already elected",
        ),
        (f"{TOOLS}.BrokerApiVersionsCommand", [], "ShareGroupDescribe(77): 1 [usable: 1]"),
        (f"{TOOLS}.GroupsCommand", ["--list"], "GROUP"),
        ("kafka.admin.ConfigCommand", ["--describe", "--entity-type", "brokers",
                                       "--entity-name", "0", "--all"], "num.partitions=4"),
    ],
)  # fmt: skip
def test_a_tool_runs(
    appliance: EmbeddedAppliance, gateway: str, name: str, arguments: list[str], said: str
) -> None:
    with Admin(appliance.address) as admin:
        if "java-tools" not in admin.list_topics():
            admin.create_topics([NewTopic("java-tools", 2)])
    assert said in tool(name, gateway, *arguments)


@pytest.mark.long
def test_the_console_producer_writes_lines(appliance: EmbeddedAppliance, gateway: str) -> None:
    make(appliance, "java-console")
    topic = ("--topic", "java-console", "--reader-property", "parse.key=true")
    tool(f"{TOOLS}.ConsoleProducer", gateway, *topic, lines="a\t1\nb\t2\n")
    assert committed(appliance, "java-console", 2) == [b"1", b"2"]


@pytest.mark.long
def test_records_are_deleted_and_a_share_group_is_reset(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("java-deleted", 1)])
        for number in range(5):
            producer.send("java-deleted", b"%d" % number)
        producer.flush()
        with ShareConsumer("java-deleted", bootstrap=appliance.address, group_id="java-reset"):
            pass
    places = {"partitions": [{"topic": "java-deleted", "partition": 0, "offset": 3}]}
    (tmp_path / "places.json").write_text(json.dumps({**places, "version": 1}))
    deleted = tool(
        f"{TOOLS}.DeleteRecordsCommand", gateway, "--offset-json-file", f"{tmp_path}/places.json"
    )
    assert "low_watermark: 3" in deleted
    group = f"{TOOLS}.consumer.group.ShareGroupCommand"
    named = ("--group", "java-reset")
    reset = tool(
        group, gateway, "--reset-offsets", *named, "--topic", "java-deleted", "--to-earliest",
        "--execute",
    )  # fmt: skip
    assert reset.split()[-3:] == ["java-deleted", "0", "3"]
    topic = ("--topic", "java-deleted")
    assert "Successful" in tool(group, gateway, "--delete-offsets", *named, *topic)
    assert "successful" in tool(group, gateway, "--delete", *named)
