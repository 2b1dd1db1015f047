"""The tables of docs/delivery.md are true of every consumer: each way of reading, each way of
ending, what is committed, what comes again.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Record, ShareConsumer, TopicPartition
from tailrace.aio import AsyncConsumer, AsyncShareConsumer
from tailrace.core.errors import InvalidRequestError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.worlds import LoopWorld, ThreadWorld
from tests.kit.members.queues import take
from tests.kit.processes import wait_until

PAGE = pathlib.Path(__file__).parents[2] / "docs/delivery.md"
COUNT = 12
AT_ONCE = 3
LONG_MS = 60_000
LOCKS_THAT_LAST_MS = 3_600_000
"""More than a test waits."""


class EndsError(BaseException):
    """An exception of a signal's handler that is no Exception."""


def table(name: str) -> list[tuple[str, str, str]]:
    """(way of reading, way of ending, what is committed) of each cell."""
    lines = re.findall(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", PAGE.read_text(), re.DOTALL)[
        0
    ].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        (row[0], end, cell)
        for row in rows[2:]
        for end, cell in zip(rows[0][1:], row[1:], strict=True)
    ]


async def done(result: Any) -> Any:
    """The result of a method of either kind of consumer."""
    return await result if inspect.isawaitable(result) else result


End = Callable[[], Awaitable[bool]]
"""Ends the block, or returns whether to read on."""


class Program:
    """A program that reads in one way; `given`: the offsets that each call, or each turn of a loop,
    gave it.
    """

    def __init__(self, consumer: Any, way: str) -> None:
        self.consumer = consumer
        self.way = way
        self.given: list[list[int]] = []

    @property
    def is_enough(self) -> bool:
        return sum(map(len, self.given)) >= 2 * AT_ONCE

    async def read(self, end: End) -> None:
        """Two calls, or as many turns of a loop as give as much; then the block ends."""
        if self.way == "`for record in consumer`":
            await self._loop(end)
            return
        while not self.is_enough or await end():
            self.given.append(await self._call())

    async def _call(self) -> list[int]:
        match self.way:
            case "`poll()`":
                return [
                    record.offset for record in await done(self.consumer.poll(LONG_MS, AT_ONCE))
                ]
            case "`consume()`":
                return [record.offset for record in await done(self.consumer.consume(AT_ONCE))]
            case "`getone()`":
                return [(await self.consumer.getone()).offset]
        return [
            offset
            for batch in await done(self.consumer.poll_arrow(LONG_MS))
            for offset in batch.offsets.to_pylist()
        ]

    async def _loop(self, end: End) -> None:
        if hasattr(self.consumer, "__aiter__"):
            async for record in self.consumer:
                self.given.append([record.offset])
                if self.is_enough and not await end():
                    break
            return
        for record in self.consumer:
            self.given.append([record.offset])
            if self.is_enough and not await end():
                break

    def committed(self, cell: str) -> list[int]:
        """The offsets that a cell of the table speaks of."""
        counts = {"all": len(self.given), "nothing": 0}
        return [
            offset
            for some in self.given[: counts.get(cell, len(self.given) - 1)]
            for offset in some
        ]


async def ends(program: Program, how: str, armed: list[bool]) -> bool:
    """End the block inside of its body; returns whether to read on."""
    if how == "exception in the block":
        raise EndsError
    if how == "`commit()`, then an exception":
        await done(program.consumer.commit())
        raise EndsError
    if how == "the next call is ended by an exception":
        armed.append(True)
        return True
    if how == "`unsubscribe()`, revocation":
        await done(program.consumer.unsubscribe())
    return False


async def live(consumer: Any, way: str, how: str, armed: list[bool]) -> Program:
    """A program's life with its consumer."""
    program = Program(consumer, way)
    is_async = hasattr(consumer, "__aenter__")
    try:
        if is_async:
            async with consumer:
                await program.read(lambda: ends(program, how, armed))
        elif how == "the process is killed":
            await program.read(lambda: ends(program, how, armed))
        else:
            with consumer:
                await program.read(lambda: ends(program, how, armed))
    except EndsError:
        pass
    return program


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A partition of batches of AT_ONCE records."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic))
        for number in range(COUNT):
            producer.send(topic, b"%d" % number)
            if number % AT_ONCE == AT_ONCE - 1:
                producer.flush()
    return topic


def fails_if(armed: list[bool]) -> Callable[[bytes], bytes]:
    def deserialize(value: bytes) -> bytes:
        if armed:
            raise EndsError
        return value

    return deserialize


def vanish(consumer: Any) -> None:
    """End the client's connections, as the end of a killed process does."""
    plain: Any = consumer if isinstance(consumer, Consumer) else consumer._consumer
    plain._group._abandon.detach()
    plain._group._thread.stop()
    plain._closed = True
    plain._connection.close()


