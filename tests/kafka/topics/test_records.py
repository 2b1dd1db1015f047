"""Records of Kafka clients are records of the log: both sides read what the other wrote."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import subprocess
import threading
from typing import Any

import psutil
import pyarrow as pa
import pytest

import tailrace
from netfront.kafka.apis.records.fetch import OUT_MAX_BYTES
from netfront.kafka.records.batch_layout import read_kafka_header
from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES
from tests.kit.appliances.topics import read_all
from tests.kit.peers.kafka_batches import kafka_batch as batch
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, children

PRODUCE, FETCH, LIST_OFFSETS, INIT_PRODUCER_ID, EPOCHS = 0, 1, 2, 22, 23
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def make(appliance: EmbeddedAppliance, topic: str, partitions: int = 1, **configs: Any) -> bytes:
    with Admin(appliance.address) as admin:
        settings = {name.replace("_", "."): value for name, value in configs.items()}
        admin.create_topics([NewTopic(topic, partitions, settings)])
        return bytes.fromhex(str(admin.describe_topics(topic)[topic]["topic_id"]))


def produce(
    client: RawKafka, topic: str, records: bytes | None, acks: int = -1, version: int = 9
) -> dict[str, Any]:
    """Returns the partition's entry."""
    data = [{"index": 0, "records": records}]
    asked = {"transactional_id": None, "acks": acks, "timeout_ms": 30_000,
             "topic_data": [{"name": topic, "partition_data": data}]}  # fmt: skip
    response = client.ask(PRODUCE, version, asked)
    found: dict[str, Any] = response["responses"][0]["partition_responses"][0]
    return found


def fetch_request(topic: dict[str, Any], offset: int, **fields: Any) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20,
                 "current_leader_epoch": fields.pop("epoch", -1)}  # fmt: skip
    return {"max_wait_ms": 0, "min_bytes": 1, "isolation_level": 0, "session_id": 0,
            "topics": [{**topic, "partitions": [partition]}], **fields}  # fmt: skip


def fetch(
    client: RawKafka, topic: str, offset: int, version: int = 12, **fields: Any
) -> dict[str, Any]:
    response = client.ask(FETCH, version, fetch_request({"topic": topic}, offset, **fields))
    found: dict[str, Any] = response["responses"][0]["partitions"][0]
    return found


# ---- Produce -------------------------------------------------------------------------------------


