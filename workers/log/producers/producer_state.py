"""Producer state: deduplication of idempotent producers, the open transactions and the delay
positions of a partition.

Kafka's rules (KIP-98): a producer numbers its records per partition. Its last REMEMBERED_BATCHES
(Kafka: five) are remembered, so that a retry of any in flight is recognised and acknowledged with
its first offset. A gap is refused. A higher epoch starts at sequence 0.

Owner: the worker decides with it. The flusher keeps a copy of what it has flushed, and snapshots it
when a segment begins.

Invariants:
- At most REMEMBERED_BATCHES per producer, consecutive in sequence, ascending in offset.
- More than KEPT producers only if each has appended within IDLE_US, as of the last check, which is
  at most EXPIRY_INTERVAL_US old.

Crash: rebuilt from the snapshot of the active segment, its batch headers, and the ring's
descriptors.

Forgetting producers: a forgotten producer's retry would be appended twice. Sequence 0 looks like a
beginning, and any other gets UNKNOWN_SEQUENCE, after which a producer resends the batch under a new
epoch. A table of fixed size that evicts the longest idle would let one client, by inventing ids,
turn others' retries into duplicates. So a producer that may still retry is never forgotten:
- A producer retries until its delivery_timeout_ms (two minutes) is over. Then it reports the
  outcome as unknown and never resends that batch.
- Only producers that have appended nothing for IDLE_US are forgotten, and only where more than KEPT
  are known, or after producer.id.expiration.ms (a day). They lose a round trip for a new epoch.
- At `producer.ids.max`, new producers are refused with TOO_MANY_PRODUCERS, which their clients
  retry. Known ones continue. Transactional ones do not count: they are forgotten with the end of
  their transaction, and not before.
- Times are by the wall clock, which survives a restart. Where its owner knows of jumps, a batch is
  only as old as the time that has passed (`moved`). Set back, the clock lets producers stay longer.
- A tombstone of (id, epoch) would tell a retry from a beginning, but could not acknowledge it with
  its offset.

Worker, flusher and snapshots apply one rule at the same batches, so a successor remembers the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES, SEQUENCE_MODULUS
from workers.log.producers.open_transactions import OpenTransaction, OpenTransactions


class Remembered(NamedTuple):
    """One batch of a producer.

    `last_sequence` and `next_offset` are where its successor belongs.
    """

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
    """True for an unknown producer. Append its batch only if `has_room`."""
    is_stored: bool = False
    """True for a refused batch that was certainly appended, and whose offset is forgotten."""


KEPT = 256
"""Number of producers of a partition remembered for a day, however idle: a few tens of KB."""
IDLE_US = 900_000_000
"""Beyond KEPT, producers idle for this long are forgotten. Longer than any producer retries."""
EXPIRY_INTERVAL_US = 1_000_000

_APPEND = Verdict(Decision.APPEND)
_APPEND_NEW = Verdict(Decision.APPEND, is_new=True)


_DELAYS = "delays"
"""Key of the delay positions in a snapshot, in place of a producer id."""
_TRANSACTIONS = "transactions"
"""Key of the open transactions in a snapshot, in place of a producer id."""


# A producer is `bytes`: its batches, newest first, each with the epoch and the fields of
# Remembered. 70 bytes and a dict entry for one batch, where objects took 500, and nothing for the
# garbage collector to scan.
_BATCH = struct.Struct("<iiiqqq")
OLDER_BYTES = (REMEMBERED_BATCHES - 1) * _BATCH.size
"""Bytes kept of a producer after its newest batch."""
_EPOCH, _LAST_SEQUENCE, _BASE_OFFSET, _TIME = 0, 2, 3, 5


def _oldest_first(packed: bytes) -> list[Remembered]:
    return [Remembered._make(fields[1:]) for fields in _BATCH.iter_unpack(packed)][::-1]


def _unmoved(append_time_us: int) -> int:
    return append_time_us


class ProducerTable:
    """Producers and delay positions of one partition, which decide if a batch is new."""

    def __init__(self, moved: Callable[[int], int] = _unmoved) -> None:
        self.moved = moved
        """An append time, corrected for later jumps of the wall clock."""
        self._producers: dict[int, bytes] = {}
        self._next_expiry_us = 0
        """Earliest time at which a producer can have become idle."""
        self.open_ordinal = 0
        """Delay log: first ordinal (`tailrace.core.schedule.delays`) that is not closed. Later
        rows are due then at the earliest.
        """
        self.delivered = (0, 0)
        """Topic: (ordinal, delay position) of the last delayed row delivered to it."""
        self.transactions = OpenTransactions()

    def __len__(self) -> int:
        return (
            len(self._producers)
            + len(self.transactions)
            + (self.open_ordinal > 0)
            + (self.delivered > (0, 0))
        )

    @property
    def producer_count(self) -> int:
        """Number of producers without those of open transactions, which are bounded by the
        registered transactional ids.
        """
        return max(0, len(self._producers) - len(self.transactions))

    def has_room(self, limit: int, now_us: int) -> bool:
        """True if one more producer may be remembered. Idle ones are forgotten first."""
        if self.producer_count < KEPT:
            return True
        self._forget_idle(now_us)
        return self.producer_count < limit

    def _forget_idle(self, now_us: int) -> None:
        if not 0 < self._next_expiry_us - now_us <= EXPIRY_INTERVAL_US:  # or the clock was set back
            self._next_expiry_us = now_us + EXPIRY_INTERVAL_US
            self.expire(now_us - IDLE_US)

    def close_below(self, ordinal: int) -> None:
        """Record a mark of the delay log that closes all ordinals below."""
        self.open_ordinal = max(self.open_ordinal, ordinal)

    def deliver(self, ordinal: int, position: int) -> None:
        """Record that delayed rows up to this one were delivered."""
        self.delivered = max(self.delivered, (ordinal, position))

    def decide(
        self,
        producer_id: int,
        epoch: int,
        base_sequence: int,
        last_offset_delta: int,
        forget_before_us: int = 0,
    ) -> Verdict:
        """Decide about a batch of `last_offset_delta + 1` records from `base_sequence` on.

        A producer that has appended nothing since `forget_before_us` is forgotten
        (producer.id.expiration.ms).
        """
        packed = self._producers.get(producer_id)
        newest = None if packed is None else _BATCH.unpack_from(packed)
        if (
            newest is not None
            and self._is_before(newest[_TIME], forget_before_us)
            and self.transactions.of(producer_id) is None
        ):
            self.expire(forget_before_us)
            newest = None
        if newest is None or packed is None:
            # Kafka accepts any sequence of an unknown producer, which can hide a loss. Here it has
            # to begin at 0.
            return (
                _APPEND_NEW
                if base_sequence == 0
                else Verdict(Decision.REFUSE, None, ErrorCode.UNKNOWN_SEQUENCE)
            )
        if epoch != newest[_EPOCH]:
            if epoch < newest[_EPOCH]:
                return Verdict(Decision.REFUSE, None, ErrorCode.STALE_PRODUCER_EPOCH)
            return (
                _APPEND
                if base_sequence == 0
                else Verdict(Decision.REFUSE, None, ErrorCode.OUT_OF_ORDER_SEQUENCE)
            )
        if base_sequence == (newest[_LAST_SEQUENCE] + 1) % SEQUENCE_MODULUS:
            return _APPEND
        last_sequence = (base_sequence + last_offset_delta) % SEQUENCE_MODULUS
        for batch in _oldest_first(packed):
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                return Verdict(Decision.DUPLICATE, batch)
        # Before everything remembered: appended and acknowledged long ago, its offset is forgotten.
        # After it: a batch is missing.
        behind = (newest[_LAST_SEQUENCE] - last_sequence) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2
        return Verdict(
            Decision.REFUSE,
            None,
            ErrorCode.UNKNOWN_SEQUENCE if behind else ErrorCode.OUT_OF_ORDER_SEQUENCE,
            # an epoch's sequences are appended without gaps from 0 on
            is_stored=base_sequence <= last_sequence < newest[_LAST_SEQUENCE],
        )

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
        """Remember an appended batch, unless it lies at or before the newest remembered offset."""
        last_sequence = (base_sequence + last_offset_delta) % SEQUENCE_MODULUS
        batch = _BATCH.pack(
            epoch, base_sequence, last_sequence, base_offset, next_offset, append_time_us
        )
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

    def end_transaction(self, producer_id: int, epoch: int) -> OpenTransaction | None:
        """Record a marker. Returns the transaction that it ends.

        The producer's batches are forgotten: no batch of an ended epoch is ever taken again, and
        the next epoch begins at sequence 0.
        """
        ended = self.transactions.end(producer_id, epoch)
        if ended is not None:
            self._producers.pop(producer_id, None)
        return ended

    def _is_before(self, append_time_us: int, time_us: int) -> bool:
        return append_time_us < time_us and self.moved(append_time_us) < time_us

    def expire(self, forget_before_us: int) -> int:
        """Forget producers that have appended nothing since. Return their number. Those with an
        open transaction stay.
        """
        old = [
            producer_id
            for producer_id, packed in self._producers.items()
            if self._is_before(_BATCH.unpack_from(packed)[_TIME], forget_before_us)
            and self.transactions.of(producer_id) is None
        ]
        for producer_id in old:
            del self._producers[producer_id]
        return len(old)

    def to_snapshot(self, transactions: OpenTransactions | None = None) -> list[Any]:
        """Return plain lists for `from_snapshot`. `transactions`: others than the open ones."""
        transactions = self.transactions if transactions is None else transactions
        rows: list[Any] = [
            [
                producer_id,
                _BATCH.unpack_from(packed)[_EPOCH],
                [list(batch) for batch in _oldest_first(packed)],
            ]
            for producer_id, packed in self._producers.items()
        ]
        if self.open_ordinal or self.delivered > (0, 0):
            rows.append([_DELAYS, self.open_ordinal, list(self.delivered)])
        if len(transactions):
            rows.append([_TRANSACTIONS, 0, transactions.to_snapshot()])
        return rows

    @classmethod
    def from_snapshot(cls, snapshot: list[Any]) -> ProducerTable:
        """Return the table of a `to_snapshot` result.

        Raises TypeError, ValueError, IndexError for other lists.
        """
        table = cls()
        for producer_id, epoch, batches in snapshot:
            if producer_id == _DELAYS:
                table.open_ordinal, table.delivered = epoch, (batches[0], batches[1])
                continue
            if producer_id == _TRANSACTIONS:
                table.transactions = OpenTransactions.from_snapshot(batches)
                continue
            if batches:
                table._producers[producer_id] = b"".join(
                    _BATCH.pack(epoch, *fields)
                    for fields in batches[: -REMEMBERED_BATCHES - 1 : -1]
                )
        return table
