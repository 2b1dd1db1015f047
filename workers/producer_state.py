"""Deduplication: what a partition remembers of each idempotent producer and of its delays, and the decision on the next batch.

Kafka's rules (KIP-98): a producer numbers its records per partition; the last five batches are remembered, so that a retry of any that may
be in flight is recognised and answered with its first offset; a gap is refused; a higher epoch starts at sequence 0.

Owner: the worker decides with it; the flusher keeps a copy from what it has flushed, and snapshots that when a segment is rolled.
Invariants: at most REMEMBERED_BATCHES per producer, consecutive in sequence, ascending in offset.
Crash: rebuilt from the snapshot of the live segment, the headers in it, and the ring's descriptors.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from tailrace.batch_header import REMEMBERED_BATCHES, SEQUENCE_MODULUS
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


_APPEND = Verdict(Decision.APPEND)


_DELAYS = "delays"
"""In the place of a producer's id in a snapshot: what is known of delays."""


class _Producer:
    __slots__ = ("batches", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: list[Remembered] = []


class ProducerTable:
    """The producers of one partition, and how far its delays are: what decides whether a batch is new."""

    def __init__(self) -> None:
        self._producers: dict[int, _Producer] = {}
        self.open_ordinal = 0
        """Of a delay log: the first ordinal (`tailrace.delays`) that is not closed; later rows are due then at the earliest."""
        self.delivered = (0, 0)
        """Of a topic: (ordinal, delay position) of the last delayed row that was delivered to it."""

    def __len__(self) -> int:
        return len(self._producers) + (self.open_ordinal > 0) + (self.delivered > (0, 0))

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
        producer = self._producers.get(producer_id)
        if producer is not None and producer.batches and producer.batches[-1].append_time_us < forget_before_us:
            self.expire(forget_before_us)
            producer = None
        if producer is None:
            # Kafka accepts any sequence of an unknown producer; that can hide a loss. Here it has to begin at 0.
            return _APPEND if base_sequence == 0 else Verdict(Decision.REFUSE, None, ErrorCode.UNKNOWN_SEQUENCE)
        if epoch != producer.epoch:
            if epoch < producer.epoch:
                return Verdict(Decision.REFUSE, None, ErrorCode.STALE_PRODUCER_EPOCH)
            return _APPEND if base_sequence == 0 else Verdict(Decision.REFUSE, None, ErrorCode.OUT_OF_ORDER_SEQUENCE)
        batches = producer.batches
        if base_sequence == (batches[-1].last_sequence + 1) % SEQUENCE_MODULUS:
            return _APPEND
        last_sequence = (base_sequence + last_offset_delta) % SEQUENCE_MODULUS
        for batch in batches:
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                return Verdict(Decision.DUPLICATE, batch)
        # Behind everything remembered: it was appended long ago and acknowledged; its offset is forgotten. Ahead: one is missing.
        behind = (batches[-1].last_sequence - last_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2
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
        producer = self._producers.get(producer_id)
        if producer is None or producer.epoch != epoch:
            if producer is not None and producer.epoch > epoch:
                return
            producer = self._producers[producer_id] = _Producer(epoch)
        batches = producer.batches
        if batches and batches[-1].base_offset >= base_offset:
            return
        batches.append(
            Remembered(base_sequence, (base_sequence + last_offset_delta) % SEQUENCE_MODULUS, base_offset, next_offset, append_time_us)
        )
        if len(batches) > REMEMBERED_BATCHES:
            del batches[0]

    def expire(self, forget_before_us: int) -> int:
        """Forget every producer that has appended nothing since; answers how many."""
        old = [number for number, p in self._producers.items() if p.batches and p.batches[-1].append_time_us < forget_before_us]
        for producer_id in old:
            del self._producers[producer_id]
        return len(old)

    def to_snapshot(self) -> list[Any]:
        """For `from_snapshot`; plain lists."""
        rows: list[Any] = [[producer_id, p.epoch, [list(b) for b in p.batches]] for producer_id, p in self._producers.items()]
        if self.open_ordinal or self.delivered > (0, 0):
            rows.append([_DELAYS, self.open_ordinal, list(self.delivered)])
        return rows

    @classmethod
    def from_snapshot(cls, snapshot: list[Any]) -> ProducerTable:
        table = cls()
        for producer_id, epoch, batches in snapshot:
            if producer_id == _DELAYS:
                table.open_ordinal, table.delivered = epoch, (batches[0], batches[1])
                continue
            producer = table._producers[producer_id] = _Producer(epoch)
            producer.batches = [Remembered(*fields) for fields in batches]
        return table
