"""Every public behaviour of Producer and AsyncProducer, over a real appliance: one body for
both.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, TopicPartition, embedded, scan
from tailrace.core.errors import (
    BufferExhaustedError,
    ClientClosedError,
    DelayNotEnabledError,
    InvalidRecordError,
    NotReachableError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    RequestTimeoutError,
    SchemaMismatchError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.worlds import ENOUGH_S, WORLDS, World

NOWHERE = "tcp://127.0.0.1:1"


async def _awaited(*_: object) -> None:
    """A callback that nothing would await."""


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of three partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 3))
    return topic


def stored(appliance: EmbeddedAppliance, topic: str, count: int) -> list[Any]:
    """The topic's records, by a plain consumer."""
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        records = consumer.consume(count, timeout=ENOUGH_S)
        assert len(records) == count
        return records


@WORLDS
def test_a_record_is_stored_as_it_was_given(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            handle = await producer.send(
                made, "text", "key", [("h", b"1"), ("n", None)], 2, 1_700_000_000_000
            )
            metadata = await handle
            assert (metadata.topic, metadata.partition, metadata.offset, metadata.timestamp) == (
                made,
                2,
                0,
                1_700_000_000_000,
            )
            assert handle.done()
            assert handle.exception() is None

    world.run(body())
    (record,) = stored(appliance, made, 1)
    assert (record.key, record.value, record.headers) == (
        b"key",
        b"text",
        [("h", b"1"), ("n", None)],
    )


@WORLDS
def test_headers_that_can_be_read_once_are_stored_with_each_record_that_waits(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    """71 to 85 of 200 acknowledged records had lost theirs: the send that waited was begun again,
    with an iterator that was used up.
    """

    async def body() -> None:
        async with world.producer(appliance.address, buffer_memory=65536, linger_ms=0) as producer:
            for number in range(200):
                await producer.send(
                    made, bytes(2_000), headers=iter([("n", b"%d" % number)]), partition=0
                )

    world.run(body())
    assert [record.headers for record in stored(appliance, made, 200)] == [
        [("n", b"%d" % number)] for number in range(200)
    ]


@WORLDS
def test_a_serializer_and_a_partitioner_are_called_once_for_each_record(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    calls: list[str] = []

    def serializer(value: Any) -> bytes:
        calls.append("value")
        return bytes(value)

    def partitioner(_topic: str, _key: bytes | None, partition_count: int) -> int:
        calls.append("partition")
        return len(calls) % partition_count

    async def body() -> None:
        settings = {
            "value_serializer": serializer,
            "partitioner": partitioner,
            "buffer_memory": 65536,
            "linger_ms": 0,
        }
        async with world.producer(appliance.address, **settings) as producer:
            for _ in range(100):
                await producer.send(made, 2_000)

    world.run(body())
    assert (calls.count("value"), calls.count("partition")) == (100, 100)
    assert len(stored(appliance, made, 100)) == 100


@WORLDS
def test_each_fault_of_a_record_is_said_and_costs_nothing_else(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    faults: list[tuple[type[TailraceError], dict[str, Any]]] = [
        (InvalidRecordError, {"value": 7}),
        (InvalidRecordError, {"key": object()}),
        (InvalidRecordError, {"headers": 7}),
        (InvalidRecordError, {"headers": [("a", "b")]}),
        (InvalidRecordError, {"timestamp": "now"}),
        (InvalidRecordError, {"on_delivery": 7}),
        (InvalidRecordError, {"on_delivery": _awaited}),
        (PartitionOutOfRangeError, {"partition": 3}),
        (RecordTooLargeError, {"value": bytes(2 << 20)}),
        (DelayNotEnabledError, {"deliver_after": dt.timedelta(seconds=1)}),
    ]

    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            for kind, given in faults:
                for _ in range(2):  # before the topic is known, and after
                    with pytest.raises(kind):
                        await producer.send(made, **{"value": b"x", **given})
            with pytest.raises(UnknownTopicError):
                await producer.send(f"{made}-not", b"x")
            with pytest.raises(InvalidRecordError):
                await producer.send(7, b"x")
            with pytest.raises(InvalidRecordError):
                await producer.send(["unhashable"], b"x")
            assert (await (await producer.send(made, b"x"))).offset == 0

    world.run(body())


@WORLDS
@pytest.mark.parametrize(
    "kind",
    [bytearray, memoryview, lambda given: memoryview(bytearray(given))],
    ids=["bytearray", "view", "writable"],
)
def test_a_key_may_be_any_buffer(
    world: World, appliance: EmbeddedAppliance, made: str, kind: Any
) -> None:
    """Without the compiled kernel a memoryview of a bytearray, which has no hash, was a bare
    ValueError.
    """

    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            for value in (b"1", b"2"):  # the first asks for the topic, the second does not
                await producer.send(made, value, kind(b"key"))

    world.run(body())
    assert [record.key for record in stored(appliance, made, 2)] == [b"key", b"key"]


@WORLDS
def test_frames_are_cut_into_batches_that_wait_for_room(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    rows = [b"%06d" % number for number in range(20_000)]

    async def body() -> None:
        async with world.producer(appliance.address, buffer_memory=1 << 17) as producer:
            batches = await (
                await producer.send_arrow(
                    made, pa.table({"value": pa.array(rows, pa.binary())}), partition=1
                )
            )
            assert [batch.partition for batch in batches] == [1] * len(batches)
            assert sum(batch[3] for batch in batches) == len(rows)
            assert len(batches) > 3
            with pytest.raises(SchemaMismatchError):
                await producer.send_arrow(made, pa.table({"other": [1]}))
            with pytest.raises(PartitionOutOfRangeError):
                await producer.send_arrow(made, pa.table({"value": [b"x"]}), partition=3)

    world.run(body())
    assert [record.value for record in stored(appliance, made, len(rows))] == rows


@WORLDS
def test_flush_waits_for_all_and_close_ends_all(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    async def body() -> None:
        called: list[Any] = []
        producer = world.producer(appliance.address, linger_ms=60_000)
        handles = [
            await producer.send(
                made,
                b"x",
                partition=n % 3,
                on_delivery=lambda metadata, error: called.append((metadata, error)),
            )
            for n in range(10)
        ]
        await producer.flush()
        assert all(handle.done() for handle in handles)
        assert await producer.partitions_for(made) == [0, 1, 2]
        assert (await producer.metrics())["records_sent"] == 10
        await producer.flush(timeout=0)
        last = await producer.send(made, b"last", partition=0)
        await producer.close()
        await producer.close()
        assert (await last).offset == 4
        assert len(called) == 10
        assert all(error is None for _, error in called)
        for call in (
            (producer.send(made, b"x"), producer.flush(), producer.partitions_for(made))
            if world.name == "loop"
            else ()
        ):
            with pytest.raises(ClientClosedError):
                await call
        if world.name == "thread":
            for method, arguments in (
                ("send", (made, b"x")),
                ("flush", ()),
                ("partitions_for", (made,)),
            ):
                with pytest.raises(ClientClosedError):
                    getattr(producer, method)(*arguments)

    world.run(body())


@WORLDS
def test_without_an_appliance_each_wait_ends_in_time_with_its_own_error(world: World) -> None:
    async def body() -> None:
        producer = world.producer(NOWHERE, max_block_ms=200)
        with pytest.raises(NotReachableError):
            await producer.send("t", b"x")
        with pytest.raises(NotReachableError):
            await producer.partitions_for("t")
        await producer.close()

    world.run(body())


@WORLDS
def test_a_buffer_that_stays_full_says_so_and_a_flush_that_takes_too_long(
    world: World, tmp_path: Any
) -> None:
    from tailrace.embedded_appliance import start_embedded

    running = start_embedded()
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("t")])

    async def body() -> None:
        producer = world.producer(
            running.address,
            buffer_memory=65536,
            max_block_ms=300,
            delivery_timeout_ms=2_000,
            request_timeout_ms=1_000,
        )
        await (await producer.send("t", b"x"))
        running.stop()
        for _ in range(3):
            await producer.send("t", bytes(20_000))
        with pytest.raises(BufferExhaustedError):
            await producer.send("t", bytes(20_000))
        with pytest.raises(RequestTimeoutError):
            await producer.flush(timeout=0.05)
        await producer.close(timeout=0)

    world.run(body())


@WORLDS
def test_a_block_that_raises_ends_the_producer(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            await producer.send(made, b"x")
            raise LookupError

    with pytest.raises(LookupError):
        world.run(body())
    assert len(stored(appliance, made, 1)) == 1


@WORLDS
@pytest.mark.parametrize("is_frame", [False, True])
def test_a_send_that_may_not_wait_says_so_and_finds_its_topic_later(
    world: World, topic: str, is_frame: bool
) -> None:
    """`max_block_ms=0`: the topic is looked up, and created, behind the program's back."""
    known = f"{topic}-known"
    refusals: list[str] = []

    async def body(address: str) -> None:
        async with world.producer(address, max_block_ms=0) as producer:
            for name in (known, topic):
                while True:
                    try:
                        if is_frame:
                            await (await producer.send_arrow(name, pa.table({"value": [b"x"]})))
                        else:
                            await (await producer.send(name, b"x"))
                        break
                    except RequestTimeoutError as error:
                        refusals.append(str(error))
                        await world.pause()

    with embedded() as appliance:
        with Admin(appliance.address) as admin:
            admin.create_topics(NewTopic(known))
        world.run(body(appliance.address))
        for name in (known, topic):
            assert len(stored(appliance, name, 1)) == 1
    for refusal in refusals:
        assert "is not known to this producer yet" in refusal
        assert "send the record again in a moment" in refusal


@WORLDS
def test_a_send_that_may_not_wait_says_that_no_appliance_has_answered(world: World) -> None:
    async def body() -> None:
        async with world.producer(NOWHERE, max_block_ms=0) as producer:
            with pytest.raises(
                RequestTimeoutError, match=r"no appliance at .* has answered yet.*max_block_ms is 0"
            ):
                await producer.send("t", b"x")

    world.run(body())


@WORLDS
def test_a_send_that_may_not_wait_learns_that_there_is_no_such_topic(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    async def body() -> None:
        async with world.producer(appliance.address, max_block_ms=0) as producer:
            while True:
                try:
                    await producer.send(topic, b"x")
                except RequestTimeoutError:
                    await world.pause()
                except UnknownTopicError:
                    break

    world.run(body())


@WORLDS
def test_a_time_before_1970_is_refused(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    async def body() -> None:
        early = dt.datetime(1969, 12, 31, 23, 59, 59)
        column = pa.array([dt.datetime(2020, 1, 1), early], pa.timestamp("us", "UTC"))
        table = pa.table({"value": [b"a", b"b"], "timestamp": column})
        async with world.producer(appliance.address) as producer:
            calls: list[Callable[[], Any]] = [
                lambda: producer.send(made, b"x", timestamp=-5),
                lambda: producer.send(made, b"x", timestamp=-1),
                lambda: producer.send(made, b"x", timestamp=early),
                lambda: producer.send_arrow(made, table.select(["value"]), timestamp=early),
                lambda: producer.send_arrow(made, table),
                lambda: producer.send_arrow(made, table, key_column="value"),
            ]
            for call in calls:
                with pytest.raises(InvalidRecordError, match="before 1970"):
                    await call()
            await (await producer.send(made, b"0", partition=0, timestamp=0))

    world.run(body())
    (record,) = stored(appliance, made, 1)
    assert (record.value, record.timestamp) == (b"0", 0)


@WORLDS
def test_the_time_of_a_row_is_its_column_in_the_log_as_well(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    """Lookups by time and retention go by the batch's header, which `send` stamps."""
    columns = [("timestamp", pa.timestamp("us", "UTC")), ("n", pa.int64())]
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=pa.schema(columns)))
    times = [dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (2100, 1950, 2090)]
    milliseconds = [int(time.timestamp() * 1000) for time in times]

    async def body() -> None:
        async with world.producer(appliance.address, linger_ms=60_000) as producer:
            handles = [
                await producer.send(topic, {"timestamp": time, "n": number})
                for number, time in enumerate(times)
            ]
            nameless = await producer.send(topic, {"n": 3})
            given = [
                await producer.send(topic, row, timestamp=1_000)
                for row in ({"n": 4}, {"n": 5, "timestamp": times[2]})
            ]
            await producer.flush()
            assert [(await handle).timestamp for handle in handles] == milliseconds
            assert (await nameless).timestamp == milliseconds[0], "the largest of its batch"
            assert [(await handle).timestamp for handle in given] == [1_000, milliseconds[2]]

    world.run(body())
    records = stored(appliance, topic, 6)
    assert [record.timestamp for record in records] == [
        *milliseconds, milliseconds[0], 1_000, milliseconds[2]
    ]  # fmt: skip
    assert records[4].value == {"n": 4, "timestamp": dt.datetime.fromtimestamp(1, dt.UTC)}
    key = TopicPartition(topic, 0)
    with Consumer(bootstrap=appliance.address) as consumer:
        found = consumer.offsets_for_times({key: dt.datetime(2095, 1, 1)})[key]
        assert found is not None
        assert (found.offset, found.timestamp) == (0, milliseconds[0])


@WORLDS
def test_a_row_is_stored_as_it_was_when_it_was_sent(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    """A program that fills one dict for all its rows had the last one's values in each row of a
    batch.
    """
    schema = pa.schema(
        [
            ("number", pa.int64()),
            ("name", pa.binary()),
            ("marks", pa.list_(pa.int64())),
            ("place", pa.struct([("tags", pa.list_(pa.string()))])),
            ("curve", pa.list_(pa.float64())),
        ]
    )
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=schema))

    async def body() -> None:
        row: dict[str, Any] = {
            "number": 0,
            "name": bytearray(b"0"),
            "marks": [0],
            "place": {"tags": ["0"]},
            "curve": np.zeros(1),
        }
        async with world.producer(appliance.address, linger_ms=100) as producer:
            for number in range(10):
                row["number"] = row["marks"][0] = row["curve"][0] = number
                row["name"][:] = b"%d" % number
                row["place"]["tags"][0] = str(number)
                await producer.send(topic, row)
            row.clear()

    world.run(body())
    assert [record.value for record in stored(appliance, topic, 10)] == [
        {
            "number": number,
            "name": b"%d" % number,
            "marks": [number],
            "place": {"tags": [str(number)]},
            "curve": [float(number)],
        }
        for number in range(10)
    ]


@WORLDS
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_frame_is_stored_as_it_was_when_it_was_sent(
    world: World, compression: str, appliance: EmbeddedAppliance, topic: str
) -> None:
    """Arrow and pandas share the memory of numpy's arrays. A program that used its arrays again had
    later values in batches that waited.
    """
    schema = pa.schema([("number", pa.int64()), ("price", pa.float64())])
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=schema))

    async def body() -> None:
        numbers, prices = np.zeros(100, np.int64), np.zeros(100)
        frame = pa.table({"number": numbers, "price": prices})
        async with world.producer(appliance.address, compression_type=compression) as producer:
            for count in range(300):
                numbers[:], prices[:] = count, count / 2
                await producer.send_arrow(topic, frame)
            numbers[:], prices[:] = -1, -1

    world.run(body())
    found = scan(topic, appliance.address).read_all()
    assert found["number"].to_pylist() == [count for count in range(300) for _ in range(100)]
    assert found["price"].to_pylist() == [count / 2 for count in range(300) for _ in range(100)]


@WORLDS
def test_headers_of_a_row_are_refused(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    """They were left out without a word."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=pa.schema([("number", pa.int64())])))

    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            for _ in range(2):  # before the topic is known, and after
                with pytest.raises(InvalidRecordError, match="its rows have no headers"):
                    await producer.send(topic, {"number": 1}, headers=[("h", b"1")])
            await producer.send(topic, {"number": 2}, headers=[])

    world.run(body())
    assert [record.value for record in stored(appliance, topic, 1)] == [{"number": 2}]


@WORLDS
def test_a_coroutine_function_that_comes_to_a_known_topic_is_named_in_the_log(
    world: World, appliance: EmbeddedAppliance, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fast path takes any callback. An error of a send to a known topic would come too late."""

    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            await producer.send(made, b"x", partition=0)
            await (await producer.send(made, b"x", partition=0, on_delivery=lambda *_: _awaited()))

    world.run(body())
    assert "on_delivery returned a coroutine" in caplog.text


@WORLDS
@pytest.mark.parametrize("partitioner", ["producer", "hash_slots"])
def test_a_topic_that_takes_smaller_batches_from_now_on_takes_every_record_that_fits(
    world: World, appliance: EmbeddedAppliance, topic: str, partitioner: str
) -> None:
    """A whole batch was lost, whose records all fitted."""
    too_large = {3, 150}
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 1, {"partitioner": partitioner}))

        async def body() -> None:
            async with world.producer(appliance.address, linger_ms=60_000) as producer:
                await (await producer.send(topic, b"first"))
                admin.alter_topics({topic: {"max.message.bytes": 5_000}})
                handles = [
                    await producer.send(
                        topic, b"%d" % number, b"k", [("h", bytes(8_000 * (number in too_large)))]
                    )
                    for number in range(200)
                ]
                await producer.flush()
                failed = {number for number in range(200) if handles[number].exception()}
                assert failed == too_large
                for number in too_large:
                    assert isinstance(handles[number].exception(), RecordTooLargeError)
                await (await producer.send(topic, b"last", b"k"))

        world.run(body())
    fitting = [b"%d" % number for number in range(200) if number not in too_large]
    values = [record.value for record in stored(appliance, topic, 200)]
    assert values == [b"first", *fitting, b"last"]


@WORLDS
def test_a_frame_for_a_topic_that_takes_smaller_batches_from_now_on_is_split(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    with Admin(appliance.address) as admin:

        async def body() -> None:
            async with world.producer(appliance.address) as producer:
                await (await producer.send(made, b"first", partition=0))
                admin.alter_topics({made: {"max.message.bytes": 5_000}})
                frame = pa.table({"value": [b"%d" % number for number in range(3_000)]})
                await (await producer.send_arrow(made, frame, partition=0))

        world.run(body())
    values = [record.value for record in stored(appliance, made, 3_001)]
    assert values == [b"first", *(b"%d" % number for number in range(3_000))]


@WORLDS
def test_a_refusal_shows_the_producer_that_the_topic_takes_no_records_without_a_key_from_now_on(
    world: World, appliance: EmbeddedAppliance, made: str
) -> None:
    """It sent such records for a minute, and each batch with one was lost."""
    with Admin(appliance.address) as admin:

        async def body() -> None:
            async with world.producer(appliance.address, metadata_max_age_ms=3_600_000) as producer:
                await (await producer.send(made, b"first", b"k"))
                admin.alter_topics({made: {"cleanup.policy": "compact"}})
                deadline = time.monotonic() + ENOUGH_S
                while True:
                    try:
                        handle = await producer.send(made, b"without a key")
                    except InvalidRecordError:
                        break
                    assert time.monotonic() < deadline, "the producer goes on sending them"
                    with pytest.raises(InvalidRecordError):
                        await handle
                await (await producer.send(made, b"last", b"k"))

        world.run(body())
