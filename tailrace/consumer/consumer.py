"""The consumer: reads topics, as records or as Arrow batches.

One thread's: there is no lock and no helper thread; `poll` drives everything, and a fetch is always
under way while the caller works on what came. What waits is written as steps
(`tailrace.client.steps`), which `tailrace.aio.AsyncConsumer` takes in an event loop. Partitions are
given by `assign`, or all of the topics named at construction, or the group's share of them
(`tailrace.group`: such a consumer has a thread for its heartbeats, which touches nothing here).

Invariants: within a partition records come in offset order, each once, from the position on. Every
    way of reading delivers from one buffer (`tailrace.fetch.record_buffer`), as the last bytecode
    before the call returns: what ends a call otherwise leaves the position where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Unpack

from tailrace.admin.admin import partition_counts
from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.connection import NEVER_NS, Connection
from tailrace.client.kafka_names import (
    RENAMED_CONSUMER_METHODS,
    RenamedMethods,
    refuse_keywords,
    warn_if_seconds,
)
from tailrace.client.metadata_cache import MetadataCache
from tailrace.client.runtime import SYSTEM, Runtime
from tailrace.client.serdes import deserialized
from tailrace.client.settings import ConsumerOptions, ConsumerSettings, build, documented, merged
from tailrace.client.steps import Steps, T, Wait, call_json, operation, run
from tailrace.client.topic_metadata import TopicInfo
from tailrace.consumer.dead_letter_queue import Producers
from tailrace.consumer.group_api import GroupApi
from tailrace.consumer.offset_queries import OffsetQueries
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import (
    name_list,
    name_of,
    partition_list,
    partition_of,
    partitions_named,
    timeout_ms_of,
    timeout_s_of,
    whole,
)
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.fetcher import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from tailrace.consumer.retry_topic import RetryTopicProducer
    from tailrace.group.group_coordinator import ConsumerCoordinator

LOOP_POLL_NS = 1_000_000_000
"""A loop over records looks up at least so often, to see that the consumer was closed."""


@documented(ConsumerSettings)
class Consumer(GroupApi, OffsetQueries, RenamedMethods):
    """Reads topics, record by record or as Arrow batches. A context manager; for one thread at a
    time.

        with tailrace.Consumer("orders", bootstrap="tcp://127.0.0.1:7420",
            auto_offset_reset="earliest") as consumer: for record in consumer:
                print(record.offset, record.key, record.value)

    It reads all partitions of the topics that it is given, or what `assign` says, from the end on
    unless `auto_offset_reset` is "earliest". With a `group_id` it shares them with the group's
    other consumers, and begins where the group has committed. `poll` returns records, `poll_arrow`
    whole batches with their columns untouched. Settings are keyword arguments, and those that Kafka
    has are called as there. Every method of a closed consumer but `close` and `metrics` raises
    ClientClosedError.
    """

    _renamed: ClassVar[dict[str, str]] = RENAMED_CONSUMER_METHODS
    _taking_steps: ClassVar[frozenset[CodeType]]
    """The functions that take the steps of a consumer's operations."""

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ConsumerOptions],
    ) -> None:
        """`topics`: names, or a list of them; a dict first holds settings with Kafka's names
        (`{"bootstrap.servers": "localhost:7420"}`). Without topics `assign` follows. `bootstrap`:
        the appliance's address. `runtime`: the clock and the network; tests have their own.

        Raises InvalidSettingError before anything is opened; UnknownTopicError, and
        NotReachableError when no appliance answers within request_timeout_ms.
        """
        first = topics[0] if topics and isinstance(topics[0], Mapping) else None
        names = [
            name
            for given in topics[1 if first is not None else 0 :]
            for name in name_list("topics", given)
        ]
        given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
        self.settings = build(ConsumerSettings, merged(first, given))
        self._connection = Connection(
            self.settings.bootstrap_servers, self.settings.client_id, runtime, "consumer"
        )
        self._runtime = runtime
        self._now_ns = runtime.monotonic_ns
        self._buffer = RecordBuffer(_deserializer(self.settings))
        self._fetch_loop = FetchLoop(
            self._connection, self.settings, self._now_ns, self._offsets, self._buffer.first_offset
        )
        self._infos = MetadataCache(self._call)
        self._closed = False
        self._asking_count = 0
        """Callers that are in a call that asks for records; perhaps one that was interrupted."""
        self._group: ConsumerCoordinator | None = (
            None if self.settings.group_id is None else self._make_group(runtime)
        )
        self._retries: RetryTopicProducer | None = None
        self._producers = Producers(self.settings.bootstrap_servers, runtime)
        if names:
            try:
                self._run_steps(self._begin_with(names))
            except BaseException:
                self.close()
                raise

    def _make_group(self, runtime: Runtime) -> ConsumerCoordinator:
        from tailrace.group.group_coordinator import ConsumerCoordinator

        try:
            return ConsumerCoordinator(
                self, self._is_nested, self._connection, self.settings, runtime, self._fetch_loop,
                self._buffer, self._call,
                self._infos.as_assigned, self._all_topics,
            )  # fmt: skip
        except BaseException:
            self._connection.close()
            raise

    def _make_retries(self) -> RetryTopicProducer:
        from tailrace.consumer.retry_topic import RetryTopicProducer

        return RetryTopicProducer(
            self.settings,
            self._connection,
            self._fetch_loop,
            self._call,
            self._info,
            self._producers,
        )

    def _begin_with(self, names: list[str]) -> Steps[None]:
        """The topics named at construction."""
        if self._group is None:
            yield from self._read_all_of(names)
        else:
            from tailrace.group.rebalance_listener import RebalanceCallbacks
            from tailrace.group.subscription import subscription_of

            yield from self._group.subscribe(subscription_of(names, None), RebalanceCallbacks())

    def __enter__(self) -> Consumer:
        self._check_open()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._close(True, error is None)

    def close(self, autocommit: bool = True) -> None:
        """Commit (with enable_auto_commit, and `autocommit`), leave the group, end the connection.
        A second time it does nothing. A `with` block that ends by an exception commits nothing that
        the last call has delivered: it is read again. Raises what a listener raises; all is closed
        then.
        """
        self._close(autocommit, True)

    def _close(self, autocommit: bool, is_handled: bool) -> None:
        if self._closed:
            if not self._depth({Consumer._close.__code__}, sys._getframe(1)):
                # a close before may have been interrupted; one that is under way has called a
                # listener
                self._end()
            return
        try:
            self._closed = True
            self._run_steps(self._closing(autocommit, is_handled))
        finally:
            self._end()

    def _closing(self, autocommit: bool, is_handled: bool) -> Steps[None]:
        """All of closing that waits."""
        try:
            if self._group is not None and self._connection.is_usable:
                yield from self._group.close(autocommit=autocommit, is_handled=is_handled)
        finally:
            self._buffer.keep_assigned({})  # a loop over the records ends
        if self._retries is not None and self._connection.is_usable:
            yield from self._retries.close()

    def _end(self) -> None:
        self._connection.close()

    def _run_steps(self, steps: Steps[T], /) -> T:
        return run(steps, self._sleep_until)

    def _sleep_until(self, until_ns: int | None) -> None:
        self._connection.wait(
            NEVER_NS if until_ns is None else until_ns - self._now_ns(), self._fetch_loop.wake_fd
        )

    # ---- topics ----------------------------------------------------------------------------------

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(self._connection, api, request, self.settings.request_timeout_ms)

    def _check_open(self) -> None:
        """Raises ClientClosedError, also in a child of the process that made the consumer."""
        self._connection.check_usable()

    def _info(self, topic: str) -> Steps[TopicInfo]:
        self._check_open()
        return self._infos.of(topic)

    @operation
    def partitions_for(self, topic: str) -> Steps[list[int]]:
        """The topic's partition numbers as they are now, ascending. Raises UnknownTopicError,
        InvalidRequestError.
        """
        return self._partitions_for(topic)

    def _partitions_for(self, topic: str) -> Steps[list[int]]:
        self._check_open()
        return list(
            range(len((yield from self._infos.refresh(name_of("topic", topic))).partitions))
        )

    @operation
    def topics(self) -> Steps[list[str]]:
        """Names of all topics of the appliance, ascending."""
        return self._all_topics()

    def _all_topics(self) -> Steps[list[str]]:
        self._check_open()
        return list((yield from partition_counts(self._call)))

    # ---- assignment ------------------------------------------------------------------------------

    @operation
    def assign(self, partitions: Sequence[TopicPartition]) -> Steps[None]:
        """Read exactly these partitions; those assigned already go on where they are.

        With a group_id they begin where the group has committed, no membership is needed, and what
        was delivered of those that are given up is committed (enable_auto_commit). What the group
        retries of them (`retry_later`) is read too; `assignment` has those partitions. Raises
        UnknownTopicError, PartitionOutOfRangeError, and InvalidRequestError, also while it is
        subscribed.
        """
        return self._assign(partitions)

    def _assign(self, partitions: Sequence[TopicPartition]) -> Steps[None]:
        self._check_open()
        requested = partition_list(partitions)
        self._check_not_subscribed()
        infos = {}
        if self._group is not None and requested:
            requested = list(
                dict.fromkeys(requested + (yield from self._group.retries_of(requested)))
            )
        for key in requested:
            infos[key] = yield from self._infos.with_partition(key)
        self._check_not_subscribed()
        given_up = [key for key in self._fetch_loop.cursors if key not in infos]
        if self._group is not None and given_up:
            yield from self._group.position_tracker.commit_before_revoking(given_up)
        cursors: dict[TopicPartition, PartitionPosition] = {}
        for key, info in infos.items():
            cursor = self._fetch_loop.cursors.get(key)
            if cursor is None or cursor.info.topic_id != info.topic_id:
                cursor = PartitionPosition(key, info)
                if self._group is not None:
                    self._group.read_as_retries(cursor)
            cursors[key] = cursor
        if self._group is not None:
            self._group.read_from_committed(
                [
                    cursor
                    for key, cursor in cursors.items()
                    if self._fetch_loop.cursors.get(key) is not cursor
                ]
            )
        self._fetch_loop.cursors = cursors
        self._buffer.keep_assigned(cursors)

    def _check_not_subscribed(self) -> None:
        if self._group is not None and self._group.is_subscribed:
            raise InvalidRequestError(
                "the group decides what this consumer reads; write unsubscribe() before assign()"
            )

    def _read_all_of(self, topics: list[str]) -> Steps[None]:
        keys = []
        for topic in topics:
            keys += [
                TopicPartition(topic, number) for number in (yield from self._partitions_for(topic))
            ]
        yield from self._assign(keys)

    def assignment(self) -> list[TopicPartition]:
        """What is read: the partitions of the topics at construction, those of the last `assign`,
        or the group's share of them.
        """
        self._check_open()
        return list(self._fetch_loop.cursors)

    def _cursor(self, partition: TopicPartition) -> PartitionPosition:
        self._check_open()
        key = partition_of(partition)
        cursor = self._fetch_loop.cursors.get(key)
        if cursor is None:
            raise InvalidRequestError(
                f"{key.topic}-{key.partition} is not assigned to this "
                f"consumer{self._why_not_assigned()}"
            )
        return cursor

    def _why_not_assigned(self) -> str:
        """For a member that nothing is assigned to: when that comes."""
        if self._group is None or not self._group.is_subscribed or self._fetch_loop.cursors:
            return ""
        return (
            ": its group assigns partitions while poll() runs. Poll until assignment() has "
            "them, or do this in on_partitions_assigned of a listener"
        )

    def pause(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out nothing of these (each by itself, or one list) until `resume`; nothing is lost.
        Raises InvalidRequestError for one that is not assigned.
        """
        cursors = self._named_cursors(partitions)
        for cursor in cursors:
            cursor.pause(by_user=True)
        self._buffer.withdraw(
            self._fetch_loop.cursors, [cursor.key for cursor in cursors], rows_too=False
        )

    def resume(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out these again (each by itself, or one list). Raises InvalidRequestError for one
        that is not assigned.
        """
        for cursor in self._named_cursors(partitions):
            cursor.pause(by_user=False)

    def _named_cursors(self, partitions: tuple[Any, ...]) -> list[PartitionPosition]:
        self._check_open()
        return [self._cursor(partition) for partition in partitions_named(partitions)]

    def paused(self) -> list[TopicPartition]:
        """Which of the assigned partitions are paused."""
        self._check_open()
        return [key for key, cursor in self._fetch_loop.cursors.items() if cursor.is_paused_by_user]

    # ---- positions -------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. Whether it exists shows at the next poll. Raises
        InvalidRequestError.
        """
        cursor = self._cursor(partition)
        self._go_on_at(cursor, whole("offset", offset, 0))

    def _go_on_at(self, cursor: PartitionPosition, offset: int) -> None:
        if self._group is not None:
            self._group.position_tracker.on_seek(cursor.key)
        self._buffer.move(cursor, offset)
        self._fetch_loop.on_seek()

    @operation
    def seek_to_beginning(self, *partitions: TopicPartition | list[TopicPartition]) -> Steps[None]:
        """Go on at the first offset (of all assigned partitions when none is named)."""
        return self._seek_all(partitions, "earliest")

    @operation
    def seek_to_end(self, *partitions: TopicPartition | list[TopicPartition]) -> Steps[None]:
        """Go on behind the last record (of all assigned partitions when none is named)."""
        return self._seek_all(partitions, "latest")

    def _seek_all(self, partitions: tuple[Any, ...], at: str) -> Steps[None]:
        keys = (
            [cursor.key for cursor in self._named_cursors(partitions)]
            if partitions
            else self.assignment()
        )
        if not keys and (why := self._why_not_assigned()):
            raise InvalidRequestError(f"nothing is assigned to this consumer{why}")
        offsets = yield from self._offsets(keys, at)
        for key, offset in offsets.items():
            self._go_on_at(self._cursor(key), offset)

    @operation
    def position(self, partition: TopicPartition) -> Steps[int]:
        """The offset of the next record that will be delivered. Raises InvalidRequestError for a
        partition that is not assigned.
        """
        return self._position(self._cursor(partition))

    def _position(self, cursor: PartitionPosition) -> Steps[int]:
        if self._group is not None:
            yield from self._group.decide(cursor)
        yield from self._fetch_loop.decide_positions([cursor])
        first = self._buffer.first_offset(cursor.key)
        if first is not None:
            return first
        if cursor.position is None:
            assert cursor.error is not None
            raise cursor.error
        return cursor.position  # also where something is damaged: the next poll says so

    def positions(self) -> dict[TopicPartition, int]:
        """Of each assigned partition the offset of the next record that will be delivered, by what
        was delivered; those that are not known yet are left out. It is what `commit` without
        offsets commits.
        """
        self._check_open()
        first = self._buffer.first_offsets()
        found = {
            key: first.get(key, cursor.position) for key, cursor in self._fetch_loop.cursors.items()
        }
        return {key: offset for key, offset in found.items() if offset is not None}

    # ---- reading ---------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[Record]:
        """Up to `max_records` records (default max_poll_records), which may be of several
        partitions; waits for the first for at most `timeout_ms` milliseconds. Empty when the time
        is up.

        Raises CorruptBatchError, RecordTooLargeError (a batch that unpacks to more than
        `max_decompressed_batch_bytes`), InvalidRecordError (a deserializer failed),
        OffsetOutOfRangeError (auto_offset_reset="none"), NotReachableError, UnknownTopicError. The
        first three name the offsets; the position stays before them until `seek`.
        """
        limit, deadline_ns = self._poll_arguments(timeout_ms, max_records, others)
        self._have_records(1, limit, deadline_ns)
        return self._buffer.deliver(limit)

    def _poll_arguments(
        self, timeout_ms: float, max_records: int | None, others: Mapping[str, Any]
    ) -> tuple[int, int]:
        """(limit, deadline) of a poll."""
        if others:
            refuse_keywords("poll", others)
        limit = (
            self.settings.max_poll_records
            if max_records is None
            else whole("max_records", max_records, 1)
        )
        self._check_open()
        if type(timeout_ms) is float:
            warn_if_seconds(timeout_ms)
        return limit, self._now_ns() + int(timeout_ms_of(timeout_ms) * 1_000_000)

    def consume(self, num_messages: int = 1, timeout: float | None = -1.0) -> list[Record]:
        """Up to `num_messages` records, as confluent-kafka's: waits until there are as many or
        `timeout` seconds are over (-1, None: without end). Raises what `poll` does; what came
        before an error is delivered first, and what came before an exception of another kind by the
        next call.
        """
        requested, deadline_ns = self._consume_arguments(num_messages, timeout)
        if requested:
            self._have_records(requested, requested, deadline_ns)
        return self._buffer.deliver(requested)

    def _consume_arguments(
        self, num_messages: int, timeout: float | None
    ) -> tuple[int, int | None]:
        """(how many, deadline) of a consume."""
        requested = whole("num_messages", num_messages, 0)
        self._check_open()
        timeout_s = None if timeout == -1 else timeout_s_of(timeout)
        return requested, None if timeout_s is None else self._now_ns() + int(timeout_s * 1e9)

    def _have_records(self, requested: int, limit: int, deadline_ns: int | None) -> None:
        """Have `requested` records in the buffer, and up to `limit`, or as many as came in time."""
        group = self._group
        if group is None and not self._asking_count:  # as below, where nothing else is to be done
            try:
                self._asking_count = 1
                count = self._fill(limit)
                if count < requested:
                    self._run_steps(self._gather(requested, limit, deadline_ns))
                self._fetch_loop.ask_ahead(-1 if count <= limit else self._buffer.batch_count)
            finally:
                self._asking_count = 0
            return
        self._check_may_ask()
        try:
            self._begin_poll()
            is_quiet = group is None or group.is_quiet(self._now_ns())
            count = self._fill(limit) if is_quiet else 0
            if count < requested:
                self._run_steps(self._gather(requested, limit, deadline_ns))
            self._fetch_loop.ask_ahead(-1 if count <= limit else self._buffer.batch_count)
        finally:
            self._end_poll()

    def _begin_poll(self) -> None:
        """The program asks for records."""
        if self._group is not None:
            self._group.begin_poll()
        self._asking_count += 1

    def _end_poll(self) -> None:
        self._asking_count = max(0, self._asking_count - 1)
        if self._group is not None:
            self._group.end_poll()

    def _check_may_ask(self) -> None:
        """Raises InvalidRequestError in a listener, a callback or a deserializer that such a call,
        or a step of the group, calls.
        """
        is_busy = self._asking_count or (self._group is not None and self._group.is_in_step)
        if is_busy and self._depth(
            self._taking_steps | {Consumer._have_records.__code__}, sys._getframe(2)
        ):
            raise InvalidRequestError(
                "this consumer is being asked for records, and calls this code meanwhile (a "
                "listener, a callback or a deserializer): let it return, "
                "and read where poll() was called"
            )

    def _depth(self, codes: Collection[CodeType], frame: FrameType | None) -> int:
        """How many functions of these, of this consumer, lie on the stack from `frame` on. It tells
        the truth, whatever an interrupt has left behind.
        """
        count, users = 0, (self, self._public())
        while frame is not None:
            if frame.f_code in codes and frame.f_locals.get("self") in users:
                count += 1
            frame = frame.f_back
        return count

    def _is_nested(self) -> bool:
        """Of an operation under way: whether another one of this consumer called the code that
        called it.
        """
        return self._depth(self._taking_steps, sys._getframe(1)) > 1

    def _fill(self, limit: int) -> int:
        """Have up to `limit` records in the buffer, of what has come; returns how many there are.
        Raises InvalidRecordError where the first cannot be had.
        """
        buffer, fetch_loop = self._buffer, self._fetch_loop
        count = buffer.gather(limit, fetch_loop.cursors)
        while count < limit:
            cursor = fetch_loop.next_cursor()
            if cursor is None:
                break
            buffer.take_batch(cursor, self.settings)
            before, count = count, buffer.gather(limit, fetch_loop.cursors)
            if count == before:
                break
        return count

    def _gather(self, requested: int, limit: int, deadline_ns: int | None) -> Steps[None]:
        """`_have_records`, which waits. What stands behind an error is read when the error was
        raised; what stands before it is delivered first.
        """
        group, count = self._group, 0
        self._buffer.has_failure = False
        while True:
            if group is not None:
                yield from group.step()
            try:
                count = self._fill(limit)
                if count >= requested or (count and self._buffer.has_failure):
                    return
                for cursor in () if count else list(self._fetch_loop.cursors.values()):
                    if cursor.error is not None and not cursor.buffered and not cursor.is_paused:
                        yield from self._fetch_loop.raise_or_reset(cursor)
                fetch = self._fetch_loop.poll if group is None else group.poll
                if not (
                    yield from fetch(
                        deadline_ns, partial(self._has_more_than, count, self._buffer.batch_count)
                    )
                ):
                    return
            except TailraceError as error:
                if not count or (group is not None and error is group.raised):
                    raise
                return

    def _has_more_than(self, record_count: int, batch_count: int) -> bool:
        """Whether another task has taken something into the buffer."""
        return self._buffer.batch_count != batch_count or len(self._buffer) > record_count

    def _gather_of(
        self, requested: Collection[TopicPartition], limit: int, deadline_ns: int | None
    ) -> Steps[None]:
        """`_gather`, of some partitions only."""
        fetch_loop = self._fetch_loop
        while True:
            if self._group is not None:
                yield from self._group.step()
            others = [
                cursor
                for key, cursor in fetch_loop.cursors.items()
                if key not in requested and not cursor.is_paused_by_user
            ]
            try:
                for cursor in others:
                    cursor.pause(by_user=True)
                count = self._fill(limit)
            finally:
                for cursor in others:
                    cursor.pause(by_user=False)
            now_ns = self._now_ns()
            if count or (deadline_ns is not None and now_ns >= deadline_ns):
                return
            yield from (fetch_loop if self._group is None else self._group).poll(now_ns, _never)
            yield Wait(
                fetch_loop.retry_ns(fetch_loop.fetcher, fetch_loop.cursors.values(), deadline_ns)
            )
            self._connection.process()

    def poll_arrow(self, timeout_ms: float = 0) -> list[TopicBatch]:
        """Whole batches that have come, columns untouched; waits for the first for at most
        `timeout_ms` milliseconds. A batch that the position lies in begins at the position.
        Deserializers are not asked. Raises what `poll` does.
        """
        _, deadline_ns = self._poll_arguments(timeout_ms, None, {})
        self._check_may_ask()
        try:
            self._begin_poll()
            self._run_steps(self._gather_arrow(deadline_ns))
        finally:
            self._end_poll()
        return self._buffer.deliver_batches()

    def _gather_arrow(self, deadline_ns: int | None) -> Steps[None]:
        """Have batches in the buffer. What `poll` has decoded of one comes again as a batch."""
        group, fetch_loop, buffer = self._group, self._fetch_loop, self._buffer
        if group is not None:
            yield from group.step()
        if not buffer.has_batches:
            buffer.withdraw(fetch_loop.cursors)
            fetch_loop.on_seek()
            if not (
                yield from (fetch_loop if group is None else group).poll(
                    deadline_ns, partial(getattr, buffer, "has_batches")
                )
            ):
                return
        while (cursor := fetch_loop.next_cursor()) is not None:
            buffer.take_arrow(cursor, self.settings)
            if cursor.error is not None and not buffer.has_batches:
                yield from fetch_loop.raise_or_reset(cursor)
        fetch_loop.ask_ahead()

    def __iter__(self) -> Iterator[Record]:
        """Records without end: waits for new ones, until the consumer is closed. Raises what `poll`
        does. A `commit` on the way is of the records so far, and what is left of a loop is
        delivered by the next one, or by any other call that reads, also from inside the loop.
        """
        self._check_open()
        return self._without_end()

    def _without_end(self) -> Iterator[Record]:
        buffer, limit = self._buffer, self.settings.max_poll_records
        while True:
            yield from buffer.iterator
            if self._closed:
                return
            self._check_open()
            self._have_records(1, limit, self._now_ns() + LOOP_POLL_NS)

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, batches_consumed, bytes_consumed,
        fetches.
        """
        buffer = self._buffer
        return {
            "records_consumed": buffer.record_count, "batches_consumed": buffer.batch_count,
            "bytes_consumed": buffer.byte_count,
            "fetches": self._fetch_loop.fetcher.fetch_count,
        }  # fmt: skip


Consumer._taking_steps = frozenset({Consumer._run_steps.__code__})


def _never() -> bool:
    return False


def _deserializer(settings: ConsumerSettings) -> Any:
    """What a record buffer takes; None: there are no deserializers."""
    if settings.key_deserializer is None and settings.value_deserializer is None:
        return None
    return partial(
        deserialized,
        key_deserializer=settings.key_deserializer,
        value_deserializer=settings.value_deserializer,
    )
