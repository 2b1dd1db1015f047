"""What the coordinator tells the other processes about a partition, and how requests pass between fronts and coordinator: the messages
on their lanes.

Owner: the coordinator writes assignments; workers copy them into their rings as control descriptors, so that the flusher meets them in
order with the data.
Invariants: `version` grows with every change of a topic; applying an assignment twice, or an older one after a newer, changes nothing.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import lru_cache
from typing import Any

import orjson


class LaneKind(IntEnum):
    """The `kind` of a lane message."""

    PRODUCE = 0
    ASSIGN = 1
    """Payload: an Assignment. `flags` 1: a replay for a restarted process, nothing new."""
    FED = 2
    """The whole catalog was sent to the process generation in `correlation_id`."""
    LEASE = 5
    """Coordinator to flusher; payload JSON: topic_id (hexadecimal), partition, lease, offset, ttl_ms: what a reader wants kept, and for how long."""
    FOLLOW = 6
    """Coordinator to flusher: the dedicated worker of number `slot` has a ring now."""
    REQUEST = 3
    """Front to coordinator, scheduler or groups; `slot` is the API number, payload JSON."""
    RESPONSE = 4
    """The answer; `flags` is the error code, payload JSON."""
    SESSION_CLOSED = 7
    """Front to groups: the session that has sent group requests has ended; no payload."""
    PUSH = 8
    """Groups to front: tell the session something that it did not ask for; `slot` is the API number, payload JSON."""


REPLAY = 1
SHARED_COUNT = 32
"""How many schemas, and how many tables of settings, a process looks through for an equal one."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition: who serves it and how. `dropped` takes it away."""

    topic: str
    topic_id: bytes
    partition: int
    partition_count: int
    slot: int
    version: int
    worker: int
    front: int
    data_dir: int
    schema_id: int
    schema: bytes
    """An encapsulated Arrow schema message."""
    typed: bool
    dropped: bool = False
    delete_before: int = 0
    """Records below this offset are to be deleted."""
    revive: bool = False
    """The disk of a partition that is offline is said to be good again; only the news says so, a replay never does."""
    delay_of: str = ""
    """Of a delay log: the id, hexadecimal, of the topic whose delayed records it holds."""
    delay_log: str = ""
    """Of a topic that has one: its delay log's id."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The topic's settings, complete and of the right types (see `appliance.topic_settings`)."""
    given: dict[str, Any] = field(default_factory=dict)
    """Those that were asked for, and when the topic was made: what its files say of it."""
    created_us: int = 0
    slot_counts: list[int] = field(default_factory=list)
    """With hash slots: how many partitions the topic has had, one after the other; the length is the version of its slot map."""
    slots: str = ""
    """The slots of this partition, as ranges."""
    hand_over: list[list[int]] = field(default_factory=list)
    """[source partition, offset] of each that gave it slots; complete where readers are told."""

    @property
    def has_delays(self) -> bool:
        """Whether the scheduler looks at this partition: a delay log, or what is delivered to."""
        return bool(self.delay_of or self.delay_log)

    @property
    def directory_name(self) -> str:
        return f"{self.topic}-{self.partition}"

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in _FIELDS}
        values["topic_id"] = self.topic_id.hex()
        values["schema"] = base64.b64encode(self.schema).decode("ascii")
        return orjson.dumps(values)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Assignment:
        """Equal schemas and settings of assignments decoded one after the other are one object: a topic may have a thousand partitions."""
        values = orjson.loads(payload)
        values["topic"] = sys.intern(values["topic"])
        values["topic_id"] = bytes.fromhex(values["topic_id"])
        values["schema"] = _schema(values["schema"])
        values["settings"] = _settings(orjson.dumps(values["settings"]))
        values["given"] = _settings(orjson.dumps(values["given"]))
        return cls(**values)


_FIELDS = tuple(field.name for field in fields(Assignment))


@lru_cache(maxsize=SHARED_COUNT)
def _schema(encoded: str) -> bytes:
    return base64.b64decode(encoded)


@lru_cache(maxsize=SHARED_COUNT)
def _settings(encoded: bytes) -> dict[str, Any]:
    """Nobody changes what is given out."""
    found: dict[str, Any] = orjson.loads(encoded)
    return found
