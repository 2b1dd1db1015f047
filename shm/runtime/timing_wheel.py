"""Hierarchical timing wheel for timeouts. Pure: no thread, no sleep, time is passed in.

After Varghese and Lauck, "Hashed and Hierarchical Timing Wheels" (1987), as in Kafka's TimingWheel.
Level L has 64 buckets of 64**L ticks each. A timer is in the lowest level whose 64 buckets reach
its tick. When time reaches a bucket of level L > 0, its timers move down (cascade). One bit per
bucket marks it as occupied, so that empty time costs nothing to pass.

Worked example, tick 1 ms, current tick 0 (bucket = first tick it covers):

    timer due at    level   bucket          moves down at    fires at
    5 ms            0       5               -                5
    63 ms           0       63              -                63
    64 ms           1       1 (64..127)     64               64
    200 ms          1       3 (192..255)    192 to level 0   200
    70,000 ms       2       17 (69,632..)   69,632 to 1, then 69,952 to 0   70,000

`workers.delays.store.array_wheel` is the variant for thousands of rows, and
`workers.delays.store.bucket_files` keeps its far buckets on disk.

Owner: one process; not thread-safe.

Invariants:
- No timer fires before its deadline.
- A timer fires at the first `advance` at or after its deadline, rounded up to a tick, unless
  `limit` is reached.
- Timers fire in order of (tick, deadline, order of adding).
- `add` and `cancel` are O(1). Levels are created on demand.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")

_BITS = 6
_BUCKETS = 1 << _BITS
_MASK = _BUCKETS - 1
_ALL = (1 << _BUCKETS) - 1


class Timer(Generic[Item]):
    """A pending timeout, and the handle for `cancel`."""

    __slots__ = ("_bucket", "deadline_ns", "item", "sequence", "tick")

    def __init__(self, deadline_ns: int, tick: int, sequence: int, item: Item) -> None:
        self.deadline_ns = deadline_ns
        self.tick = tick
        self.sequence = sequence
        self.item = item
        self._bucket: _Bucket[Item] | None = None


class _Bucket(Generic[Item]):
    __slots__ = ("bit", "level", "timers")

    def __init__(self, level: _Level[Item] | None, bit: int) -> None:
        self.level = level
        self.bit = bit
        self.timers: dict[Timer[Item], None] = {}

    def add(self, timer: Timer[Item]) -> None:
        self.timers[timer] = None
        timer._bucket = self
        if self.level is not None:
            self.level.occupied |= self.bit

    def remove(self, timer: Timer[Item]) -> None:
        del self.timers[timer]
        timer._bucket = None
        if not self.timers and self.level is not None:
            self.level.occupied &= ~self.bit


class _Level(Generic[Item]):
    __slots__ = ("buckets", "occupied", "shift")

    def __init__(self, number: int) -> None:
        self.shift = _BITS * number
        self.occupied = 0
        self.buckets: list[_Bucket[Item]] = [_Bucket(self, 1 << i) for i in range(_BUCKETS)]

    def next_tick(self, current: int) -> int | None:
        """Return the first tick of the next occupied bucket after `current`, or None."""
        if not self.occupied:
            return None
        here = current >> self.shift
        slot = (here + 1) & _MASK
        ahead = ((self.occupied >> slot) | (self.occupied << (_BUCKETS - slot))) & _ALL
        return (here + 1 + (ahead & -ahead).bit_length() - 1) << self.shift


NEVER_NS = 1 << 63
"""Time later than every deadline."""


class TimingWheel(Generic[Item]):
    """Timers with items of one type."""

    def __init__(self, start_ns: int, tick_ns: int = 1_000_000) -> None:
        if tick_ns <= 0:
            raise ValueError("tick_ns must be positive")
        self.tick_ns = tick_ns
        self._current = start_ns // tick_ns
        self._levels: list[_Level[Item]] = [_Level(0)]
        self._due: _Bucket[Item] = _Bucket(None, 0)
        self._sequence = 0
        self._count = 0
        self.quiet_until_ns = NEVER_NS
        """`advance` has no work before this time. Cancelled timers may keep it low."""

    def __len__(self) -> int:
        return self._count

    def add(self, deadline_ns: int, item: Item) -> Timer[Item]:
        """Add a timer that fires at the first `advance` at or after `deadline_ns`."""
        self._sequence += 1
        timer = Timer(deadline_ns, -(-deadline_ns // self.tick_ns), self._sequence, item)
        self._place(timer)
        self._count += 1
        return timer

    def cancel(self, timer: Timer[Item]) -> bool:
        """Cancel a timer. Return False if it has fired or was cancelled before."""
        bucket = timer._bucket
        if bucket is None:
            return False
        bucket.remove(timer)
        self._count -= 1
        return True

    def _place(self, timer: Timer[Item]) -> None:
        tick, current = timer.tick, self._current
        if tick <= current:
            self._due.add(timer)
            self.quiet_until_ns = 0
            return
        number = 0
        while (tick >> (_BITS * number)) - (current >> (_BITS * number)) >= _BUCKETS:
            number += 1
        while len(self._levels) <= number:
            self._levels.append(_Level(len(self._levels)))
        level = self._levels[number]
        level.buckets[(tick >> level.shift) & _MASK].add(timer)
        self.quiet_until_ns = min(
            self.quiet_until_ns, (tick >> level.shift << level.shift) * self.tick_ns
        )

    def _next(self) -> tuple[int, _Level[Item]] | None:
        """Return the next occupied bucket's first tick and its level.

        If several begin at the same tick, the highest level comes first, so that its timers move
        down in time.
        """
        found: tuple[int, _Level[Item]] | None = None
        for level in reversed(self._levels):
            tick = level.next_tick(self._current)
            if tick is not None and (found is None or tick < found[0]):
                found = tick, level
        return found

    def advance(self, now_ns: int, limit: int = 1024) -> list[Item]:
        """Move time to `now_ns` and return the items of due timers. At most `limit` timers move or
        fire.

        At the limit, time stops where it is and the next call continues. Time never runs backwards.
        """
        target = now_ns // self.tick_ns
        fired: list[Timer[Item]] = []
        budget = limit
        budget = self._pop_due(fired, budget)
        while budget > 0 and not self._due.timers:
            upcoming = self._next()
            if upcoming is None or upcoming[0] > target:
                self._current = max(self._current, target)
                break
            tick, level = upcoming
            bucket = level.buckets[(tick >> level.shift) & _MASK]
            if level.shift:
                # Step to just before the bucket and move its timers down. They belong below this
                # level then.
                moved = list(bucket.timers)[:budget]
                self._current = tick - 1
                for timer in moved:
                    bucket.remove(timer)
                    self._place_below(timer, tick)
                budget -= len(moved)
                continue
            self._current = tick
            for timer in sorted(bucket.timers, key=lambda t: (t.deadline_ns, t.sequence)):
                bucket.remove(timer)
                self._due.add(timer)
            budget = self._pop_due(fired, budget)
        upcoming_ns = self.next_deadline_ns()
        self.quiet_until_ns = NEVER_NS if upcoming_ns is None else upcoming_ns
        return [timer.item for timer in fired]

    def _place_below(self, timer: Timer[Item], bucket_tick: int) -> None:
        """Place a cascading timer relative to its bucket's first tick.

        It then leaves its level even though `current` is one tick before.
        """
        tick = timer.tick
        number = 0
        while (tick >> (_BITS * number)) - (bucket_tick >> (_BITS * number)) >= _BUCKETS:
            number += 1
        level = self._levels[number]
        level.buckets[(tick >> level.shift) & _MASK].add(timer)

    def _pop_due(self, fired: list[Timer[Item]], budget: int) -> int:
        for timer in list(self._due.timers)[: max(0, budget)]:
            self._due.remove(timer)
            self._count -= 1
            fired.append(timer)
            budget -= 1
        return budget

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next `advance` with work (fire or move down), or None."""
        if self._due.timers:
            return self._current * self.tick_ns
        upcoming = self._next()
        return None if upcoming is None else upcoming[0] * self.tick_ns
