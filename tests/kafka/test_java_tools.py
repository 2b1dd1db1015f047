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
from tailrace import Admin, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.kafka_owners import committed, make, owner
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


def tool(name: str, gateway: str, *arguments: str, lines: str = "", fails: bool = False) -> str:
    """Run a tool, which reads these lines; its output. `fails`: it ends with an error."""
    command = ["java", "-Xmx256m", "-XX:-UsePerfData", "-cp", f"{JARS}/*", name,
               "--bootstrap-server", gateway, *arguments]  # fmt: skip
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr + done.stdout if fails else done.stdout


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


# ---- administration, each operation --------------------------------------------------------------


@pytest.mark.long
def test_a_topic_grows_is_listed_and_deleted(appliance: EmbeddedAppliance, gateway: str) -> None:
    topics, named = f"{TOOLS}.TopicCommand", ("--topic", "java-grows")
    tool(topics, gateway, "--create", *named, "--config", "retention.ms=3600000")
    tool(topics, gateway, "--alter", *named, "--partitions", "5")
    described = tool(topics, gateway, "--describe", *named)
    assert "PartitionCount: 5" in described
    assert "retention.ms=3600000" in described
    assert "java-grows" in tool(topics, gateway, "--list").split()
    assert "unclean" in tool(
        topics, gateway, "--create", "--topic", "java-refused", "--config",
        "unclean.leader.election.enable=true", fails=True,
    )  # fmt: skip
    tool(topics, gateway, "--delete", *named)
    with Admin(appliance.address) as admin:
        assert "java-grows" not in admin.list_topics()


@pytest.mark.long
def test_a_consumer_group_is_listed_described_reset_and_deleted(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """With all ways of naming an offset."""
    group, named = f"{TOOLS}.consumer.group.ConsumerGroupCommand", ("--group", "java-group")
    place = TopicPartition("java-offsets", 0)
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("java-offsets", 1)])
        for number in range(10):
            producer.send("java-offsets", b"%d" % number, timestamp=1_700_000_000_000 + number)
        producer.flush()
        reset = ("--reset-offsets", *named, "--topic", "java-offsets")
        for wished, offset in (
            (["--to-latest"], 10),
            (["--to-earliest"], 0),
            (["--to-offset", "7"], 7),
            (["--shift-by", "-2"], 5),
            (["--to-datetime", "2023-11-14T22:13:20.003"], 3),
            (["--to-current"], 3),
        ):
            tool(group, gateway, *reset, *wished, "--execute")
            found = admin.list_group_offsets("java-group")[place]
            assert found is not None
            assert (wished, found.offset) == (wished, offset)
        assert "java-group" in tool(group, gateway, "--list").split()
        row = tool(group, gateway, "--describe", *named, "--offsets").split()
        assert row[row.index("java-offsets") :][:5] == ["java-offsets", "0", "3", "10", "7"]
        assert "Empty" in tool(group, gateway, "--describe", *named, "--state")
        tool(group, gateway, "--describe", *named, "--members", "--verbose")
        tool(group, gateway, "--delete-offsets", *named, "--topic", "java-offsets")
        assert place not in admin.list_group_offsets("java-group")
        tool(group, gateway, *reset, "--to-earliest", "--execute")
        tool(group, gateway, "--delete", *named)
        assert "java-group" not in admin.list_groups()


@pytest.mark.long
def test_settings_of_topics_and_groups_are_changed(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    configs = "kafka.admin.ConfigCommand"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("java-settings", 1)])

        def retention() -> object:
            found = admin.describe_topics("java-settings")["java-settings"]["configs"]
            return found["retention.ms"]

        default = retention()
        for entity, setting in (
            (("--entity-type", "topics", "--entity-name", "java-settings"), "retention.ms=7200000"),
            (("--entity-type", "groups", "--entity-name", "java-settings"),
             "consumer.session.timeout.ms=50000"),
        ):  # fmt: skip
            tool(configs, gateway, "--alter", *entity, "--add-config", setting)
            assert setting in tool(configs, gateway, "--describe", *entity)
            if "topics" in entity:
                assert retention() == 7_200_000
            name = setting.partition("=")[0]
            tool(configs, gateway, "--alter", *entity, "--delete-config", name)
            assert setting not in tool(configs, gateway, "--describe", *entity)
            said = tool(
                configs, gateway, "--alter", *entity, "--add-config", "no.such=1", fails=True
            )
            assert "no.such" in said
        assert retention() == default


@pytest.mark.long
def test_open_transactions_are_aborted(appliance: EmbeddedAppliance, gateway: str) -> None:
    """By the place where one begins, and by its id."""
    topic_id, transactions = make(appliance, "java-open"), f"{TOOLS}.TransactionsCommand"
    place = ("--topic", "java-open", "--partition", "0")
    with owner(gateway, "java-aborted", 2) as one, owner(gateway, "java-ended", 2) as two:
        assert one.write("java-open", topic_id, b"a") == 0
        described = tool(transactions, gateway, "describe", "--transactional-id", "java-aborted")
        assert "Ongoing" in described
        assert str(one.producer_id) in tool(transactions, gateway, "describe-producers", *place)
        tool(transactions, gateway, "abort", *place, "--start-offset", "0")
        assert one.end(True) != 0
        assert two.write("java-open", topic_id, b"b") == 0
        tool(transactions, gateway, "forceTerminateTransaction", "--transactionalId", "java-ended")
        assert two.end(True) != 0
    with owner(gateway, "java-committed", 2) as three:
        assert three.write("java-open", topic_id, b"c") == 0
        assert three.end(True) == 0
    assert committed(appliance, "java-open", 1) == [b"c"]


@pytest.mark.long
def test_offsets_of_every_kind_and_the_cluster_are_shown(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("java-times", 1)])
        for time_ms in (1_700_000_000_000, 1_700_000_000_900, 1_700_000_000_500):
            producer.send("java-times", b"x", timestamp=time_ms)
            producer.flush()
    for time, offset in (
        ("latest", "3"), ("earliest", "0"), ("max-timestamp", "1"), ("-4", "0"),
        ("1700000000100", "1"),
    ):  # fmt: skip
        found = tool(f"{TOOLS}.GetOffsetShell", gateway, "--topic", "java-times", "--time", time)
        assert found.strip() == f"java-times:0:{offset}", time
    command = ["java", "-cp", f"{JARS}/*", f"{TOOLS}.ClusterTool"]
    for name in ("cluster-id", "list-endpoints"):
        said = subprocess.run(
            [*command, name, "--bootstrap-server", gateway],
            capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True,
        ).stdout  # fmt: skip
        assert said.strip(), name
    assert gateway.rpartition(":")[2] in said
    tool(f"{TOOLS}.StreamsResetter", gateway, "--application-id", "java-app", "--input-topics",
         "java-times")  # fmt: skip
