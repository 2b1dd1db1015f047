"""Partition metadata, `partition.json`: the state of a partition that must outlive its segments.

It has the topic id, log start offset, leader epochs, schemas, known damage, and the decisions about
the topic, from which the controller can rebuild a lost catalog.

Owner: the flusher writes it durably on each change (rarely). Fronts read the epochs, the offline
tools everything.

Invariants:
- Epochs ascend in number and in start offset.
- Damaged ranges ascend and do not overlap.

Crash: it is written to a temporary name, synced and renamed. The old or the new file is there,
whole.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import PARTITION_FILE as PARTITION_FILE
from tailrace.format.record_batch.batch_header import checksum_seed

FORMAT_VERSION = 5
READ_VERSIONS = (2, 3, 4, FORMAT_VERSION)
"""Version 2 had no decisions. In version 3 segments had the suffix `.arrow`, and may still have it.
Version 4 had no hash slots.
"""
SHARED_COUNT = 32
"""Schemas cached per process, so that equal ones are shared."""


class DamagedRange(NamedTuple):
    """The unreadable offsets `start` to `end - 1`.

    In their segment they are at `position` to `end_position`; 0 means to its end.
    """

    segment_base: int
    position: int
    end_position: int
    start: int
    end: int


class Epoch(NamedTuple):
    """A leader epoch: the log was written under `number` from `start` on."""

    number: int
    start: int


class SlotMapEnd(NamedTuple):
    """The slot map of this version applies to offsets from `end` on,
    maps before it to those below.
    """

    version: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The catalog's entry of the partition's topic."""

    version: int
    partition_count: int
    schema_id: int
    typed: bool
    created_us: int
    delay_of: str
    """The topic id (hexadecimal) of a delay log's topic, else ""."""
    given: dict[str, Any]
    """The settings given by the user."""
    slot_counts: list[int] = field(default_factory=list)
    """The topic's history of partition counts, if it has hash slots."""


@dataclass(slots=True)
class PartitionMetadata:
    """The contents of `partition.json`."""

    topic: str
    partition: int
    topic_id: bytes
    schemas: dict[int, bytes]
    """Schema id -> the encapsulated schema message at the start of its segments."""
    log_start_offset: int = 0
    epochs: list[Epoch] = field(default_factory=lambda: [Epoch(0, 0)])
    damage: list[DamagedRange] = field(default_factory=list)
    offline: str = ""
    """The reason why writes are rejected; empty: they are accepted."""
    run: str = ""
    """The appliance's run that opened this log last. Each run bumps an epoch at most once."""
    decision: Decision | None = None
    """The newest decision that the flusher has carried out. None in files of an older version."""
    map_ends: list[SlotMapEnd] = field(default_factory=list)
    """The log end offset when the worker began to use each slot map but the first."""

    @property
    def seed(self) -> int:
        """The seed of this partition's header checksums."""
        return checksum_seed(self.topic_id, self.partition)

    @property
    def leader_epoch(self) -> int:
        """The newest epoch's number."""
        return self.epochs[-1].number

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of the record at `offset`, written or to be written."""
        return next(
            (epoch.number for epoch in reversed(self.epochs) if epoch.start <= offset),
            self.epochs[0].number,
        )

    def begin_epoch(self, start: int, above: int = 0) -> None:
        """Begin an epoch at `start`: records from there on may differ from earlier reads.

        The new number is also above `above`.
        """
        number = max(self.leader_epoch, above) + 1
        self.epochs = [epoch for epoch in self.epochs if epoch.start < start or not epoch.number]
        self.epochs.append(Epoch(number, start))

    def note_map(self, version: int, end: int) -> bool:
        """Record that a slot map applies from `end` on. Called in order with the data.

        Returns True if the map is new.
        """
        if version <= max(1, self.map_ends[-1].version if self.map_ends else 0):
            return False
        self.map_ends.append(SlotMapEnd(version, end))
        return True

    def end_of_epoch(self, number: int) -> int | None:
        """The end offset of epoch `number`, None while it is the newest.

        A reader of that epoch beyond its end has read lost records (KIP-320).
        """
        return next((epoch.start for epoch in self.epochs if epoch.number > number), None)

    def damage_at(self, offset: int) -> DamagedRange | None:
        """The damaged range that contains `offset`, None if it can be read."""
        return next((damage for damage in self.damage if damage.start <= offset < damage.end), None)

    def encode(self) -> bytes:
        """Encode the file as checked JSON."""
        fields: dict[str, Any] = asdict(self)
        fields["epochs"] = [list(epoch) for epoch in self.epochs]
        fields["damage"] = [list(damage) for damage in self.damage]
        fields["map_ends"] = [list(each) for each in self.map_ends]
        fields["format"] = FORMAT_VERSION
        fields["topic_id"] = self.topic_id.hex()
        fields["schemas"] = {
            str(number): base64.b64encode(message).decode("ascii")
            for number, message in self.schemas.items()
        }
        return checked_json.encode(fields)

    @classmethod
    def decode(cls, data: bytes) -> PartitionMetadata | None:
        """Decode the file. None if it is damaged, or another kind of file with a valid checksum."""
        fields = checked_json.decode(data)
        if not isinstance(fields, dict) or fields.pop("format", None) not in READ_VERSIONS:
            return None
        try:
            fields["topic_id"] = bytes.fromhex(fields["topic_id"])
            fields["schemas"] = {
                int(number): _schema(message) for number, message in fields["schemas"].items()
            }
            fields["epochs"] = [Epoch(*epoch) for epoch in fields["epochs"]]
            fields["damage"] = [DamagedRange(*damage) for damage in fields["damage"]]
            fields["map_ends"] = [SlotMapEnd(*each) for each in fields.get("map_ends", ())]
            fields["decision"] = Decision(**fields["decision"]) if fields.get("decision") else None
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError):
            # The checksum is valid, but this is another kind of file.
            return None


@lru_cache(maxsize=SHARED_COUNT)
def _schema(encoded: str) -> bytes:
    """Decode a schema. A topic's partitions share one copy."""
    return base64.b64decode(encoded)
