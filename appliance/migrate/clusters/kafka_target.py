"""Writes records into topics of a Kafka cluster, each once: the way back.

Records, and the entries of the journal that map their offsets, are written in transactions of one
transactional id. Kafka's markers take offsets, so these are mapped.

Owner: one session of one migration. The transactional id of the migration fences the one before.
Crash: an open transaction is aborted by the next session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from appliance.migrate.clusters.kafka_client import TIMEOUT_S, KafkaCluster, sentence_of
from appliance.migrate.clusters.kafka_source import KafkaSource
from appliance.migrate.errors import InterruptedSessionError, MigrationError, TakenOverError
from appliance.migrate.journal import SETTINGS, Entry, encoded, journal_topic
from appliance.migrate.rows import LastRow, Rows, runs_of
from shm.crash_points import crash_point
from tailrace.core.topic_partition import TopicPartition

TRANSACTION_TIMEOUT_MS = 120_000
INIT_TIMEOUT_S = 60.0
COMMIT_TIMEOUT_S = 60.0
OPTIONS = {
    "linger.ms": 5,
    "compression.type": "lz4",
    "batch.size": 1 << 20,
    "queue.buffering.max.kbytes": 65_536,
    "message.max.bytes": 64 << 20,
    "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
    "delivery.timeout.ms": 60_000,
}
FENCED = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
RECORD_EXTRA_BYTES = 256


class KafkaTarget:
    """A cluster, as the target of a session."""

    writes_plainly = False

    def __init__(self, cluster: KafkaCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._journal = TopicPartition(journal_topic(name), 0)
        self._producer: Any = None
        self._written: dict[TopicPartition, list[int]] = {}
        """Offsets that records of the open transaction have got."""
        self._sent_count = 0
        self._failure: str = ""
        self._is_begun = False
        self._configs: dict[str, dict[str, str]] = {}

    # ---- a session -------------------------------------------------------------------------------

    def open(self) -> list[bytes | None]:
        """Fence the session before, end what it had open, and return the journal's values. Raises
        InterruptedSessionError.
        """
        self._cluster.create(self._journal.topic, 1, SETTINGS)
        self._producer = self._cluster.producer(
            **{**OPTIONS, "transactional.id": f"tailrace-migrate-{self._name}"}
        )
        self._guarded(lambda: self._producer.init_transactions(INIT_TIMEOUT_S))
        return self._read_journal()

    def peek(self) -> list[bytes | None]:
        """The values of the journal, empty without one; no run is fenced."""
        if self._journal.topic not in self._cluster.topic_names():
            return []
        return self._read_journal()

    def _read_journal(self) -> list[bytes | None]:
        source = KafkaSource(self._cluster, "read_committed")
        try:
            first, end = source.bounds([self._journal])[self._journal]
            source.assign({self._journal: first})
            found: list[bytes | None] = []
            while end > first:
                parts, ends = source.read(TIMEOUT_S / 10)
                for rows in parts:
                    found += rows.values
                if ends.get(self._journal, -1) >= end:
                    break
            return found
        finally:
            source.close()

    def close(self) -> None:
        """Give the session up: what has no outcome is not waited for."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None
        self._written = {}
        self._sent_count, self._failure, self._is_begun = 0, "", False

    def end(self) -> None:
        """Close everything."""
        self.close()

    # ---- topics ----------------------------------------------------------------------------------

    def topics(self) -> dict[str, int]:
        """Name -> number of partitions."""
        return self._cluster.topic_names()

    def refusal_of(self, name: str, partitions: int, configs: Mapping[str, str]) -> str:
        """The sentence that says why a topic cannot be created; "" if it can."""
        try:
            self._cluster.create(name, partitions, configs, validate_only=True)
        except MigrationError as error:
            return str(error)
        return ""

    def create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Create a topic. Raises MigrationError."""
        self._cluster.create(name, partitions, configs)

    def add_partitions(self, name: str, partitions: int) -> None:
        """Let a topic have as many partitions. Raises MigrationError."""
        self._cluster.add_partitions(name, partitions)

    def alter(self, name: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic. Raises MigrationError."""
        self._cluster.alter(name, configs)

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The ends of logs. Raises InterruptedSessionError."""
        bounds = self._guarded(lambda: self._cluster.bounds(partitions, "read_uncommitted"))
        return {partition: end for partition, (_, end) in bounds.items()}

    # ---- records ---------------------------------------------------------------------------------

    def write(self, rows: Rows, target_end: int) -> None:
        """Write rows in the open transaction, which is begun. Raises InterruptedSessionError."""
        del target_end
        self._begin()
        topic, number = rows.partition.topic, rows.partition.partition
        note = self._note_of(self._written.setdefault(rows.partition, []))
        headers = rows.headers or [None] * len(rows)
        for stamp, key, value, given in zip(
            rows.stamps_ms, rows.keys, rows.values, headers, strict=True
        ):
            # librdkafka takes 0 for now
            self._produce(
                topic, value, key, number, on_delivery=note, timestamp=max(1, stamp),
                headers=list(given) if given else None,
            )  # fmt: skip
        self._producer.poll(0)

    def _note_of(self, offsets: list[int]) -> Callable[[Any, Any], None]:
        def note(error: Any, message: Any) -> None:
            if error is not None:
                self._failure = self._failure or error.str()
            else:
                offsets.append(message.offset())

        return note

    def _produce(self, *arguments: Any, **options: Any) -> None:
        while True:
            try:
                self._guarded(lambda: self._producer.produce(*arguments, **options))
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._sent_count += 1
                return

    def _begin(self) -> None:
        if not self._is_begun:
            self._guarded(self._producer.begin_transaction)
            self._is_begun = True

    def commit(
        self,
        entries_of: Callable[[Mapping[TopicPartition, Sequence[Sequence[int]]]], Sequence[Entry]],
    ) -> dict[TopicPartition, int]:
        """Commit the open transaction with its entries. `entries_of` gets the offsets of its
        records, as [first, count] of each partition. Returns the ends of the partitions' logs.
        Raises InterruptedSessionError, TakenOverError.
        """
        self._begin()
        self._flush()
        written = {partition: runs_of(offsets) for partition, offsets in self._written.items()}
        crash_point("migrate.before_entries")
        note = self._note_of([])
        for entry in entries_of(written):
            self._produce(self._journal.topic, encoded(entry), None, 0, on_delivery=note)
        self._flush()
        crash_point("migrate.before_commit")
        self._guarded(lambda: self._producer.commit_transaction(COMMIT_TIMEOUT_S))
        crash_point("migrate.after_commit")
        self._is_begun = False
        self._written = {}
        return {partition: runs[-1][0] + runs[-1][1] for partition, runs in written.items() if runs}

    def _flush(self) -> None:
        left = self._producer.flush(COMMIT_TIMEOUT_S)
        if self._failure:
            raise InterruptedSessionError(f"kafka: {self._failure}")
        if left:
            raise InterruptedSessionError(f"kafka: {left} records were not acknowledged in time")

    def too_large(self, rows: Rows) -> tuple[int, int, int] | None:
        """(row, bytes, limit) of the first record that the topic does not take, or None."""
        limit = self._limit(rows.partition.topic)
        if rows.byte_count <= limit and rows.headers is None:
            return None
        return rows.first_over(limit)

    def _limit(self, topic: str) -> int:
        return int(self._config(topic, "max.message.bytes")) - RECORD_EXTRA_BYTES

    def _config(self, topic: str, name: str) -> str:
        if topic not in self._configs:
            self._configs[topic] = self._cluster.configs(topic)
        return self._configs[topic][name]

    def missing_key(self, rows: Rows) -> int | None:
        """The first row without a key in a compacted topic, or None."""
        if None not in rows.keys or "compact" not in self._config(
            rows.partition.topic, "cleanup.policy"
        ):
            return None
        return list(rows.keys).index(None)

    # ---- of plain writing, which needs required offsets ------------------------------------------

    def plain_count(self, partition: TopicPartition, start: int) -> int:
        """0: nothing is written plainly."""
        del partition, start
        return 0

    def last_rows(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, LastRow]:
        """Nothing: records of others do not disturb a map."""
        del offsets
        return {}

    def position_plain(self, positions: Mapping[TopicPartition, int]) -> None:
        """Nothing is written plainly."""

    def write_plain(self, rows: Rows) -> None:
        """Nothing is written plainly."""
        raise NotImplementedError

    def settle(self, waiting_max: int = 0) -> None:
        """Let callbacks run; `commit` waits for outcomes."""
        del waiting_max
        if self._producer is not None:
            self._producer.poll(0)

    # ---- groups ----------------------------------------------------------------------------------

    def set_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, tuple[int, str]]
    ) -> None:
        """Set committed offsets. Raises MigrationError with the reason."""
        self._cluster.set_offsets(group, offsets)

    # ---- errors ----------------------------------------------------------------------------------

    def _guarded(self, function: Callable[[], Any]) -> Any:
        from confluent_kafka import KafkaException

        try:
            return function()
        except KafkaException as error:
            found = error.args[0]
            if hasattr(found, "name") and found.name() in FENCED:
                raise TakenOverError(
                    f"another `tailrace migrate` of the name {self._name} has begun; this one ends."
                ) from None
            raise InterruptedSessionError(f"kafka: {sentence_of(error)}") from None
