"""PRODUCE requests with batches of many partitions, and those of clients that know one batch a
request, by clients that keep to nothing.
"""

from __future__ import annotations

import os
import pathlib

import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.crc32c import Readable
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import API_VERSIONS, Api
from tests.kit.batches import make_batch
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import children

PARTITIONS = 4


@pytest.fixture
def info(appliance: EmbeddedAppliance, topic: str) -> TopicInfo:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS)])
        return admin.topic_info([topic])[topic]


def batch_for(
    info: TopicInfo, partition: int, count: int = 1, *, producer_id: int = -1, sequence: int = 0
) -> tuple[bytes, int, bytes]:
    """(topic id, partition, a batch for it)."""
    return (
        info.topic_id,
        partition,
        bytes(
            make_batch(
                count,
                seed=info.seeds[partition],
                schema_id=info.schema_id,
                producer_id=producer_id,
                sequence=sequence,
            )
        ),
    )


@pytest.mark.parametrize("acks", [1, produce_messages.ACKS_ALL])
def test_batches_of_many_partitions_are_answered_together_in_the_order_of_the_request(
    appliance: EmbeddedAppliance, info: TopicInfo, acks: int
) -> None:
    with RawClient(appliance.address) as client:
        for cuts in ((), (1,), (1, 2, 3)):
            code, entries = client.produced(
                client.produce(
                    [batch_for(info, p, p + 1) for p in range(PARTITIONS)], acks=acks, cuts=cuts
                )
            )
            assert code is ErrorCode.OK
            assert [entry.error for entry in entries] == [0] * PARTITIONS
        assert [entry.base_offset for entry in entries] == [2 * (p + 1) for p in range(PARTITIONS)]


def test_a_partition_several_times_in_a_request_is_appended_in_its_order_and_a_repetition_is_told(
    appliance: EmbeddedAppliance, info: TopicInfo
) -> None:
    batches = [batch_for(info, 1, 2, producer_id=5, sequence=2 * n) for n in range(3)]
    with RawClient(appliance.address) as client:
        for flags in (0, produce_messages.PRODUCED_DUPLICATE):
            code, entries = client.produced(client.produce([*batches, batch_for(info, 0)]))
            assert code is ErrorCode.OK
            assert [(entry.error, entry.flags, entry.base_offset) for entry in entries[:3]] == [
                (0, flags, 0),
                (0, flags, 2),
                (0, flags, 4),
            ]
            assert entries[3].flags == 0


def test_what_is_wrong_with_one_batch_costs_the_others_nothing(
    appliance: EmbeddedAppliance, info: TopicInfo
) -> None:
    good = batch_for(info, 0)
    flipped = bytearray(good[2])
    flipped[-3] ^= 1
    with RawClient(appliance.address) as client:
        asked: list[tuple[bytes, int, Readable]] = [
            good, (bytes(16), 0, good[2]), (info.topic_id, PARTITIONS, good[2]),
            (info.topic_id, 1, b""), (info.topic_id, 1, bytes(50)),
            (info.topic_id, 0, flipped), (info.topic_id, 0, bytes(2 << 20)),
            (info.topic_id, 0, bytes(200)), good,
        ]  # fmt: skip
        code, entries = client.produced(client.produce(asked))
    assert code is ErrorCode.OK
    assert [ErrorCode(entry.error) for entry in entries] == [
        ErrorCode.OK, ErrorCode.UNKNOWN_TOPIC, ErrorCode.PARTITION_OUT_OF_RANGE,
        ErrorCode.UNSUPPORTED_BATCH, ErrorCode.UNSUPPORTED_BATCH,
        ErrorCode.CORRUPT_BATCH, ErrorCode.RECORD_TOO_LARGE, ErrorCode.UNSUPPORTED_BATCH,
        ErrorCode.OK,
    ]  # fmt: skip
    assert (entries[0].base_offset, entries[-1].base_offset) == (0, 1)


def test_a_client_that_knows_version_1_only_is_served_and_told_so(
    appliance: EmbeddedAppliance, info: TopicInfo
) -> None:
    with RawClient(appliance.address, versions={**API_VERSIONS, Api.PRODUCE: (1, 1)}) as client:
        assert client.versions[Api.PRODUCE] == 1
        head = produce_messages.encode_produce(
            produce_messages.ProduceRequest(info.topic_id, 2, produce_messages.ACKS_ALL, 30_000)
        )
        for offset in range(2):
            code, body = client.answer(client.send(Api.PRODUCE, head, batch_for(info, 2)[2]))
            assert code is ErrorCode.OK
            assert produce_messages.decode_produced(body[0]).base_offset == offset
    with RawClient(appliance.address, versions={**API_VERSIONS, Api.PRODUCE: (1, 9)}) as client:
        assert client.versions[Api.PRODUCE] == API_VERSIONS[Api.PRODUCE][1]


def test_a_front_that_has_had_large_batches_takes_more_of_them_without_fresh_pages(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    frame = pa.table({"value": pa.array([os.urandom(1_000)] * 1_000, pa.binary())})
    fronts = [pid for name, pid in children(appliance).items() if name.startswith("tr-front")]

    def faults() -> int:
        return sum(
            int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
            for pid in fronts
        )

    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(appliance.address) as producer:
        least = 1 << 30
        for _ in range(5):  # the first has the memory fetched
            before = faults()
            for _ in range(30):
                producer.send_arrow(topic, frame)
            producer.flush()
            least = min(least, faults() - before)
    assert least < 30 * 50, "page faults for 30 batches of 250 pages"
