"""The programs of a schedule: producers, consumers, an administrator; each holds what it sees
against what was promised.

Owner: one `tests.sim.schedule.Schedule`. Invariants: a program never waits, it has turns; every
    record that is sent or read is noted in the history.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from tailrace.client.connections.connection import Connection, OnResponse
from tailrace.consumer.consumer import Consumer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CorruptBatchError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    TailraceError,
)
from tailrace.core.records import RecordMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.producer import Producer
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tests.kit.batches import TIME_US
from tests.kit.checker import History, value_of
from tests.sim.machine.machine_parts import MS, SECOND
from tests.sim.machine.world import World

TOPIC = "t"
LATER = "later"


class Inbox:
    """Answers, to be handled outside of the connection: inside it a check that fails would be an
    answer that the connection does not understand.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[OnResponse, Response | None]] = deque()

    def later(self, handler: OnResponse) -> OnResponse:
        """To be given to `Connection.request`."""
        return lambda response: self._waiting.append((handler, response))

    def handle(self) -> None:
        """Handle what has come."""
        while self._waiting:
            handler, response = self._waiting.popleft()
            handler(response)


class Refusal(NamedTuple):
    """A record that was given up."""

    partition: int
    value: bytes
    error: TailraceError


@dataclass(slots=True)
class Delayed:
    """Records that are to be delivered later, to a topic of their own; and what became of them."""

    world: World
    rng: random.Random
    partitions: int
    sent: dict[bytes, int] = field(default_factory=dict)
    """value -> partition"""
    acknowledged: set[bytes] = field(default_factory=set)

    def send(self, producer: Producer, name: str) -> None:
        partition = self.rng.randrange(self.partitions)
        value = b"%b-%d" % (name.encode(), len(self.sent))
        self.sent[value] = partition
        due_us = (
            self.world.clock.wall_us() + self.rng.randrange(0, self.rng.choice((20, 2_000))) * 1000
        )
        due = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=due_us)
        producer.send(
            LATER,
            value,
            partition=partition,
            timestamp=TIME_US,
            deliver_at=due,
            on_delivery=partial(self._on_delivery, value),
        )

    def _on_delivery(
        self, value: bytes, metadata: RecordMetadata | None, _error: TailraceError | None
    ) -> None:
        if metadata is not None:
            assert metadata.offset is None
            assert metadata.delay_id
            self.acknowledged.add(value)

    def check(
        self, readable: Mapping[int, Sequence[tuple[int, bytes]]], *, is_lossless: bool
    ) -> None:
        """Check that what came is what was sent; exactly once, unless something acknowledged may be
        lost.
        """
        found = [
            (value, partition) for partition, records in readable.items() for _, value in records
        ]
        for value, partition in found:
            assert self.sent.get(value) == partition, (
                f"{value!r} was not sent to partition {partition}"
            )
        if is_lossless:
            names = [value for value, _ in found]
            assert len(names) == len(set(names)), (
                f"delivered twice: {sorted(name for name in names if names.count(name) > 1)[:4]}"
            )
            assert self.acknowledged <= set(names), (
                f"acknowledged and never delivered: {sorted(self.acknowledged - set(names))[:4]}"
            )


@dataclass(slots=True)
class ProducerActor:
    """A program that sends."""

    name: str
    producer: Producer
    rng: random.Random
    history: History
    partitions: int
    delayed: Delayed | None
    next_number: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    sent_ns: dict[bytes, int] = field(default_factory=dict)

    def turn(self) -> None:
        sender_thread = self.producer._sender_thread
        if self.rng.random() < 0.7 and sender_thread.accumulator.incomplete_count < 12:
            partition = self.rng.randrange(self.partitions)
            for _ in range(self.rng.randint(1, 3)):
                value = value_of(self.name, self.next_number, b"x" * self.rng.randint(0, 60))
                self.next_number += 1
                self.sent_ns[value] = sender_thread.now_ns()
                self.history.send(partition, value)
                on_delivery = partial(self._on_delivery, partition, value)
                self.producer.send(
                    TOPIC, value, partition=partition, timestamp=TIME_US, on_delivery=on_delivery
                )
            if self.delayed is not None and self.rng.random() < 0.5:
                self.delayed.send(self.producer, self.name)
            if self.rng.random() < 0.5:
                with sender_thread.lock:
                    sender_thread.close_all()
        self.pump()

    def pump(self) -> None:
        sender_thread = self.producer._sender_thread
        with sender_thread.lock:
            sender_thread.run_once()
        sender_thread.make_callbacks()

    def _on_delivery(
        self,
        partition: int,
        value: bytes,
        metadata: RecordMetadata | None,
        error: TailraceError | None,
    ) -> None:
        if metadata is not None:
            assert metadata.offset is not None
            self.history.acknowledge(partition, value, metadata.offset)
        else:
            assert error is not None
            self.refusals.append(Refusal(partition, value, error))

    def next_wake_ns(self, now_ns: int) -> int:
        return self.producer._sender_thread.next_wake_ns(now_ns)

    def has_input(self) -> bool:
        socket: Any = self.producer._sender_thread.connection._socket
        return socket is not None and bool(socket.link.to_client)


