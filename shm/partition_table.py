"""The partition table: what readers may know of each partition, published by the flusher of its data directory.

Owner: the flusher writes every word of its table; fronts, workers, coordinator, scheduler and `status` read.
Invariants: log_start_offset <= high_watermark <= log_end_offset; high_watermark never moves back while the region lives and the slot has the same
    topic; whatever is read of a slot by one call was true at one time.
Layout: `TableLayout`. A slot has a count and two states; the one that holds is number `count % 2`:

      0: count (0: never written) | 64: state 0, 152 bytes (`_STATE`) | 224: state 1

Crash: a killed flusher's successor writes every slot anew from disk and ring.

How a state of nineteen words is read whole: the writer fills the state that does not hold and counts up, which is one store. The reader loads the count,
copies the state that holds, and loads the count again: if it is the same, nobody wrote into that state meanwhile, because it is written only
once the count has moved on. A writer killed anywhere leaves the old state, which its successor replaces, so readers never wait for a dead one (after a
sequence lock left odd they would); they copy again only when a live one has published, a few thousand times a second at most.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from shm.cell import are_compiled, is_twin_of, new
from shm.layout import SlotState, TableLayout
from shm.region import Region
from tailrace import kernel

_STATE = struct.Struct("<16s17Q")
_BOUNDS = struct.Struct("<16s5Q")
_APPEND = struct.Struct("<5Q")
_APPEND_AT = 24
_DELIVERED = struct.Struct("<2Q")
_DELIVERED_AT = _STATE.size - _DELIVERED.size


class PartitionState(NamedTuple):
    """One slot, read at one time. In the order of `_STATE`."""

    topic_id: bytes
    partition: int
    state: SlotState
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    live_segment_base: int
    live_valid_end: int
    applied_version: int
    max_timestamp_us: int
    size_bytes: int
    reason: int
    """Error code that says why writes are refused, where they are."""
    live_since_us: int
    last_append_us: int
    segment_count: int
    """Changes with every segment that comes or goes, so that readers know when to look at the directory again."""
    delivered_ordinal: int = 0
    """Of the last delayed row that is as safe as the topic promises, with the next: 0, 0 when there is none."""
    delivered_position: int = 0

    @classmethod
    def empty(cls, topic_id: bytes, partition: int, state: SlotState, version: int) -> PartitionState:
        return cls(topic_id, partition, state, 0, 0, 0, 0, 0, 0, version, 0, 0, 0, 0, 0, 0)


def _named(fields: tuple[Any, ...]) -> PartitionState:
    return PartitionState(fields[0], fields[1], SlotState(fields[2]), *fields[3:])


def read_state(memory: memoryview, layout: TableLayout, slot: int, count: int) -> PartitionState:
    """What a slot's state is, or will be, once its count is `count`. For checks."""
    return _named(_STATE.unpack_from(memory, layout.slot(slot) + TableLayout.STATES[count & 1]))


class PartitionTable:
    """The slots of one data directory."""

    def __new__(cls, region: Region) -> PartitionTable:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        self.layout = TableLayout(region.header.first)
        self._words = region.words
        self._bytes = region.bytes
        self.slot_count = self.layout.slot_count

    def _read(self, slot: int, fields: struct.Struct, offset: int) -> tuple[Any, ...]:
        """Fields of the state that holds, all of one time."""
        start = self.layout.slot(slot)
        words, index = self._words, start // 8
        count = words[index]  # SYNC POINT: slot
        while True:
            found = fields.unpack_from(self._bytes, start + TableLayout.STATES[count & 1] + offset)
            again = words[index]
            if again == count:
                return found
            count = again

    def read(self, slot: int) -> PartitionState:
        """A slot's state."""
        return _named(self._read(slot, _STATE, 0))

    def bounds(self, slot: int) -> tuple[bytes, int, int, int, int, int]:
        """(topic id, partition, state, leader epoch, log start offset, high watermark): a quarter of what `read` costs."""
        topic_id, partition, state, epoch, start, high_watermark = self._read(slot, _BOUNDS, 0)
        return topic_id, partition, state, epoch, start, high_watermark

    def append_state(self, slot: int) -> tuple[int, ...]:
        """(state, leader epoch, log start offset, high watermark, log end offset): what a worker looks at for each batch."""
        return self._read(slot, _APPEND, _APPEND_AT)

    def delivered(self, slot: int) -> tuple[int, int]:
        """(ordinal, position) of the last delivered row."""
        ordinal, position = self._read(slot, _DELIVERED, _DELIVERED_AT)
        return ordinal, position

    def all(self) -> list[PartitionState]:
        """Every slot that has ever been written."""
        free = bytes(16)
        states = (self.read(slot) for slot in range(self.slot_count) if self._words[self.layout.slot(slot) // 8])
        return [state for state in states if state.topic_id != free]

    def write(self, slot: int, state: PartitionState) -> None:
        """The flusher: replace a slot's state."""
        start = self.layout.slot(slot)
        count = self._words[start // 8] + 1
        _STATE.pack_into(self._bytes, start + TableLayout.STATES[count & 1], *state)
        self._words[start // 8] = count  # SYNC POINT: slot (the state before it)


if kernel.compiled is not None:

    @is_twin_of(PartitionTable)
    class _CompiledPartitionTable(kernel.compiled.PartitionTable, PartitionTable):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            PartitionTable.__init__(self, region)
            self._begin(region.bytes)
