"""Kafka clients find the cluster and its topics; what is no request ends its connection alone."""

from __future__ import annotations

import contextlib
import resource
import shutil
import struct
import subprocess
import sys

import psutil
import pytest

from appliance.supervise.processes.child_processes import MODULES
from netfront.kafka.apis.call import NODE_ID
from netfront.kafka.apis.cluster.features import FEATURES
from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.decoding import Reader, decode, response_reader
from netfront.kafka.wire.definitions import definition
from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance, embedded
from tests.kit.peers.raw_kafka import API_VERSIONS, RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, children, stopped

PRODUCE, METADATA, FIND_COORDINATOR, JOIN_GROUP, PARTITIONS = 0, 3, 10, 11, 75
ALL = {"topics": None}
LOADED = """import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith("netfront.kafka")])"""


def gateway_pid(appliance: EmbeddedAppliance) -> int:
    return children(appliance)["tr-kafka-0"]


def test_every_version_of_every_listed_api_has_a_definition(gateway: str) -> None:
    with RawKafka(gateway) as client:
        for version in range(5):
            listed = client.ask(API_VERSIONS, version, {})
            assert listed["error_code"] == 0
            assert {key["api_key"] for key in listed["api_keys"]} == set(APIS)
    for api, row in APIS.items():
        found = definition(api)
        assert found is not None
        assert found["low"] <= row.low <= row.high <= found["high"]


def test_an_unknown_version_of_api_versions_is_answered_with_those_that_are_known(
    gateway: str,
) -> None:
    with RawKafka(gateway) as client:
        client.send_bytes(struct.pack(">ihhih", 10, API_VERSIONS, 99, 7, -1))
        data = client.receive_bytes()
        assert data is not None
        found = decode(response_reader(API_VERSIONS, 0), Reader(data, 4))
        assert found["error_code"] == KafkaError.UNSUPPORTED_VERSION
        assert found["api_keys"]
        assert client.ask(METADATA, 1, ALL)["brokers"]  # the connection goes on


def test_older_clients_are_not_told_of_features_that_may_be_at_level_0(gateway: str) -> None:
    """Clients of Java, such as 3.4, could not connect (KAFKA-17492)."""
    with RawKafka(gateway) as client:
        for version, supported in ((3, set()), (4, set(FEATURES))):
            found = client.ask(API_VERSIONS, version, {})
            assert {each["name"] for each in found["supported_features"]} == supported
            assert {each["name"] for each in found["finalized_features"]} == set(FEATURES)