@dataclass(slots=True)
class ConsumerActor:
    """A program that follows every partition from the beginning."""

    consumer: Consumer
    history: History
    allows_loss: bool
    allows_holes: bool
    allows_deletion: bool
    positions: dict[int, int] = field(default_factory=dict)
    watermarks: dict[int, int] = field(default_factory=dict)

    def turn(self) -> None:
        try:
            records = self.consumer.poll(0)
        except TailraceError as error:
            self._on_error(error)
            return
        for record in records:
            expected = self.positions.get(record.partition, 0)
            assert record.offset == expected, (
                f"partition {record.partition}: offset {record.offset} came where {expected} "
                "belongs"
            )
            self.positions[record.partition] = expected + 1
            assert record.value is not None
            if not self.allows_loss:
                self.history.read(record.partition, record.offset, record.value)
        if not self.allows_loss:
            for key, cursor in self.consumer._fetch_loop.cursors.items():
                seen, known = cursor.high_watermark or 0, self.watermarks.get(key.partition, 0)
                assert seen >= known, (
                    f"the high watermark of partition {key.partition} went back from {known} to "
                    f"{seen}"
                )
                self.watermarks[key.partition] = seen
                self.history.watermarks[key.partition] = max(
                    seen, self.history.watermarks.get(key.partition, 0)
                )

    def _on_error(self, error: TailraceError) -> None:
        if isinstance(error, LogTruncatedError):
            assert self.allows_loss, f"a reader was told that what it had read is lost: {error}"
            self._go_back(error)
        elif isinstance(error, OffsetOutOfRangeError):
            assert self.allows_loss or self.allows_deletion, (
                f"a reader fell out of a log that had lost nothing: {error}"
            )
            self._restart()
        elif isinstance(error, CorruptBatchError):
            assert self.allows_holes, f"what nobody damaged is damaged: {error}"
            partition, offset = skip(self.consumer, error)
            self.positions[partition] = offset
        else:
            assert error.code in (
                ErrorCode.STORAGE_ERROR,
                ErrorCode.NOT_READY,
                ErrorCode.TIMED_OUT,
                ErrorCode.NOT_REACHABLE,
            ), repr(error)

    def _go_back(self, error: LogTruncatedError) -> None:
        for key in self.consumer.assignment():
            if f"{key.topic}-{key.partition} " in str(error):
                self._seek(key, error.offset or 0)

    def _restart(self) -> None:
        """On from the beginning, which may have moved."""
        try:
            for key, start in self.consumer.beginning_offsets(self.consumer.assignment()).items():
                if self.allows_loss or start > self.positions.get(key.partition, 0):
                    self._seek(key, start)
        except TailraceError:
            pass  # nobody answers now: the next turn falls out again

    def _seek(self, key: TopicPartition, offset: int) -> None:
        self.consumer.seek(key, offset)
        self.positions[key.partition] = offset

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.consumer._connection.next_tick_ns()
        return now_ns + 50 * MS if tick_ns is None else tick_ns

    def has_input(self) -> bool:
        socket: Any = self.consumer._connection._socket
        return socket is not None and bool(socket.link.to_client)


@dataclass(slots=True)
class AdminActor:
    """Somebody who deletes records, and makes and deletes other topics; asks, and does not wait."""

    connection: Connection
    rng: random.Random
    history: History
    partitions: int

    def turn(self) -> None:
        self.pump()
        if not self.connection.is_ready or self.rng.random() > 0.2:
            return
        choice = self.rng.random()
        if choice < 0.5:
            partition = self.rng.randrange(self.partitions)
            known = [
                offset
                for (its_partition, _), offset in self.history.acknowledged.items()
                if its_partition == partition
            ]
            before = self.rng.randint(0, max(known, default=0))
            body = {"topics": [{"name": TOPIC, "partitions": {str(partition): before}}]}
            self._ask(Api.DELETE_RECORDS, body)
        elif choice < 0.8:
            self._ask(
                Api.CREATE_TOPICS,
                {
                    "topics": [
                        {"name": "other", "partitions": self.rng.randint(1, 3), "configs": {}}
                    ]
                },
            )
        else:
            self._ask(Api.DELETE_TOPICS, {"topics": [{"name": "other"}]})

    def _ask(self, api: Api, body: dict[str, Any]) -> None:
        self.connection.request(api, [requests.encode_json(body)], lambda _: None)

    def pump(self) -> None:
        self.connection.process()
        self.connection.tick(self.connection.now_ns())

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self.connection.next_tick_ns()
        return now_ns + SECOND if tick_ns is None else tick_ns

    def has_input(self) -> bool:
        socket: Any = self.connection._socket
        return socket is not None and bool(socket.link.to_client)


def skip(consumer: Consumer, error: CorruptBatchError) -> tuple[int, int]:
    """As the message says. Answers partition and offset."""
    assert error.key is not None
    assert error.next_offset is not None
    consumer.seek(error.key, error.next_offset)
    return error.key.partition, error.next_offset
