"""Invariant checks of rings, lanes and the partition table, made at every published store in tests.

Production uses plain words for a region (see `atomic_word`). Tests and simulation use
`CheckedBuffer`, which raises InvariantError at the store that breaks an invariant.

Owner: tests and simulation.

Invariants: those that the modules named in `_CHECKS` state.
"""

from __future__ import annotations

from collections.abc import Callable

from shm.memory.layout import (
    FRONTS_MAX,
    OUTCOME_BYTES,
    LaneLayout,
    RegionKind,
    RingLayout,
    SlotState,
    TableLayout,
)
from shm.memory.region import Region

Check = Callable[[int, int, int], str | None]
"""(word index, old value, new value) -> description of the broken invariant, or None."""


class InvariantError(AssertionError):
    """A published store that breaks an invariant."""


class CheckedBuffer:
    """Words of a region, each store checked first.

    `before` and `after` are called around each store, `on_load` before each load.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._words = region.bytes.cast("Q")
        self._check = _CHECKS.get(region.header.kind, lambda _: None)(region)
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        self.on_load: Callable[[], None] | None = None

    def __getitem__(self, index: int) -> int:
        if self.on_load is not None:
            self.on_load()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self.before is not None:
            self.before()
        if self._check is not None and (broken := self._check(index, self._words[index], value)):
            raise InvariantError(f"{self._region.header.kind.name.lower()}: {broken}")
        self._words[index] = value
        if self.after is not None:
            self.after()

    def release(self) -> None:
        self._words.release()


def checked(region: Region) -> Region:
    """Return the region with checked words. Call it before a ring, lane or table is made of it."""
    region.words = CheckedBuffer(region)
    return region


def _ring(region: Region) -> Check:
    layout = RingLayout(region.header.first, region.header.second)
    words = region.bytes.cast("Q")
    producer_at, reclaimed_at, settled_at = (
        layout.producer_position // 8,
        layout.reclaimed // 8,
        layout.settled // 8,
    )
    cursors = {layout.cursor(front) // 8: front for front in range(FRONTS_MAX)}
    outcomes = layout.outcomes // 8
    capacity = layout.descriptor_count

    def check(index: int, old: int, new: int) -> str | None:
        producer_position, reclaimed, settled = (
            words[producer_at],
            words[reclaimed_at],
            words[settled_at],
        )
        if index == producer_at and not (old <= new and settled <= new <= reclaimed + capacity):
            return (
                f"producer_position from {old} to {new}, settled {settled}, reclaimed "
                f"{reclaimed}, {capacity} descriptors"
            )
        if index == reclaimed_at and not old <= new <= settled:
            return f"reclaimed from {old} to {new}, settled {settled}"
        if index == settled_at:
            if not old <= new <= producer_position:
                return f"settled from {old} to {new}, producer_position {producer_position}"
            unjudged = [
                n
                for n in range(old, new)
                if words[outcomes + n % capacity * (OUTCOME_BYTES // 8)] >> 8 != n + 1
            ]
            if unjudged:
                return f"settled to {new} before the verdicts of {unjudged}"
        if index in cursors and not old <= new <= producer_position:
            return (
                f"cursor {cursors[index]} from {old} to {new}, producer_position "
                f"{producer_position}"
            )
        if outcomes <= index < layout.data // 8 and (new >> 8) - 1 < max(settled, (old >> 8) - 1):
            return f"a verdict on descriptor {(new >> 8) - 1}, settled {settled}"
        return None

    return check


def _lane(region: Region) -> Check:
    layout = LaneLayout(region.header.first)
    words = region.bytes.cast("Q")
    producer_at, consumer_at = layout.producer_position // 8, layout.consumer_position // 8

    def check(index: int, old: int, new: int) -> str | None:
        producer_position, consumer_position = words[producer_at], words[consumer_at]
        if index == producer_at and not old <= new <= consumer_position + layout.lane_bytes:
            return (
                f"producer_position from {old} to {new}, consumer_position "
                f"{consumer_position}, {layout.lane_bytes} bytes"
            )
        if index == consumer_at and not old <= new <= producer_position:
            return f"consumer_position from {old} to {new}, producer_position {producer_position}"
        return None

    return check


def _table(region: Region) -> Check:
    from shm.tables.partition_table import PartitionState, read_state

    layout = TableLayout(region.header.first)

    def check(index: int, old: int, new: int) -> str | None:
        slot = (8 * index - layout.slot(0)) // (layout.slot(1) - layout.slot(0))
        if 8 * index != layout.slot(slot):
            return f"word {index} is not a slot's count"
        if new != old + 1:
            return f"count of slot {slot} from {old} to {new}"
        shown: PartitionState = read_state(region.bytes, layout, slot, old)
        state: PartitionState = read_state(region.bytes, layout, slot, new)
        if not state.log_start_offset <= state.high_watermark <= state.log_end_offset:
            return (
                f"slot {slot}: start {state.log_start_offset}, high watermark "
                f"{state.high_watermark}, end {state.log_end_offset}"
            )
        if not state.log_start_offset <= state.last_stable_offset <= state.high_watermark:
            return (
                f"slot {slot}: start {state.log_start_offset}, last stable offset "
                f"{state.last_stable_offset}, high watermark {state.high_watermark}"
            )
        gone = (SlotState.DELETED, SlotState.UNREADABLE)
        if (
            shown.topic_id == state.topic_id
            and state.state not in gone
            and state.high_watermark < shown.high_watermark
        ):
            return (
                f"slot {slot}: high watermark from {shown.high_watermark} to {state.high_watermark}"
            )
        if (
            shown.topic_id == state.topic_id
            and state.state not in gone
            and state.last_stable_offset < shown.last_stable_offset
        ):
            return (
                f"slot {slot}: last stable offset from {shown.last_stable_offset} to "
                f"{state.last_stable_offset}"
            )
        return None

    return check


_CHECKS: dict[RegionKind, Callable[[Region], Check]] = {
    RegionKind.RING: _ring,
    RegionKind.LANE: _lane,
    RegionKind.TABLE: _table,
}
