"""Partition table: the state of each partition, published by the flusher of its data directory.

Owner: the flusher writes every word of its table. Fronts, workers, controller, scheduler and
`status` read it.

Invariants:
- log_start_offset <= high_watermark <= log_end_offset.
- last_stable_offset <= high_watermark. Everything below it is decided, and what was aborted is in
  the transaction indexes.
- high_watermark and last_stable_offset never move back while the region lives and the slot has the
  same topic.
- One call returns values of one point in time.

Layout: `TableLayout`. A slot has a count and two states, of which number `count % 2` is valid:

      0: count (0: never written) | 64: state 0, 248 bytes (`_STATE`) | 320: state 1

Crash: a killed flusher's successor rewrites every slot from disk and ring.

A state of 31 words is read consistently as follows. The writer fills the invalid state, then
increments the count with one store. The reader loads the count, copies the valid state, and loads
the count again. If it is unchanged, the copy is consistent, because a state is written only after
the count has moved past it. A killed writer leaves the old state, so that readers never wait for
it, as they would with a sequence lock left odd. Readers retry only after a new publication, at most
a few thousand times a second.
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from typing import Any, NamedTuple

from shm.memory.atomic_word import are_compiled, compiled_variant_of, new
from shm.memory.layout import SlotState, TableLayout
from shm.memory.region import Region
from tailrace import kernel

_STATE = struct.Struct("<16s29Q")
_BOUNDS = struct.Struct("<16s5Q")
_APPEND = struct.Struct("<5Q")
_APPEND_AT = 24
_DELIVERED = struct.Struct("<2Q")
_STABLE = struct.Struct("<2Q")
_APPENDED = struct.Struct("<2Q")
_CLEANING = struct.Struct("<8Q")
_STABLE_AT = _STATE.size - _CLEANING.size - _APPENDED.size - _STABLE.size
_DELIVERED_AT = _STABLE_AT - _DELIVERED.size


@unique
class CleaningState(IntEnum):
    """State of compaction of a partition."""

    NONE = 0
    """The topic is not compacted, or nothing is to be done."""
    RUNNING = 1
    WAITS_FOR_READERS = 2
    """Cleaned segments are ready, and a lease keeps the old ones."""
    STOPPED = 3
    """A batch or a file that the cleaner cannot read: what follows it stays as it is."""
    RETRYING = 4
    """A cleaning has failed. It is tried again after a minute."""


CLEANING_NAMES = {
    CleaningState.NONE: "idle",
    CleaningState.RUNNING: "cleaning",
    CleaningState.WAITS_FOR_READERS: "waits for readers",
    CleaningState.STOPPED: "stopped",
    CleaningState.RETRYING: "retrying",
}
"""States in responses. They are a part of the protocol."""


class PartitionState(NamedTuple):
    """State of one slot at one point in time, in the order of `_STATE`."""

    topic_id: bytes
    partition: int
    state: SlotState
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    active_segment_base: int
    active_valid_end: int
    applied_version: int
    max_timestamp_us: int
    size_bytes: int
    reason: int
    """Error code of the reason why writes are refused, or 0."""
    active_since_us: int
    last_append_us: int
    segment_count: int
    """Number of segments. Readers list the directory again after a change."""
    delivered_ordinal: int = 0
    """Last delayed row that is durable as the topic requires, with `delivered_position`. Both 0 if
    there is none.
    """
    delivered_position: int = 0
    last_stable_offset: int = 0
    """First offset of the oldest open transaction below the high watermark, or the high watermark.
    Readers of committed records read up to here.
    """
    aborted_version: int = 0
    """Version of the partition's transaction indexes: the flusher raises it when it has entered an
    aborted transaction, and readers then read the indexes again. 0: there is nothing to leave out.
    """
    appended_batches: int = 0
    """Batches that the flusher has placed since it started, with `appended_bytes`."""
    appended_bytes: int = 0
    files_version: int = 0
    """Grows when sealed segments were replaced by cleaned ones. Readers then open the files again.
    """
    cleaned_below: int = 0
    """Compacted topic: first offset that no pass of the cleaner has reached."""
    clean_bytes: int = 0
    """Compacted topic: bytes of cleaned segments."""
    dirty_bytes: int = 0
    """Compacted topic: bytes of sealed segments that can be cleaned now, and are not."""
    dirty_since_us: int = 0
    """Compacted topic: append time of the oldest of these, 0 if there is none."""
    cleaning_state: int = 0
    """See `CleaningState`."""
    compaction_asked: int = 0
    """Compacted topic: number of the last request to clean it now that the flusher knows."""
    compaction_done: int = 0
    """The same of the last request that it has carried out, as far as it can be."""

    @classmethod
    def empty(
        cls, topic_id: bytes, partition: int, state: SlotState, version: int
    ) -> PartitionState:
        return cls(topic_id, partition, state, 0, 0, 0, 0, 0, 0, version, 0, 0, 0, 0, 0, 0)


def _named(fields: tuple[Any, ...]) -> PartitionState:
    return PartitionState(fields[0], fields[1], SlotState(fields[2]), *fields[3:])


def read_state(memory: memoryview, layout: TableLayout, slot: int, count: int) -> PartitionState:
    """Return a slot's state at count `count`, which may be the next one. For checks."""
    return _named(_STATE.unpack_from(memory, layout.slot(slot) + TableLayout.STATES[count & 1]))


