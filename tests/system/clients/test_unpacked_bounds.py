"""Batches that are small as bytes and large unpacked, and those that say what only the appliance
may say: refused where they would be stored.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import RecordTooLargeError, UnsafeBatchError, UnsupportedBatchError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_SPARSE,
    ATTRIBUTE_TRANSACTIONAL,
    header_position,
    read_header,
)
from tailrace.kernel.reference_arrow import default_rows, null_headers
from tailrace.protocol import produce_messages
from tests.kit.batches import make_batch, reseal
from tests.kit.peers.produce_call import produce


@pytest.fixture
def delayed(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [NewTopic(topic, configs={"delay.enabled": "true", "compression.type": "zstd"})]
        )
    return topic


def info_of(appliance: EmbeddedAppliance, name: str) -> TopicInfo:
    with Admin(appliance.address) as admin:
        return admin.topic_info([name])[name]


def produce_raw(
    appliance: EmbeddedAppliance, info: TopicInfo, batch: bytes | bytearray
) -> produce_messages.ProducedEntry:
    connection = Connection(appliance.address, "raw")
    try:
        return produce(connection, info.topic_id, batch)
    finally:
        connection.close()


def restarts(appliance: EmbeddedAppliance) -> list[int]:
    with Admin(appliance.address) as admin:
        return [process["restarts"] for process in admin.describe_cluster()["processes"]]


def test_a_few_kilobytes_that_unpack_to_many_messages_or_millions_of_rows_are_refused(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    info = info_of(appliance, delayed)
    millions = pa.nulls(2_000_000, pa.binary())
    for rows in (
        default_rows([0], [None], [bytes(20 << 20)], None),
        pa.RecordBatch.from_arrays([pa.array([0] * len(millions), pa.timestamp("us", "UTC")),
        millions, millions, null_headers(len(millions))],
                                   names=["timestamp", "key", "value", "headers"]),
    ):  # fmt: skip
        bomb = arrow_batch.encode(
            rows,
            schema_id=info.schema_id,
            seed=info.seeds[0],
            compression="zstd",
            first_timestamp_us=0,
            max_timestamp_us=0,
        )
        assert len(bomb) < 200_000
        with pytest.raises(RecordTooLargeError, match="decompression"):
            produce_raw(appliance, info, bomb)
    assert not any(restarts(appliance))


def test_a_delayed_record_that_could_not_be_delivered_uncompressed_is_refused_and_what_can_be_split_is_sent(  # noqa: E501
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    one = pa.table({"value": [b"x" * 5_000_000]})
    uneven = pa.table({"value": [b"x" * 3000] * 2000 + [b"y"] * 18_000})
    with Producer(appliance.address, compression_type="zstd") as producer:
        with pytest.raises(RecordTooLargeError):
            producer.send_arrow(delayed, one, deliver_after=timedelta(hours=1)).result(60)
        producer.send_arrow(delayed, uneven, deliver_after=timedelta(milliseconds=1)).result(60)
        producer.send_arrow(delayed, one).result(60)
    count = 0
    with Consumer(delayed, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while count < uneven.num_rows + 1:
            polled = sum(batch.batch.num_rows for batch in consumer.poll_arrow(60_000))
            assert polled, f"{count} came"
            count += polled
    assert not any(restarts(appliance))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attributes": ATTRIBUTE_TRANSACTIONAL}, UnsafeBatchError),
        ({"attributes": ATTRIBUTE_SPARSE}, UnsupportedBatchError),
        ({"attributes": 1 << 20}, UnsupportedBatchError),
        ({"due_us": 1 << 32}, UnsafeBatchError),
    ],
)
def test_what_is_the_appliances_or_not_there_yet_is_refused(
    appliance: EmbeddedAppliance, delayed: str, change: dict[str, int], error: type[Exception]
) -> None:
    topic = info_of(appliance, delayed)
    assert topic.delay_log is not None
    for info in (topic, topic.delay_log):
        batch = make_batch(3, seed=info.seeds[0], schema_id=info.schema_id)
        position = header_position(batch)
        batch[position : position + 136] = replace(read_header(batch), **change).to_bytes()
        with pytest.raises(error):
            produce_raw(appliance, info, reseal(batch, info.seeds[0]))
    assert not any(restarts(appliance))
