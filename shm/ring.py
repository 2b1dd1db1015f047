"""A worker's ring: bytes, and one fixed-size descriptor per request. `head` counts descriptors; storing it is the only commit.

The idea is LMAX's Disruptor (one writer, one published sequence, every consumer a stage with a cursor of its own) over a byte ring as in
Aeron's log buffers.

Owner: the worker writes descriptors, data, `head` and `reclaimed`; the flusher writes outcomes and `settled`; front i writes `cursor(i)`.
Invariants:
    reclaimed <= min(settled, cursors of live fronts);   settled <= head <= reclaimed + descriptor_count
    positions are monotonic byte numbers; a batch lies in one piece at `position % ring_bytes`, aligned to 64
    descriptor n lies at index n % descriptor_count and carries count n + 1: reused ones show another count
Layout: `RingLayout`.
Crash: a worker killed before `head` is stored has written nothing; after it, everything. A flusher killed anywhere starts again at
`settled` and
    writes each batch to the place recorded in its outcome.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from shm.cell import Cell, are_compiled, is_twin_of, new
from shm.layout import (
    ACKS_MASK,
    ALIGNMENT_BYTES,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    FLAG_BYTES,
    FLAG_CONTROL,
    FLAG_DUPLICATE,
    FRONTS_MAX,
    OUTCOME_BYTES,
    OUTCOME_SECOND_PLACE,
    OUTCOME_VERDICT,
    RingLayout,
    Verdict,
    align,
)
from shm.region import Region
from tailrace import kernel


class Descriptor(NamedTuple):
    """One request's fate, in field order of `layout.DESCRIPTOR`."""

    ordinal: int
    """Its number + 1: a descriptor that has been reused shows another."""
    position: int
    length: int
    slot: int
    base_offset: int
    next_offset: int
    """The partition's log end offset when this was published."""
    session: int
    """Front generation << 32 | session number."""
    correlation_id: int
    lane_position: int
    """Where in its lane the worker goes on after this request."""
    flags: int
    source_lane: int
    result: int
    """An ErrorCode number; not 0: refused, no bytes."""
    producer_id: int
    base_sequence: int
    producer_epoch: int
    reserved: int
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
    def is_duplicate(self) -> bool:
        return bool(self.flags & FLAG_DUPLICATE)

    @property
    def has_bytes(self) -> bool:
        return bool(self.flags & FLAG_BYTES)


class Outcome(NamedTuple):
    """What the flusher wrote beside a descriptor."""

    verdict: Verdict
    segment_base: int
    file_position: int


_PLACE = struct.Struct("<QQ")
_OUTCOME_WORDS = OUTCOME_BYTES // 8


def _place_at(word: int) -> int:
    """Where in an outcome the place lies that its word calls valid."""
    return 8 + (word & OUTCOME_SECOND_PLACE)


class Ring:
    """What every stage sees of a ring."""

    def __new__(cls, region: Region) -> Any:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        self.layout = RingLayout(region.header.first, region.header.second)
        self.ring_bytes = self.layout.ring_bytes
        self.capacity = self.layout.descriptor_count
        words = region.words
        self.head = Cell(words, self.layout.head)
        self.reclaimed = Cell(words, self.layout.reclaimed)
        self.settled = Cell(words, self.layout.settled)
        self.cursors = [Cell(words, self.layout.cursor(front)) for front in range(FRONTS_MAX)]
        self._words = words
        self._descriptors = region.bytes[self.layout.descriptors : self.layout.outcomes]
        self._outcomes = region.bytes[self.layout.outcomes : self.layout.data]
        self._outcome_words = self.layout.outcomes // 8
        self.data = region.bytes[self.layout.data : self.layout.data + self.ring_bytes]

    def descriptor(self, number: int) -> Descriptor:
        """Descriptor `number`; its `.ordinal` is `number + 1` unless it has been reused."""
        return Descriptor._make(DESCRIPTOR.unpack_from(self._descriptors, number % self.capacity * DESCRIPTOR_BYTES))

    def bytes_of(self, descriptor: Descriptor) -> memoryview:
        """The batch of a descriptor that is not reclaimed."""
        index = descriptor.position % self.ring_bytes
        return self.data[index : index + descriptor.length]

    def outcome(self, number: int) -> Outcome:
        """What became of descriptor `number`; NONE where the flusher has not come to it."""
        index = number % self.capacity
        word = self._words[self._outcome_words + index * _OUTCOME_WORDS]  # SYNC POINT: outcome
        if word >> 8 != number + 1:
            return Outcome(Verdict.NONE, 0, 0)
        segment_base, file_position = _PLACE.unpack_from(self._outcomes, index * OUTCOME_BYTES + _place_at(word))
        return Outcome(Verdict(word & OUTCOME_VERDICT), segment_base, file_position)

    def plan(self, number: int, segment_base: int, file_position: int) -> None:
        """The flusher: record where the batch of descriptor `number` goes, before it is written there; also anew, after a disk error. The word says which
        of two places holds: a flusher killed in the midst of this leaves the place that it had recorded before.
        """
        index = number % self.capacity
        at = self._outcome_words + index * _OUTCOME_WORDS
        word = (number + 1) << 8 | (~self._words[at] & OUTCOME_SECOND_PLACE) | Verdict.PLANNED
        _PLACE.pack_into(self._outcomes, index * OUTCOME_BYTES + _place_at(word), segment_base, file_position)
        self._words[at] = word  # SYNC POINT: outcome (the place before it; read by a successor)

    def judge(self, number: int, verdict: Verdict) -> None:
        """The flusher: the final word on descriptor `number`. Visible to others once `settled` passes it."""
        at = self._outcome_words + number % self.capacity * _OUTCOME_WORDS
        self._words[at] = (number + 1) << 8 | (self._words[at] & OUTCOME_SECOND_PLACE) | verdict  # SYNC POINT: outcome (before settled)

    def used(self) -> int:
        """Bytes between the oldest batch that is not reclaimed and the newest, as a stage other than the worker sees it."""
        head, reclaimed = self.head.load(), self.reclaimed.load()  # SYNC POINT: head, reclaimed
        if head == reclaimed:
            return 0
        last, first = self.descriptor(head - 1), self.descriptor(reclaimed)
        return max(0, last.position + last.length - first.position)

    def is_crowded(self) -> bool:
        """Whether more than half is in use: then whoever frees space rings the worker.

        Looking at this before deciding to ring is safe although a load may overtake the store that freed space: a batch is at most a
        quarter of
        the ring, so the worker published at least one `head` beyond the half long before it could find the ring full.
        """
        return self.used() > self.ring_bytes // 2 or self.head.load() - self.reclaimed.load() > self.capacity // 2


