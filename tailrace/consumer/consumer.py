"""The consumer: reads topics, as records or as Arrow batches.

It has no lock and no helper thread. `poll` does all work, and a fetch is always in flight while the
program processes records. Operations that wait are written as steps
(`tailrace.client.connections.steps`), which `tailrace.aio.AsyncConsumer` runs in an event loop.
Partitions are assigned by `assign`, by the topics at construction (all of theirs), or by the group
(`tailrace.group`: such a consumer has a thread for its heartbeats, which touches nothing here).

Owner: one thread uses a Consumer.

Invariants:
- Within a partition records are delivered in offset order, each once, from the position on.
- Every way of reading delivers from one buffer (`tailrace.fetch.record_buffer`), by the last
  bytecode before the call returns. A call that ends by an exception leaves the position where it
  was.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Unpack

from tailrace.admin.topic_list import partition_counts
from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.config.from_context import FromContext
from tailrace.client.config.kafka_names import (
    RENAMED_CONSUMER_METHODS,
    RenamedMethods,
    refuse_keywords,
    warn_if_seconds,
)
from tailrace.client.config.setting_fields import build, documented, merged
from tailrace.client.config.settings import ConsumerOptions, ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import NEVER_NS, SYSTEM, Runtime
from tailrace.client.connections.steps import Steps, T, call_json, operation, run
from tailrace.client.records.serdes import deserialized
from tailrace.client.topics.metadata_cache import MetadataCache
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.client.tracing.setting import read_spans_of
from tailrace.consumer.group_api import GroupApi
from tailrace.consumer.offset_queries import OffsetQueries
from tailrace.consumer.poll_loop import PollLoop
from tailrace.consumer.subscription_state import SubscriptionState
from tailrace.core.errors import InvalidRequestError
from tailrace.core.loop_end import program_frame
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import (
    name_list,
    name_of,
    partition_list,
    timeout_ms_of,
    timeout_s_of,
    whole,
)
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.group.dead_letter_queue import Producers
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from tailrace.consumer.retry_topic import RetryTopicProducer
    from tailrace.group.group_coordinator import ConsumerCoordinator

LOOP_POLL_NS = 1_000_000_000
"""The longest wait of a loop over records before it checks whether the consumer was closed."""


@documented(ConsumerSettings)
class Consumer(GroupApi, OffsetQueries, FromContext, RenamedMethods):
    """Reads topics, record by record or as Arrow batches. A context manager; for one thread at a
    time.

        with tailrace.Consumer("orders", bootstrap=address, group_id="billing") as consumer:
            for record in consumer:
                print(record.offset, record.key, record.value)

    It reads all partitions of its topics, or those of `assign`, from the end on unless
    `auto_offset_reset` is "earliest". With a `group_id` it shares the partitions with the group's
    other consumers, and begins at the committed offsets. `poll` returns records, `poll_arrow` whole
    batches with their columns. Settings are keyword arguments, with Kafka's names where Kafka has
    them. After `close` every method but `close` and `metrics` raises ClientClosedError.
    """

    _renamed: ClassVar[dict[str, str]] = RENAMED_CONSUMER_METHODS
    _taking_steps: ClassVar[frozenset[CodeType]]
    """The functions that run the steps of a consumer's operations."""

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ConsumerOptions],
    ) -> None:
        """Connect, and read `topics`: names, or a list of them. A dict in front holds settings by
        Kafka's names (`{"bootstrap.servers": "localhost:7420"}`). Without topics call `assign` or
        `subscribe`. `bootstrap` is the appliance's address. `runtime` is the clock and the network,
        which tests replace.

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
        self._spans = read_spans_of(self.settings)
        self._connection = Connection(
            self.settings.bootstrap_servers, self.settings.client_id, runtime, "consumer"
        )
        self._runtime = runtime
        self._now_ns = runtime.monotonic_ns
        self._buffer = RecordBuffer(
            _deserializer(self.settings), notes_last=self.settings.group_id is not None
        )
        self._fetch_loop = FetchLoop(
            self._connection, self.settings, self._now_ns, self._offsets, self._buffer.first_offset
        )
        self._infos = MetadataCache(self._call)
        self._closed = False
        self._group: ConsumerCoordinator | None = (
            None if self.settings.group_id is None else self._make_group(runtime)
        )
        self._state = SubscriptionState(
            self._connection,
            self._fetch_loop,
            self._buffer,
            self._group,
            self._infos,
            self._offsets,
        )
        self._poll_loop = PollLoop(
            self._connection,
            self.settings,
            self._fetch_loop,
            self._buffer,
            self._group,
            self._now_ns,
        )
        self._retries: RetryTopicProducer | None = None
        self._producers = Producers(self.settings.bootstrap_servers, runtime, self.settings.tracing)
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
        """Read the topics named at construction."""
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
        """Commit (with enable_auto_commit and `autocommit`), leave the group, close the connection.
        A repeated call does nothing. A `with` block that ends by an exception does not commit the
        records of the last call, which are read again. Raises what a listener raises, after
        closing.
        """
        self._close(autocommit, True)

    def _close(self, autocommit: bool, is_handled: bool) -> None:
        if self._closed:
            if not self._depth({Consumer._close.__code__}, sys._getframe(1)):
                # An earlier close may have been interrupted. One in progress has called a listener.
                self._end()
            return
        try:
            self._closed = True
            self._run_steps(self._closing(autocommit, is_handled))
        finally:
            self._end()

    def _closing(self, autocommit: bool, is_handled: bool) -> Steps[None]:
        """The steps of closing that wait."""
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
        """Raise ClientClosedError after `close`, and in a child of the process that made the
        consumer.
        """
        self._connection.check_usable()

    def _info(self, topic: str) -> Steps[TopicInfo]:
        self._check_open()
        return self._infos.of(topic)

    @operation
    def partitions_for(self, topic: str) -> Steps[list[int]]:
        """The topic's current partition numbers, ascending. Raises UnknownTopicError,
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
        """The names of all topics, ascending."""
        return self._all_topics()

    def _all_topics(self) -> Steps[list[str]]:
        self._check_open()
        return list((yield from partition_counts(self._call)))

    # ---- assignment ------------------------------------------------------------------------------

    @operation
    def assign(self, partitions: Sequence[TopicPartition]) -> Steps[None]:
        """Read exactly these partitions. Those that were assigned before keep their positions.

        With a group_id they begin at the group's committed offsets, without membership in the
        group. Delivered records of partitions that are given up are committed (enable_auto_commit).
        The partitions of the group's retry topics (`retry_later`) are added, and `assignment` has
        them. Raises UnknownTopicError, PartitionOutOfRangeError, and InvalidRequestError, also
        after `subscribe`.
        """
        return self._assign(partitions)

    def _assign(self, partitions: Sequence[TopicPartition]) -> Steps[None]:
        self._check_open()
        yield from self._state.assign(partition_list(partitions))

    def _read_all_of(self, topics: list[str]) -> Steps[None]:
        keys = []
        for topic in topics:
            keys += [
                TopicPartition(topic, number) for number in (yield from self._partitions_for(topic))
            ]
        yield from self._assign(keys)

    def assignment(self) -> list[TopicPartition]:
        """The assigned partitions: of the topics at construction, of the last `assign`, or of the
        group's assignment.
        """
        self._check_open()
        return list(self._fetch_loop.cursors)

    def _cursor(self, partition: TopicPartition) -> PartitionPosition:
        return self._state.cursor(partition)

    def pause(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Stop delivering these partitions (single ones, or one list) until `resume`. No record is
        lost. Raises InvalidRequestError for one that is not assigned.
        """
        self._state.pause(partitions)

    def resume(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Deliver these partitions (single ones, or one list) again. Raises InvalidRequestError for
        one that is not assigned.
        """
        self._state.resume(partitions)

    def paused(self) -> list[TopicPartition]:
        """The paused partitions."""
        self._check_open()
        return [key for key, cursor in self._fetch_loop.cursors.items() if cursor.is_paused_by_user]

    # ---- positions -------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Move the position to `offset`. If it does not exist, the next poll finds that. Raises
        InvalidRequestError, and UnknownTopicIdError if `partition` has the topic of a record
        (`record.topic`) that was deleted and made again.
        """
        self._state.seek(self._state.cursor_to_seek(partition), whole("offset", offset, 0))

    @operation
    def seek_to_beginning(self, *partitions: TopicPartition | list[TopicPartition]) -> Steps[None]:
        """Move to the first offset of these partitions; none named: of all."""
        return self._state.seek_all(partitions, "earliest")

    @operation
    def seek_to_end(self, *partitions: TopicPartition | list[TopicPartition]) -> Steps[None]:
        """Move behind the last record of these partitions; none named: of all."""
        return self._state.seek_all(partitions, "latest")

    @operation
    def position(self, partition: TopicPartition) -> Steps[int]:
        """The offset of the next record to deliver. Raises InvalidRequestError for a partition that
        is not assigned.
        """
        return self._position(self._cursor(partition))

    def _position(self, cursor: PartitionPosition) -> Steps[int]:
        return self._state.position(cursor)

    def positions(self) -> dict[TopicPartition, int]:
        """The offset of the next record to deliver, for each assigned partition whose position is
        known. `commit` without offsets commits these.
        """
        self._check_open()
        return self._state.positions()

    # ---- reading ---------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[Record]:
        """Return up to `max_records` records (default max_poll_records), perhaps of several
        partitions. Waits for the first for at most `timeout_ms` milliseconds. The list is empty
        after a timeout.

        Raises CorruptBatchError, RecordTooLargeError (a batch decompresses to more than
        `max_decompressed_batch_bytes`), InvalidRecordError (a deserializer failed),
        OffsetOutOfRangeError (auto_offset_reset="none"), NotReachableError, UnknownTopicError. The
        first three name the offsets, and the position stays before them until `seek`.
        """
        limit, deadline_ns = self._poll_arguments(timeout_ms, max_records, others)
        if self._spans is None:
            self._have_records(1, limit, deadline_ns)
        else:
            with self._spans.receiving(partial(self._buffer.first, limit)):
                self._have_records(1, limit, deadline_ns)
        return self._buffer.deliver(limit)

    def _poll_arguments(
        self, timeout_ms: float, max_records: int | None, others: Mapping[str, Any]
    ) -> tuple[int, int]:
        """(limit, deadline in ns) of a poll."""
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
        """Return up to `num_messages` records, as in confluent-kafka: waits until there are as
        many, or for `timeout` seconds (-1, None: without limit). Raises what `poll` does. Records
        before an error are delivered first. Records that came before an exception of another kind
        are delivered by the next call.
        """
        requested, deadline_ns = self._consume_arguments(num_messages, timeout)
        if requested and self._spans is None:
            self._have_records(requested, requested, deadline_ns)
        elif requested and self._spans is not None:
            with self._spans.receiving(partial(self._buffer.first, requested)):
                self._have_records(requested, requested, deadline_ns)
        return self._buffer.deliver(requested)

    def _consume_arguments(
        self, num_messages: int, timeout: float | None
    ) -> tuple[int, int | None]:
        """(number of records, deadline in ns) of a consume."""
        requested = whole("num_messages", num_messages, 0)
        self._check_open()
        timeout_s = None if timeout == -1 else timeout_s_of(timeout)
        return requested, None if timeout_s is None else self._now_ns() + int(timeout_s * 1e9)

    def _have_records(self, requested: int, limit: int, deadline_ns: int | None) -> None:
        """Buffer at least `requested` and up to `limit` records, or those that come in time."""
        group, poll_loop = self._group, self._poll_loop
        if group is None and not poll_loop.active_count:
            # The fast path: the same as below, without a group and without a call in progress.
            try:
                poll_loop.active_count = 1
                count = poll_loop.fill(limit)
                if count < requested:
                    self._run_steps(poll_loop.gather(requested, limit, deadline_ns))
                self._fetch_loop.ask_ahead(-1 if count <= limit else self._buffer.batch_count)
            finally:
                poll_loop.active_count = 0
            return
        self._check_may_ask()
        try:
            poll_loop.begin()
            is_quiet = group is None or group.is_quiet(self._now_ns())
            count = poll_loop.fill(limit) if is_quiet else 0
            if count < requested:
                self._run_steps(poll_loop.gather(requested, limit, deadline_ns))
            self._fetch_loop.ask_ahead(-1 if count <= limit else self._buffer.batch_count)
        finally:
            poll_loop.end()

    def _check_may_ask(self) -> None:
        """Raise InvalidRequestError in a listener, a callback or a deserializer that a poll, or a
        step of the group, has called.
        """
        is_busy = self._poll_loop.active_count or (
            self._group is not None and self._group.step_lock.is_locked
        )
        if is_busy and self._depth(
            self._taking_steps | {Consumer._have_records.__code__}, sys._getframe(2)
        ):
            raise InvalidRequestError(
                "this consumer cannot be read inside its own poll(): a listener, a callback or a "
                "deserializer, which poll() has called, asks for records. Let it return, and read "
                "where poll() was called"
            )

    def _depth(self, codes: Collection[CodeType], frame: FrameType | None) -> int:
        """The number of stack frames from `frame` on that run one of these functions for this
        consumer. It does not depend on state that an interrupt may have left behind.
        """
        count, users = 0, (self, self._public())
        while frame is not None:
            if frame.f_code in codes and frame.f_locals.get("self") in users:
                count += 1
            frame = frame.f_back
        return count

    def _is_nested(self) -> bool:
        """True if the running operation was called by code that another operation of this consumer
        called.
        """
        return self._depth(self._taking_steps, sys._getframe(1)) > 1

    def poll_arrow(self, timeout_ms: float = 0) -> list[TopicBatch]:
        """Return whole batches with their columns. Waits for the first for at most `timeout_ms`
        milliseconds. A batch that contains the position begins at the position. Deserializers are
        not called. Raises what `poll` does.
        """
        _, deadline_ns = self._poll_arguments(timeout_ms, None, {})
        self._check_may_ask()
        gathering = self._poll_loop.gather_batches(deadline_ns)
        if self._spans is not None:
            gathering = self._spans.receiving_batches(gathering, self._buffer.first_batches)
        try:
            self._poll_loop.begin()
            self._run_steps(gathering)
        finally:
            self._poll_loop.end()
        return self._buffer.deliver_batches()

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records without end, until the consumer is closed. Raises what `poll` does.
        A `commit` in the loop commits the records up to the current one. Records that the loop did
        not take are delivered by the next loop or call, also by one inside the loop. With a group
        it polls at least four times a second, and for each record that takes longer.
        """
        self._check_open()
        return self._without_end()

    def _without_end(self) -> Iterator[Record]:
        buffer, poll_loop = self._buffer, self._poll_loop
        loop_span = None if self._spans is None else self._spans.loop()
        try:
            while True:
                buffer.follow(self._fetch_loop.cursors)
                yield from poll_loop.loop_part(loop_span)
                if loop_span is not None:
                    loop_span.end()
                if self._closed:
                    return
                self._check_open()
                self._have_records(1, poll_loop.loop_limit, self._now_ns() + LOOP_POLL_NS)
        except GeneratorExit:
            if loop_span is not None:
                loop_span.end_dropped(program_frame())
            raise
        finally:
            if loop_span is not None:
                loop_span.end()

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, batches_consumed, bytes_consumed, fetches,
        throttled (waits for quotas) and throttled_ms.
        """
        buffer = self._buffer
        return {
            "records_consumed": buffer.record_count, "batches_consumed": buffer.batch_count,
            "bytes_consumed": buffer.byte_count,
            "fetches": self._fetch_loop.fetcher.fetch_count,
            "throttled": self._connection.throttled_count,
            "throttled_ms": self._connection.throttled_ms,
        }  # fmt: skip


Consumer._taking_steps = frozenset({Consumer._run_steps.__code__})


def _deserializer(settings: ConsumerSettings) -> Any:
    """The deserializer for the record buffer; None: records are delivered as stored."""
    if settings.key_deserializer is None and settings.value_deserializer is None:
        return None
    return partial(
        deserialized,
        key_deserializer=settings.key_deserializer,
        value_deserializer=settings.value_deserializer,
    )
