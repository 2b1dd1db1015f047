"""Retries: a record that cannot be handled now comes to the same group again, after a delay.

`consumer.retry_later(record, delay)` writes the record to the group's retry topic, `<topic>.<group>.retry`, as a delayed record, and returns when it is on the
disk: the original may be committed then. The retry topic is made when it is first needed, with delay.enabled and as many partitions as the topic. Consumers
of the group read it beside the topic, from its beginning, without being told to.

A record that comes again is one of the retry topic: `Record.topic`, `.partition` and `.offset` are the retry topic's, so that positions and commits are what
they are everywhere. Where it came from, its headers say:

    retry.topic, retry.partition, retry.offset   of the original
    retry.attempt                                1 the first time that it comes again
    retry.first_timestamp                        the original's timestamp, milliseconds

Past `retry_attempts_max` it goes to the dead-letter topic of the original's topic. Order is not kept: what is retried comes behind records that were later.

Owner: one Consumer, one thread; the producers have their own.
Crash: a program that is killed between the retry and its commit reads the original again and may retry it twice: at least once, as every group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tailrace.connection import Connection
from tailrace.dead_letters import DeadLetters, Letter, make_topic
from tailrace.environment import REAL, Environment
from tailrace.errors import InvalidRequestError, NotSupportedError, RequestTimeoutError, TailraceError, UnknownTopicError
from tailrace.fetcher import Fetcher, PartitionCursor
from tailrace.formats import arrow_batch
from tailrace.offset_lookup import Call
from tailrace.producer import Producer
from tailrace.protocol.wire import Api
from tailrace.reading import Reading
from tailrace.records import Record, TopicPartition
from tailrace.retry_topics import is_retry_topic, retry_topic
from tailrace.settings import ConsumerSettings
from tailrace.topics import TopicInfo, topics_from_metadata
from tailrace.units import duration_ms

PREFIX = "retry."


def delay_of(given: Any) -> timedelta:
    """A timedelta, seconds, or text such as "30s" or "1h30m". Raises InvalidRequestError."""
    if isinstance(given, timedelta):
        delay = given
    elif isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < 1e9:
        delay = timedelta(seconds=given)
    else:
        delay_ms = duration_ms(given.strip()) if isinstance(given, str) and given.strip() else None
        if delay_ms is None:
            raise InvalidRequestError(f'delay is {given!r:.100}; it takes a timedelta, seconds, or text such as "30s" or "1h30m"')
        delay = timedelta(milliseconds=delay_ms)
    if delay < timedelta(0):
        raise InvalidRequestError(f"delay is {given!r:.100}; it takes a time from 0 on")
    return delay


class RetryLater:
    """See the module's docstring. Its producers are made when they are first needed."""

    def __init__(
        self,
        settings: ConsumerSettings,
        connection: Connection,
        reading: Reading,
        call: Call,
        info: Callable[[str], TopicInfo],
        environment: Environment,
    ) -> None:
        """`call`, `info`, `reading`: the consumer's."""
        assert settings.group_id is not None
        self._connection = connection
        self._reading = reading
        self._group = settings.group_id
        self._settings = settings
        self._call = call
        self._info = info
        self._environment = environment
        self._producer: Producer | None = None
        self._letters: DeadLetters | None = None
        self._made: set[str] = set()
        self._lock = threading.Lock()
        self._owns_connection = False

    @classmethod
    def standalone(cls, settings: ConsumerSettings) -> RetryLater:
        """With a connection of its own, for a consumer that must not block: `retry` is called in another thread."""
        connection = Connection(settings.bootstrap, f"{settings.client_id}-retries", REAL, "consumer")

        def call(api: Api, request: dict[str, Any]) -> dict[str, Any]:
            return connection.call_json(api, request, settings.request_timeout_ms)

        def info(topic: str) -> TopicInfo:
            return topics_from_metadata(call(Api.METADATA, {"topics": [topic]}), topic)[topic]

        found = cls(settings, connection, Reading(connection, settings, REAL.monotonic_ns, lambda *_: {}, lambda _: None), call, info, REAL)
        found._owns_connection = True
        return found

    def retry(self, record: Record, delay: Any) -> int:
        """Have the record come again. Returns which attempt that will be, 0: it went to the dead-letter topic. Raises what writing it is refused with."""
        with self._lock:
            return self._retry(record, delay)

    def _retry(self, record: Record, delay: Any) -> int:
        if not isinstance(record, Record):
            raise InvalidRequestError(f"{record!r:.100} is no record; give one that poll() has returned")
        after = delay_of(delay)
        origin, partition, offset, attempt, first_timestamp = self._origin(record)
        info = self._info(origin)
        if info.typed:
            raise NotSupportedError(
                f"topic {origin!r} has a schema of its own, and its rows no headers to count attempts in: send the row again yourself"
            )
        stored = self._stored(record)
        if attempt >= self._settings.retry_attempts_max:
            self._dead_letter(stored._replace(topic=origin, partition=partition, offset=offset, timestamp=first_timestamp), info, attempt)
            return 0
        headers = [header for header in stored.headers if not header[0].startswith(PREFIX)]
        headers += [
            (f"{PREFIX}{name}", str(value).encode())
            for name, value in (
                ("topic", origin), ("partition", partition), ("offset", offset), ("attempt", attempt + 1), ("first_timestamp", first_timestamp),
            )
        ]  # fmt: skip
        self._send(retry_topic(origin, self._group), info, stored, headers, after)
        return attempt + 1

    def _stored(self, record: Record) -> Record:
        """The record as it lies in the log: where there are deserializers, it is read again. Raises OffsetOutOfRangeError when retention has removed it."""
        if self._settings.key_deserializer is None and self._settings.value_deserializer is None:
            return record
        cursor = PartitionCursor(TopicPartition(record.topic, record.partition), self._info(record.topic))
        cursor.seek(record.offset)
        now_ns, timeout_ms = self._environment.monotonic_ns, self._settings.request_timeout_ms
        fetcher, deadline_ns = Fetcher(self._connection, self._settings, now_ns), now_ns() + timeout_ms * 1_000_000
        while (taken := cursor.take(self._settings)) is None:
            self._reading.step(fetcher, [cursor], deadline_ns)
            if cursor.error is not None:
                raise cursor.error
            if now_ns() >= deadline_ns:
                raise RequestTimeoutError(
                    f"offset {record.offset} of {record.topic}-{record.partition} was not read again within {timeout_ms} ms"
                )
        header, rows, first = taken
        return arrow_batch.to_records(record.topic, record.partition, first, rows.slice(0, 1), header, cursor.info.typed)[0]

    def _origin(self, record: Record) -> tuple[str, int, int, int, int]:
        """(topic, partition, offset, attempts so far, timestamp) of the original."""
        if is_retry_topic(record.topic, self._group):
            said = dict(record.headers)
            try:
                return (
                    said["retry.topic"].decode(), int(said["retry.partition"]), int(said["retry.offset"]), int(said["retry.attempt"]),
                    int(said["retry.first_timestamp"]),
                )  # fmt: skip
            except (KeyError, ValueError):
                pass  # something else has written it: it counts as an original
        return record.topic, record.partition, record.offset, 0, record.timestamp

    def _send(self, name: str, info: TopicInfo, record: Record, headers: list[tuple[str, bytes]], after: timedelta) -> None:
        if self._producer is None:
            timeout_ms = self._settings.request_timeout_ms
            self._producer = Producer(
                bootstrap=self._settings.bootstrap, client_id=f"{self._settings.client_id}-retries", environment=self._environment, linger_ms=0,
                delivery_timeout_ms=timeout_ms, max_block_ms=timeout_ms, max_request_size=64 << 20,
            )  # fmt: skip
        for is_again in (False, True):
            if name not in self._made:
                configs = {"delay.enabled": True, "max.message.bytes": info.settings["max.message.bytes"]}
                make_topic(self._call, self._environment, name, len(info.partitions), configs)
                self._made.add(name)
            try:
                partition = record.partition if record.partition < len(self._producer.partitions_for(name)) else None
                self._producer.send(name, record.value, record.key, headers, partition, deliver_after=after).result()
                return
            except UnknownTopicError:  # it was deleted since
                self._made.discard(name)
                if is_again:
                    raise

    def _dead_letter(self, record: Record, info: TopicInfo, attempts: int) -> None:
        if self._letters is None:
            s = self._settings
            self._letters = DeadLetters(s.bootstrap, s.client_id, self._call, self._environment, s.request_timeout_ms)
        reason = f"tried again {attempts} times, as often as retry_attempts_max allows"
        error: TailraceError | None = self._letters.write([Letter(record, info, self._group, reason, attempts + 1)])[0]
        if error is not None:
            raise error

    def close(self) -> None:
        """End the producers."""
        with self._lock:
            if self._producer is not None:
                self._producer.close()
            if self._letters is not None:
                self._letters.close()
            if self._owns_connection:
                self._connection.close()