class PartitionTable:
    """Slots of one data directory."""

    def __new__(cls, region: Region) -> PartitionTable:
        return new(cls, are_compiled(region.words))

    def __init__(self, region: Region) -> None:
        self.layout = TableLayout(region.header.first)
        self._words = region.words
        self._bytes = region.bytes
        self.slot_count = self.layout.slot_count

    def _read(self, slot: int, fields: struct.Struct, offset: int) -> tuple[Any, ...]:
        """Return fields of the valid state, consistent in time."""
        start = self.layout.slot(slot)
        words, index = self._words, start // 8
        count = words[index]  # SYNC POINT: slot
        while True:
            found = fields.unpack_from(self._bytes, start + TableLayout.STATES[count & 1] + offset)
            recount = words[index]
            if recount == count:
                return found
            count = recount

    def read(self, slot: int) -> PartitionState:
        """Return a slot's state."""
        return _named(self._read(slot, _STATE, 0))

    def bounds(self, slot: int) -> tuple[bytes, int, int, int, int, int]:
        """Return (topic id, partition, state, leader epoch, log start offset, high watermark).

        A quarter of the cost of `read`.
        """
        topic_id, partition, state, epoch, start, high_watermark = self._read(slot, _BOUNDS, 0)
        return topic_id, partition, state, epoch, start, high_watermark

    def append_state(self, slot: int) -> tuple[int, ...]:
        """Return (state, leader epoch, log start offset, high watermark, log end offset), which a
        worker checks for each batch.
        """
        return self._read(slot, _APPEND, _APPEND_AT)

    def delivered(self, slot: int) -> tuple[int, int]:
        """Return (ordinal, position) of the last delivered row."""
        ordinal, position = self._read(slot, _DELIVERED, _DELIVERED_AT)
        return ordinal, position

    def stable(self, slot: int) -> tuple[int, int]:
        """Return (last stable offset, aborted count)."""
        last_stable_offset, aborted_version = self._read(slot, _STABLE, _STABLE_AT)
        return last_stable_offset, aborted_version

    def all(self) -> list[PartitionState]:
        """Return the states of all slots ever written."""
        free = bytes(16)
        states = (
            self.read(slot)
            for slot in range(self.slot_count)
            if self._words[self.layout.slot(slot) // 8]
        )
        return [state for state in states if state.topic_id != free]

    def write(self, slot: int, state: PartitionState) -> None:
        """Replace a slot's state. Only the flusher calls it."""
        start = self.layout.slot(slot)
        count = self._words[start // 8] + 1
        _STATE.pack_into(self._bytes, start + TableLayout.STATES[count & 1], *state)
        self._words[start // 8] = count  # SYNC POINT: slot (the state before it)


if kernel.compiled is not None:

    @compiled_variant_of(PartitionTable)
    class _CompiledPartitionTable(kernel.compiled.PartitionTable, PartitionTable):  # type: ignore[misc]
        def __init__(self, region: Region) -> None:
            PartitionTable.__init__(self, region)
            self._begin(region.bytes)
