"""Each `send` during `close` is refused before anything of it is stored, or has a true outcome."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.aio import AsyncProducer
from tailrace.core.errors import ClientClosedError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.producer.producer import CALLBACK_ROUNDS_MAX
from tests.conformance.worlds import ENOUGH_S, WORLDS, World
from tests.kit.processes import children, stopped, wait_until

MANY = 4_000
SENDERS = 3


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    return topic


@contextmanager
def no_acknowledgement(appliance: EmbeddedAppliance) -> Iterator[None]:
    worker = children(appliance)["tr-worker-0"]
    with stopped(worker):
        yield


def stored(appliance: EmbeddedAppliance, topic: str) -> list[Any]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        count = consumer.highwater(TopicPartition(topic, 0))
        return [record.value for record in consumer.consume(count, ENOUGH_S)] if count else []


def test_a_close_that_waits_refuses_other_threads_and_delivers_what_came_before(
    appliance: EmbeddedAppliance, made: str
) -> None:
    producer = Producer(appliance.address, linger_ms=0)
    producer.send(made, b"first").result(ENOUGH_S)
    with no_acknowledgement(appliance):
        before = [producer.send(made, b"before"), producer.send(made, b"too")]
        closing = threading.Thread(target=producer.close)
        closing.start()
        wait_until(lambda: producer._sender_thread.is_closing, "close() has begun")
        for refused in (
            lambda: producer.send(made, b"late"),
            lambda: producer.send(made, "late", partition=0, timestamp=5),
            lambda: producer.send_arrow(made, pa.table({"value": [b"late"]})),
        ):
            with pytest.raises(ClientClosedError, match="so this one was not sent"):
                refused()
        assert not any(handle.done() for handle in before), "close() still waits for them"
    closing.join(ENOUGH_S)
    assert [handle.result(0).offset for handle in before] == [1, 2]
    assert stored(appliance, made) == [b"first", b"before", b"too"]


def test_a_close_of_a_loops_producer_refuses_other_tasks(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        producer = AsyncProducer(appliance.address, linger_ms=0)
        await producer.send_and_wait(made, b"first")
        with no_acknowledgement(appliance):
            before = await producer.send(made, b"before")
            closing = asyncio.ensure_future(producer.close())
            while not producer._producer.sender_thread.is_closing:
                await asyncio.sleep(0)
            with pytest.raises(ClientClosedError, match="so this one was not sent"):
                await producer.send(made, b"late")
            with pytest.raises(ClientClosedError, match="so this one was not sent"):
                await producer.send_arrow(made, pa.table({"value": [b"late"]}))
            assert not closing.done()
        await closing
        assert (await before).offset == 1

    asyncio.run(asyncio.wait_for(main(), ENOUGH_S))
    assert stored(appliance, made) == [b"first", b"before"]


@WORLDS
def test_a_record_without_an_outcome_says_if_it_may_be_stored(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    async def body() -> list[Any]:
        producer = world.producer(appliance.address, max_in_flight_requests_per_connection=1)
        await (await producer.send(made, b"first"))
        handles = []
        with no_acknowledgement(appliance):
            handles.append(await producer.send(made, b"under way"))
            with pytest.raises(TailraceError):
                await producer.flush(timeout=0.2)
            handles.append(await producer.send(made, b"behind it"))
            await producer.close(timeout=0)
        return [handle.exception() for handle in handles]

    under_way, behind = world.run(body())
    assert isinstance(under_way, ClientClosedError)
    assert "it may be stored, or not" in str(under_way)
    assert isinstance(behind, ClientClosedError)
    assert "it is not stored" in str(behind)
    wait_until(lambda: len(stored(appliance, made)) == 2, "what was under way arrives")


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_threads_that_send_until_they_are_refused_know_of_each_record_what_became_of_it(
    appliance: EmbeddedAppliance, made: str, linger_ms: int
) -> None:
    producer = Producer(appliance.address, linger_ms=linger_ms)
    producer.send(made, b"first").result(ENOUGH_S)
    accepted: list[tuple[bytes, Any]] = []
    refused: list[bytes] = []
    are_sending = threading.Semaphore(0)

    def send(sender: int) -> None:
        number = 0
        while True:
            value = b"%d-%d" % (sender, number)
            number += 1
            try:
                accepted.append((value, producer.send(made, value)))
            except ClientClosedError:
                refused.append(value)
                return
            if number == 100:
                are_sending.release()

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(SENDERS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert are_sending.acquire(timeout=ENOUGH_S)
    producer.close()
    for thread in threads:
        thread.join(ENOUGH_S)
    assert [handle.exception(0) for _, handle in accepted if handle.exception(0)] == []
    assert len(refused) == SENDERS
    assert sorted(stored(appliance, made)) == sorted([b"first", *(value for value, _ in accepted)])


def test_callbacks_may_send_while_close_waits_ten_times_in_a_row(
    appliance: EmbeddedAppliance, made: str
) -> None:
    sent: list[Any] = []
    refused: list[Exception] = []
    producer = Producer(appliance.address, linger_ms=60_000)

    def again(_metadata: Any, error: Any) -> None:
        assert error is None
        try:
            sent.append(producer.send(made, b"%d" % (len(sent) + 1), on_delivery=again))
        except ClientClosedError as refusal:
            refused.append(refusal)

    producer.send(made, b"0", on_delivery=again)
    producer.close()
    assert len(refused) == 1
    assert [handle.exception(0) for handle in sent] == [None] * len(sent)
    assert len(sent) == CALLBACK_ROUNDS_MAX
    assert stored(appliance, made) == [b"%d" % number for number in range(len(sent) + 1)]


def test_a_frame_that_was_sent_in_part_says_how_many_rows(
    appliance: EmbeddedAppliance, made: str
) -> None:
    producer = Producer(appliance.address, buffer_memory="2MiB", max_block_ms=200)
    producer.send(made, b"first").result(ENOUGH_S)
    frame = pa.table({"value": [os.urandom(1_000) for _ in range(MANY)]})
    with no_acknowledgement(appliance), pytest.raises(TailraceError) as refusal:
        producer.send_arrow(made, frame)
    count = int(str(refusal.value).split()[0])
    assert 0 < count < MANY
    assert "rows of the frame were accepted before this" in str(refusal.value)
    producer.close()
    assert len(stored(appliance, made)) == 1 + count
