"""The consumer: reads topics, as records or as Arrow batches.

One thread's: there is no lock and no helper thread; `poll` drives everything, and a fetch is always under way while the caller works on what came.
Partitions are given by `assign`, or all of the topics named at construction, or the group's share of them (`tailrace.groups`: such a consumer has a
thread for its heartbeats, which touches nothing here).

Invariants: within a partition records come in offset order, each once, from the position on; the position moves only past what was handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Unpack

from tailrace.admin import partition_counts
from tailrace.arguments import (
    name_list,
    name_of,
    partition_list,
    partition_of,
    partitions_named,
    timeout_ms_of,
    timeout_s_of,
    whole,
)
from tailrace.connection import Connection
from tailrace.decoded_records import DecodedRecords
from tailrace.environment import REAL, Environment
from tailrace.errors import InvalidRequestError, TailraceError
from tailrace.fetcher import PartitionCursor
from tailrace.group_methods import GroupMethods
from tailrace.offset_questions import OffsetQuestions
from tailrace.other_names import CONSUMER_ELSEWHERE, OtherNames, refuse_keywords, wonder_at_seconds
from tailrace.protocol.wire import Api
from tailrace.reading import Reading
from tailrace.records import Record, TopicBatch, TopicPartition
from tailrace.serializers import deserialized, failure_at
from tailrace.settings import ConsumerOptions, ConsumerSettings, build, documented, merged
from tailrace.topic_batches import topic_batch
from tailrace.topic_infos import TopicInfos
from tailrace.topics import TopicInfo

if TYPE_CHECKING:
    from tailrace.groups.group_reading import GroupReading
    from tailrace.retry_later import RetryLater


@documented(ConsumerSettings)
class Consumer(GroupMethods, OffsetQuestions, OtherNames):
    """Reads topics, record by record or as Arrow batches. A context manager; for one thread at a time.

        with tailrace.Consumer("orders", bootstrap="tcp://127.0.0.1:7420", auto_offset_reset="earliest") as consumer:
            for record in consumer:
                print(record.offset, record.key, record.value)

    It reads all partitions of the topics that it is given, or what `assign` says, from the end on unless `auto_offset_reset` is "earliest". With a `group_id`
    it shares them with the group's other consumers, and begins where the group has committed. `poll` returns records, `poll_arrow` whole batches with
    their columns untouched. Settings are keyword arguments, and those that Kafka has are called as there. Every method of a closed consumer but `close` and
    `metrics` raises ClientClosedError.
    """

    _elsewhere: ClassVar[dict[str, str]] = CONSUMER_ELSEWHERE

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        environment: Environment = REAL,
        **settings: Unpack[ConsumerOptions],
    ) -> None:
        """`topics`: names, or a list of them; a dict first holds settings with Kafka's names (`{"bootstrap.servers": "localhost:7420"}`). Without topics
        `assign` follows. `bootstrap`: the appliance's address. `environment`: the clock and the network; tests have their own.

        Raises InvalidSettingError before anything is opened; UnknownTopicError, and NotReachableError when no appliance answers within request_timeout_ms.
        """
        first = topics[0] if topics and isinstance(topics[0], Mapping) else None
        names = [name for given in topics[1 if first is not None else 0 :] for name in name_list("topics", given)]
        given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
        self.settings = build(ConsumerSettings, merged(first, given))
        self._deserializes = self.settings.key_deserializer is not None or self.settings.value_deserializer is not None
        self._connection = Connection(self.settings.bootstrap, self.settings.client_id, environment, "consumer")
        self._environment = environment
        self._now_ns = environment.monotonic_ns
        self._decoded = DecodedRecords()
        self._reading = Reading(self._connection, self.settings, self._now_ns, self._offsets, self._decoded.first_offset)
        self._infos = TopicInfos(self._call)
        self._closed = False
        self._counters = {"records_consumed": 0, "batches_consumed": 0, "bytes_consumed": 0}
        self._group: GroupReading | None = None if self.settings.group_id is None else self._make_group(environment)
        self._retries: RetryLater | None = None
        self._iterating: Iterator[Record] | None = None
        if names:
            try:
                if self._group is None:
                    self._read_all_of(names)
                else:
                    self.subscribe(names)
            except BaseException:
                self.close()
                raise

    def _make_group(self, environment: Environment) -> GroupReading:
        from tailrace.groups.group_reading import GroupReading

        try:
            return GroupReading(
                self, self._connection, self.settings, environment, self._reading, self._decoded, self._call, self._infos.as_assigned, self.topics,
            )  # fmt: skip
        except BaseException:
            self._connection.close()
            raise

    def _make_retries(self) -> RetryLater:
        from tailrace.retry_later import RetryLater

        return RetryLater(self.settings, self._connection, self._reading, self._call, self._info, self._environment)

    def __enter__(self) -> Consumer:
        self._check_open()
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._close(True, error is None)

    def close(self, autocommit: bool = True) -> None:
        """Commit (with enable_auto_commit, and `autocommit`), leave the group, end the connection. A second time it does nothing. A `with` block that ends
        by an exception commits nothing that the last `poll` has handed out: it is read again. Raises what a listener raises; all is closed then.
        """
        self._close(autocommit, True)

    def _close(self, autocommit: bool, is_handled: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._group is not None and self._connection.is_usable:
                self._group.close(autocommit=autocommit, is_handled=is_handled)
        finally:
            if self._retries is not None and self._connection.is_usable:
                self._retries.close()
            self._connection.close()

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self.settings.request_timeout_ms)

    def _check_open(self) -> None:
        """Raises ClientClosedError, also in a child of the process that made the consumer."""
        self._connection.check_usable()

    def _info(self, topic: str) -> TopicInfo:
        self._check_open()
        return self._infos.of(topic)

    def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers as they are now, ascending. Raises UnknownTopicError, InvalidRequestError."""
        self._check_open()
        return list(range(len(self._infos.asked_anew(name_of("topic", topic)).partitions)))

    def topics(self) -> list[str]:
        """Names of all topics of the appliance, ascending."""
        self._check_open()
        return list(partition_counts(self._call))

    # ---- assignment ------------------------------------------------------------------------------------------------------------------

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions; those assigned already go on where they are. With a group_id they begin where the group has committed, and no
        membership is needed. Raises UnknownTopicError, PartitionOutOfRangeError, and InvalidRequestError, also while it is subscribed.
        """
        self._check_open()
        if self._group is not None and self._group.is_subscribed:
            raise InvalidRequestError("the group decides what this consumer reads; write unsubscribe() before assign()")
        cursors: dict[TopicPartition, PartitionCursor] = {}
        for key in partition_list(partitions):
            info = self._infos.with_partition(key)
            cursor = self._reading.cursors.get(key)
            cursors[key] = cursor if cursor is not None and cursor.info.topic_id == info.topic_id else PartitionCursor(key, info)
        kept = {key for key, cursor in cursors.items() if self._reading.cursors.get(key) is cursor}
        if self._group is not None:
            self._group.read_from_committed([cursor for key, cursor in cursors.items() if key not in kept])
        self._reading.cursors = cursors
        self._decoded.keep_only(kept)

    def _read_all_of(self, topics: list[str]) -> None:
        self.assign([TopicPartition(topic, p) for topic in topics for p in self.partitions_for(topic)])

    def assignment(self) -> list[TopicPartition]:
        """What is read: the partitions of the topics at construction, those of the last `assign`, or the group's share of them."""
        self._check_open()
        return list(self._reading.cursors)

    def _cursor(self, partition: TopicPartition) -> PartitionCursor:
        self._check_open()
        key = partition_of(partition)
        cursor = self._reading.cursors.get(key)
        if cursor is None:
            raise InvalidRequestError(f"{key.topic}-{key.partition} is not assigned to this consumer{self._why_not_assigned()}")
        return cursor

    def _why_not_assigned(self) -> str:
        """For a member that nothing is assigned to: when that comes."""
        if self._group is None or not self._group.is_subscribed or self._reading.cursors:
            return ""
        return ": its group assigns partitions while poll() runs. Poll until assignment() has them, or do this in on_partitions_assigned of a listener"

    def pause(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out nothing of these (each by itself, or one list) until `resume`; nothing is lost. Raises InvalidRequestError for one that is not assigned."""
        for cursor in self._named_cursors(partitions):
            cursor.pause(by_user=True)

    def resume(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Hand out these again (each by itself, or one list). Raises InvalidRequestError for one that is not assigned."""
        for cursor in self._named_cursors(partitions):
            cursor.pause(by_user=False)

    def _named_cursors(self, partitions: tuple[Any, ...]) -> list[PartitionCursor]:
        self._check_open()
        return [self._cursor(partition) for partition in partitions_named(partitions)]

    def paused(self) -> list[TopicPartition]:
        """Which of the assigned partitions are paused."""
        self._check_open()
        return [key for key, cursor in self._reading.cursors.items() if cursor.is_paused_by_user]

    # ---- positions -------------------------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. Whether it exists shows at the next poll. Raises InvalidRequestError."""
        cursor = self._cursor(partition)
        cursor.seek(whole("offset", offset, 0))
        self._reading.sought()
        self._decoded.drop(cursor.key)
        if self._group is not None:
            self._group.progress.sought(cursor.key)

    def seek_to_beginning(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Go on at the first offset (of all assigned partitions when none is named)."""
        self._seek_all(partitions, "earliest")

    def seek_to_end(self, *partitions: TopicPartition | list[TopicPartition]) -> None:
        """Go on behind the last record (of all assigned partitions when none is named)."""
        self._seek_all(partitions, "latest")

    def _seek_all(self, partitions: tuple[Any, ...], at: str) -> None:
        keys = [cursor.key for cursor in self._named_cursors(partitions)] if partitions else self.assignment()
        if not keys and (why := self._why_not_assigned()):
            raise InvalidRequestError(f"nothing is assigned to this consumer{why}")
        for key, offset in self._offsets(keys, at).items():
            self.seek(key, offset)

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record that will be handed out. Raises InvalidRequestError for a partition that is not assigned."""
        cursor = self._cursor(partition)
        if self._group is not None:
            self._group.decide(cursor)
        self._reading.decide_positions([cursor])
        first = self._decoded.first_offset(cursor.key)
        if first is not None:
            return first
        if cursor.position is None:
            assert cursor.error is not None
            raise cursor.error
        return cursor.position  # also where something is damaged: the next poll says so

    # ---- reading ---------------------------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0, max_records: int | None = None, **others: Never) -> list[Record]:
        """Up to `max_records` records (default max_poll_records), which may be of several partitions; waits for the first for at most `timeout_ms`
        milliseconds. Empty when the time is up.

        Raises CorruptBatchError, RecordTooLargeError (a batch that unpacks to more than `max_unpacked_batch_bytes`), InvalidRecordError (a deserializer
        failed), OffsetOutOfRangeError (auto_offset_reset="none"), NotReachableError, UnknownTopicError. The first three name the offsets; the position stays
        before them until `seek`.
        """
        if others:
            refuse_keywords("poll", others)
        limit = self.settings.max_poll_records if max_records is None else whole("max_records", max_records, 1)
        self._check_open()
        if type(timeout_ms) is float:
            wonder_at_seconds(timeout_ms)
        deadline_ns = self._now_ns() + int(timeout_ms_of(timeout_ms) * 1_000_000)
        self._iterating = None
        if self._group is None:
            return self._poll(limit, deadline_ns, self._reading.advance)
        with self._group.polling():
            self._group.step()
            result = self._poll(limit, deadline_ns, self._group.advance)
        self._group.progress.handed_out(result)
        return result

    def _poll(self, limit: int, deadline_ns: int, advance: Callable[[int], bool]) -> list[Record]:
        result: list[Record] = []
        self._decoded.hand_out(result, limit, self._reading.cursors)
        if not result and not advance(deadline_ns):
            return result
        while len(result) < limit:
            cursor = self._reading.next_cursor()
            if cursor is None:
                break
            self._take_records(cursor, swallow=bool(result))
            if not self._decoded.hand_out(result, limit, self._reading.cursors):
                if not result and cursor.error is not None:
                    self._reading.raise_or_reset(cursor)
                break
        self._reading.ask_ahead()
        if self._deserializes:
            result = self._deserialized(result)
        self._counters["records_consumed"] += len(result)
        return result

    def consume(self, num_messages: int = 1, timeout: float | None = -1.0) -> list[Record]:
        """Up to `num_messages` records, as confluent-kafka's: waits until there are as many or `timeout` seconds are over (-1, None: without end). Raises
        what `poll` does; what came before an error is handed out first.
        """
        wanted = whole("num_messages", num_messages, 0)
        timeout_s = None if timeout == -1 else timeout_s_of(timeout)
        deadline_ns = None if timeout_s is None else self._now_ns() + int(timeout_s * 1e9)
        result: list[Record] = []
        while len(result) < wanted:
            left_ms = 1_000 if deadline_ns is None else max(0, deadline_ns - self._now_ns()) // 1_000_000
            try:
                result += self.poll(min(left_ms, 1_000), wanted - len(result))
            except TailraceError:
                if not result:
                    raise
                break  # the next call meets it again
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                break
        return result

    def _deserialized(self, records: list[Record]) -> list[Record]:
        """What the deserializers make of records. One that fails is met when it is the first: what comes from it on is handed out again."""
        result, error = deserialized(records, self.settings.key_deserializer, self.settings.value_deserializer)
        if error is not None:
            again: dict[TopicPartition, int] = {}
            for record in records[len(result) :]:
                again.setdefault(TopicPartition(record.topic, record.partition), record.offset)
            for key, offset in again.items():
                self.seek(key, offset)
            if not result:
                raise failure_at(records[0], error) from error
        return result

    def _take_records(self, cursor: PartitionCursor, *, swallow: bool) -> None:
        plain = cursor.take_plain()
        if plain is not None:
            rows, end, byte_count = plain
            self._decoded.put(cursor.key, rows, end)
            self._counters["batches_consumed"] += 1
            self._counters["bytes_consumed"] += byte_count
            return
        try:
            taken = cursor.take(self.settings)
        except TailraceError as error:
            cursor.drop_buffered(error)
            if not swallow:  # what is good goes out first; the next poll meets this again
                self._reading.raise_or_reset(cursor)
            return
        if taken is not None:
            self._decoded.decode(cursor, *taken)
            self._counters["batches_consumed"] += 1
            self._counters["bytes_consumed"] += taken[0].batch_length

    def poll_arrow(self, timeout_ms: float = 0) -> list[TopicBatch]:
        """Whole batches that have come, columns untouched; waits for the first for at most `timeout_ms` milliseconds. A batch that the position lies in
        begins at the position. Deserializers are not asked. Raises what `poll` does.
        """
        self._check_open()
        deadline_ns = self._now_ns() + int(timeout_ms_of(timeout_ms) * 1_000_000)
        self._iterating = None
        if self._group is None:
            return self._poll_arrow(deadline_ns, self._reading.advance)
        with self._group.polling():
            self._group.step()
            result = self._poll_arrow(deadline_ns, self._group.advance)
        self._group.progress.handed_out(result)
        return result

    def _poll_arrow(self, deadline_ns: int, advance: Callable[[int], bool]) -> list[TopicBatch]:
        for key, offset in self._decoded.give_back().items():  # poll() has decoded part of a batch: the rest comes again as a batch
            self._reading.cursors[key].seek(offset)
            self._reading.sought()
        result: list[TopicBatch] = []
        if not advance(deadline_ns):
            return result
        while (cursor := self._reading.next_cursor()) is not None:
            try:
                taken = cursor.take(self.settings)
            except TailraceError as error:
                cursor.drop_buffered(error)
                if not result:
                    self._reading.raise_or_reset(cursor)
                continue
            if taken is not None:
                header, rows, _ = taken
                result.append(topic_batch(cursor.key, *taken))
                self._counters["records_consumed"] += rows.num_rows
                self._counters["batches_consumed"] += 1
                self._counters["bytes_consumed"] += header.batch_length
        self._reading.ask_ahead()
        return result

    def __iter__(self) -> Iterator[Record]:
        """Records without end: waits for new ones, until the consumer is closed. Raises what `poll` does. A `commit` on the way is of the records so far, and
        what is left of a loop is handed out by the next one, or by `poll`.
        """
        self._check_open()
        return self._without_end()

    def _without_end(self) -> Iterator[Record]:
        while not self._closed:
            records = self.poll(timeout_ms=1000)
            iterator = self._iterating = iter(records)
            if self._group is not None:
                self._group.progress.iterating(records, iterator)
            try:
                yield from iterator
            finally:
                if self._iterating is iterator and not self._closed:
                    self._give_back(records, iterator)

    def _give_back(self, records: list[Record], iterator: Iterator[Record]) -> None:
        """What was not taken of an iteration is handed out again, unless its partition has been given up or moved meanwhile."""
        taken = len(records) - length_hint(iterator)
        first: dict[TopicPartition, int] = {}
        last: dict[TopicPartition, int] = {}
        for record in iterator:
            key = TopicPartition(record.topic, record.partition)
            first.setdefault(key, record.offset)
            last[key] = record.offset
        for key, offset in first.items():
            cursor = self._reading.cursors.get(key)
            if cursor is not None and cursor.position is not None and cursor.position > last[key]:
                epoch = cursor.taken_epoch
                self.seek(key, offset)
                cursor.taken_epoch = epoch
        if self._group is not None:
            self._group.progress.left_iteration(records[max(0, taken - 1) : taken])

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, batches_consumed, bytes_consumed, fetches."""
        return {**self._counters, "fetches": self._reading.fetcher.fetch_count}
