"""Ring of a worker: a byte ring for batches, with one fixed-size descriptor per request.

`producer_position` counts descriptors. Storing it is the only commit. The design is LMAX's
Disruptor (one writer, one published sequence, a cursor for every consumer) over a byte ring as in
Aeron's log buffers.

Owner:
- Worker: descriptors, data, `producer_position` and `reclaimed`.
- Flusher: outcomes and `settled`.
- Front i: `cursor(i)`.

Invariants:
- reclaimed <= min(settled, cursors of live fronts).
- settled <= producer_position <= reclaimed + descriptor_count.
- Positions are monotonic byte numbers. A batch is contiguous at `position % ring_bytes`, aligned to
  64.
- Descriptor n is at index n % descriptor_count and carries ordinal n + 1. A reused one has another
  ordinal.

Layout: `RingLayout`.

Crash: a worker killed before `producer_position` is stored has written nothing, after it
everything. A killed flusher's successor resumes at `settled` and writes each batch to the place
recorded in its outcome.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from shm.memory.atomic_word import AtomicCounter, are_compiled, compiled_variant_of, new
from shm.memory.layout import (
    ACKS_MASK,
    ALIGNMENT_BYTES,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    FLAG_BYTES,
    FLAG_CONTROL,
    FLAG_DUPLICATE,
    FLAG_TRANSACTIONAL,
    FRONTS_MAX,
    OUTCOME_BYTES,
    OUTCOME_SECOND_PLACE,
    OUTCOME_VERDICT,
    RingLayout,
    Verdict,
    align,
)
from shm.memory.region import Region
from tailrace import kernel


class Descriptor(NamedTuple):
    """Descriptor of one request, in the field order of `layout.DESCRIPTOR`."""

    ordinal: int
    """Number of the descriptor + 1. A reused descriptor has another ordinal."""
    position: int
    length: int
    slot: int
    base_offset: int
    next_offset: int
    """Log end offset of the partition after this request."""
    session: int
    """Front generation << 32 | session number."""
    correlation_id: int
    lane_position: int
    """Lane position at which the worker resumes after this request."""
    flags: int
    source_lane: int
    result: int
    """ErrorCode number. If not 0, the request was refused and has no bytes."""
    producer_id: int
    base_sequence: int
    producer_epoch: int
    control_type: int
    """The type of a transaction's marker, as in the batch header. 0 for other batches."""
    last_offset_delta: int
    leader_epoch: int
    append_time_us: int
    max_timestamp_us: int
    delay_ordinal: int
    delay_position: int

    @property
    def acks(self) -> int:
        return self.flags & ACKS_MASK

    @property
    def is_control(self) -> bool:
        return bool(self.flags & FLAG_CONTROL)

    @property
    def is_transactional(self) -> bool:
        """True for a batch of a transaction and for the marker that ends one."""
        return bool(self.flags & FLAG_TRANSACTIONAL)

    @property
    def is_duplicate(self) -> bool:
        return bool(self.flags & FLAG_DUPLICATE)

    @property
    def has_bytes(self) -> bool:
        return bool(self.flags & FLAG_BYTES)


class Outcome(NamedTuple):
    """Result that the flusher wrote for a descriptor."""

    verdict: Verdict
    segment_base: int
    file_position: int


_PLACE = struct.Struct("<QQ")
_OUTCOME_WORDS = OUTCOME_BYTES // 8


def _place_at(word: int) -> int:
    """Return the offset within an outcome of the place that its word selects."""
    return 8 + (word & OUTCOME_SECOND_PLACE)


class Ring:
    """Ring as every process sees it."""

    def __new__(cls, region: Region) -> Any:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        self.layout = RingLayout(region.header.first, region.header.second)
        self.ring_bytes = self.layout.ring_bytes
        self.capacity = self.layout.descriptor_count
        words = region.words
        self.producer_position = AtomicCounter(words, self.layout.producer_position)
        self.reclaimed = AtomicCounter(words, self.layout.reclaimed)
        self.settled = AtomicCounter(words, self.layout.settled)
        self.cursors = [
            AtomicCounter(words, self.layout.cursor(front)) for front in range(FRONTS_MAX)
        ]
        self._words = words
        self._descriptors = region.bytes[self.layout.descriptors : self.layout.outcomes]
        self._outcomes = region.bytes[self.layout.outcomes : self.layout.data]
        self._outcome_words = self.layout.outcomes // 8
        self.data = region.bytes[self.layout.data : self.layout.data + self.ring_bytes]

    def descriptor(self, number: int) -> Descriptor:
        """Return descriptor `number`. Its `ordinal` is `number + 1` unless it was reused."""
        return Descriptor._make(
            DESCRIPTOR.unpack_from(self._descriptors, number % self.capacity * DESCRIPTOR_BYTES)
        )

    def bytes_of(self, descriptor: Descriptor) -> memoryview:
        """Return the batch of a descriptor that is not reclaimed."""
        index = descriptor.position % self.ring_bytes
        return self.data[index : index + descriptor.length]

    def outcome(self, number: int) -> Outcome:
        """Return the outcome of descriptor `number`.

        Its verdict is NONE before the flusher has reached it.
        """
        index = number % self.capacity
        word = self._words[self._outcome_words + index * _OUTCOME_WORDS]  # SYNC POINT: outcome
        if word >> 8 != number + 1:
            return Outcome(Verdict.NONE, 0, 0)
        segment_base, file_position = _PLACE.unpack_from(
            self._outcomes, index * OUTCOME_BYTES + _place_at(word)
        )
        return Outcome(Verdict(word & OUTCOME_VERDICT), segment_base, file_position)

    def plan(self, number: int, segment_base: int, file_position: int) -> None:
        """Record where the batch of descriptor `number` will be written. Only the flusher calls it,
        again after a disk error.

        The outcome word selects one of two places. A flusher killed during this call leaves the
        place recorded before.
        """
        index = number % self.capacity
        at = self._outcome_words + index * _OUTCOME_WORDS
        word = (number + 1) << 8 | (~self._words[at] & OUTCOME_SECOND_PLACE) | Verdict.PLANNED
        _PLACE.pack_into(
            self._outcomes, index * OUTCOME_BYTES + _place_at(word), segment_base, file_position
        )
        self._words[at] = word  # SYNC POINT: outcome (the place before it; read by a successor)

    def judge(self, number: int, verdict: Verdict) -> None:
        """Store the final verdict on descriptor `number`. Only the flusher calls it. Others see it
        once `settled` has passed it.
        """
        at = self._outcome_words + number % self.capacity * _OUTCOME_WORDS
        # SYNC POINT: outcome (before settled)
        self._words[at] = (number + 1) << 8 | (self._words[at] & OUTCOME_SECOND_PLACE) | verdict

    def used(self) -> int:
        """Return the bytes between the oldest batch that is not reclaimed and the newest, as seen
        by other processes than the worker.
        """
        # SYNC POINT: producer_position, reclaimed
        producer_position, reclaimed = self.producer_position.load(), self.reclaimed.load()
        if producer_position == reclaimed:
            return 0
        last, first = self.descriptor(producer_position - 1), self.descriptor(reclaimed)
        return max(0, last.position + last.length - first.position)

    def is_crowded(self) -> bool:
        """True if more than half is in use. A process that frees space then rings the worker.

        The check before the ring is safe although a load may overtake the store that freed space. A
        batch is at most a quarter of the ring, so the worker published a `producer_position` beyond
        the half long before it could find the ring full.
        """
        return (
            self.used() > self.ring_bytes // 2
            or self.producer_position.load() - self.reclaimed.load() > self.capacity // 2
        )


