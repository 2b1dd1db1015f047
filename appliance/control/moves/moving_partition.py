"""One partition on its way to another data directory, and its logs.

Owner: the controller (`partition_moves`).
Invariants: a partition and that of its delay log are one move. Their rows in the catalog are
written together, so a successor finds both in one stage.
Crash: `taken_up` makes the moves of a predecessor from the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.catalog.moved_partitions import MovedPartition, Stage
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from shm.tables.partition_table import PartitionState
from tailrace.core.schedule.delays import DELAY_SUFFIX, delay_log_name

Key = tuple[bytes, int]
"""(topic id, partition)."""


@dataclass(slots=True)
class Part:
    """A partition's log that moves: the topic's, or its delay log's."""

    name: str
    topic_id: bytes
    partition: int
    former: PartitionRow
    version: int = 0
    """Closing: the version that closes it."""
    end_offset: int = 0
    """Left: end of the log at its arrival. A transaction that was open then begins below."""
    leases: set[str] = field(default_factory=set)
    """Leases of readers that may have begun with the former files."""

    @property
    def key(self) -> Key:
        return self.topic_id, self.partition


@dataclass(slots=True)
class Move:
    """One partition on its way."""

    parts: list[Part]
    """The topic's, then that of the delay log, if there is one."""
    state: str
    target: int = -1
    """Index of the directory that it moves to; -1: not known, or the topic is gone."""
    move: str = ""
    until_ns: int = 0
    """Closing, arriving: the latest time. Left: the earliest time of the removal."""
    is_opened: bool = False
    """Arriving: its new worker may append. It does not go back."""
    is_back: bool = False
    """It went back: nothing needs what is in the other directory."""
    waits_for: str = ""
    """Left: why the former files are still there."""
    sent_ns: int = 0
    is_repeated: bool = False
    """Left: the removal was requested again, since nothing was heard of the first request."""

    @property
    def name(self) -> str:
        return self.parts[0].name.removesuffix(DELAY_SUFFIX)

    @property
    def partition(self) -> int:
        return self.parts[0].partition

    @property
    def key(self) -> Key:
        return self.parts[0].key

    @property
    def former(self) -> PartitionRow:
        return self.parts[0].former

    def topics_in(self, topics: Mapping[str, Topic]) -> list[Topic]:
        """The topic of each part; empty if they are deleted, which is one decision."""
        found = []
        for part in self.parts:
            topic = topics.get(part.name)
            if topic is None or topic.topic_id != part.topic_id or topic.state == "deleting":
                return []
            found.append(topic)
        return found


def states_of(
    each: Move, topics: list[Topic], publisher: MetadataPublisher
) -> list[PartitionState]:
    """States of the parts in their present places, as the flushers show them."""
    rows = [topic.partitions[each.partition] for topic in topics]
    return [publisher.table(row).read(row.slot) for row in rows]


def taken_up(rows: list[MovedPartition], until_ns: int) -> list[Move]:
    """The moves that a predecessor has decided."""
    named = {(row.name, row.partition): row for row in rows}
    found = []
    for row in rows:
        owner = row.name.removesuffix(DELAY_SUFFIX)
        if owner != row.name and (owner, row.partition) in named:
            continue  # it is part of the topic's move
        log = named.get((delay_log_name(row.name), row.partition))
        parts = [
            Part(
                each.name, each.topic_id, each.partition,
                PartitionRow(each.partition, each.data_dir, each.slot, 0),
            )
            for each in (row, log)
            if each is not None
        ]  # fmt: skip
        state = "closing" if row.stage is Stage.CLOSED else "arriving"
        is_opened = row.stage is Stage.OPEN
        found.append(Move(parts, state, until_ns=until_ns, is_opened=is_opened))
    return found
