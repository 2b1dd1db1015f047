"""The partition table: what readers may know of each partition, published by the flusher of its data directory.

Owner: the flusher writes every word of its table; fronts, workers, coordinator and `status` read.
Invariants: log_start_offset <= high_watermark <= log_end_offset; high_watermark never moves back while the region lives;
    the words of a change are stored before `high_watermark`, so whoever has read the watermark finds the rest at least as new.
Layout: `TableLayout`, `SlotWord`.
Crash: a killed flusher's successor writes every slot anew from disk and ring.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shm.cell import Cell
from shm.layout import SlotState, SlotWord, TableLayout
from shm.region import Region

_ID = struct.Struct(">QQ")


class PartitionState(NamedTuple):
    """One slot, read at one time."""

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


class PartitionTable:
    """The slots of one data directory."""

    def __init__(self, region: Region) -> None:
        self.layout = TableLayout(region.header.first)
        self._words = region.words
        self.slot_count = self.layout.slot_count

    def cell(self, slot: int, word: SlotWord) -> Cell:
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of {self.slot_count}")
        return Cell(self._words, self.layout.word(slot, word))

    def load(self, slot: int, word: SlotWord) -> int:
        return self._words[self.layout.word(slot, word) // 8]

    def read(self, slot: int) -> PartitionState:
        """All words of a slot; the watermark is read first, so the others are at least as new."""
        start = self.layout.word(slot, SlotWord(0)) // 8
        watermark = self._words[start + SlotWord.HIGH_WATERMARK]  # SYNC POINT: high watermark
        w = self._words[start : start + SlotWord.DELIVERED_COUNT].tolist()
        return PartitionState(
            _ID.pack(w[0], w[1]),
            w[2],
            SlotState(w[3]),
            w[4],
            w[5],
            watermark,
            w[7],
            w[8],
            w[9],
            w[10],
            w[11],
            w[12],
            w[13],
            w[14],
            w[15],
            w[16],
            *self.delivered(slot),
        )

    def delivered(self, slot: int) -> tuple[int, int]:
        """(ordinal, position) of the last delivered row. Two words that belong together: the writer fills the pair that does not hold, then counts one up,
        which is one store; so a writer that is killed between leaves the old pair, and no reader waits for anybody.
        """
        start = self.layout.word(slot, SlotWord(0)) // 8
        while True:
            count = self._words[start + SlotWord.DELIVERED_COUNT]  # SYNC POINT: delivered
            pair = start + (SlotWord.DELIVERED_ODD if count & 1 else SlotWord.DELIVERED_EVEN)
            ordinal, position = self._words[pair], self._words[pair + 1]
            if self._words[start + SlotWord.DELIVERED_COUNT] == count:
                return ordinal, position

    def _write_delivered(self, start: int, ordinal: int, position: int) -> None:
        count = self._words[start + SlotWord.DELIVERED_COUNT]
        held = start + (SlotWord.DELIVERED_ODD if count & 1 else SlotWord.DELIVERED_EVEN)
        if (self._words[held], self._words[held + 1]) != (ordinal, position):
            pair = start + (SlotWord.DELIVERED_EVEN if count & 1 else SlotWord.DELIVERED_ODD)
            self._words[pair], self._words[pair + 1] = ordinal, position
            self._words[start + SlotWord.DELIVERED_COUNT] = count + 1  # SYNC POINT: delivered

    def all(self) -> list[PartitionState]:
        """Every slot that has ever been written."""
        free = _ID.pack(0, 0)
        states = (self.read(slot) for slot in range(self.slot_count) if self.load(slot, SlotWord.STATE))
        return [state for state in states if state.topic_id != free]

    def write(self, slot: int, state: PartitionState) -> None:
        """The flusher: replace a slot, watermark last."""
        start = self.layout.word(slot, SlotWord(0)) // 8
        high, low = _ID.unpack(state.topic_id)
        values = (high, low, *state[1 : SlotWord.SEGMENT_COUNT])
        self._write_delivered(start, state.delivered_ordinal, state.delivered_position)
        for index, value in enumerate(values):
            if index != SlotWord.HIGH_WATERMARK:
                self._words[start + index] = value
        self._words[start + SlotWord.HIGH_WATERMARK] = state.high_watermark  # SYNC POINT: high watermark
