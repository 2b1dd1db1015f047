"""The consumer: reads topics, as records or as Arrow batches.

One thread's: there is no lock and no helper thread; `poll` drives everything, and a fetch is always under way while the caller works on
what came.
Partitions are given by `assign`, or all of the topics named at construction. Groups are not part of this version.

Invariants: within a partition records come in offset order, each once, from the position on; the position moves only past what was
handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from tailrace import arrow_batch
from tailrace.admin import OFFSETS_AT_ONCE, check_offsets_answer, partition_counts
from tailrace.arguments import name_list, partition_list, partition_of
from tailrace.batch_header import BatchHeader
from tailrace.connection import Connection
from tailrace.environment import REAL, Environment
from tailrace.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequestError,
    NotReachableError,
    NotSupportedError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    TailraceError,
)
from tailrace.fetcher import Fetcher, PartitionCursor, corrupt_error
from tailrace.protocol.wire import Api
from tailrace.records import OffsetAndTimestamp, Record, TopicBatch, TopicPartition, to_timestamp_us
from tailrace.settings import GROUPS_LATER, ConsumerOptions, ConsumerSettings, build, merged
from tailrace.topics import TopicInfo, topics_from_metadata

DECODED_RECORDS_MAX = 16_384
"""So many rows of a batch are made Records at a time."""
UNREACHABLE_AFTER_NS = 60_000_000_000
"""A poll without an end complains when the appliance has been away for this long."""


class Consumer:
    """Reads partitions. See `tailrace.settings.ConsumerSettings` for the keyword arguments."""

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | None = None,
        environment: Environment = REAL,
        **settings: Unpack[ConsumerOptions],
    ) -> None:
        """`topics`: names, or a list of them; a dict first holds settings with Kafka's names (`{"bootstrap.servers": "localhost:7420"}`). Raises
        InvalidSettingError, UnknownTopicError, NotReachableError.
        """
        first = topics[0] if topics and isinstance(topics[0], Mapping) else None
        names = [name for given in topics[1 if first is not None else 0 :] for name in name_list("topics", given)]
        given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
        self.settings = build(ConsumerSettings, merged(first, given))
        self._deserializes = self.settings.key_deserializer is not None or self.settings.value_deserializer is not None
        self._connection = Connection(self.settings.bootstrap, self.settings.client_id, environment, "consumer")
        self._now_ns = environment.monotonic_ns
        self._fetcher = Fetcher(self._connection, self.settings, self._now_ns)
        self._infos: dict[str, TopicInfo] = {}
        self._cursors: dict[TopicPartition, PartitionCursor] = {}
        self._turn = 0
        self._taken: dict[TopicPartition, list[Record]] = {}
        """Records decoded but not yet handed out, last first; none is empty."""
        self._rest: dict[TopicPartition, tuple[BatchHeader, pa.RecordBatch, int]] = {}
        """What follows those in their batch, still as columns: a Record takes a hundred times what a short row does. (header, rows, first offset)"""
        self._away_since_ns = 0
        self._closed = False
        self._counters = {"records_consumed": 0, "batches_consumed": 0, "bytes_consumed": 0}
        if names:
            try:
                self.assign([TopicPartition(topic, p) for topic in names for p in self.partitions_for(topic)])
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._connection.close()

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self.settings.request_timeout_ms)

    def _check_open(self) -> None:
        """Raises ClientClosedError, also in a child of the process that made the consumer."""
        self._connection.check_usable()

    def _info(self, topic: str) -> TopicInfo:
        self._check_open()
        info = self._infos.get(topic)
        if info is None:
            info = self._infos[topic] = topics_from_metadata(self._call(Api.METADATA, {"topics": [topic]}), topic)[topic]
        return info

    def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        return list(range(len(self._info(topic).partitions)))

    def topics(self) -> list[str]:
        """Names of all topics of the appliance, ascending."""
        self._check_open()
        return list(partition_counts(self._call))

    # ---- assignment ------------------------------------------------------------------------------------------------------------------

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions; those assigned already go on where they are. Raises UnknownTopicError,
        PartitionOutOfRangeError.
        """
        cursors: dict[TopicPartition, PartitionCursor] = {}
        for key in partition_list(partitions):
            info = self._info(key.topic)
            if not 0 <= key.partition < len(info.partitions):
                raise PartitionOutOfRangeError(f"topic {key.topic!r} has partitions 0 to {len(info.partitions) - 1}, not {key.partition}")
            cursors[key] = self._cursors.get(key) or PartitionCursor(key, info)
        self._cursors = cursors
        self._taken = {key: rows for key, rows in self._taken.items() if key in cursors}
        self._rest = {key: rest for key, rest in self._rest.items() if key in cursors}

    def subscribe(self, *_arguments: Any, **_keywords: Any) -> None:
        """Not in this version."""
        raise NotSupportedError(GROUPS_LATER)

    def assignment(self) -> list[TopicPartition]:
        return list(self._cursors)

    def _cursor(self, partition: TopicPartition) -> PartitionCursor:
        self._check_open()
        key = partition_of(partition)
        cursor = self._cursors.get(key)
        if cursor is None:
            raise InvalidRequestError(f"{key.topic}-{key.partition} is not assigned to this consumer")
        return cursor

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these until `resume`; nothing is lost."""
        for partition in partitions:
            self._cursor(partition).is_paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            self._cursor(partition).is_paused = False

    def paused(self) -> list[TopicPartition]:
        return [key for key, cursor in self._cursors.items() if cursor.is_paused]

    # ---- positions -------------------------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. Whether it exists shows at the next poll."""
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(f"offset is {offset!r}; it must be a whole number from 0 on")
        cursor = self._cursor(partition)
        cursor.seek(offset)
        self._taken.pop(cursor.key, None)
        self._rest.pop(cursor.key, None)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first offset (of all assigned partitions when none is named)."""
        self._seek_all(partitions, "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on behind the last record (of all assigned partitions when none is named)."""
        self._seek_all(partitions, "latest")

    def _seek_all(self, partitions: Sequence[TopicPartition], at: str) -> None:
        keys = [self._cursor(partition).key for partition in partitions] or list(self._cursors)
        for key, offset in self._offsets(keys, at).items():
            self.seek(key, offset)

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record that will be handed out."""
        cursor = self._cursor(partition)
        self._decide_positions([cursor])
        taken = self._taken.get(cursor.key)
        if taken:
            return taken[-1].offset
        if cursor.position is None:
            assert cursor.error is not None
            raise cursor.error
        return cursor.position  # also where something is damaged: the next poll says so

    def _list_offsets(self, wanted: Iterable[tuple[TopicPartition, str | int | dict[str, int]]]) -> dict[TopicPartition, dict[str, Any]]:
        """What LIST_OFFSETS says of each partition. Raises what it says of one."""
        items = [{"topic": key[0], "partition": key[1], "at": at} for key, at in wanted]
        found: dict[TopicPartition, dict[str, Any]] = {}
        for start in range(0, len(items), OFFSETS_AT_ONCE):
            answer = self._call(Api.LIST_OFFSETS, {"partitions": items[start : start + OFFSETS_AT_ONCE]})
            found.update((TopicPartition(item["topic"], item["partition"]), check_offsets_answer(item)) for item in answer["offsets"])
        return found

    def _offsets(self, keys: Iterable[TopicPartition], at: str | int | dict[str, int]) -> dict[TopicPartition, int]:
        return {key: item["offset"] for key, item in self._list_offsets((key, at) for key in keys).items()}

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition."""
        return self._offsets(partition_list(partitions), "earliest")

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The high watermark of each partition: the offset behind the last record that can be read."""
        return self._offsets(partition_list(partitions), "latest")

    def highwater(self, partition: TopicPartition) -> int:
        """The high watermark of one partition, asked for now."""
        key = partition_of(partition)
        return self.end_offsets([key])[key]

    def lag(self, partition: TopicPartition) -> int:
        """How many offsets lie between the position and the end."""
        key = self._cursor(partition).key
        return self.end_offsets([key])[key] - self.position(key)

    def offsets_for_times(self, timestamps: Mapping[TopicPartition, Any]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after a time (datetime or int milliseconds), None where there is none."""
        keys = partition_list(timestamps)
        try:
            wanted = {key: to_timestamp_us(when) for key, when in zip(keys, timestamps.values(), strict=True)}
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(str(error)) from None
        result: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for key, item in self._list_offsets(wanted.items()).items():
            if item["offset"] < 0:
                result[key] = None
            elif item.get("exact"):
                result[key] = OffsetAndTimestamp(item["offset"], item["timestamp_us"] // 1000)
            else:
                result[key] = self._first_at_or_after(key, item["offset"], wanted[key])
        return result

    def _first_at_or_after(self, key: TopicPartition, start: int, when_us: int) -> OffsetAndTimestamp | None:
        """Look through the batches from `start` on, where the appliance could not: its host has no codec for a batch, or one is damaged."""
        cursor = PartitionCursor(key, self._info(key.topic))
        cursor.seek(start)
        fetcher = Fetcher(self._connection, self.settings, self._now_ns)
        deadline_ns = self._now_ns() + self.settings.request_timeout_ms * 1_000_000
        end = self.end_offsets([key])[key]
        while cursor.position is not None and cursor.position < end:
            self._step(fetcher, [cursor], deadline_ns)
            if cursor.error is not None:
                raise cursor.error
            while (taken := cursor.take(self.settings)) is not None:
                header, rows, first_offset = taken
                if header.max_timestamp_us < when_us:
                    continue
                stamps = arrow_batch.timestamps_of(rows, header)
                if stamps is None:
                    return OffsetAndTimestamp(first_offset, header.max_timestamp_us // 1000)
                index = pc.index(pc.greater_equal(stamps, when_us), True).as_py()
                if index >= 0:
                    return OffsetAndTimestamp(first_offset + index, stamps[index].as_py() // 1000)
        return None

    def _decide_positions(self, cursors: Iterable[PartitionCursor]) -> None:
        """Give every cursor without a position one, as auto_offset_reset says."""
        undecided = [cursor for cursor in cursors if cursor.position is None and cursor.error is None]
        if not undecided:
            return
        reset = self.settings.auto_offset_reset
        if reset == "none":
            for cursor in undecided:
                cursor.error = OffsetOutOfRangeError(
                    f"{cursor.key.topic}-{cursor.key.partition} has no position and auto_offset_reset is none; seek first"
                )
            return
        for key, offset in self._offsets([cursor.key for cursor in undecided], reset).items():
            for cursor in undecided:
                if cursor.key == key:
                    cursor.seek(offset)

    # ---- reading ---------------------------------------------------------------------------------------------------------------------

    def _step(self, fetcher: Fetcher, cursors: Iterable[PartitionCursor], deadline_ns: int) -> None:
        """Ask for more, take in what came, wait for something until `deadline_ns`."""
        connection = self._connection
        connection.process()
        fetcher.begin(cursors)
        connection.process()
        now_ns = self._now_ns()
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        if connection.is_ready:
            self._away_since_ns = 0
        elif not self._away_since_ns:
            self._away_since_ns = now_ns
        elif now_ns - self._away_since_ns > UNREACHABLE_AFTER_NS:
            raise NotReachableError(f"no appliance answers at {self.settings.bootstrap}{connection.met()}")
        if any(cursor.buffered or cursor.error is not None for cursor in cursors if not cursor.is_paused):
            return
        tick_ns = connection.next_tick_ns()
        wait_ns = min(deadline_ns, tick_ns if tick_ns is not None else deadline_ns) - now_ns
        if not fetcher.is_waiting and connection.is_ready:
            wait_ns = min(wait_ns, 10_000_000)
        if wait_ns > 0:
            connection.wait(wait_ns)
            connection.process()

    def _advance(self, deadline_ns: int | None) -> bool:
        """Until something can be handed out, or the time is up. Raises the error of a partition that has nothing left before it."""
        if not self._cursors:
            raise InvalidRequestError("nothing is assigned: name topics at construction, or call assign()")
        while True:
            cursors = list(self._cursors.values())
            self._decide_positions(cursors)
            until_ns = deadline_ns if deadline_ns is not None else self._now_ns() + 1_000_000_000
            self._step(self._fetcher, cursors, until_ns)
            active = [cursor for cursor in cursors if not cursor.is_paused]
            if any(cursor.buffered for cursor in active):
                return True
            for cursor in active:
                if cursor.error is not None:
                    self._raise_or_reset(cursor)
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                return False

    def _raise_or_reset(self, cursor: PartitionCursor) -> None:
        error = cursor.error
        assert error is not None
        if isinstance(error, OffsetOutOfRangeError) and self.settings.auto_offset_reset != "none":
            cursor.seek(None)
            return
        cursor.error = None
        if isinstance(error, CorruptBatchError) and error.next_offset is None and error.first_offset is not None:
            behind = self._offsets([cursor.key], {"behind": error.first_offset})[cursor.key]
            raise corrupt_error(cursor.key, error.first_offset, behind, error.detail) from None
        raise error

    def _next_cursor(self) -> PartitionCursor | None:
        """Partitions take turns, batch by batch."""
        cursors = [cursor for cursor in self._cursors.values() if cursor.buffered and not cursor.is_paused]
        if not cursors:
            return None
        self._turn += 1
        return cursors[self._turn % len(cursors)]

    def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> list[Record]:
        """Up to `max_records` records (default max_poll_records); waits for the first for at most `timeout_ms`. Empty when the time is up.

        Raises CorruptBatchError, RecordTooLargeError (a batch that unpacks to more than `max_unpacked_batch_bytes`), OffsetOutOfRangeError
        (auto_offset_reset="none"), NotReachableError, UnknownTopicError. The first two name the offsets; the position stays before them until `seek`.
        """
        limit = self.settings.max_poll_records if max_records is None else max_records
        if limit < 1:
            raise InvalidRequestError(f"max_records is {limit}; it must be at least 1")
        self._check_open()
        result: list[Record] = []
        deadline_ns = self._now_ns() + timeout_ms * 1_000_000
        self._hand_out(result, limit)
        if not result and not self._advance(deadline_ns):
            return result
        while len(result) < limit:
            cursor = self._next_cursor()
            if cursor is None:
                break
            self._take_records(cursor, swallow=bool(result))
            if not self._hand_out(result, limit):
                break
        # The next answer comes while the caller works on this one.
        self._connection.process()
        self._fetcher.begin(self._cursors.values())
        if self._deserializes:
            result = self._deserialized(result)
        self._counters["records_consumed"] += len(result)
        return result

    def consume(self, num_messages: int = 1, timeout: float = -1.0) -> list[Record]:
        """Up to `num_messages` records, as confluent-kafka's: waits until there are as many or `timeout` seconds are over (-1: without end). Raises what
        `poll` does; what came before an error is handed out first.
        """
        deadline_ns = None if timeout < 0 else self._now_ns() + int(timeout * 1e9)
        result: list[Record] = []
        while len(result) < num_messages:
            left_ms = 1_000 if deadline_ns is None else max(0, deadline_ns - self._now_ns()) // 1_000_000
            try:
                result += self.poll(min(left_ms, 1_000), num_messages - len(result))
            except TailraceError:
                if not result:
                    raise
                break  # the next call meets it again
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                break
        return result

    def _deserialized(self, records: list[Record]) -> list[Record]:
        """What the deserializers make of records. One that fails is met when it is the first: what comes from it on is handed out again."""
        keys = self.settings.key_deserializer or (lambda key: key)
        values = self.settings.value_deserializer or (lambda value: value)
        result: list[Record] = []
        try:
            for record in records:
                result.append(
                    record._replace(
                        key=None if record.key is None else keys(record.key), value=None if record.value is None else values(record.value)
                    )
                )
        except Exception as error:
            again: dict[TopicPartition, int] = {}
            for record in records[len(result) :]:
                again.setdefault(TopicPartition(record.topic, record.partition), record.offset)
            for key, offset in again.items():
                self.seek(key, offset)
            if not result:
                failed = records[0]
                refusal = InvalidRecordError(
                    f"a deserializer failed at offset {failed.offset} of {failed.topic}-{failed.partition}: {type(error).__name__}: {error}; "
                    "seek to the offset behind it to go on without it"
                )
                refusal.key = TopicPartition(failed.topic, failed.partition)
                refusal.first_offset, refusal.next_offset = failed.offset, failed.offset + 1
                raise refusal from error
        return result

    def _take_records(self, cursor: PartitionCursor, *, swallow: bool) -> None:
        try:
            taken = cursor.take(self.settings)
        except TailraceError as error:
            cursor.drop_buffered(error)
            if not swallow:  # what is good goes out first; the next poll meets this again
                self._raise_or_reset(cursor)
            return
        if taken is not None:
            self._decode(cursor, *taken)
            self._counters["batches_consumed"] += 1
            self._counters["bytes_consumed"] += taken[0].batch_length

    def _decode(self, cursor: PartitionCursor, header: BatchHeader, rows: pa.RecordBatch, first_offset: int) -> None:
        """Rows of a batch as records, as many as may be at a time."""
        key = cursor.key
        if rows.num_rows > DECODED_RECORDS_MAX:
            self._rest[key] = header, rows.slice(DECODED_RECORDS_MAX), first_offset + DECODED_RECORDS_MAX
            rows = rows.slice(0, DECODED_RECORDS_MAX)
        records = arrow_batch.to_records(key.topic, key.partition, first_offset, rows, header, cursor.info.typed)
        records.reverse()
        self._taken[key] = records

    def _hand_out(self, result: list[Record], limit: int) -> bool:
        """Move decoded records into `result`; whether there were any."""
        before = len(result)
        for key in list(self._taken):
            if self._cursors[key].is_paused:
                continue
            while len(result) < limit and key in self._taken:
                rows = self._taken[key]
                count = min(limit - len(result), len(rows))
                result += rows[: -count - 1 : -1]
                del rows[-count:]
                if not rows:
                    del self._taken[key]
                    if key in self._rest:
                        self._decode(self._cursors[key], *self._rest.pop(key))
        return len(result) > before

    def poll_arrow(self, timeout_ms: int = 0) -> list[TopicBatch]:
        """Whole batches that have come, columns untouched; waits for the first for at most `timeout_ms`. Raises what `poll` does."""
        self._check_open()
        if self._taken:
            # poll() has decoded part of a batch: give the rest again as a batch.
            for key, records in self._taken.items():
                self._cursors[key].seek(records[-1].offset)
            self._taken.clear()
            self._rest.clear()
        result: list[TopicBatch] = []
        if not self._advance(self._now_ns() + timeout_ms * 1_000_000):
            return result
        while True:
            cursor = self._next_cursor()
            if cursor is None:
                break
            try:
                taken = cursor.take(self.settings)
            except TailraceError as error:
                cursor.drop_buffered(error)
                if not result:
                    self._raise_or_reset(cursor)
                continue
            if taken is None:
                continue
            header, rows, first_offset = taken
            offsets = (
                pa.array(range(first_offset, first_offset + rows.num_rows), pa.int64())
                if rows.num_rows < 64
                else _arange(first_offset, rows.num_rows)
            )
            kind = arrow_batch.timestamp_type_of(header)
            stamp_us = header.append_time_us if kind else header.max_timestamp_us
            result.append(TopicBatch(cursor.key.topic, cursor.key.partition, first_offset, rows, offsets, stamp_us, kind))
            self._counters["records_consumed"] += rows.num_rows
            self._counters["batches_consumed"] += 1
            self._counters["bytes_consumed"] += header.batch_length
        self._connection.process()
        self._fetcher.begin(self._cursors.values())
        return result

    def __iter__(self) -> Iterator[Record]:
        """Records without end; waits for new ones."""
        while not self._closed:
            yield from self.poll(timeout_ms=1000)

    # ---- groups: not in this version ---------------------------------------------------------------------------------------------------

    def commit(self, *_arguments: Any, **_keywords: Any) -> None:
        """Not in this version."""
        raise NotSupportedError(GROUPS_LATER)

    commit_async = commit

    def committed(self, *_arguments: Any, **_keywords: Any) -> None:
        """Not in this version."""
        raise NotSupportedError(GROUPS_LATER)

    def metrics(self) -> dict[str, int]:
        """Counters since construction."""
        return {**self._counters, "fetches": self._fetcher.fetch_count}


def _arange(start: int, count: int) -> pa.Array:
    import numpy as np

    return pa.array(np.arange(start, start + count, dtype=np.int64))