@pytest.mark.parametrize(("way", "how", "cell"), table("consumers"))
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer], ids=lambda kind: kind.__name__)
def test_what_a_consumer_commits_and_what_comes_again(
    appliance: EmbeddedAppliance, filled: str, kind: Any, way: str, how: str, cell: str
) -> None:
    if (way == "`getone()`" and kind is Consumer) or (
        way == "`poll_arrow()`" and how == "the next call is ended by an exception"
    ):
        pytest.skip("there is no such call")
    if how == "the process is killed" and kind is AsyncConsumer:
        pytest.skip("as the plain consumer's")
    key, armed = TopicPartition(filled, 0), list[bool]()

    async def body() -> Program:
        consumer = kind(
            bootstrap=appliance.address,
            group_id=filled,
            auto_offset_reset="earliest",
            max_poll_records=AT_ONCE,
            value_deserializer=fails_if(armed),
        )
        await done(consumer.assign([key]))
        program = await live(consumer, way, how, armed)
        if how == "the process is killed":
            vanish(consumer)
        return program

    program: Program = (ThreadWorld() if kind is Consumer else LoopWorld()).run(body())
    committed = program.committed(cell)
    assert [offset for some in program.given for offset in some] == list(
        range(sum(map(len, program.given)))
    )
    with Consumer(
        bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    ) as successor:
        assert (successor.committed(key) or 0) == len(committed)
        successor.assign([key])
        rest = [record.offset for record in successor.consume(COUNT - len(committed), timeout=60)]
        assert rest == list(range(len(committed), COUNT))


@pytest.mark.parametrize(("way", "how", "cell"), table("queues"))
@pytest.mark.parametrize(
    "kind", [ShareConsumer, AsyncShareConsumer], ids=lambda kind: kind.__name__
)
def test_what_a_queue_accepts_and_what_comes_again_with_which_count(
    appliance: EmbeddedAppliance, filled: str, kind: Any, way: str, how: str, cell: str
) -> None:
    armed: list[bool] = []

    async def body() -> Program:
        consumer = kind(
            filled,
            bootstrap=appliance.address,
            group_id=filled,
            auto_offset_reset="earliest",
            value_deserializer=fails_if(armed),
        )
        return await live(consumer, way, how, armed)

    program: Program = (ThreadWorld() if kind is ShareConsumer else LoopWorld()).run(body())
    accepted, given = program.committed(cell), [offset for some in program.given for offset in some]
    with ShareConsumer(
        filled,
        bootstrap=appliance.address,
        group_id=filled,
        auto_offset_reset="earliest",
        share_acknowledgement_mode="explicit",
    ) as successor:
        rest = {
            record.offset: record.delivery_count
            for record in take(successor, COUNT - len(accepted))
        }
    assert rest == {
        offset: 2 if offset in given else 1 for offset in range(COUNT) if offset not in accepted
    }


def test_a_loop_of_a_queue_that_is_slow_for_its_locks_is_given_each_record_once_and_no_letter_is_written(  # noqa: E501
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 1, {"group.share.record.lock.duration.ms": 1_000}))
        for number in range(60):
            producer.send(topic, b"%d" % number)
    seen: list[tuple[int, int]] = []
    work = threading.Event()
    with ShareConsumer(
        topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest"
    ) as consumer:
        for record in consumer:
            seen.append((record.offset, record.delivery_count))
            if len(seen) == 60:
                consumer.commit()
                break
            work.wait(0.05)  # the work: no synchronisation
        assert consumer.metrics()["dead_letters"] == 0
        assert consumer.metrics()["locks_lost"] == 0
    assert seen == [(offset, 1) for offset in range(60)]


@pytest.mark.parametrize("left_by", ["break", "commit() in the body"])
def test_what_a_loop_acknowledges_itself_changes_nothing_for_its_later_records(
    appliance: EmbeddedAppliance, filled: str, left_by: str
) -> None:
    """After an `acknowledge` of any record, the last one of the loop came again."""
    settings: dict[str, Any] = {
        "bootstrap": appliance.address, "group_id": filled, "auto_offset_reset": "earliest",
    }  # fmt: skip
    with ShareConsumer(filled, **settings) as consumer:
        for record in consumer:
            if record.offset == 0:
                consumer.acknowledge(record, "accept")
            if record.offset == 2:
                if left_by != "break":
                    consumer.commit()
                break
        if left_by == "break":
            consumer.commit()
    with ShareConsumer(filled, share_acknowledgement_mode="explicit", **settings) as successor:
        rest = [(record.offset, record.delivery_count) for record in take(successor, COUNT - 3)]
    assert rest == [(offset, 1) for offset in range(3, COUNT)]


