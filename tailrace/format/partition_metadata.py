"""`partition.json`: what is known of a partition beside its segments, and must outlive them: whose it is, where it begins, what was lost, and what was decided
of its topic, from which the coordinator makes its catalog again when that is lost.

Owner: the flusher writes it, durably, on each change of what it holds (rarely); fronts read the epochs, the offline tools everything.
Invariants: epochs ascend in number and in start offset; damage lies in ascending order and does not overlap.
Crash: written to a temporary name, synced, renamed: the old or the new one is there, whole.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tailrace.formats import checked_json
from tailrace.formats.batch_header import checksum_seed

PARTITION_FILE = "partition.json"
FORMAT_VERSION = 5
READ_VERSIONS = (2, 3, 4, FORMAT_VERSION)
"""2: decisions were not kept here; 3: segments had the suffix `.arrow`, and may have it still; 4: there were no hash slots."""
SHARED_COUNT = 32
"""How many schemas a process looks through for an equal one."""


class Damage(NamedTuple):
    """Offsets `start` to `end - 1` cannot be read any more. In their segment they lie at `position`; `end_position` 0: up to its end."""

    segment_base: int
    position: int
    end_position: int
    start: int
    end: int


class Epoch(NamedTuple):
    """From `start` on, the log was written under leader epoch `number`."""

    number: int
    start: int


class MapEnd(NamedTuple):
    """The slot map of this version holds for what lies at `end` and beyond; all below was routed by maps before it."""

    version: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What the catalog says of the partition's topic."""

    version: int
    partition_count: int
    schema_id: int
    typed: bool
    created_us: int
    delay_of: str
    """Of a delay log: the id, hexadecimal, of its topic."""
    given: dict[str, Any]
    """The settings that were asked for."""
    slot_counts: list[int] = field(default_factory=list)
    """With hash slots: how many partitions the topic has had, one after the other."""


@dataclass(slots=True)
class PartitionFile:
    """What the file holds."""

    topic: str
    partition: int
    topic_id: bytes
    schemas: dict[int, bytes]
    """schema id -> the encapsulated schema message that segments of it begin with."""
    log_start_offset: int = 0
    epochs: list[Epoch] = field(default_factory=lambda: [Epoch(0, 0)])
    damage: list[Damage] = field(default_factory=list)
    offline: str = ""
    """Why writes are refused; empty: they are not."""
    run: str = ""
    """The run of the appliance that looked at this log last: each run bumps an epoch at most once."""
    decision: Decision | None = None
    """The newest that its flusher has carried out. None: an older build wrote the file."""
    map_ends: list[MapEnd] = field(default_factory=list)
    """With hash slots: where the log ended when its worker began to obey each map but the first."""

    @property
    def seed(self) -> int:
        """What header checksums of this partition start from."""
        return checksum_seed(self.topic_id, self.partition)

    @property
    def leader_epoch(self) -> int:
        """The newest epoch's number."""
        return self.epochs[-1].number

    def epoch_at(self, offset: int) -> int:
        """Under which leader epoch `offset` was, or would be, written."""
        return next((epoch.number for epoch in reversed(self.epochs) if epoch.start <= offset), self.epochs[0].number)

    def begin_epoch(self, start: int, above: int = 0) -> None:
        """What follows from offset `start` on may differ from what was read there before. The new epoch is above `above`, too."""
        number = max(self.leader_epoch, above) + 1
        self.epochs = [epoch for epoch in self.epochs if epoch.start < start or not epoch.number]
        self.epochs.append(Epoch(number, start))

    def note_map(self, version: int, end: int) -> bool:
        """A slot map holds from `end` on (said in order with the data); returns whether that is news."""
        if version <= max(1, self.map_ends[-1].version if self.map_ends else 0):
            return False
        self.map_ends.append(MapEnd(version, end))
        return True

    def end_of_epoch(self, number: int) -> int | None:
        """Where what was written under epoch `number` ends, None while it is the newest. A reader of that epoch beyond it read what was lost
        (KIP-320's idea).
        """
        return next((epoch.start for epoch in self.epochs if epoch.number > number), None)

    def damage_at(self, offset: int) -> Damage | None:
        """The damage that `offset` lies in; None: it can be read."""
        return next((damage for damage in self.damage if damage.start <= offset < damage.end), None)

    def encode(self) -> bytes:
        """The file's bytes: checked JSON."""
        fields: dict[str, Any] = asdict(self)
        fields["epochs"] = [list(epoch) for epoch in self.epochs]
        fields["damage"] = [list(damage) for damage in self.damage]
        fields["map_ends"] = [list(each) for each in self.map_ends]
        fields["format"] = FORMAT_VERSION
        fields["topic_id"] = self.topic_id.hex()
        fields["schemas"] = {str(number): base64.b64encode(message).decode("ascii") for number, message in self.schemas.items()}
        return checked_json.encode(fields)

    @classmethod
    def decode(cls, data: bytes) -> PartitionFile | None:
        """None when damaged, or when it is another file that has a fitting checksum."""
        fields = checked_json.decode(data)
        if not isinstance(fields, dict) or fields.pop("format", None) not in READ_VERSIONS:
            return None
        try:
            fields["topic_id"] = bytes.fromhex(fields["topic_id"])
            fields["schemas"] = {int(number): _schema(message) for number, message in fields["schemas"].items()}
            fields["epochs"] = [Epoch(*epoch) for epoch in fields["epochs"]]
            fields["damage"] = [Damage(*damage) for damage in fields["damage"]]
            fields["map_ends"] = [MapEnd(*each) for each in fields.get("map_ends", ())]
            fields["decision"] = Decision(**fields["decision"]) if fields.get("decision") else None
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError):  # its checksum fits, but it is another file under this name
            return None


@lru_cache(maxsize=SHARED_COUNT)
def _schema(encoded: str) -> bytes:
    """Partitions of a topic share one: it may be large, and they may be a thousand."""
    return base64.b64decode(encoded)
