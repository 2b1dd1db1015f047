"""Deduplication: what a partition remembers of each idempotent producer and of its delays, and the decision on the next batch.

Kafka's rules (KIP-98): a producer numbers its records per partition; its last REMEMBERED_BATCHES (Kafka: five) are known, so that a retry of any that may
be in flight is recognised and acknowledged with its first offset; a gap is refused; a higher epoch starts at sequence 0.

Owner: the worker decides with it; the flusher keeps a copy from what it has flushed, and snapshots that when a segment is rolled.
Invariants: at most REMEMBERED_BATCHES per producer, consecutive in sequence, ascending in offset; more than KEPT producers only if each has appended
    within IDLE_US, as far as the last look, which is at most LOOK_INTERVAL_US old, has seen.
Crash: rebuilt from the snapshot of the live segment, the headers in it, and the ring's descriptors.

Which producers may be forgotten. If a producer that was forgotten retries a batch that was appended, it is appended twice: sequence 0 looks like a beginning,
and any other gets UNKNOWN_SEQUENCE, upon which a producer sends the batch again under a new epoch. A table of fixed size that forgets the longest
idle would let one client, by inventing ids, make others' retries duplicates. So no producer is forgotten that may still retry: a producer retries
until its delivery_timeout_ms (two minutes) is over, then it reports the record's fate as unknown and never sends that batch again. Only producers that
have appended nothing for IDLE_US are forgotten, and only where more than KEPT are known (or after producer.id.expiration.ms, a day); they lose a
round trip for a new epoch, nothing else. (By the wall clock, which is all that outlives a restart: setting it forward shortens these times.) While there
are `producer.ids.max`, new producers are refused with TOO_MANY_PRODUCERS, which their SDKs retry; those that are known go on. A tombstone of
(id, epoch) instead would tell a retry from a beginning, but could not acknowledge it with its offset. Worker, flusher and snapshots follow one rule at the
same batches, so a successor remembers what its predecessor did.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any, NamedTuple

from tailrace.formats.batch_header import REMEMBERED_BATCHES, SEQUENCE_MODULUS
from tailrace.protocol.errors import ErrorCode


class Remembered(NamedTuple):
    """One batch of a producer. `last_sequence` and `next_offset` say where the following one belongs."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_us: int


class Decision(Enum):
    APPEND = 1
    DUPLICATE = 2
    REFUSE = 3


class Verdict(NamedTuple):
    decision: Decision
    original: Remembered | None = None
    code: ErrorCode = ErrorCode.OK
    is_new: bool = False
    """Nothing is known of this producer: to be appended if there is room for one more (`has_room`)."""


KEPT = 256
"""So many producers of a partition are remembered for a day, however idle: a few tens of KB."""
IDLE_US = 900_000_000
"""Beyond that, who has appended nothing for so long is forgotten: longer than any producer retries."""
LOOK_INTERVAL_US = 1_000_000

_APPEND = Verdict(Decision.APPEND)
_APPEND_NEW = Verdict(Decision.APPEND, is_new=True)


_DELAYS = "delays"
"""In the place of a producer's id in a snapshot: what is known of delays."""


# A producer is `bytes`: its batches, newest first, each with the epoch and the fields of Remembered. 70 bytes and its place in the dict for one of one
# batch, where objects took 500; and nothing that the garbage collector looks at.
_BATCH = struct.Struct("<iiiqqq")
OLDER_BYTES = (REMEMBERED_BATCHES - 1) * _BATCH.size
"""Of what is remembered of a producer, so much is kept behind its newest batch."""
_EPOCH, _LAST_SEQUENCE, _BASE_OFFSET, _TIME = 0, 2, 3, 5


def _oldest_first(packed: bytes) -> list[Remembered]:
    return [Remembered._make(fields[1:]) for fields in _BATCH.iter_unpack(packed)][::-1]