def test_a_job_that_raises_comes_again_though_the_loop_is_begun_again(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 1, {"group.share.record.lock.duration.ms": 1_000}))
        for number in range(4):
            producer.send(topic, b"%d" % number)
    seen: list[tuple[int, int]] = []
    with ShareConsumer(
        topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest"
    ) as consumer:

        def work_off() -> None:
            for record in consumer:
                seen.append((record.offset, record.delivery_count))
                assert record.offset != 3, "the job fails"

        with pytest.raises(AssertionError, match="the job fails"):
            work_off()
        for record in consumer:
            seen.append((record.offset, record.delivery_count))
            break
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]


@pytest.mark.parametrize(
    "kind", [ShareConsumer, AsyncShareConsumer], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("polls", [False, True], ids=["break", "poll in the loop's body"])
def test_a_loop_accepts_what_was_delivered_before_it_though_more_lies_in_the_buffer(
    appliance: EmbeddedAppliance, filled: str, kind: Any, polls: bool
) -> None:
    async def turns(consumer: Any) -> list[int]:
        """Four turns: of seven records that a loop acquires until then, three are left."""
        found: list[int] = []
        if kind is ShareConsumer:
            for record in consumer:
                found.append(record.offset)
                if len(found) == 4:
                    if not polls:
                        break
                    found += [other.offset for other in consumer.poll(0, 1)]
                if len(found) > 5:
                    break
            return found
        async for record in consumer:
            found.append(record.offset)
            if len(found) == 4:
                if not polls:
                    break
                found += [other.offset for other in await consumer.poll(0, 1)]
            if len(found) > 5:
                break
        return found

    async def next_turn(consumer: Any) -> list[int]:
        if kind is ShareConsumer:
            for record in consumer:
                return [record.offset]
        async for record in consumer:
            return [record.offset]
        raise AssertionError("the loop ended")

    async def body() -> list[int]:
        consumer = kind(
            filled, bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
        )
        found = await turns(consumer)
        if not polls:
            found += await next_turn(consumer)
        await done(consumer.close())
        return found

    given: list[int] = (ThreadWorld() if kind is ShareConsumer else LoopWorld()).run(body())
    assert given == list(range(len(given)))
    with ShareConsumer(
        filled,
        bootstrap=appliance.address,
        group_id=filled,
        auto_offset_reset="earliest",
        share_acknowledgement_mode="explicit",
    ) as successor:
        rest = {
            record.offset: record.delivery_count
            for record in take(successor, COUNT - len(given) + 1)
        }
    last = given[-1]
    assert rest == {offset: 2 if offset == last else 1 for offset in range(last, COUNT)}


def test_a_queue_that_is_polled_without_waiting_gets_its_records(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    """They were acquired, and never asked for: `poll()` waits for nothing by default. Locks that
    pass would bring them later.
    """
    with Admin(appliance.address) as admin:
        admin.alter_topics({filled: {"group.share.record.lock.duration.ms": LOCKS_THAT_LAST_MS}})
    found: list[int] = []
    with ShareConsumer(
        filled, bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    ) as consumer:

        def is_done() -> bool:
            found.extend(record.offset for record in consumer.poll())
            return len(found) == COUNT

        wait_until(is_done, "all records come")
    assert found == list(range(COUNT))


def test_what_was_asked_for_when_a_queue_was_closed_has_no_delivery(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    consumer = ShareConsumer(
        filled, bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    )
    poll_loop = consumer._poll_loop
    # on a busy machine the answer may come within the step that asks
    while not (poll_loop.requests.is_busy or poll_loop.fetch_loop.has_ranges):
        poll_loop.run_once(COUNT)
    consumer.close()
    with ShareConsumer(
        filled, bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    ) as successor:
        assert [record.delivery_count for record in take(successor, COUNT)] == [1] * COUNT


@pytest.mark.parametrize("ends_by_exception", [False, True])
def test_the_end_of_a_block_knows_of_commits_that_are_under_way(
    appliance: EmbeddedAppliance, filled: str, ends_by_exception: bool
) -> None:
    """The end committed nothing, as the position had been committed before the commit that was
    under way; or less than that commit.
    """
    key = TopicPartition(filled, 0)
    consumer = Consumer(bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest")
    consumer.assign([key])
    assert len(consumer.consume(AT_ONCE)) == AT_ONCE
    if ends_by_exception:
        assert len(consumer.consume(AT_ONCE)) == AT_ONCE
        consumer.commit_async()
        consumer.__exit__(EndsError, EndsError(), None)
        expected = 2 * AT_ONCE
    else:
        consumer.commit()
        consumer.seek(key, 0)
        consumer.commit_async()
        assert len(consumer.consume(AT_ONCE)) == AT_ONCE
        consumer.close()
        expected = AT_ONCE
    with Consumer(bootstrap=appliance.address, group_id=filled) as successor:
        assert successor.committed(key) == expected


@pytest.mark.parametrize("how", ["poll in the loop's body", "next, then poll", "zip"])
def test_ways_of_reading_are_mixed_and_each_goes_on_where_the_other_stopped(
    appliance: EmbeddedAppliance, filled: str, how: str
) -> None:
    key, seen = TopicPartition(filled, 0), list[int]()
    with Consumer(
        bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([key])
        if how == "zip":
            seen += [record.offset for _, record in zip(range(5), consumer, strict=False)]
        elif how == "next, then poll":
            records = iter(consumer)
            seen += [
                next(records).offset,
                *(record.offset for record in consumer.poll(LONG_MS, 2)),
                next(records).offset,
            ]
        else:
            for record in consumer:
                seen += [record.offset, *(other.offset for other in consumer.poll(0, 1))]
                consumer.commit()
                assert consumer.committed(key) == len(seen) == consumer.position(key)
                if len(seen) > 5:
                    break
        assert consumer.positions() == {key: len(seen)}
    assert seen == list(range(len(seen)))
    with Consumer(bootstrap=appliance.address, group_id=filled) as successor:
        assert successor.committed(key) == len(seen)


def test_a_loop_delivers_nothing_of_what_was_given_up_by_a_call_that_was_cut_off(
    appliance: EmbeddedAppliance, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_cut_off(_cursors: Any) -> None:
        monkeypatch.undo()
        raise EndsError

    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(filled, 0)])
        assert len(consumer.poll(LONG_MS, 1)) == 1
        monkeypatch.setattr(consumer._buffer, "keep_assigned", is_cut_off)
        with pytest.raises(EndsError):
            consumer.unsubscribe()
        assert consumer.assignment() == []
        with pytest.raises(InvalidRequestError, match="nothing is assigned"):
            next(iter(consumer))


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer], ids=lambda kind: kind.__name__)
def test_no_record_of_a_topic_comes_after_another_one_is_subscribed_to(
    appliance: EmbeddedAppliance, filled: str, kind: Any
) -> None:
    """Records that are buffered, and those that the group would still assign, stay for later."""
    other = f"{filled}-other"
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(other))
        producer.send(other, b"0").result(60)

    async def body() -> list[tuple[str, int]]:
        consumer = kind(bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest")
        came = []
        try:
            for topic in (filled, other, filled):
                await done(consumer.subscribe([topic]))
                (record,) = await done(consumer.poll(LONG_MS, 1))
                came.append((record.topic, record.offset))
        finally:
            await done(consumer.close())
        return came

    came = (ThreadWorld() if kind is Consumer else LoopWorld()).run(body())
    assert came == [(filled, 0), (other, 0), (filled, 1)]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Consumer, "`for record in consumer`"),
        (AsyncConsumer, "`for record in consumer`"),
        (AsyncConsumer, "`getone()`"),
    ],
    ids=["loop", "async-loop", "getone"],
)
def test_a_subscription_in_the_body_of_a_loop_holds_from_its_next_record_on(
    appliance: EmbeddedAppliance, filled: str, kind: Any, way: str
) -> None:
    """A loop polls four times a second, and before that when its partitions may change."""
    other = f"{filled}-other"
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(other))
        producer.send(other, b"0").result(60)

    async def body() -> list[tuple[str, int]]:
        consumer = kind(bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest")
        came: list[tuple[str, int]] = []
        later = [other, filled]

        async def goes_on(record: Record) -> bool:
            came.append((record.topic, record.offset))
            if later:
                await done(consumer.subscribe([later.pop(0)]))
                return True
            return False

        try:
            await done(consumer.subscribe([filled]))
            if way == "`getone()`":
                while await goes_on(await consumer.getone()):
                    pass
            elif kind is AsyncConsumer:
                async for record in consumer:
                    if not await goes_on(record):
                        break
            else:
                for record in consumer:
                    if not await goes_on(record):
                        break
        finally:
            await done(consumer.close())
        return came

    came = (ThreadWorld() if kind is Consumer else LoopWorld()).run(body())
    assert came == [(filled, 0), (other, 0), (filled, 1)]


def test_a_poll_inside_of_a_poll_is_refused_with_a_sentence(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    refused: list[str] = []

    def told(consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        try:
            consumer.poll(1_000)
        except Exception as error:
            refused.append(str(error))

    with Consumer(
        bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
    ) as consumer:
        consumer.subscribe([filled], on_assign=told, on_revoke=told)
        assert consumer.consume(COUNT, timeout=60)[-1].offset == COUNT - 1
    assert len(refused) == 2
    assert all("inside its own poll()" in sentence for sentence in refused[:1])