def test_a_name_that_no_topic_can_have_is_told_from_one_that_is_missing(gateway: str) -> None:
    """A client waits for a topic that is unknown, and gives up one that cannot be."""
    with RawKafka(gateway) as client:
        for name in ("missing", "missing" * 35 + "miss"):
            asked = {"topics": [{"name": name}], "allow_auto_topic_creation": False}
            (topic,) = client.ask(METADATA, 9, asked)["topics"]
            assert topic["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        for name in ("two words", "", ".", "..", "x" * 250, "missing\n"):
            for creates in (True, False):
                asked = {"topics": [{"name": name}], "allow_auto_topic_creation": creates}
                (topic,) = client.ask(METADATA, 9, asked)["topics"]
                assert topic["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION
            pages = {"topics": [{"name": name}], "response_partition_limit": 9, "cursor": None}
            (topic,) = client.ask(PARTITIONS, 0, pages)["topics"]
            assert topic["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION


def test_topics_are_listed_by_name_by_id_and_all(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        admin.create_topics([NewTopic("listed", partitions=3)])
        topic_id = bytes.fromhex(str(admin.describe_topics("listed")["listed"]["topic_id"]))
        for version in range(14):
            (topic,) = client.ask(METADATA, version, {"topics": [{"name": "listed"}]})["topics"]
            assert (topic["error_code"], topic["name"]) == (0, "listed")
            assert [p["partition_index"] for p in topic["partitions"]] == [0, 1, 2]
            assert {p["leader_id"] for p in topic["partitions"]} == {NODE_ID}
        by_id = {"topics": [{"name": None, "topic_id": topic_id}]}
        assert client.ask(METADATA, 12, by_id)["topics"][0]["name"] == "listed"
        nobody = {"topics": [{"name": None, "topic_id": bytes(15) + b"\1"}]}
        (missing,) = client.ask(METADATA, 12, nobody)["topics"]
        assert missing["error_code"] == KafkaError.UNKNOWN_TOPIC_ID
        assert "listed" in {t["name"] for t in client.ask(METADATA, 1, ALL)["topics"]}


def test_a_missing_topic_is_created_only_if_the_client_allows_it(gateway: str) -> None:
    with RawKafka(gateway) as client:
        asked = {"topics": [{"name": "made-by-use"}], "allow_auto_topic_creation": False}
        (topic,) = client.ask(METADATA, 9, asked)["topics"]
        assert topic["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        asked["allow_auto_topic_creation"] = True
        (topic,) = client.ask(METADATA, 9, asked)["topics"]
        assert (topic["error_code"], len(topic["partitions"])) == (0, 4)
        asked = {"topics": [{"name": "no/name"}]}
        (topic,) = client.ask(METADATA, 9, asked)["topics"]
        assert topic["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION


def test_topic_partitions_come_in_pages(appliance: EmbeddedAppliance, gateway: str) -> None:
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        admin.create_topics([NewTopic("paged-a", partitions=3), NewTopic("paged-b", partitions=2)])
        asked = {"topics": [{"name": "paged-a"}, {"name": "paged-b"}], "cursor": None,
                 "response_partition_limit": 2}  # fmt: skip
        seen = []
        while True:
            page = client.ask(75, 0, asked)
            seen += [
                (t["name"], p["partition_index"]) for t in page["topics"] for p in t["partitions"]
            ]
            if page["next_cursor"] is None:
                break
            asked["cursor"] = page["next_cursor"]
        assert seen == [("paged-a", n) for n in range(3)] + [("paged-b", n) for n in range(2)]


def test_a_topic_that_another_front_has_made_is_known_to_the_next_request(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """The request is in the gateway's socket when it wakes up, and the topic in its lane."""
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        client.ask(METADATA, 9, ALL)
        pid = gateway_pid(appliance)
        with stopped(pid):
            admin.create_topics([NewTopic("made-elsewhere", partitions=3)])
            asked = {"topics": [{"name": "made-elsewhere"}], "allow_auto_topic_creation": False}
            client.send(METADATA, 9, asked)
        (topic,) = client.receive(METADATA, 9)[1]["topics"]
        assert topic["error_code"] == 0
        assert [p["error_code"] for p in topic["partitions"]] == [0, 0, 0]


def test_pipelined_requests_are_answered_in_order(gateway: str) -> None:
    with RawKafka(gateway) as client:
        sent = [client.send(METADATA, 9, {"topics": [{"name": f"pipe-{n}"}]}) for n in range(60)]
        answered = [client.receive(METADATA, 9) for _ in sent]
        assert [number for number, _ in answered] == sent
        assert [m["topics"][0]["name"] for _, m in answered] == [f"pipe-{n}" for n in range(60)]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: kafka\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        struct.pack(">ihhih", 10, 999, 0, 1, -1),
        struct.pack(">ihhih", 10, METADATA, 77, 1, -1),
        struct.pack(">ihhih", 14, METADATA, 1, 1, -1) + b"\x7f\xff\xff\xff",
        struct.pack(">ihhih", 10, METADATA, 9, 1, 30_000),
        struct.pack(">i", -5),
        struct.pack(">ihhih", 100 << 20, PRODUCE, 9, 1, -1),
        struct.pack(">ihhih", 10 << 20, JOIN_GROUP, 9, 1, -1),
    ],
    ids=["http", "tls", "unknown-api", "unknown-version", "count", "client-id", "negative",
         "produce-of-100-megabytes", "join-of-10-megabytes"],
)  # fmt: skip
def test_bytes_that_are_no_request_end_their_connection_alone(
    appliance: EmbeddedAppliance, gateway: str, data: bytes
) -> None:
    pid = gateway_pid(appliance)
    with RawKafka(gateway) as other, RawKafka(gateway) as client:
        client.send_bytes(data)
        assert client.receive_bytes() is None
        assert other.ask(METADATA, 1, ALL)["brokers"]
    assert gateway_pid(appliance) == pid


def test_without_its_setting_there_is_no_gateway_and_nothing_of_it_is_loaded() -> None:
    with embedded() as running:
        assert not [name for name in children(running) if name.startswith("tr-kafka")]
        assert running.kafka_addresses == []
    parts = ["appliance.supervise.supervisor", "appliance.supervise.processes.zygote"]
    parts += MODULES.values()
    said = subprocess.run(
        [sys.executable, "-P", "-c", LOADED, *parts],
        capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S,
    ).stdout  # fmt: skip
    assert said == "[]\n"


def test_clients_are_told_the_advertised_address() -> None:
    settings = {"kafka.listen": "127.0.0.1:0", "kafka.advertised": "kafka.example.com:19092"}
    with (
        embedded(settings=settings) as running,
        RawKafka(running.kafka_addresses[0]) as client,
    ):
        (broker,) = client.ask(METADATA, 9, ALL)["brokers"]
        assert (broker["host"], broker["port"]) == ("kafka.example.com", 19092)
        asked = {"key_type": 0, "coordinator_keys": ["g"]}
        (coordinator,) = client.ask(FIND_COORDINATOR, 4, asked)["coordinators"]
        assert (coordinator["host"], coordinator["port"]) == ("kafka.example.com", 19092)


def test_a_killed_gateway_comes_back_at_its_port(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    others = {name: pid for name, pid in children(appliance).items() if name != "tr-kafka-0"}
    kill_gateway(appliance)
    with RawKafka(gateway) as client:
        assert client.ask(METADATA, 1, ALL)["brokers"]
    assert others.items() <= children(appliance).items()


def test_librdkafka_lists_the_cluster(appliance: EmbeddedAppliance, gateway: str) -> None:
    admin = pytest.importorskip("confluent_kafka.admin").AdminClient({"bootstrap.servers": gateway})
    with Admin(appliance.address) as ours:
        ours.create_topics([NewTopic("seen", partitions=2)])
    found = admin.list_topics(timeout=HANG_LIMIT_S)
    assert len(found.topics["seen"].partitions) == 2
    assert [f"{b.host}:{b.port}" for b in found.brokers.values()] == [gateway]


def test_kafka_python_lists_the_cluster(gateway: str) -> None:
    kafka_python = pytest.importorskip("kafka")
    admin = kafka_python.KafkaAdminClient(bootstrap_servers=gateway)
    assert admin.describe_cluster()["brokers"][0]["broker_id"] == NODE_ID
    admin.close()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_lists_the_cluster(gateway: str) -> None:
    found = subprocess.run(
        ["kcat", "-L", "-b", gateway], capture_output=True, text=True, check=True,
        timeout=HANG_LIMIT_S,
    ).stdout  # fmt: skip
    assert f"broker {NODE_ID} at {gateway} (controller)" in found


@pytest.mark.long
@pytest.mark.slow_because("it opens ten thousand connections")
def test_ten_thousand_connections_are_served_and_take_little_memory(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = 10_000
    if hard < wished + 1_000:
        pytest.skip(f"this process may open {hard} files: 11,000 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    process = psutil.Process(gateway_pid(appliance))
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawKafka(gateway)) for _ in range(wished)]
        for client in clients:
            assert client.ask(API_VERSIONS, 0, {})["error_code"] == 0
        grown = process.memory_info().rss - before
        assert grown < wished * 20_000
        assert clients[0].ask(METADATA, 1, ALL)["brokers"]
        assert gateway_pid(appliance) == process.pid
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with RawKafka(gateway) as client:
        assert client.ask(METADATA, 1, ALL)["brokers"]
