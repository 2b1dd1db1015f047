"""Scan plan: the offsets, partitions and places that a scan reads. It can be pickled and split, so
that tasks elsewhere read parts of it.

Owner: pure. `tailrace.scanning.planner` makes it.
Invariants: a plan does not change once it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.core.topic_partition import TopicPartition
from tailrace.format.schema import from_message
from tailrace.format.segments.transaction_index import AbortedTransaction
from tailrace.scanning.columns import Column, arrow_schema
from tailrace.scanning.options import ScanSettings

if TYPE_CHECKING:
    from tailrace.format.evolution.schema_history import SchemaHistory


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """Offsets `start` to `end - 1` of one partition."""

    topic: str
    topic_id: bytes
    partition: int
    start: int
    end: int
    directory: str = ""
    """The directory of its files on the host that made the plan; empty: only over ZeroMQ."""
    aborted: tuple[AbortedTransaction, ...] | None = None
    """The aborted transactions of a stopped appliance's log; None: the transaction indexes name
    them.
    """

    @property
    def key(self) -> TopicPartition:
        """The partition."""
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The input of a reader."""

    bootstrap: str
    """The appliance's address; empty: none runs, and the directories are read directly."""
    topic: str
    typed: bool
    schema_message: bytes
    """The version of the topic's schema that rows are returned in."""
    columns: tuple[Column, ...]
    ranges: tuple[PartitionRange, ...]
    settings: ScanSettings = field(default_factory=ScanSettings)
    lease: str = ""
    """The lease's name; empty: there is none."""
    schema_id: int = -1
    versions: tuple[tuple[int, bytes], ...] = ()
    """Schema id and message of each version of a typed topic's schema, oldest first. Empty: the
    topic has one.
    """

    @property
    def history(self) -> SchemaHistory | None:
        """The versions, by which rows are converted. None: the topic is not typed."""
        if not self.typed:
            return None
        from tailrace.format.evolution.schema_history import SchemaHistory

        versions = self.versions or ((self.schema_id, self.schema_message),)
        return SchemaHistory(versions, self.schema_id)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the scan's batches."""
        return arrow_schema(self.columns)

    @property
    def topic_schema(self) -> pa.Schema:
        """The schema of the topic's batches."""
        return from_message(self.schema_message)

    @property
    def topic_ids(self) -> dict[str, bytes]:
        """The topics that are read, by name."""
        return {r.topic: r.topic_id for r in self.ranges}

    def split(self, offsets_max: int) -> list[ScanPlan]:
        """Split into plans of at most `offsets_max` offsets each, in order."""
        pieces = [
            replace(r, start=start, end=min(start + offsets_max, r.end))
            for r in self.ranges
            for start in range(r.start, r.end, offsets_max)
        ]
        return [replace(self, ranges=(piece,)) for piece in pieces]