class RingWriter(Ring):
    """The worker's side. `append` any number of times, then `publish` once."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.next_number = self.head.load()
        self.tail = 0
        if self.next_number:
            last = self.descriptor(self.next_number - 1)
            self.tail = last.position + last.length
        self._reclaimed = self.reclaimed.load()

    def reclaim(self, live_fronts: list[int]) -> None:
        """Take back what is settled and answered."""
        limit = self.settled.load()  # SYNC POINT: settled
        for front in live_fronts:
            limit = min(limit, self.cursors[front].load())  # SYNC POINT: cursor (a front has read what lies before it)
        if limit > self._reclaimed:
            self._reclaimed = limit
            self.reclaimed.store(limit)  # SYNC POINT: reclaimed (before what lies below it is written over)

    def try_reserve(self, length: int) -> int | None:
        """The position where `length` bytes (0: none) and a descriptor fit now, or None. Reserves nothing until `append`."""
        if self.next_number - self._reclaimed >= self.capacity:
            return None
        position = align(self.tail, ALIGNMENT_BYTES)
        if position % self.ring_bytes + length > self.ring_bytes:
            position = align(position, self.ring_bytes)
        if not length:
            return self.tail
        oldest = self.descriptor(self._reclaimed).position if self._reclaimed < self.next_number else position
        if position + length - oldest > self.ring_bytes:
            return None
        return position

    def append(self, position: int, length: int, slot: int, base_offset: int, next_offset: int, session: int, correlation_id: int,
               lane_position: int, flags: int, source_lane: int, result: int, producer_id: int, base_sequence: int, producer_epoch: int,
               last_offset_delta: int, leader_epoch: int, append_time_us: int, max_timestamp_us: int,
               delay_ordinal: int = 0, delay_position: int = 0) -> None:  # fmt: skip
        """Write the next descriptor. Nobody sees it before `publish`."""
        number = self.next_number
        DESCRIPTOR.pack_into(
            self._descriptors, number % self.capacity * DESCRIPTOR_BYTES, number + 1, position, length, slot, base_offset, next_offset,
            session, correlation_id, lane_position, flags, source_lane, result, producer_id, base_sequence, producer_epoch, 0,
            last_offset_delta, leader_epoch, append_time_us, max_timestamp_us, delay_ordinal, delay_position,
        )  # fmt: skip
        self.next_number = number + 1
        self.tail = position + length

    def publish(self) -> bool:
        """Commit everything appended since the last time; False when there was nothing."""
        if self.next_number == self.head.load():
            return False
        self.head.store(self.next_number)  # SYNC POINT: head (bytes and descriptors before it; read by flusher and fronts)
        return True


if kernel.compiled is not None:

    def _begin(ring: Any, region: Region) -> None:
        layout = ring.layout
        ring._begin(
            region.bytes, layout.head, layout.reclaimed, layout.settled, layout.cursor(0), layout.descriptors, layout.outcomes, layout.data,
            Descriptor,
        )  # fmt: skip

    @is_twin_of(Ring)
    class _CompiledRing(kernel.compiled.Ring, Ring):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            Ring.__init__(self, region)
            _begin(self, region)

    @is_twin_of(RingWriter)
    class _CompiledRingWriter(kernel.compiled.RingWriter, RingWriter):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            Ring.__init__(self, region)
            _begin(self, region)
            RingWriter.__init__(self, region)
