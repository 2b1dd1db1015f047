"""Transactions of producers against a real appliance, from the public API alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.aio import AsyncProducer
from tailrace.client.connections.runtime import SYSTEM
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ProducerFencedError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S


@pytest.fixture(autouse=True)
def coordinator(appliance: EmbeddedAppliance) -> None:
    """Skip where the appliance has no coordinator of transactions."""
    with Producer(
        appliance.address, transactional_id="is-there-one", max_block_ms=10_000
    ) as producer:
        try:
            producer.init_transactions()
        except TailraceError as error:
            if error.code is not ErrorCode.UNKNOWN_API:
                raise
            pytest.skip(f"this appliance has no coordinator of transactions: {error}")


@pytest.fixture
def topics(appliance: EmbeddedAppliance, topic: str) -> list[str]:
    names = [f"{topic}-in", f"{topic}-out"]
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, partitions=2) for name in names])
    return names


def values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    """The first `count` committed values of a topic."""
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [record.value for record in consumer.consume(count, timeout=LIMIT_S)]
        return sorted(found + [record.value for record in consumer.poll(timeout_ms=200)])


def test_committed_records_are_read_and_aborted_ones_are_not(
    appliance: EmbeddedAppliance, topics: list[str], topic: str
) -> None:
    with Producer(appliance.address, transactional_id=topic) as producer:
        for number in range(6):
            producer.begin_transaction()
            for name in topics:
                producer.send(name, b"%d" % number, partition=number % 2)
            producer.flush()
            if number % 2:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    for name in topics:
        assert values(appliance, name, 3) == [b"0", b"2", b"4"]


def test_asyncio_commits_too(appliance: EmbeddedAppliance, topics: list[str], topic: str) -> None:
    async def main() -> None:
        async with (
            AsyncProducer(appliance.address, transactional_id=topic) as producer,
            producer.transaction(),
        ):
            for name in topics:
                await producer.send(name, b"x")

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert [values(appliance, name, 1) for name in topics] == [[b"x"], [b"x"]]


def test_a_producer_goes_on_after_an_idle_time(
    appliance: EmbeddedAppliance, topics: list[str], topic: str
) -> None:
    passed_ns = 0
    runtime = dataclasses.replace(SYSTEM, monotonic_ns=lambda: time.monotonic_ns() + passed_ns)
    with Producer(appliance.address, transactional_id=topic, runtime=runtime) as producer:
        for number in range(3):
            with producer.transaction():
                producer.send(topics[0], b"%d" % number)
            passed_ns += 3_600_000_000_000
    assert values(appliance, topics[0], 3) == [b"0", b"1", b"2"]


def test_the_second_owner_of_an_id_fences_the_first_and_aborts_what_it_had_open(
    appliance: EmbeddedAppliance, topics: list[str], topic: str
) -> None:
    first = Producer(appliance.address, transactional_id=topic)
    first.begin_transaction()
    first.send(topics[0], b"lost")
    first.flush()
    with Producer(appliance.address, transactional_id=topic) as second:
        with second.transaction():
            second.send(topics[0], b"kept")
        first.send(topics[0], b"zombie")
        with pytest.raises(ProducerFencedError, match="the transaction was aborted at"):
            first.commit_transaction()
    first.close()
    assert values(appliance, topics[0], 1) == [b"kept"]


def test_offsets_move_with_the_records_or_not_at_all(
    appliance: EmbeddedAppliance, topics: list[str], topic: str
) -> None:
    source, target = topics
    with Producer(appliance.address) as producer:
        for number in range(100):
            producer.send(source, b"%03d" % number)

    def consumer() -> Consumer:
        return Consumer(
            source, bootstrap=appliance.address, group_id=topic, enable_auto_commit=False,
            auto_offset_reset="earliest", max_poll_records=10,
        )  # fmt: skip

    done = 0
    fails = True
    with Producer(appliance.address, transactional_id=topic) as producer:
        while done < 100:
            with consumer() as member:
                while done < 100:
                    records = member.poll(timeout_ms=1_000)
                    if not records:
                        continue
                    producer.begin_transaction()
                    for record in records:
                        producer.send(target, record.value)
                    producer.send_offsets_to_transaction(
                        member.positions(), member.group_metadata()
                    )
                    fails = not fails
                    if fails:  # the next consumer begins where the last commit ended
                        producer.abort_transaction()
                        break
                    producer.commit_transaction()
                    done += len(records)
    assert values(appliance, target, 100) == [b"%03d" % number for number in range(100)]


def test_a_member_that_was_replaced_cannot_commit(
    appliance: EmbeddedAppliance, topics: list[str], topic: str
) -> None:
    settings: dict[str, Any] = {
        "bootstrap": appliance.address, "group_id": topic, "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
    }  # fmt: skip
    with Producer(appliance.address) as other:
        other.send(topics[0], b"1")
    with (
        Producer(appliance.address, transactional_id=topic) as producer,
        Consumer(topics[0], **settings) as first,
    ):
        (record,) = first.consume(1, timeout=LIMIT_S)
        positions, metadata = first.positions(), first.group_metadata()
        first.unsubscribe()
        producer.begin_transaction()
        producer.send(topics[1], record.value)
        producer.send_offsets_to_transaction(positions, metadata)
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()
        producer.abort_transaction()
