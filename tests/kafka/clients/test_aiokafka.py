"""aiokafka: codecs, a group of two, a transactional copy with the group's offsets, admin."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    aiokafka = pytest.importorskip("aiokafka", reason="aiokafka is not installed")
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.kit.processes import HANG_LIMIT_S

CODECS = (None, "gzip", "snappy", "lz4", "zstd")
RECORDS = 100
PARTITIONS = 3


def consumer(gateway: str, topic: str, group: str | None = None) -> Any:
    return aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=gateway, group_id=group, auto_offset_reset="earliest",
        enable_auto_commit=False, isolation_level="read_committed",
        metadata_max_age_ms=500, heartbeat_interval_ms=300,
    )  # fmt: skip


async def read(*consumers: Any) -> list[bytes]:
    """The values of all records, by all consumers, in order."""
    found: list[bytes] = []
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(found) < RECORDS:
            for each in consumers:
                rows = await each.getmany(timeout_ms=50)
                found += [record.value for records in rows.values() for record in records]
    return sorted(found)


async def produce(gateway: str, topic: str) -> list[bytes]:
    values = [b"%03d" % number for number in range(RECORDS)]
    for index, codec in enumerate(CODECS):
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=gateway, enable_idempotence=True, compression_type=codec
        )
        async with producer:
            for value in values[index :: len(CODECS)]:
                await producer.send(topic, value, key=value, headers=[("codec", b"%d" % index)])
    return values


async def copy(gateway: str, source: str, target: str) -> None:
    reader, group = consumer(gateway, source, f"{target}-copy"), f"{target}-copy"
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=gateway, transactional_id=target)
    async with reader, producer:
        count = aborted = 0
        while count < RECORDS:
            rows = await reader.getmany(timeout_ms=1000, max_records=20)
            if not rows:
                continue
            await producer.begin_transaction()
            for records in rows.values():
                for record in records:
                    await producer.send(target, record.value)
            if not aborted:
                aborted += 1
                await producer.abort_transaction()
                await reader.seek_to_committed()
                for place in reader.assignment():
                    if await reader.committed(place) is None:
                        await reader.seek_to_beginning(place)
                continue
            offsets = {place: records[-1].offset + 1 for place, records in rows.items()}
            await producer.send_offsets_to_transaction(offsets, group)
            await producer.commit_transaction()
            count += sum(map(len, rows.values()))


def test_groups_transactions_and_administration(gateway: str) -> None:
    source, target = "aio-source", "aio-target"

    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=gateway)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(each, PARTITIONS, 1) for each in (source, target)])
            assert {source, target} <= set(await admin.list_topics())
            values = await produce(gateway, source)
            one, two = (consumer(gateway, source, "aio-group") for _ in range(2))
            async with one, two:
                assert await read(one, two) == values
                for each in (one, two):
                    await each.commit()
            await copy(gateway, source, target)
            async with consumer(gateway, target) as reader:
                assert await read(reader) == values
            offsets = await admin.list_consumer_group_offsets(f"{target}-copy")
            assert sum(each.offset for each in offsets.values()) == RECORDS
            groups = await admin.list_consumer_groups()
            assert ("aio-group", "consumer") in groups
            await admin.create_partitions({source: aiokafka.admin.NewPartitions(4)})
            await admin.delete_topics([source])
        finally:
            await admin.close()

    asyncio.run(run())