class ProducerTable:
    """The producers of one partition, and how far its delays are: what decides whether a batch is new."""

    def __init__(self) -> None:
        self._producers: dict[int, bytes] = {}
        self._look_again_us = 0
        """Before this time no producer can have become idle."""
        self.open_ordinal = 0
        """Of a delay log: the first ordinal (`tailrace.delays`) that is not closed; later rows are due then at the earliest."""
        self.delivered = (0, 0)
        """Of a topic: (ordinal, delay position) of the last delayed row that was delivered to it."""

    def __len__(self) -> int:
        return len(self._producers) + (self.open_ordinal > 0) + (self.delivered > (0, 0))

    @property
    def producer_count(self) -> int:
        return len(self._producers)

    def has_room(self, limit: int, now_us: int) -> bool:
        """Whether one more producer may be remembered; those that are idle are forgotten for it."""
        if len(self._producers) < KEPT:
            return True
        self._forget_idle(now_us)
        return len(self._producers) < limit

    def _forget_idle(self, now_us: int) -> None:
        if now_us >= self._look_again_us:
            self._look_again_us = now_us + LOOK_INTERVAL_US
            self.expire(now_us - IDLE_US)

    def close_below(self, ordinal: int) -> None:
        """The delay log has a mark that closes all ordinals below."""
        self.open_ordinal = max(self.open_ordinal, ordinal)

    def deliver(self, ordinal: int, position: int) -> None:
        """A batch of delayed rows was delivered up to this one."""
        self.delivered = max(self.delivered, (ordinal, position))

    def decide(self, producer_id: int, epoch: int, base_sequence: int, last_offset_delta: int, forget_before_us: int = 0) -> Verdict:
        """What to do with a batch whose first record has `base_sequence` and which has `last_offset_delta + 1` of them.

        A producer that has appended nothing since `forget_before_us` is forgotten (producer.id.expiration.ms).
        """
        packed = self._producers.get(producer_id)
        newest = None if packed is None else _BATCH.unpack_from(packed)
        if newest is not None and newest[_TIME] < forget_before_us:
            self.expire(forget_before_us)
            newest = None
        if newest is None or packed is None:
            # Kafka accepts any sequence of an unknown producer; that can hide a loss. Here it has to begin at 0.
            return _APPEND_NEW if base_sequence == 0 else Verdict(Decision.REFUSE, None, ErrorCode.UNKNOWN_SEQUENCE)
        if epoch != newest[_EPOCH]:
            if epoch < newest[_EPOCH]:
                return Verdict(Decision.REFUSE, None, ErrorCode.STALE_PRODUCER_EPOCH)
            return _APPEND if base_sequence == 0 else Verdict(Decision.REFUSE, None, ErrorCode.OUT_OF_ORDER_SEQUENCE)
        if base_sequence == (newest[_LAST_SEQUENCE] + 1) % SEQUENCE_MODULUS:
            return _APPEND
        last_sequence = (base_sequence + last_offset_delta) % SEQUENCE_MODULUS
        for batch in _oldest_first(packed):
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                return Verdict(Decision.DUPLICATE, batch)
        # Behind everything remembered: it was appended long ago and acknowledged; its offset is forgotten. Ahead: one is missing.
        behind = (newest[_LAST_SEQUENCE] - last_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2
        return Verdict(Decision.REFUSE, None, ErrorCode.UNKNOWN_SEQUENCE if behind else ErrorCode.OUT_OF_ORDER_SEQUENCE)

    def record(
        self,
        producer_id: int,
        epoch: int,
        base_sequence: int,
        last_offset_delta: int,
        base_offset: int,
        next_offset: int,
        append_time_us: int,
    ) -> None:
        """Remember an appended batch. One that lies at or before the newest remembered offset is known already."""
        last_sequence = (base_sequence + last_offset_delta) % SEQUENCE_MODULUS
        batch = _BATCH.pack(epoch, base_sequence, last_sequence, base_offset, next_offset, append_time_us)
        packed = self._producers.get(producer_id)
        if packed is not None:
            newest = _BATCH.unpack_from(packed)
            if newest[_EPOCH] == epoch:
                if newest[_BASE_OFFSET] < base_offset:
                    self._producers[producer_id] = batch + packed[:OLDER_BYTES]
                return
            if newest[_EPOCH] > epoch:
                return
        elif len(self._producers) >= KEPT:
            self._forget_idle(append_time_us)
        self._producers[producer_id] = batch

    def expire(self, forget_before_us: int) -> int:
        """Forget every producer that has appended nothing since; returns how many."""
        old = [producer_id for producer_id, packed in self._producers.items() if _BATCH.unpack_from(packed)[_TIME] < forget_before_us]
        for producer_id in old:
            del self._producers[producer_id]
        return len(old)

    def to_snapshot(self) -> list[Any]:
        """For `from_snapshot`; plain lists."""
        rows: list[Any] = [
            [producer_id, _BATCH.unpack_from(packed)[_EPOCH], [list(batch) for batch in _oldest_first(packed)]]
            for producer_id, packed in self._producers.items()
        ]
        if self.open_ordinal or self.delivered > (0, 0):
            rows.append([_DELAYS, self.open_ordinal, list(self.delivered)])
        return rows

    @classmethod
    def from_snapshot(cls, snapshot: list[Any]) -> ProducerTable:
        """What `to_snapshot` returned. Raises TypeError, ValueError, IndexError for another list."""
        table = cls()
        for producer_id, epoch, batches in snapshot:
            if producer_id == _DELAYS:
                table.open_ordinal, table.delivered = epoch, (batches[0], batches[1])
                continue
            if batches:
                table._producers[producer_id] = b"".join(_BATCH.pack(epoch, *fields) for fields in batches[: -REMEMBERED_BATCHES - 1 : -1])
        return table
