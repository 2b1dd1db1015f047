"""Rate uses: how much each front uses of the rates that the fronts of the appliance share.

Owner: each front writes its own rows; the others read them.

Invariants:
- A row is that of the rate whose number it has. The number decides the place, so a rate whose place
  is taken has no row, and its fronts know nothing of each other.
- A reader may see the use of a rate that has just left its place, for the moment of a change.

Layout: `ControlLayout.rate_uses`: for each front USES_MAX rows of two words, number and use. The
lowest bit of the use says that more was asked for.

Crash: a killed front leaves its rows; a successor clears them.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from shm.memory.atomic_word import AtomicBuffer
from shm.memory.layout import USES_MAX, ControlLayout

_MOST = 1 << 60


class RateUse(NamedTuple):
    """Use that a front makes of a rate."""

    amount: int
    """A second."""
    is_limited: bool
    """True if it would use more."""


UNUSED = RateUse(0, False)


def number_of(name: str) -> int:
    """The number of a rate: the same in every process, never 0."""
    data = name.encode()
    return crc32(data) << 31 | crc32(data, 1) >> 1 | 1


class RateUses:
    """The rows of all fronts, of which one front writes its own."""

    def __init__(self, words: AtomicBuffer, layout: ControlLayout, front: int) -> None:
        self._words = words
        self._layout = layout
        self._front = front

    def clear(self) -> None:
        """Clear the rows of this front."""
        for number in range(USES_MAX):
            self._words[self._place(self._front, number)] = 0

    def put(self, number: int, use: RateUse) -> None:
        """Show the use that this front makes of a rate, if its place is free."""
        words, place = self._words, self._place(self._front, number)
        if words[place] not in (0, number):
            return
        if not words[place]:
            words[place + 1] = 0
            words[place] = number
        words[place + 1] = min(max(0, use.amount), _MOST) << 1 | use.is_limited

    def remove(self, number: int) -> None:
        """Remove the row of a rate."""
        place = self._place(self._front, number)
        if self._words[place] == number:
            self._words[place] = 0

    def of_others(self, number: int, fronts: int) -> list[RateUse]:
        """The uses that the other fronts, of so many, make of a rate."""
        found = []
        for front in range(fronts):
            if front != self._front:
                place = self._place(front, number)
                use = self._words[place + 1]
                is_known = self._words[place] == number
                found.append(RateUse(use >> 1, bool(use & 1)) if is_known else UNUSED)
        return found

    def _place(self, front: int, number: int) -> int:
        return self._layout.rate_use(front, (number >> 1) % USES_MAX)