def test_a_large_record_in_a_small_batch_is_appended(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """Kafka counts what the producer has packed: `max.message.bytes` refused the record."""
    make(appliance, "packed-small", max_message_bytes=65_536)
    value = b"1234567890" * 50_000
    with RawKafka(gateway) as client:
        entry = produce(client, "packed-small", batch(value, codec=CODECS.index("gzip")))
        assert (entry["error_code"], entry["base_offset"]) == (0, 0), entry["error_message"]
        found = fetch(client, "packed-small", 0)
        assert read_kafka_header(found["records"]).record_count == 1
        entry = produce(client, "packed-small", batch(value))
        assert entry["error_code"] == KafkaError.MESSAGE_TOO_LARGE
    assert [one.value for one in read_all(appliance, "packed-small", 1)] == [value]


def test_a_request_that_unpacks_to_many_times_its_size_takes_bounded_memory(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """All of it was converted before any of it was passed on."""
    make(appliance, "bombs", retention_bytes=1)
    records = batch(*[bytes(900_000)] * 13, codec=CODECS.index("zstd"))
    data = [{"index": 0, "records": records}] * 30
    asked = {"transactional_id": None, "acks": 1, "timeout_ms": 30_000,
             "topic_data": [{"name": "bombs", "partition_data": data}]}  # fmt: skip
    process = psutil.Process(children(appliance)["tr-kafka-0"])
    before = process.memory_info().rss
    with RawKafka(gateway) as client:
        client.set_timeout(HANG_LIMIT_S)
        (topic,) = client.ask(PRODUCE, 9, asked)["responses"]
    assert [one["error_code"] for one in topic["partition_responses"]] == [0] * len(data)
    assert highest_memory(process.pid) < before + (200 << 20)


def highest_memory(pid: int) -> int:
    """The most memory that a process has had, bytes."""
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("version", range(3, 13))
def test_every_version_of_produce_appends(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"version-{version}"
    make(appliance, topic)
    with RawKafka(gateway) as client:
        for number in range(2):
            entry = produce(client, topic, batch(b"a", b"b"), version=version)
            assert (entry["error_code"], entry["base_offset"]) == (0, 2 * number)
    records = read_all(appliance, topic, 4)
    assert [(r.value, r.key, r.headers) for r in records[:2]] == [
        (b"a", b"k", [("h", b"1")]), (b"b", b"k", [("h", b"1")])
    ]  # fmt: skip
    assert records[1].timestamp == 1_700_000_000_001


@pytest.mark.parametrize("version", [3, 6, 7])
def test_zstd_of_a_version_that_does_not_know_it_is_refused(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic, zstd = f"zstd-of-{version}", CODECS.index("zstd")
    make(appliance, topic)
    packed = batch(b"a" * 1000, codec=zstd)
    refused = KafkaError.UNSUPPORTED_COMPRESSION_TYPE if version < 7 else KafkaError.NONE
    with RawKafka(gateway) as client:
        for records in (packed, batch(b"a") + packed):
            assert produce(client, topic, records, version=version)["error_code"] == refused
        assert produce(client, topic, batch(b"c", codec=3), version=version)["error_code"] == 0


def test_version_13_names_topics_by_id(appliance: EmbeddedAppliance, gateway: str) -> None:
    topic_id = make(appliance, "by-id")
    with RawKafka(gateway) as client:
        for asked_id, error in ((topic_id, 0), (bytes(15) + b"\7", KafkaError.UNKNOWN_TOPIC_ID)):
            data = [{"index": 0, "records": batch(b"x")}]
            asked = {"acks": 1, "timeout_ms": 9_000,
                     "topic_data": [{"topic_id": asked_id, "partition_data": data}]}  # fmt: skip
            response = client.ask(PRODUCE, 13, asked)
            assert response["responses"][0]["partition_responses"][0]["error_code"] == error


def test_a_repeated_batch_is_appended_once_and_a_missing_one_is_noticed(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "idempotent")
    with RawKafka(gateway) as client:
        found = client.ask(
            INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout_ms": 1}
        )
        identity = found["producer_id"], found["producer_epoch"]
        first = batch(b"a", b"b", producer=(*identity, 0))
        assert produce(client, "idempotent", first)["base_offset"] == 0
        second = batch(b"c", producer=(*identity, 2))
        assert produce(client, "idempotent", second)["base_offset"] == 2
        assert produce(client, "idempotent", first)["base_offset"] == 0
        gap = produce(client, "idempotent", batch(b"e", producer=(*identity, 4)))
        assert gap["error_code"] == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
        asked = {"transactional_id": None, "transaction_timeout_ms": 1, "producer_id": identity[0],
                 "producer_epoch": identity[1]}  # fmt: skip
        following = client.ask(INIT_PRODUCER_ID, 4, asked)
        assert (following["error_code"], following["producer_epoch"]) == (0, identity[1] + 1)
    assert [r.value for r in read_all(appliance, "idempotent", 3)] == [b"a", b"b", b"c"]


def test_a_batch_of_an_unknown_producer_is_refused_with_the_log_start_offset(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "forgotten")
    with RawKafka(gateway) as client:
        found = client.ask(
            INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout_ms": 1}
        )
        identity = found["producer_id"], found["producer_epoch"]
        refused = produce(client, "forgotten", batch(b"a", producer=(*identity, 7)))
    assert refused["error_code"] == KafkaError.UNKNOWN_PRODUCER_ID
    assert refused["log_start_offset"] == 0, "-1: Java's producer repeats it in vain"


def test_a_repeated_batch_behind_those_remembered_is_acknowledged_and_appended_once(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "behind")
    with RawKafka(gateway) as client:
        found = client.ask(
            INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout_ms": 1}
        )
        identity = found["producer_id"], found["producer_epoch"]
        batches = [batch(b"%d" % n, producer=(*identity, n)) for n in range(REMEMBERED_BATCHES + 2)]
        for data in batches:
            assert produce(client, "behind", data)["error_code"] == KafkaError.NONE
        again = produce(client, "behind", batches[0])
        assert again["error_code"] == KafkaError.DUPLICATE_SEQUENCE_NUMBER
        assert again["base_offset"] == -1
        assert produce(client, "behind", batches[2])["base_offset"] == 2
    found_values = [r.value for r in read_all(appliance, "behind", len(batches))]
    assert found_values == [b"%d" % n for n in range(len(batches))]


def bent(at: int, value: int) -> bytes:
    data = bytearray(batch(b"x"))
    data[at] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("records", "error"),
    [
        (bent(17, 0xAA), KafkaError.CORRUPT_MESSAGE),
        (bent(16, 1), KafkaError.INVALID_RECORD),
        (bent(8, 0x7F), KafkaError.CORRUPT_MESSAGE),
        (batch(b"x")[:30], KafkaError.CORRUPT_MESSAGE),
        (b"", KafkaError.INVALID_RECORD),
        (None, KafkaError.INVALID_RECORD),
        (batch(bytes(2 << 20)), KafkaError.MESSAGE_TOO_LARGE),
    ],
    ids=["crc", "magic-1", "length", "cut-off", "empty", "null", "too-large"],
)
def test_records_that_are_none_are_refused_and_the_connection_goes_on(
    appliance: EmbeddedAppliance, gateway: str, records: bytes | None, error: int
) -> None:
    with Admin(appliance.address) as admin:
        if "refusing" not in admin.list_topics():
            admin.create_topics([NewTopic("refusing")])
    with RawKafka(gateway) as client:
        assert produce(client, "refusing", records)["error_code"] == error
        assert produce(client, "refusing", batch(b"x"))["error_code"] == 0


def test_unknown_topics_and_acks_are_refused(appliance: EmbeddedAppliance, gateway: str) -> None:
    make(appliance, "acks")
    with RawKafka(gateway) as client:
        entry = produce(client, "missing", batch(b"x"))
        assert entry["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        entry = produce(client, "acks", batch(b"x"), acks=2)
        assert entry["error_code"] == KafkaError.INVALID_REQUIRED_ACKS
        data = [{"index": 0, "records": batch(b"unanswered")}]
        topics = [{"name": "acks", "partition_data": data}]
        client.send(PRODUCE, 9, {"acks": 0, "timeout_ms": 1, "topic_data": topics})
        assert produce(client, "acks", batch(b"answered"), acks=1)["base_offset"] == 1


@pytest.mark.parametrize("refused", ["missing topic", "no batch", "no producer"])
def test_a_producer_without_acknowledgements_learns_of_a_refusal_by_the_end_of_its_connection(
    appliance: EmbeddedAppliance, gateway: str, refused: str
) -> None:
    """It went on sending to what is not there; of an unknown producer it got a response that it
    did not wait for. What it has sent to other partitions is appended.
    """
    topic = f"unanswered-{refused.replace(' ', '-')}"
    make(appliance, topic, 2)
    good = {"index": 0, "records": batch(b"stored")}
    topics: list[dict[str, Any]] = [{"name": topic, "partition_data": [good]}]
    asked: dict[str, Any] = {"transactional_id": None, "acks": 0, "timeout_ms": 1}
    if refused == "missing topic":
        topics.append({"name": "not-there", "partition_data": [good]})
    elif refused == "no batch":
        topics[0]["partition_data"] = [good, {"index": 1, "records": b"x" * 70}]
    else:
        asked["transactional_id"] = "nobody's"
    with RawKafka(gateway) as client:
        client.send(PRODUCE, 9, {**asked, "topic_data": topics})
        assert client.receive_bytes() is None
    if refused != "no producer":
        assert [one.value for one in read_all(appliance, topic, 1)] == [b"stored"]


def test_a_client_that_sends_and_leaves_has_its_records_appended(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "leaving")
    with RawKafka(gateway) as client:
        for number in range(40):
            data = [{"index": 0, "records": batch(b"%d" % number)}]
            topics = [{"name": "leaving", "partition_data": data}]
            asked = {"transactional_id": None, "acks": 0, "timeout_ms": 1, "topic_data": topics}
            client.send(PRODUCE, 9, asked)
    values = [record.value for record in read_all(appliance, "leaving", 40)]
    assert values == [b"%d" % number for number in range(40)]


# ---- Fetch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(4, 19))
def test_every_version_of_fetch_reads(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"fetch-{version}"
    topic_id = make(appliance, topic)
    with RawKafka(gateway) as client:
        produce(client, topic, batch(b"a", b"b"))
        name = {"topic_id": topic_id} if version >= 13 else {"topic": topic}
        response = client.ask(FETCH, version, fetch_request(name, 1))
        (entry,) = response["responses"][0]["partitions"]
        assert (entry["error_code"], entry["high_watermark"]) == (0, 2)
        assert b"a" in bytes(entry["records"])


def test_a_fetch_that_names_all_its_partitions_is_of_no_session(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """With the epochs -1 and 0 a client ends its session, which may be another broker's."""
    make(appliance, "sessions")
    with RawKafka(gateway) as client:
        produce(client, "sessions", batch(b"a"))
        for epoch in (-1, 0):
            found = fetch(client, "sessions", 0, session_id=7, session_epoch=epoch)
            assert (found["error_code"], b"a" in bytes(found["records"])) == (0, True)
        asked = fetch_request({"topic": "sessions"}, 0, session_id=7, session_epoch=3)
        response = client.ask(FETCH, 12, asked)
        assert response["error_code"] == KafkaError.FETCH_SESSION_ID_NOT_FOUND


def test_a_fetch_waits_for_records_and_no_longer_than_asked(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "waiting")
    with RawKafka(gateway) as reader, RawKafka(gateway) as writer:
        assert not fetch(reader, "waiting", 0, max_wait_ms=50)["records"]
        found: list[dict[str, Any]] = []
        asked = threading.Thread(
            target=lambda: found.append(fetch(reader, "waiting", 0, max_wait_ms=50_000))
        )
        asked.start()
        produce(writer, "waiting", batch(b"woken"))
        asked.join(HANG_LIMIT_S)
        assert b"woken" in bytes(found[0]["records"])


def test_a_fetch_unpacks_no_more_than_a_response_may_have(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "packed", compression_type="producer")
    value = bytes(900_000)
    with Producer(appliance.address, compression_type="zstd", batch_size=1 << 20) as producer:
        for _ in range(25):
            producer.send("packed", value).result(HANG_LIMIT_S)
    with RawKafka(gateway) as client:
        entry = fetch(client, "packed", 0, max_bytes=1 << 30)
        assert OUT_MAX_BYTES <= len(entry["records"]) < OUT_MAX_BYTES + (2 << 20)


def test_a_client_that_reads_nothing_takes_one_response_of_memory(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "unread", compression_type="producer")
    with Producer(appliance.address, compression_type="zstd", batch_size=1 << 20) as producer:
        for _ in range(18):
            producer.send("unread", bytes(900_000)).result(HANG_LIMIT_S)
    process = psutil.Process(children(appliance)["tr-kafka-0"])
    with RawKafka(gateway) as other, RawKafka(gateway) as client:
        fetch(other, "unread", 0, max_bytes=1 << 30)
        before = process.memory_info().rss
        asked = fetch_request({"topic": "unread"}, 0, max_bytes=1 << 30)
        sent = [client.send(FETCH, 12, asked) for _ in range(24)]
        fetch(other, "unread", 0, max_bytes=1 << 30)  # those before it are served, or wait
        assert process.memory_info().rss < before + 5 * OUT_MAX_BYTES
        assert [client.receive(FETCH, 12)[0] for _ in sent] == sent


def test_fetches_that_cannot_be_served_have_their_error(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "errors")
    with RawKafka(gateway) as client:
        produce(client, "errors", batch(b"x"))
        for offset in (-1, 99):
            assert fetch(client, "errors", offset)["error_code"] == KafkaError.OFFSET_OUT_OF_RANGE
        unknown = fetch(client, "absent", 0)
        assert unknown["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        assert fetch(client, "errors", 0, epoch=5)["error_code"] == KafkaError.UNKNOWN_LEADER_EPOCH
        lost = {"topic_id": bytes(15) + b"\1"}
        response = client.ask(FETCH, 13, fetch_request(lost, 0))
        (entry,) = response["responses"][0]["partitions"]
        assert entry["error_code"] == KafkaError.UNKNOWN_TOPIC_ID
        asked = fetch_request({"topic": "errors"}, 0, session_id=7, session_epoch=1)
        response = client.ask(FETCH, 12, asked)
        assert response["error_code"] == KafkaError.FETCH_SESSION_ID_NOT_FOUND


def test_committed_reads_leave_out_what_was_aborted(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    make(appliance, "outcomes")
    with Producer(appliance.address, transactional_id="ours") as producer:
        producer.init_transactions()
        for number, outcome in enumerate("cacaa"):
            producer.begin_transaction()
            producer.send("outcomes", f"{outcome}{number}".encode())
            if outcome == "c":
                producer.commit_transaction()
            else:
                producer.flush()
                producer.abort_transaction()

    def read(isolation: str) -> list[bytes]:
        consumer = confluent.Consumer(
            {"bootstrap.servers": gateway, "group.id": "none", "isolation.level": isolation,
             "enable.partition.eof": True, "enable.auto.commit": False}
        )  # fmt: skip
        consumer.assign([confluent.TopicPartition("outcomes", 0, 0)])
        found: list[bytes] = []
        while True:
            message = consumer.poll(HANG_LIMIT_S)
            assert message is not None, found
            if message.error() is not None:
                assert message.error().code() == confluent.KafkaError._PARTITION_EOF
                break
            found.append(message.value())
        consumer.close()
        return found

    assert read("read_committed") == [b"c0", b"c2"]
    assert read("read_uncommitted") == [b"c0", b"a1", b"c2", b"a3", b"a4"]


# ---- offsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, 12))
def test_offsets_are_found_by_place_and_time(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"offsets-{version}"
    make(appliance, topic)
    base = 1_700_000_000_000
    wished = {-1: 3, -2: 0, -3: 2, -4: 0, -5: -1, base + 1: 1, base - 5: 0, base + 9: -1}
    with RawKafka(gateway) as client:
        produce(client, topic, batch(b"a", b"b", b"c"))
        for timestamp, offset in wished.items():
            partition = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
            asked = {"replica_id": -1, "isolation_level": 0, "timeout_ms": 1,
                     "topics": [{"name": topic, "partitions": [partition]}]}  # fmt: skip
            response = client.ask(LIST_OFFSETS, version, asked)
            (entry,) = response["topics"][0]["partitions"]
            assert (timestamp, entry["error_code"], entry["offset"]) == (timestamp, 0, offset)


def test_offsets_are_not_told_to_a_client_that_knows_another_leader_epoch(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "fenced")
    with RawKafka(gateway) as client:
        for epoch, error in ((-1, 0), (0, 0), (7, KafkaError.UNKNOWN_LEADER_EPOCH)):
            partition = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": epoch}
            asked = {"replica_id": -1, "isolation_level": 0,
                     "topics": [{"name": "fenced", "partitions": [partition]}]}  # fmt: skip
            (entry,) = client.ask(LIST_OFFSETS, 7, asked)["topics"][0]["partitions"]
            assert (epoch, entry["error_code"]) == (epoch, error)


def test_an_epoch_ends_at_the_end_of_the_log(appliance: EmbeddedAppliance, gateway: str) -> None:
    make(appliance, "epochs")
    with RawKafka(gateway) as client:
        produce(client, "epochs", batch(b"a"))
        for epoch, ends in ((0, (0, 1)), (7, (-1, -1))):
            partition = {"partition": 0, "current_leader_epoch": 0, "leader_epoch": epoch}
            asked = {"replica_id": -1, "topics": [{"topic": "epochs", "partitions": [partition]}]}
            (entry,) = client.ask(EPOCHS, 4, asked)["topics"][0]["partitions"]
            assert (entry["leader_epoch"], entry["end_offset"]) == ends


# ---- clients -------------------------------------------------------------------------------------


def test_batches_leave_as_their_producer_has_packed_them(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "as-packed", compression_type="producer")
    with RawKafka(gateway) as client:
        for codec in (0, 1, 2, 3, 4, 0):
            packed = batch(*(b"v%d" % number for number in range(50)), codec=codec)
            offset = produce(client, "as-packed", packed)["base_offset"]
            records = fetch(client, "as-packed", offset)["records"]
            assert read_kafka_header(records).attributes == codec
    kill_gateway(appliance)
    with RawKafka(gateway) as client:
        assert read_kafka_header(fetch(client, "as-packed", 0)["records"]).attributes == 0


@pytest.mark.parametrize("version", [4, 9, 10, 12])
def test_a_client_that_is_older_than_zstd_gets_none_of_it(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    zstd, is_older = CODECS.index("zstd"), version < 10
    for setting, error, codec in (
        ("zstd", KafkaError.UNSUPPORTED_COMPRESSION_TYPE, None),
        ("producer", KafkaError.NONE, 0),
    ):
        topic = f"{setting}-for-{version}"
        make(appliance, topic, compression_type=setting)
        with RawKafka(gateway) as client:
            produce(client, topic, batch(b"a" * 1000, codec=zstd))
            entry = fetch(client, topic, 0, version)
            assert entry["error_code"] == (error if is_older else 0)
            records, wished = entry["records"], codec if is_older else zstd
            assert (read_kafka_header(records).attributes if records else None) == wished


@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_writes_and_reads(
    appliance: EmbeddedAppliance, gateway: str, codec: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    topic = f"librdkafka-{codec}"
    make(appliance, topic, compression_type="none" if codec in ("gzip", "snappy") else codec)
    producer = confluent.Producer(
        {"bootstrap.servers": gateway, "compression.type": codec, "enable.idempotence": True}
    )
    values = [b"v%d" % n for n in range(500)]
    for value in values:
        producer.produce(topic, value, key=b"k", headers=[("h", b"1")], partition=0)
    assert producer.flush(HANG_LIMIT_S) == 0
    assert [(r.value, r.key) for r in read_all(appliance, topic, 500)] == [
        (v, b"k") for v in values
    ]
    consumer = confluent.Consumer(
        {"bootstrap.servers": gateway, "group.id": "none", "enable.auto.commit": False}
    )
    consumer.assign([confluent.TopicPartition(topic, 0, 0)])
    found: list[Any] = []
    while len(found) < len(values):
        (message,) = consumer.consume(1, HANG_LIMIT_S)
        assert message.error() is None
        found.append(message)
    consumer.close()
    assert [m.value() for m in found] == values
    assert (found[0].headers(), found[0].offset()) == ([("h", b"1")], 0)


def test_kafka_python_reads_what_we_write(appliance: EmbeddedAppliance, gateway: str) -> None:
    kafka_python = pytest.importorskip("kafka")
    make(appliance, "ours")
    with Producer(appliance.address) as producer:
        producer.send("ours", None, key=b"tombstone")
        producer.send("ours", "é".encode(), headers=[("h", b"")], timestamp=1_234_567)
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=gateway, consumer_timeout_ms=9_000)
    partition = kafka_python.TopicPartition("ours", 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    found = [next(consumer) for _ in range(2)]
    consumer.close()
    assert [(r.key, r.value) for r in found] == [(b"tombstone", None), (None, "é".encode())]
    assert (found[1].timestamp, found[1].headers) == (1_234_567, [("h", b"")])


def test_aiokafka_writes_and_reads(appliance: EmbeddedAppliance, gateway: str) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    make(appliance, "aio")

    async def run() -> list[bytes]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=gateway, enable_idempotence=True)
        await producer.start()
        for number in range(20):
            await producer.send_and_wait("aio", b"%d" % number)
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=gateway)
        await consumer.start()
        partition = aiokafka.TopicPartition("aio", 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        found = [(await consumer.getone()).value for _ in range(20)]
        await consumer.stop()
        return found

    expected = [b"%d" % number for number in range(20)]
    assert asyncio.run(run()) == expected
    with Consumer("aio", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        assert next(iter(consumer)).value == b"0"


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_writes_reads_queries_and_joins_groups(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "kcat")

    def kcat(*arguments: str, given: str = "") -> str:
        return subprocess.run(
            ["kcat", "-b", gateway, *arguments], input=given, capture_output=True, text=True,
            check=True, timeout=HANG_LIMIT_S,
        ).stdout  # fmt: skip

    kcat("-P", "-t", "kcat", "-K:", given="a:1\nb:2\n")
    assert kcat("-C", "-t", "kcat", "-e", "-o", "beginning", "-f", "%k=%s\n") == "a=1\nb=2\n"
    assert kcat("-Q", "-t", "kcat:0:-1") == "kcat [0] offset 2\n"
    kcat("-P", "-t", "kcat", "-X", "transactional.id=kcat", given="3\n")
    earliest = ("-q", "-c", "3", "-X", "auto.offset.reset=earliest")
    for protocol in ("range", "cooperative-sticky"):
        chosen = ("-X", f"partition.assignment.strategy={protocol}")
        assert kcat("-G", f"kcat-{protocol}", *earliest, *chosen, "kcat") == "1\n2\n3\n"


def test_a_typed_topic_is_json_to_kafka_clients(appliance: EmbeddedAppliance, gateway: str) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    schema = pa.schema([("city", pa.string()), ("degrees", pa.float64())])
    with Admin(appliance.address) as admin, Producer(appliance.address) as ours:
        admin.create_topics([NewTopic("typed", schema=schema)])
        ours.send_arrow("typed", pa.table({"city": ["Oslo"], "degrees": [3.5]}, schema=schema))
    with RawKafka(gateway) as client:
        entry = produce(client, "typed", batch(b'{"city": "Rome", "degrees": 21}'))
        assert entry["error_code"] == 0
        entry = produce(client, "typed", batch(b'{"city": "Bonn", "degrees": 1}', b'{"city": 7}'))
        assert entry["error_code"] == KafkaError.INVALID_RECORD
    with Consumer("typed", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        rows: list[Any] = []
        while len(rows) < 2:
            for found in consumer.poll_arrow(timeout_ms=60_000):
                rows += found.batch.to_pylist()
    assert rows == [{"city": "Oslo", "degrees": 3.5}, {"city": "Rome", "degrees": 21.0}]
    reader = confluent.Consumer({"bootstrap.servers": gateway, "group.id": "none"})
    reader.assign([confluent.TopicPartition("typed", 0, 0)])
    values = [json.loads(reader.consume(1, HANG_LIMIT_S)[0].value()) for _ in range(2)]
    reader.close()
    assert values == rows


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_a_kafka_producer_goes_on_while_its_topics_schema_changes(
    appliance: EmbeddedAppliance, gateway: str, topic: str, is_idempotent: bool
) -> None:
    """It knows the first version alone. Batches that an alteration overtakes are sent again."""
    confluent = pytest.importorskip("confluent_kafka")
    fields = [pa.field("city", pa.string()), pa.field("number", pa.int64())]
    failed: list[Any] = []
    delivered: list[int] = []

    def note(error: Any, message: Any) -> None:
        if error is None:
            delivered.append(message.offset())
        else:
            failed.append(error)

    producer = confluent.Producer(
        {"bootstrap.servers": gateway, "enable.idempotence": is_idempotent, "linger.ms": 1}
    )
    sent = 0
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, schema=pa.schema(fields))])
        for change in range(8):
            if change == 4:
                fields[0] = pa.field("town", pa.string(), metadata={"tailrace.alias": "city"})
            added = pa.field(f"more{change}", pa.int64(), metadata={"tailrace.default": "7"})
            fields.append(added)
            until = len(delivered) + 200
            altering = threading.Thread(
                target=admin.alter_topics, kwargs={"schema": {topic: pa.schema(fields)}}
            )
            altering.start()
            while (altering.is_alive() or len(delivered) < until) and not failed:
                if sent - len(delivered) < 2_000:
                    row = {"city": "Oslo", "number": sent}
                    producer.produce(topic, json.dumps(row), on_delivery=note)
                    sent += 1
                    producer.poll(0)
                else:
                    producer.poll(0.01)
            altering.join()
    assert producer.flush(HANG_LIMIT_S) == 0
    assert not failed
    rows = tailrace.scan(topic, appliance.address).read_all()
    assert sorted(rows.column("number").to_pylist()) == list(range(sent))
    assert rows.column("town").unique().to_pylist() == ["Oslo"]
    assert rows.column("more0").unique().to_pylist() == [7]


def test_an_idempotent_producer_survives_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    make(appliance, "killed")
    failed: list[Any] = []

    def note(error: Any, _message: Any) -> None:
        if error is not None:
            failed.append(error)

    producer = confluent.Producer({"bootstrap.servers": gateway, "enable.idempotence": True})
    values = [b"%d" % n for n in range(300)]
    for number, value in enumerate(values):
        producer.produce("killed", value, on_delivery=note)
        producer.poll(0.001)
        if number in (100, 200):
            kill_gateway(appliance)
    assert producer.flush(HANG_LIMIT_S) == 0
    assert not failed
    assert [r.value for r in read_all(appliance, "killed", 300)] == values


def test_any_sizes_in_a_produce_request_leave_the_gateway_alive(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "sizes")
    body = batch(b"a", b"b", codec=0)
    for at in range(0, len(body), 3):
        with RawKafka(gateway) as client:
            damaged = bytearray(body)
            damaged[at : at + 4] = struct.pack(">i", 0x7FFFFFFF)
            assert produce(client, "sizes", bytes(damaged))["error_code"] in (0, 2, 10, 87)
