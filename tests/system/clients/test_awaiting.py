"""Handles in coroutines and where a Future is taken."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pyarrow as pa
import pytest

from tailrace import Admin, BatchMetadata, NewTopic, Producer, RecordMetadata
from tailrace.core.errors import ClientClosedError, InvalidRecordError, NotReachableError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S


def test_handles_are_awaited_by_many_tasks_at_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    async def send_all(producer: Producer) -> list[int | None]:
        async def send(number: int) -> int | None:
            return (await producer.send(topic, b"%d" % number, partition=0)).offset

        return await asyncio.gather(*(send(number) for number in range(500)))

    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        assert asyncio.run(send_all(producer)) == list(range(500))


def test_frames_are_awaited(appliance: EmbeddedAppliance, topic: str) -> None:
    async def send(producer: Producer) -> int:
        sent = await producer.send_arrow(topic, pa.table({"value": [b"x"] * 1_000}))
        return sum(batch.record_count for batch in sent)

    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=4_096) as producer,
    ):
        admin.create_topics([NewTopic(topic)])
        assert asyncio.run(send(producer)) == 1_000


def test_where_a_future_is_taken_a_handle_gives_one(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    called = threading.Event()
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        handles = [producer.send(topic, b"x", partition=0) for _ in range(10)]
        handles[3].add_done_callback(lambda handle: called.set() if handle.done() else None)
        done = concurrent.futures.as_completed(
            [handle.future() for handle in handles], timeout=HANG_LIMIT_S
        )
        assert sorted(future.result().offset or 0 for future in done) == list(range(10))
        assert called.wait(HANG_LIMIT_S)
        late = threading.Event()
        handles[0].add_done_callback(lambda _: late.set())
        assert late.is_set(), "it has ended already"


def test_errors_come_where_they_are_awaited() -> None:
    async def send(producer: Producer) -> None:
        await producer.send("t", b"x")

    with (
        Producer("localhost:1", max_block_ms=100) as nobody,
        pytest.raises(NotReachableError, match="no appliance answers"),
    ):
        asyncio.run(send(nobody))


def test_what_is_awaited_ends_with_its_producer(appliance: EmbeddedAppliance, topic: str) -> None:
    async def send(producer: Producer) -> None:
        handle = producer.send(topic, b"x")
        waiting = asyncio.ensure_future(asyncio.wrap_future(handle.future()))
        await asyncio.to_thread(producer.close, 0.0)
        await asyncio.wait([waiting], timeout=HANG_LIMIT_S)
        error = waiting.exception()
        assert error is None or isinstance(error, ClientClosedError), (
            "it may have been acknowledged before"
        )

    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, linger_ms=10_000) as producer,
    ):
        admin.create_topics([NewTopic(topic)])
        asyncio.run(send(producer))


def test_a_handle_is_a_future_of_the_standard_library(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    async def both(producer: Producer) -> tuple[RecordMetadata, list[BatchMetadata]]:
        one, many = (
            producer.send(topic, b"x", partition=0),
            producer.send_arrow(topic, pa.table({"value": [b"x"]}), partition=0),
        )
        return await asyncio.wrap_future(one), await asyncio.wrap_future(many)

    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        handles = [producer.send(topic, b"%d" % number, partition=0) for number in range(200)]
        assert all(isinstance(handle, concurrent.futures.Future) for handle in handles)
        first_done = concurrent.futures.wait(handles, 20, concurrent.futures.FIRST_COMPLETED)
        assert first_done.done
        in_order_of_completion = list(concurrent.futures.as_completed(handles, 20))
        assert set(in_order_of_completion) == set(handles), (
            "the handles themselves, not others in their place"
        )
        assert concurrent.futures.wait(handles, 20) == (set(handles), set())
        assert [handle.result(0).offset for handle in handles] == list(range(200))
        assert not any(
            handle.cancel() or handle.cancelled() or handle.running() for handle in handles
        )
        frames = producer.send_arrow(topic, pa.table({"value": [b"x"] * 50_000}), partition=0)
        assert concurrent.futures.wait([frames], 20).done == {frames}
        assert sum(batch.record_count for batch in frames.result(HANG_LIMIT_S)) == 50_000
        one, many = asyncio.run(both(producer))
        assert one.offset == 50_200
        assert many[0].base_offset == 50_201


def test_handles_that_fail_are_futures_that_fail(appliance: EmbeddedAppliance, topic: str) -> None:
    schema = pa.schema([("n", pa.int64())])
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, linger_ms=10_000) as producer,
    ):
        admin.create_topics([NewTopic(topic, schema=schema)])
        handles = [
            producer.send(topic, {"n": "three" if number == 3 else number}, partition=0)
            for number in range(100)
        ]
        done, waiting = concurrent.futures.wait(handles, 0)
        assert (len(done), len(waiting)) == (0, 100), "nothing has been sent yet"
        followed = [handle.future() for handle in handles]
        producer.flush(HANG_LIMIT_S)
        assert concurrent.futures.wait(followed, 20).done == set(followed)
        errors = [future.exception(0) for future in followed]
        assert isinstance(errors.pop(3), InvalidRecordError)
        assert errors == [None] * 99, "a row that does not fit costs no other row of its batch"
        offsets = [handle.result(0).offset for number, handle in enumerate(handles) if number != 3]
        assert offsets == list(range(99)), "in the order in which they were sent"
