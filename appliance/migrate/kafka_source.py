"""Reads the records of a Kafka cluster, by partition and offset.

librdkafka fetches all partitions at the same time in threads of its own; `read` takes what has
come, many records at once.

Owner: one session.
Invariants:
- Rows of a partition are in the order of their offsets, from the position of `assign` on.
- A partition is at its end when the library has reported it behind the last row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.migrate.errors import InterruptedSessionError, MigrationError
from appliance.migrate.kafka_client import KafkaCluster, sentence_of
from appliance.migrate.rows import Rows, size_of
from tailrace.core.topic_partition import TopicPartition

RECORDS_AT_ONCE = 10_000
OPTIONS = {
    "enable.partition.eof": True,
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 131_072,
    "fetch.message.max.bytes": 8 << 20,
    "fetch.queue.backoff.ms": 5,
    "check.crcs": True,
}


class KafkaSource:
    """The records of some partitions."""

    def __init__(self, cluster: KafkaCluster, isolation: str) -> None:
        """`isolation`: read_committed leaves aborted records out. Raises MigrationError."""
        self._cluster = cluster
        self._isolation = isolation
        self._consumer = cluster.consumer(**{**OPTIONS, "isolation.level": isolation})
        self._topics: dict[tuple[str, int], TopicPartition] = {}

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """(first offset, end) of partitions. Raises InterruptedSessionError."""
        try:
            return self._cluster.bounds(partitions, self._isolation)
        except Exception as error:
            raise InterruptedSessionError(f"kafka: {sentence_of(error)}") from None

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read partitions from these offsets on."""
        from confluent_kafka import TopicPartition as Assigned

        self._topics = {(each.topic, each.partition): each for each in positions}
        self._consumer.assign(
            [Assigned(each.topic, each.partition, offset) for each, offset in positions.items()]
        )

    def stop(self, partition: TopicPartition) -> None:
        """Read a partition no more."""
        from confluent_kafka import TopicPartition as Assigned

        self._topics.pop((partition.topic, partition.partition), None)
        self._consumer.incremental_unassign([Assigned(partition.topic, partition.partition)])

    def read(self, timeout_s: float) -> tuple[Sequence[Rows], dict[TopicPartition, int]]:
        """Rows that have come, and the partitions that are at their end now, with that offset.
        Waits for the first for at most `timeout_s`. Raises InterruptedSessionError, MigrationError.
        """
        messages = self._consumer.consume(RECORDS_AT_ONCE, timeout_s / 20)
        if not messages:
            messages = self._consumer.consume(1, timeout_s)
        parts: dict[TopicPartition, list[Any]] = {}
        ends: dict[TopicPartition, int] = {}
        topics, last, into = self._topics, (None, None), None
        for message in messages:
            error = message.error()
            if error is not None:
                self._note_error(message, error, ends)
                continue
            key = message.topic(), message.partition()
            if key != last:
                last, into = key, None
                if key in topics:
                    into = parts.setdefault(topics[key], [])
                    ends.pop(topics[key], None)
            if into is not None:
                into.append(message)
        return [_rows(partition, part) for partition, part in parts.items()], ends

    def _note_error(self, message: Any, error: Any, ends: dict[TopicPartition, int]) -> None:
        from confluent_kafka import KafkaError

        code = error.code()
        partition = self._topics.get((message.topic(), message.partition()))
        if code == KafkaError._PARTITION_EOF:
            if partition is not None:
                ends[partition] = message.offset()
            return
        if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise InterruptedSessionError(
                f"{message.topic()}-{message.partition()} has no records at the offset where the "
                "copy goes on"
            )
        if code in (
            KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
        ):  # fmt: skip
            raise InterruptedSessionError(f"topic {message.topic()} is gone")
        if code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION):
            raise MigrationError(f"Kafka refuses to show {message.topic()}: {error.str()}.")
        if not error.retriable():
            raise InterruptedSessionError(f"kafka: {error.str()}")
        time.sleep(0.05)

    def close(self) -> None:
        """Let the library end."""
        self._consumer.close()


def _rows(partition: TopicPartition, messages: list[Any]) -> Rows:
    keys = [message.key() for message in messages]
    values = [message.value() for message in messages]
    headers: list[Any] | None = [message.headers() for message in messages]
    if headers is not None and not any(headers):
        headers = None
    return Rows(
        partition,
        [message.offset() for message in messages],
        [message.timestamp()[1] for message in messages],
        keys,
        values,
        headers,
        size_of(keys, values),
    )
