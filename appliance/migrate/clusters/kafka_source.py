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
from itertools import groupby
from typing import Any

from appliance.migrate.clusters.kafka_client import KafkaCluster, library, sentence_of
from appliance.migrate.errors import InterruptedSessionError, MigrationError
from appliance.migrate.rows import Rows, size_of
from tailrace.core.topic_partition import TopicPartition

RECORDS_AT_ONCE = 10_000
NO_PARTITION = TopicPartition("", 0)
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
        self._message_type = library().Message
        self._topics: dict[tuple[str, int], TopicPartition] = {}

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """(first offset, end) of partitions. Raises InterruptedSessionError."""
        try:
            return self._cluster.bounds(partitions, self._isolation)
        except Exception as error:
            raise InterruptedSessionError(f"kafka: {sentence_of(error)}") from None

    def unstable(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(last stable offset, high watermark) of the partitions with an open transaction. Records
        between the two are not read yet. Raises InterruptedSessionError.
        """
        if self._isolation != "read_committed":
            return {}
        stable = self.bounds(partitions)
        try:
            ends = self._cluster.bounds(stable, "read_uncommitted")
        except Exception as error:
            raise InterruptedSessionError(f"kafka: {sentence_of(error)}") from None
        return {
            each: (end, ends[each][1]) for each, (_, end) in stable.items() if end < ends[each][1]
        }

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
        kind = self._message_type
        # by type: a comparison of the library's errors with None breaks the interpreter
        has_errors = bool({*map(type, map(kind.error, messages))} - {type(None)})
        names = list(zip(map(kind.topic, messages), map(kind.partition, messages), strict=True))
        start = 0
        for name, count in _runs(names):
            end = start + count
            part, start = messages[start:end], end
            partition = self._topics.get(name)
            if has_errors:
                part = self._without_errors(part, ends)
            if partition is not None and part:
                parts.setdefault(partition, []).extend(part)
        return [_rows(partition, part, kind) for partition, part in parts.items()], ends

    def _without_errors(
        self, messages: Sequence[Any], ends: dict[TopicPartition, int]
    ) -> list[Any]:
        """The messages that are records. An end counts if no record of its partition follows."""
        records = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._note_error(message, error, ends)
                continue
            records.append(message)
            ends.pop(self._topics.get((message.topic(), message.partition()), NO_PARTITION), None)
        return records

    def _note_error(self, message: Any, error: Any, ends: dict[TopicPartition, int]) -> None:
        from confluent_kafka import KafkaError

        code = error.code()
        if message.topic() is None and not error.fatal() and code != KafkaError._AUTHENTICATION:
            return  # of the group that the library wants, and that is not used
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


def _runs(names: Sequence[Any]) -> list[tuple[Any, int]]:
    """(name, length) of each run of equal names: a fetch brings many records of one partition."""
    if names and names.count(names[0]) == len(names):
        return [(names[0], len(names))]
    return [(name, sum(1 for _ in run)) for name, run in groupby(names)]


def _rows(partition: TopicPartition, messages: list[Any], kind: Any) -> Rows:
    keys, values = list(map(kind.key, messages)), list(map(kind.value, messages))
    headers: list[Any] | None = list(map(kind.headers, messages))
    if headers is not None and not any(headers):
        headers = None
    stamps = [stamp for _, stamp in map(kind.timestamp, messages)]
    return Rows(
        partition, list(map(kind.offset, messages)), stamps, keys, values, headers,
        size_of(keys, values),
    )  # fmt: skip
