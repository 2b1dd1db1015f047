"""Retries: a record that cannot be processed now is delivered to the same group again, after a
delay.

`consumer.retry_later(record, delay)` writes the record to the group's retry topic,
`<topic>.<group>.retry` (`tailrace.core.topic_names`), as a delayed record, and returns when it is
on the disk. Then the original may be committed. The retry topic is created when it is first needed,
with delay.enabled and the settings of its topic (`tailrace.client.topics.derived_topics`). A record
has the same partition in both. Consumers of the group read the retry topic beside the topic, from
its beginning: a consumer that subscribes reads its share, a consumer that assigns partitions reads
those of the same numbers.

A retried record is one of the retry topic: `Record.topic`, `.partition` and `.offset` are the retry
topic's, also for positions and commits. Its last headers, after those of its sender, name its
origin:

    retry.topic_id                               id of the original topic (a recreated one differs)
    retry.topic, retry.partition, retry.offset   of the original
    retry.attempt                                1 for the first retry
    retry.first_timestamp                        the original's timestamp, milliseconds

After `max_retry_attempts` it goes to the dead-letter topic of the original's topic. Order is not
kept: retried records come after later ones.

Owner: one Consumer, in its thread or event loop.

Crash: a program that is killed between the retry and its commit reads the original again, and may
retry it twice (at least once, as in every group).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from tailrace.batch import arrow_codec
from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Call, Steps, invoke
from tailrace.client.topics.derived_topics import ensure
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.errors import (
    InvalidRequestError,
    NotSupportedError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    RequestTimeoutError,
    UnknownTopicError,
    UnknownTopicIdError,
)
from tailrace.core.records import Record
from tailrace.core.topic_names import (
    HEADERS,
    added_headers,
    is_of_group,
    is_retry_topic,
    retry_topic,
    sent_headers,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.units import duration_ms
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.fetcher import Fetcher
from tailrace.fetch.partition_position import PartitionPosition, TakenBatch
from tailrace.fetch.read_errors import UnknownSchemaError
from tailrace.group.dead_letter_queue import DeadLetter, DeadLetters, Producers, until_known
from tailrace.protocol.frame import Api


def delay_of(given: Any) -> timedelta:
    """A delay from a timedelta, seconds, or text such as "30s" or "1h30m". Raises
    InvalidRequestError.
    """
    if isinstance(given, timedelta):
        delay = given
    elif isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < 1e9:
        delay = timedelta(seconds=given)
    else:
        delay_ms = duration_ms(given.strip()) if isinstance(given, str) and given.strip() else None
        if delay_ms is None:
            raise InvalidRequestError(
                f'delay is {given!r:.100}; it takes a timedelta, seconds, or text such as "30s" '
                'or "1h30m"'
            )
        delay = timedelta(milliseconds=delay_ms)
    if delay < timedelta(0):
        raise InvalidRequestError(f"delay is {given!r:.100}; it must not be negative")
    return delay


class _Origin(NamedTuple):
    """The record that was first passed to `retry_later`."""

    topic: str
    topic_id: str
    """Empty: the current topic of this name."""
    partition: int
    offset: int
    attempt: int
    """The number of its retries."""
    timestamp: int


def _taken(cursor: PartitionPosition, settings: ConsumerSettings) -> TakenBatch | None:
    """The next batch, None also while its schema is to be looked up by the next fetch."""
    try:
        return cursor.take(settings)
    except UnknownSchemaError:
        return None


class RetryTopicProducer:
    """Writes the retries of one consumer. Its producers are made when they are first needed."""

    def __init__(
        self,
        settings: ConsumerSettings,
        connection: Connection,
        fetch_loop: FetchLoop,
        call: Call,
        info: Callable[[str], Steps[TopicInfo]],
        producers: Producers,
    ) -> None:
        """`call`, `info` and `fetch_loop` are the consumer's."""
        assert settings.group_id is not None
        self._connection = connection
        self._fetch_loop = fetch_loop
        self._group = settings.group_id
        self._settings = settings
        self._call = call
        self._info = info
        self._producers = producers
        self._producer: Any = None
        self._letters: DeadLetters | None = None
        self._made: dict[str, int] = {}
        """The partition counts of retry topics that were created or checked."""

    def retry(self, record: Record, delay: Any) -> Steps[int]:
        """Write a retry of the record. Returns the number of the coming attempt; 0: it went to the
        dead-letter topic. Raises the error of writing.
        """
        if not isinstance(record, Record):
            raise InvalidRequestError(
                f"{record!r:.100} is no record; give one that poll() has returned"
            )
        after = delay_of(delay)
        origin = self._origin(record)
        info = yield from self._info(origin.topic)
        if info.typed:
            raise NotSupportedError(
                f"topic {origin.topic!r} has a schema, and its rows have no headers to count "
                "attempts in: send the row again with a producer"
            )
        stored = yield from self._stored(record)
        topic_id = origin.topic_id or record.topic_id.hex() or info.topic_id.hex()
        if origin.attempt >= self._settings.max_retry_attempts:
            yield from self._dead_letter(
                stored, origin, (yield from self._current_info(origin.topic)), topic_id
            )
            return 0
        added = (
            topic_id,
            origin.topic,
            origin.partition,
            origin.offset,
            origin.attempt + 1,
            origin.timestamp,
        )
        headers = list(sent_headers(stored.headers) if origin.attempt else stored.headers)
        headers += [(name, str(value).encode()) for name, value in zip(HEADERS, added, strict=True)]
        yield from self._send(
            retry_topic(origin.topic, self._group),
            stored._replace(topic=origin.topic, partition=origin.partition),
            headers,
            after,
        )
        return origin.attempt + 1

    def _stored(self, record: Record) -> Steps[Record]:
        """The stored form of the record. With deserializers it is fetched again. Raises
        OffsetOutOfRangeError when retention has removed it, UnknownTopicIdError when its topic was
        deleted.
        """
        if self._settings.key_deserializer is None and self._settings.value_deserializer is None:
            return record
        info = yield from self._info(record.topic)
        if record.topic_id not in (b"", info.topic_id):
            info = yield from self._current_info(record.topic)
        if record.topic_id not in (b"", info.topic_id):
            raise UnknownTopicIdError(
                f"offset {record.offset} of {record.topic}-{record.partition} is of a topic that "
                "was deleted, and a consumer with deserializers fetches a record again to retry it"
            )
        cursor = PartitionPosition(TopicPartition(record.topic, record.partition), info)
        cursor.seek(record.offset)
        now_ns, timeout_ms = self._connection.now_ns, self._settings.request_timeout_ms
        fetcher, deadline_ns = (
            Fetcher(self._connection, self._settings, now_ns),
            now_ns() + timeout_ms * 1_000_000,
        )
        while (taken := _taken(cursor, self._settings)) is None:
            if (cursor.position or 0) > record.offset:
                raise _removed(record)
            yield from self._fetch_loop.step(fetcher, [cursor], deadline_ns)
            if cursor.error is not None:
                raise cursor.error
            if now_ns() >= deadline_ns:
                raise RequestTimeoutError(
                    f"offset {record.offset} of {record.topic}-{record.partition} was not fetched "
                    f"again within {timeout_ms} ms (request_timeout_ms)"
                )
        header, rows, first, _ = taken
        if first != record.offset:
            raise _removed(record)
        return arrow_codec.to_records(
            record.topic, record.partition, first, rows.slice(0, 1), header, cursor.info.typed
        )[0]

    def _origin(self, record: Record) -> _Origin:
        if is_retry_topic(record.topic, self._group) and is_of_group(
            record.headers, record.topic, self._group
        ):
            marks = added_headers(record.headers)
            try:
                numbers = [int(marks[name]) for name in HEADERS[2:]]
                found = _Origin(
                    marks["retry.topic"].decode(),
                    marks.get("retry.topic_id", b"").decode(),
                    *numbers,
                )
            except (KeyError, ValueError):
                pass  # written by another program: it counts as an original
            else:
                if found.partition >= 0 and found.attempt > 0:
                    return found
        return _Origin(record.topic, "", record.partition, record.offset, 0, record.timestamp)

    def _send(
        self, name: str, record: Record, headers: list[tuple[str, Any]], after: timedelta
    ) -> Steps[None]:
        """Send `record`, in its stored form, with the topic and partition of its original."""
        for is_retried in (False, True):
            if self._made.get(name, 0) <= record.partition:
                yield from self._make(name, record.topic)
            producer = self._retry_producer()
            try:
                count = len((yield from invoke(producer.partitions_for, name)))
                partition = record.partition if record.partition < count else None
                send = partial(
                    producer.send,
                    name,
                    record.value,
                    record.key,
                    headers,
                    partition,
                    deliver_after=after,
                )
                yield from invoke(self._producers.outcome, (yield from invoke(send)))
                return
            except (UnknownTopicError, RecordTooLargeError):
                # The retry topic was deleted, or max.message.bytes of the origin was raised.
                self._made.pop(name, None)
                if is_retried:
                    raise

    def _retry_producer(self) -> Any:
        if self._producer is None:
            timeout_ms = self._settings.request_timeout_ms
            self._producer = self._producers.make(
                client_id=f"{self._settings.client_id}-retries", linger_ms=0,
                delivery_timeout_ms=timeout_ms, max_block_ms=timeout_ms, max_request_size=64 << 20,
            )  # fmt: skip
        return self._producer

    def _make(self, name: str, origin: str) -> Steps[None]:
        """Create or check the retry topic, with the current settings of its origin."""
        info = yield from self._current_info(origin)
        found = yield from until_known(
            self._connection.now_ns, lambda: ensure(self._call, name, info, {"delay.enabled": True})
        )
        if found is not None:
            self._made[name] = len(found.partitions)
        producer, self._producer = self._producer, None
        if producer is not None:  # it may have old metadata of the retry topic
            yield from invoke(producer.close)

    def _current_info(self, topic: str) -> Steps[TopicInfo]:
        """The topic with its current settings. Raises UnknownTopicError."""
        return topics_from_metadata(
            (yield from self._call(Api.METADATA, {"topics": [topic]})), topic
        )[topic]

    def _dead_letter(
        self, stored: Record, origin: _Origin, info: TopicInfo, topic_id: str
    ) -> Steps[None]:
        if self._letters is None:
            s = self._settings
            self._letters = DeadLetters(
                s.client_id,
                self._call,
                self._connection.now_ns,
                self._producers,
                s.request_timeout_ms,
            )
        record = stored._replace(
            topic=origin.topic,
            partition=origin.partition,
            offset=origin.offset,
            timestamp=origin.timestamp,
        )
        reason = f"tried again {origin.attempt} times, as often as max_retry_attempts allows"
        (error,) = yield from self._letters.write(
            [DeadLetter(record, info, self._group, reason, origin.attempt + 1, topic_id)], []
        )
        if error is not None:
            raise error

    def close(self) -> Steps[None]:
        """Close the producers."""
        if self._producer is not None:
            yield from invoke(self._producer.close)
        if self._letters is not None:
            yield from self._letters.close()


def _removed(record: Record) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"offset {record.offset} of {record.topic}-{record.partition} has no record any more: "
        "compaction has removed it since it was delivered"
    )
