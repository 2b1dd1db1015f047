"""The appliance as the source of a migration: its topics, groups and records.

Owner: one process that copies.
Invariants:
- Rows of a partition are in the order of their offsets, from the position of `assign` on.
- A partition is at its end when the reader has passed everything that is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from appliance.config.topic_settings import TOPIC_SETTINGS
from appliance.migrate.clusters.kafka_client import TopicDescription
from appliance.migrate.errors import InterruptedSessionError, MigrationError
from appliance.migrate.rows import Rows, size_of
from tailrace.admin.admin import Admin
from tailrace.batch.topic_batch import TopicBatch
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition

FETCH_MAX_BYTES = 64 << 20


class TailraceCluster:
    """Topics and groups of the appliance."""

    def __init__(self, bootstrap: str, connect_timeout_ms: int) -> None:
        """Connects with the first request."""
        self.bootstrap = bootstrap
        self.admin = Admin(bootstrap, connect_timeout_ms=connect_timeout_ms)

    def topic_names(self) -> dict[str, int]:
        """Name -> number of partitions."""
        counts = self.admin.partition_counts()
        return {str(name): count for name, count in counts.items()}

    def describe(self, names: Collection[str]) -> dict[str, TopicDescription]:
        """Topics that exist. Raises MigrationError for a typed one."""
        found = {}
        for topic, info in self.admin.topic_info(names).items():
            name = str(topic)
            if info.typed:
                raise MigrationError(
                    f"topic {name} is typed, and Kafka has no columns. Leave it out, or "
                    "write its rows with a program of yours."
                )
            configs = {
                setting: str(value).lower() if isinstance(value, bool) else str(value)
                for setting, value in info.settings.items()
                if setting in TOPIC_SETTINGS and value != TOPIC_SETTINGS[setting].default
            }
            found[name] = TopicDescription(name, info.topic_id.hex(), len(info.partitions), configs)
        return found

    def groups(self) -> list[str]:
        """Names of the consumer groups."""
        return [
            name for name, group in self.admin.list_groups().items() if group["kind"] != "share"
        ]

    def offsets(self, group: str) -> dict[TopicPartition, tuple[int, str]]:
        """(committed offset, metadata) of each partition."""
        return {
            partition: (int(offset), offset.metadata)
            for partition, offset in self.admin.list_group_offsets(group).items()
            if offset is not None
        }

    def member_count(self, group: str) -> int:
        """The number of a group's members."""
        listed = self.admin.list_groups()
        return int(listed[group]["members"]) if group in listed else 0


class TailraceSource:
    """The records of some partitions."""

    def __init__(self, cluster: TailraceCluster, isolation: str) -> None:
        """`isolation`: read_committed leaves aborted records out."""
        self._admin = cluster.admin
        self._isolation = isolation
        self._consumer = Consumer(
            bootstrap=cluster.bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level=isolation,
            fetch_max_bytes=FETCH_MAX_BYTES,
            client_id="tailrace-migrate",
        )
        self._assigned: dict[TopicPartition, None] = {}

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """(first offset, end) of partitions. Raises InterruptedSessionError."""
        end = "end" if self._isolation == "read_committed" else "high_watermark"
        try:
            found = self._admin.offsets(dict.fromkeys(partitions, "earliest"))
            return {
                partition: (answer["beginning"], answer.get(end, answer["end"]))
                for partition, answer in found.items()
            }
        except (TailraceError, KeyError) as error:
            raise InterruptedSessionError(str(error)) from None

    def unstable(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(last stable offset, high watermark) of the partitions with an open transaction. Records
        between the two are not read yet. Raises InterruptedSessionError.
        """
        if self._isolation != "read_committed":
            return {}
        try:
            found = self._admin.offsets(dict.fromkeys(partitions, "latest"))
            return {
                partition: (answer["end"], answer["high_watermark"])
                for partition, answer in found.items()
                if answer["end"] < answer.get("high_watermark", answer["end"])
            }
        except (TailraceError, KeyError) as error:
            raise InterruptedSessionError(str(error)) from None

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read partitions from these offsets on."""
        self._assigned = dict.fromkeys(positions)
        try:
            self._consumer.assign(list(positions))
            for partition, offset in positions.items():
                self._consumer.seek(partition, offset)
        except TailraceError as error:
            raise InterruptedSessionError(str(error)) from None

    def stop(self, partition: TopicPartition) -> None:
        """Read a partition no more."""
        self._assigned.pop(partition, None)
        self._consumer.pause(partition)

    def read(self, timeout_s: float) -> tuple[Sequence[Rows], dict[TopicPartition, int]]:
        """Rows that have come, and the partitions that are at their end now, with that offset.
        Waits for the first for at most `timeout_s`. Raises InterruptedSessionError.
        """
        try:
            batches = self._consumer.poll_arrow(int(timeout_s * 1_000))
            if batches:
                return [_rows(batch) for batch in batches if len(batch)], {}
            ends = {}
            for partition, (_, end) in self.bounds(self._assigned).items():
                if self._consumer.position(partition) >= end:
                    ends[partition] = end
            return [], ends
        except TailraceError as error:
            raise InterruptedSessionError(str(error)) from None

    def close(self) -> None:
        """Close the reader."""
        self._consumer.close()


def _rows(batch: TopicBatch) -> Rows:
    columns = batch.batch
    keys = columns.column("key").to_pylist()
    values = columns.column("value").to_pylist()
    if batch.has_one_time:
        stamps = [batch.timestamp_us // 1_000] * len(batch)
    else:
        stamps_us = columns.column("timestamp").cast("int64").to_numpy(zero_copy_only=False)
        stamps = (stamps_us.astype(np.int64) // 1_000).tolist()
    headers = columns.column("headers")
    given: list[Any] | None = None
    if headers.null_count < len(batch) and pc.sum(pc.list_value_length(headers)).as_py():
        given = [
            None if not each else [(header["key"], header["value"]) for header in each]
            for each in headers.to_pylist()
        ]
    return Rows(
        TopicPartition(str(batch.topic), batch.partition), batch.offsets.to_pylist(), stamps, keys,
        values, given, size_of(keys, values),
    )  # fmt: skip
