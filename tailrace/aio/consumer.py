"""Reading from a coroutine: `tailrace.Consumer`, its methods awaited, and `async for record in consumer`.

Fetches go on while the program is elsewhere: their answers are taken in by the event loop, at most one for each partition.

Owner: one event loop's thread.
Invariants: no record is lost by a cancelled await, or by leaving an `async for`: what was taken ahead for it is handed out by the next call, or read again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.driver import IN_A_LOOP, Driver
from tailrace.aio.group_methods import AsyncGroupMethods
from tailrace.aio.loop_consumer import LoopConsumer
from tailrace.arguments import by_partition, name_list, partition_list, partitions_named, timeout_ms_of, timeout_s_of, whole
from tailrace.consumer import Consumer
from tailrace.errors import ClientClosedError, InvalidRequestError, RequestTimeoutError, TailraceError
from tailrace.other_names import OtherNames, refuse_keywords
from tailrace.records import OffsetAndTimestamp, Record, TopicBatch, TopicPartition, to_timestamp_us
from tailrace.settings import ConsumerOptions

if TYPE_CHECKING:
    from tailrace.aio.group import LoopGroup
    from tailrace.retry_later import RetryLater

NS_PER_MS = 1_000_000
Found = TypeVar("Found", list[Record], list[TopicBatch])


class AsyncConsumer(AsyncClient, AsyncGroupMethods, OtherNames):
    """`tailrace.Consumer` for coroutines: the same arguments, settings, methods and errors; each method is awaited.

        async with AsyncConsumer("orders", bootstrap="tcp://127.0.0.1:7420") as consumer:
            async for record in consumer:
                ...

    Several tasks may use it; each record goes to one of them. aiokafka's `getone` and `getmany` are here too.
    """

    _elsewhere = Consumer._elsewhere

    def __init__(
        self, *topics: str | Iterable[str] | Mapping[str, Any], bootstrap: str | None = None, **settings: Unpack[ConsumerOptions]
    ) -> None:
        """As `Consumer`; the topics are looked up by `start()`, or the first use. Raises InvalidSettingError."""
        first = topics[:1] if topics and isinstance(topics[0], Mapping) else ()
        self._topics = [name for given in topics[len(first) :] for name in name_list("topics", given)]
        self._consumer = LoopConsumer(*first, bootstrap=bootstrap, environment=IN_A_LOOP, **settings)
        self._driver = Driver(type(self).__name__, self._consumer, self._consumer.connection)
        self._ahead: deque[Record] = deque()
        """What was taken for `async for` and not yet handed out."""
        self._starting = asyncio.Lock()
        self._is_closing = False
        self._group: LoopGroup | None = None
        self._retries: RetryLater | None = None
        if self._consumer.group is not None:
            from tailrace.aio.group import LoopGroup

            self._group = LoopGroup(type(self).__name__, self._consumer, self._consumer.group, self._driver)
            names, self._topics = self._topics, []
            if names:
                self._consumer.subscribe(names)

    async def start(self) -> None:
        """Assign all partitions of the topics named at construction. Raises UnknownTopicError, NotReachableError; the consumer is closed then, as when a
        Consumer cannot be made.
        """
        self._driver.enter()
        try:
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def close(self, autocommit: bool = True) -> None:
        """As `Consumer.close`. Who waits for records gets ClientClosedError, an `async for` ends."""
        await self._close(autocommit, True)

    async def __aexit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        await self._close(True, error is None)

    async def _close(self, autocommit: bool, is_handled: bool) -> None:
        self._driver.enter_to_close()
        if self._is_closing:
            return
        self._is_closing = True
        try:
            if self._group is not None and self._consumer.connection.is_usable:
                self._group.enter_to_close()
                await self._group.close(list(self._consumer.assignment()), autocommit=autocommit, is_handled=is_handled)
        finally:
            self._end(self._consumer.close_without_group)
            if self._retries is not None:
                await asyncio.to_thread(self._retries.close)

    def __del__(self) -> None:
        if getattr(self, "_group", None) is not None and not self._is_closed:
            assert self._group is not None
            self._group.forget()
        super().__del__()

    async def _ready(self) -> None:
        self._driver.enter()
        if self._group is not None:
            self._group.enter()
        if not self._topics:
            return
        async with self._starting:
            names = self._topics
            if names:  # else another task was the first
                await self._operate(self._assign_all, names)
                if self._topics is names:  # no assign() came meanwhile
                    self._topics = []

    def _assign_all(self, topics: list[str]) -> None:
        if self._topics is not topics:
            return
        self._consumer.assign([TopicPartition(topic, number) for topic in topics for number in self._consumer.partitions_for(topic)])

    async def _use(self, operation: Callable[..., Any], /, *arguments: Any) -> Any:
        """An operation that knows of positions: what was taken ahead is given back before it."""
        await self._ready()
        self._give_back()
        return await self._operate(operation, *arguments)

    def _give_back(self, keys: Iterable[TopicPartition] | None = None) -> None:
        """What was taken ahead (of `keys` only) is read again."""
        wanted = None if keys is None else set(keys)
        first: dict[TopicPartition, int] = {}
        for _ in range(len(self._ahead)):
            record = self._ahead.popleft()
            key = TopicPartition(record.topic, record.partition)
            if wanted is None or key in wanted:
                first.setdefault(key, record.offset)
            else:
                self._ahead.append(record)
        for partition, offset in first.items():
            self._consumer.seek(partition, offset)
        if first:
            self._tell_ahead()

    def _tell_ahead(self) -> None:
        """What is ahead now is not to be committed as handed out."""
        if self._consumer.group is not None:
            self._consumer.group.progress.iterating(list(self._ahead), self._ahead)

    # ---- reading -----------------------------------------------------------------------------------------------------------------------

    async def _poll(self, look: Callable[[], Found], timeout_ms: float | None) -> Found:
        """What `look` finds, as soon as it finds something; empty when the time is up (None: never)."""
        await asyncio.sleep(0)  # records that are there already must not keep the loop's other tasks waiting
        deadline_ns = None if timeout_ms is None else self._consumer.now_ns() + int(timeout_ms_of(timeout_ms) * NS_PER_MS)
        if self._group is None:
            return await self._look_until(look, deadline_ns)
        self._group.begin_to_wait()
        try:
            return await self._look_until(look, deadline_ns)
        finally:
            self._group.end_wait()
            if not self._is_closed:
                self._group.settle()

    async def _look_until(self, look: Callable[[], Found], deadline_ns: int | None) -> Found:
        group = self._group
        while True:
            with self._driver.watching() as wait:
                looked_ns = self._consumer.now_ns()
                if group is not None:
                    await group.step(self._give_back)
                found = await self._driver.run(look)
                if group is not None:
                    group.go_on_waiting()
                    group.settle()
                if found or (deadline_ns is not None and self._consumer.now_ns() >= deadline_ns):
                    return found
                times = [at_ns for at_ns in (deadline_ns, self._consumer.look_again_ns(looked_ns)) if at_ns is not None]
                await wait(min(times, default=None))
            self._driver.enter()

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None, **others: Never) -> list[Record]:
        """Up to `max_records` records (default max_poll_records); awaits the first for at most `timeout_ms`. Empty when the time is up. Raises what
        `Consumer.poll` does.
        """
        if others:
            refuse_keywords("poll", others)
        return await self._poll_some((), timeout_ms, max_records)

    async def _poll_some(self, partitions: tuple[Any, ...], timeout_ms: float | None, max_records: int | None) -> list[Record]:
        await self._ready()
        limit = self._consumer.settings.max_poll_records if max_records is None else whole("max_records", max_records, 1)
        if partitions:
            self._give_back()
        wanted = set(partitions_named(partitions))
        return await self._poll(lambda: self._look(wanted, limit), timeout_ms)

    def _look(self, wanted: set[TopicPartition], limit: int) -> list[Record]:
        """What is there of the wanted partitions, of all when none is named."""
        consumer = self._consumer
        if self._ahead and not wanted:
            return [self._ahead.popleft() for _ in range(min(limit, len(self._ahead)))]
        paused = set(consumer.paused())
        others = [key for key in consumer.assignment() if key not in wanted and key not in paused] if wanted else []
        consumer.pause(*others)
        try:
            return consumer.poll(0, limit)
        finally:
            consumer.resume(*others)

    async def poll_arrow(self, timeout_ms: float = 0) -> list[TopicBatch]:
        """Whole batches that have come, columns untouched; awaits the first for at most `timeout_ms`. Raises what `poll` does."""
        await self._ready()
        self._give_back()
        return await self._poll(lambda: self._consumer.poll_arrow(0), timeout_ms)

    async def consume(self, num_messages: int = 1, timeout: float | None = -1.0) -> list[Record]:
        """Up to `num_messages` records: waits until there are as many or `timeout` seconds are over (-1, None: without end). Raises what `poll` does; what came
        before an error is handed out first, and what came before a cancellation is handed out by the next call.
        """
        now_ns = self._consumer.now_ns
        wanted = whole("num_messages", num_messages, 0)
        timeout_s = None if timeout == -1 else timeout_s_of(timeout)
        deadline_ns = None if timeout_s is None else now_ns() + int(timeout_s * 1e9)
        result: list[Record] = []
        try:
            while len(result) < wanted:
                left_ms = None if deadline_ns is None else max(0.0, (deadline_ns - now_ns()) / NS_PER_MS)
                found = await self._poll_some((), left_ms, wanted - len(result))
                if not found:
                    break
                result += found
        except TailraceError:
            if not result:
                raise
        except asyncio.CancelledError:
            self._ahead.extendleft(reversed(result))
            self._tell_ahead()
            raise
        return result

    async def getmany(
        self, *partitions: TopicPartition | list[TopicPartition], timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """`poll`, by aiokafka's name: records by partition; of `partitions` only, where some are named."""
        result: dict[TopicPartition, list[Record]] = {}
        for record in await self._poll_some(partitions, timeout_ms, max_records):
            result.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        return result

    async def getone(self, *partitions: TopicPartition | list[TopicPartition]) -> Record:
        """The next record; waits for one without end. Of `partitions` only, where some are named. Raises what `poll` does."""
        if partitions:
            return (await self._poll_some(partitions, None, 1))[0]
        await self._ready()
        return (await self._poll(self._look_for_one, None))[0]

    def _look_for_one(self) -> list[Record]:
        """The next record, if it is there. As many as one poll gives are taken ahead."""
        if not self._ahead:
            self._ahead.extend(self._consumer.poll())
            self._tell_ahead()
            if len(self._ahead) > 1:
                self._driver.wake_watchers()  # other tasks may have waited for these
        return [self._ahead.popleft()] if self._ahead else []

    def __aiter__(self) -> AsyncIterator[Record]:
        """Records without end, until the consumer is closed; waits for new ones."""
        return self

    async def __anext__(self) -> Record:
        if self._ahead and not self._is_closed:
            self._driver.enter()
            return self._ahead.popleft()
        try:
            return await self.getone()
        except ClientClosedError:
            if self._is_closed:
                raise StopAsyncIteration from None
            raise

    # ---- assignment and positions ----------------------------------------------------------------------------------------------------------

    async def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """As `Consumer.assign`, also in the place of the topics named at construction."""
        self._driver.enter()
        given = partition_list(partitions)
        self._topics = []
        await self._use(self._consumer.assign, given)
        self._driver.wake_watchers()

    async def assignment(self) -> list[TopicPartition]:
        """The partitions that are read."""
        await self._ready()
        return self._consumer.assignment()

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        return await self._operate(self._consumer.partitions_for, topic)

    async def topics(self) -> list[str]:
        """Names of all topics of the appliance, ascending."""
        return await self._operate(self._consumer.topics)

    async def pause(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out nothing of these until `resume`; nothing is lost."""
        await self._use(self._consumer.pause, *partitions)

    async def resume(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out records of these again."""
        await self._use(self._consumer.resume, *partitions)
        self._driver.wake_watchers()

    async def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        await self._ready()
        return self._consumer.paused()

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. Whether it exists shows at the next poll."""
        await self._use(self._consumer.seek, partition, offset)
        self._driver.wake_watchers()

    async def seek_to_beginning(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Go on at the first offset (of all assigned partitions when none is named)."""
        await self._use(self._consumer.seek_to_beginning, *partitions)
        self._driver.wake_watchers()

    async def seek_to_end(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Go on behind the last record (of all assigned partitions when none is named)."""
        await self._use(self._consumer.seek_to_end, *partitions)
        self._driver.wake_watchers()

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record that will be handed out."""
        position: int = await self._use(self._consumer.position, partition)
        return position

    async def lag(self, partition: TopicPartition) -> int:
        """How many offsets lie between the position and the end."""
        lag: int = await self._use(self._consumer.lag, partition)
        return lag

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition."""
        return await self._operate(self._consumer.beginning_offsets, partitions)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The high watermark of each partition: the offset behind the last record that can be read."""
        return await self._operate(self._consumer.end_offsets, partitions)

    async def highwater(self, partition: TopicPartition) -> int:
        """The high watermark of one partition, asked for now."""
        return await self._operate(self._consumer.highwater, partition)

    async def offsets_for_times(self, timestamps: Mapping[TopicPartition, Any]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after a time (datetime or int milliseconds), None where there is none."""
        result: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for key, when in by_partition("timestamps", timestamps, "{TopicPartition(topic, 0): datetime}").items():
            try:
                when_us = to_timestamp_us(when)
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(str(error)) from None
            start, found = await self._operate(self._consumer.find_time, key, when_us)
            if start >= 0 and found is None:
                found = await self._first_at_or_after(key, start, when_us)
            result[key] = found
        return result

    async def _first_at_or_after(self, key: TopicPartition, start: int, when_us: int) -> OffsetAndTimestamp | None:
        """Look through the batches from `start` on, where the appliance could not say (see `tailrace.time_search`)."""
        consumer, timeout_ms = self._consumer, self._consumer.settings.request_timeout_ms
        cursor, fetcher = await self._operate(consumer.search_from, key, start)
        end = await self.highwater(key)
        deadline_ns = consumer.now_ns() + timeout_ms * NS_PER_MS
        while cursor.position is not None and cursor.position < end:
            with self._driver.watching() as wait:
                looked_ns = consumer.now_ns()
                found = await self._operate(consumer.search_on, cursor, fetcher, when_us)
                if found is not None:
                    return found
                if consumer.now_ns() >= deadline_ns:
                    raise RequestTimeoutError(f"{key.topic}-{key.partition} could not be read to its end within {timeout_ms} ms")
                if cursor.position < end:
                    times = [deadline_ns, self._driver.connection.next_tick_ns(), cursor.retry_at_ns]
                    await wait(min(at_ns for at_ns in times if at_ns is not None and at_ns > looked_ns))
        return None

    # ---- the rest ------------------------------------------------------------------------------------------------------------------------

    async def metrics(self) -> dict[str, int]:
        """Counters since construction."""
        self._driver.enter()
        return self._consumer.metrics()