class RingWriter(Ring):
    """Worker's side. Call `write` any number of times, then `commit` once."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.next_number = self.producer_position.load()
        self.next_position = 0
        if self.next_number:
            last = self.descriptor(self.next_number - 1)
            self.next_position = last.position + last.length
        self._reclaimed = self.reclaimed.load()

    def reclaim(self, live_fronts: list[int]) -> None:
        """Reclaim descriptors that are settled and that all live fronts have read."""
        limit = self.settled.load()  # SYNC POINT: settled
        for front in live_fronts:
            # SYNC POINT: cursor (a front has read what lies before it)
            limit = min(limit, self.cursors[front].load())
        if limit > self._reclaimed:
            self._reclaimed = limit
            # SYNC POINT: reclaimed (before what lies below it is written over)
            self.reclaimed.store(limit)

    def try_claim(self, length: int) -> int | None:
        """Return the position for `length` bytes (0: none) and a descriptor, or None if they do not
        fit.

        It reserves nothing before `write`.
        """
        if self.next_number - self._reclaimed >= self.capacity:
            return None
        position = align(self.next_position, ALIGNMENT_BYTES)
        if position % self.ring_bytes + length > self.ring_bytes:
            position = align(position, self.ring_bytes)
        if not length:
            return self.next_position
        oldest = (
            self.descriptor(self._reclaimed).position
            if self._reclaimed < self.next_number
            else position
        )
        if position + length - oldest > self.ring_bytes:
            return None
        return position

    def write(self, position: int, length: int, slot: int, base_offset: int, next_offset: int,
    session: int, correlation_id: int,
               lane_position: int, flags: int, source_lane: int, result: int, producer_id: int,
               base_sequence: int, producer_epoch: int,
               last_offset_delta: int, leader_epoch: int, append_time_us: int,
               max_timestamp_us: int,
               delay_ordinal: int = 0, delay_position: int = 0,
               control_type: int = 0) -> None:  # fmt: skip
        """Write the next descriptor. Readers see it after `commit`."""
        number = self.next_number
        DESCRIPTOR.pack_into(
            self._descriptors, number % self.capacity * DESCRIPTOR_BYTES, number + 1, position,
            length, slot, base_offset, next_offset,
            session, correlation_id, lane_position, flags, source_lane, result, producer_id,
            base_sequence, producer_epoch, control_type,
            last_offset_delta, leader_epoch, append_time_us, max_timestamp_us, delay_ordinal,
            delay_position,
        )  # fmt: skip
        self.next_number = number + 1
        self.next_position = position + length

    def commit(self) -> bool:
        """Publish everything written since the last commit. Return False if there is nothing."""
        if self.next_number == self.producer_position.load():
            return False
        # SYNC POINT: producer_position (after bytes and descriptors; read by flusher and fronts)
        self.producer_position.store(self.next_number)
        return True


if kernel.compiled is not None:

    def _begin(ring: Any, region: Region) -> None:
        layout = ring.layout
        ring._begin(
            region.bytes, layout.producer_position, layout.reclaimed, layout.settled,
            layout.cursor(0), layout.descriptors, layout.outcomes, layout.data,
            Descriptor,
        )  # fmt: skip

    @compiled_variant_of(Ring)
    class _CompiledRing(kernel.compiled.Ring, Ring):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            Ring.__init__(self, region)
            _begin(self, region)

    @compiled_variant_of(RingWriter)
    class _CompiledRingWriter(kernel.compiled.RingWriter, RingWriter):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            Ring.__init__(self, region)
            _begin(self, region)
            RingWriter.__init__(self, region)
