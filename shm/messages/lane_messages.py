"""Lane messages: partition assignments from the controller, and requests and responses between
processes.

Owner: the controller writes assignments. Workers copy them into their rings as control descriptors,
so that the flusher sees them in order with the data.

Invariants:
- `version` grows with every change of a topic.
- Applying an assignment twice, or an older one after a newer one, changes nothing.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass, field, fields
from enum import IntEnum, unique
from functools import lru_cache
from typing import Any

import orjson


@unique
class LaneKind(IntEnum):
    """The `kind` of a lane message."""

    PRODUCE = 0
    ASSIGN = 1
    """Payload: an Assignment. `flags` is 1 for a replay to a restarted process."""
    FED = 2
    """The whole catalog was sent to the process generation in `correlation_id`."""
    LEASE = 5
    """Controller to flusher: retain records for a reader. Payload JSON: topic_id (hexadecimal),
    partition, lease, offset, ttl_ms.
    """
    FOLLOW = 6
    """Controller to flusher: the dedicated worker `slot` has a ring now."""
    REQUEST = 3
    """Front to controller, scheduler or groups. `slot` is the API number, payload JSON."""
    RESPONSE = 4
    """Response to REQUEST. `flags` is the error code, payload JSON."""
    SESSION_CLOSED = 7
    """Front to groups: a session with group requests has ended. No payload."""
    PUSH = 8
    """Groups to front: push to a session. `slot` is the API number, payload JSON."""
    TRANSACTIONS_FEED = 9
    """Coordinator of transactions to worker: replace what is registered by the DECISIONS that
    follow, up to TRANSACTIONS_FED.
    """
    DECISIONS = 10
    """Coordinator of transactions to worker. Payload: see `shm.messages.transaction_messages`."""
    TRANSACTIONS_FED = 11
    """Everything was sent to the worker's process generation in `correlation_id`."""
    TRANSACTIONS_CONNECTED = 12
    """Worker to coordinator of transactions: the process generation in `correlation_id` has
    started. 0: it needs another feed.
    """
    OPENED = 13
    """Worker to coordinator of transactions: these transactions have a batch here. Once for each
    transaction and generation of either process.
    """
    SETTLED = 14
    """Worker to coordinator of transactions: which decisions are carried out durably."""
    ASK_OUTCOME = 15
    """Worker to coordinator of transactions: how did these end, which are open in a partition, and
    not registered?
    """
    PRODUCER_IDS = 16
    """Controller to groups: `correlation_id` is the first of a block of producer ids for the
    process generation in `session`.
    """
    PURGE = 17
    """Controller to flusher: remove a deleted topic from the bin. Payload: its topic id."""
    COMPACT = 18
    """Controller to flusher: clean a compacted partition now. Payload JSON: topic id (hexadecimal),
    partition, number of the request.
    """

    PRODUCE_OWNED = 19
    """Front to worker: PRODUCE of a batch for a delay log, in whose header the front has written
    the number of its owner.
    """
    RIGHTS = 30
    """Controller to front: users and ACLs that have changed. Payload JSON: users, removed_users,
    acls, removed_acls. Where a feed begins, `flags` is 1, and the payload has the path of the
    catalog, where the front reads all of them (`shm.rights.stored_rights`).
    """


AUDIT_REQUEST = 0xFF01
"""API number of a front's own request to the controller: write events of the audit log. No client
can send it.
"""
PRODUCER_OWNERS = 0xFF02
"""API number of a front's own request to the process of groups: the users and transactional ids of
transactional producer ids. No client can send it.
"""
REPLAY = 1
SHARED_COUNT = 32
"""Number of schemas, and of settings, that a process caches to share equal ones."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of one partition to its processes, with its settings. `dropped` removes it. The
    controller sends it. It is unrelated to the assignment of a consumer group.
    """

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
    """Encapsulated Arrow schema message."""
    typed: bool
    dropped: bool = False
    binned: bool = False
    """With `dropped`: move the partition's files to the bin instead of removing them. Without it,
    in a replay: that move is under way, and is completed by a `dropped` that follows.
    """
    undeleted: bool = False
    """True until a topic that comes back from the bin is open, or a partition that moves: its log
    does not begin empty.
    """
    departing: str = ""
    """The data directory that the partition is about to move to. Its worker appends nothing more,
    and its flusher completes the copy there. Readers go on. Without `move` it is closed and nothing
    else: it has left, or arrives.
    """
    move: str = ""
    """With `departing`: the name of this move, which the copy carries."""
    delete_before: int = 0
    """Delete the records below this offset."""
    revive: bool = False
    """True to bring an offline partition back, after its disk was repaired.

    Never set in a replay.
    """
    delay_of: str = ""
    """Delay log: topic id, hexadecimal, of the topic whose delayed records it holds."""
    delay_log: str = ""
    """Topic with delays: topic id, hexadecimal, of its delay log."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the topic, complete and typed (see `appliance.config.topic_config`)."""
    given: dict[str, Any] = field(default_factory=dict)
    """Settings given at creation. The partition's files record them with `created_us`."""
    created_us: int = 0
    slot_counts: list[int] = field(default_factory=list)
    """Successive partition counts of a topic with hash slots.

    The length is its slot map version.
    """
    slots: str = ""
    """Slots of this partition, as ranges."""
    hand_over: list[list[int]] = field(default_factory=list)
    """[source partition, offset] of each that gave it slots.

    Complete where readers are notified.
    """
    older_schemas: dict[int, bytes] = field(default_factory=dict)
    """Schema id -> message of the versions before `schema`. Batches of them may be on their way."""

    @property
    def has_delays(self) -> bool:
        """True if the scheduler serves this partition: a delay log, or a topic that has one."""
        return bool(self.delay_of or self.delay_log)

    @property
    def directory_name(self) -> str:
        return f"{self.topic}-{self.partition}"

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in _FIELDS}
        values["topic_id"] = self.topic_id.hex()
        values["schema"] = base64.b64encode(self.schema).decode("ascii")
        values["older_schemas"] = {
            str(number): base64.b64encode(message).decode("ascii")
            for number, message in self.older_schemas.items()
        }
        return orjson.dumps(values)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Assignment:
        """Decode an assignment. Equal schemas and settings of successive assignments are shared,
        since a topic may have a thousand partitions.
        """
        values = orjson.loads(payload)
        values["topic"] = sys.intern(values["topic"])
        values["topic_id"] = bytes.fromhex(values["topic_id"])
        values["schema"] = _schema(values["schema"])
        values["older_schemas"] = {
            int(number): _schema(message) for number, message in values["older_schemas"].items()
        }
        values["settings"] = _settings(orjson.dumps(values["settings"]))
        values["given"] = _settings(orjson.dumps(values["given"]))
        return cls(**values)


_FIELDS = tuple(field.name for field in fields(Assignment))


@lru_cache(maxsize=SHARED_COUNT)
def _schema(encoded: str) -> bytes:
    return base64.b64decode(encoded)


@lru_cache(maxsize=SHARED_COUNT)
def _settings(encoded: bytes) -> dict[str, Any]:
    """Return decoded settings, shared between assignments. Callers must not change them."""
    found: dict[str, Any] = orjson.loads(encoded)
    return found
