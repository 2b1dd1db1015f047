"""The invariants of rings, lanes and the partition table, checked at every published store, where a test asks for it.

Production uses a plain `memoryview` for a region's words (see `cell`); tests and simulation put `CheckedWords` in its place, which raises InvariantError
at the store that breaks one.

Owner: tests and simulation.
Invariants: those that the modules named in `_CHECKS` state; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from shm.layout import FRONTS_MAX, OUTCOME_BYTES, LaneLayout, RegionKind, RingLayout, SlotState, TableLayout
from shm.region import Region

Check = Callable[[int, int, int], str | None]
"""(index of the word, what it holds, what is to be stored) -> what would be broken, or None."""


class InvariantError(AssertionError):
    """A published store that breaks what its module promises."""


class CheckedWords:
    """A region's words, each store checked first. `before` and `after` are called around each store, `on_load` before each load."""

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
    """The region, its words checked from now on: before anybody has made a ring, lane or table of it."""
    region.words = CheckedWords(region)
    return region


def _ring(region: Region) -> Check:
    layout = RingLayout(region.header.first, region.header.second)
    words = region.bytes.cast("Q")
    head_at, reclaimed_at, settled_at = layout.head // 8, layout.reclaimed // 8, layout.settled // 8
    cursors = {layout.cursor(front) // 8: front for front in range(FRONTS_MAX)}
    outcomes = layout.outcomes // 8
    capacity = layout.descriptor_count

    def check(index: int, old: int, new: int) -> str | None:
        head, reclaimed, settled = words[head_at], words[reclaimed_at], words[settled_at]
        if index == head_at and not (old <= new and settled <= new <= reclaimed + capacity):
            return f"head from {old} to {new}, settled {settled}, reclaimed {reclaimed}, {capacity} descriptors"
        if index == reclaimed_at and not old <= new <= settled:
            return f"reclaimed from {old} to {new}, settled {settled}"
        if index == settled_at:
            if not old <= new <= head:
                return f"settled from {old} to {new}, head {head}"
            unjudged = [n for n in range(old, new) if words[outcomes + n % capacity * (OUTCOME_BYTES // 8)] >> 8 != n + 1]
            if unjudged:
                return f"settled to {new} before the verdicts of {unjudged}"
        if index in cursors and not old <= new <= head:
            return f"cursor {cursors[index]} from {old} to {new}, head {head}"
        if outcomes <= index < layout.data // 8 and (new >> 8) - 1 < max(settled, (old >> 8) - 1):
            return f"a verdict on descriptor {(new >> 8) - 1}, settled {settled}"
        return None

    return check


def _lane(region: Region) -> Check:
    layout = LaneLayout(region.header.first)
    words = region.bytes.cast("Q")
    tail_at, consumed_at = layout.tail // 8, layout.consumed // 8

    def check(index: int, old: int, new: int) -> str | None:
        tail, consumed = words[tail_at], words[consumed_at]
        if index == tail_at and not old <= new <= consumed + layout.lane_bytes:
            return f"tail from {old} to {new}, consumed {consumed}, {layout.lane_bytes} bytes"
        if index == consumed_at and not old <= new <= tail:
            return f"consumed from {old} to {new}, tail {tail}"
        return None

    return check


def _table(region: Region) -> Check:
    from shm.partition_table import PartitionState, read_state

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
            return f"slot {slot}: start {state.log_start_offset}, high watermark {state.high_watermark}, end {state.log_end_offset}"
        gone = (SlotState.DELETED, SlotState.UNREADABLE)
        if shown.topic_id == state.topic_id and state.state not in gone and state.high_watermark < shown.high_watermark:
            return f"slot {slot}: high watermark from {shown.high_watermark} to {state.high_watermark}"
        return None

    return check


_CHECKS: dict[RegionKind, Callable[[Region], Check]] = {RegionKind.RING: _ring, RegionKind.LANE: _lane, RegionKind.TABLE: _table}
