"""Offset bits: one bit for each offset of a part of a log, set for those of superseded records.

Owner: one pass of the cleaner. `KeyOffsets.put` sets bits in `data`.

Invariants:
- The bit of offset n is bit (n - base) & 7 of byte (n - base) >> 3. Bits below `start` say nothing.
- A bit that is set stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Offsets = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.uint8]]


class OffsetBits:
    """See the module's docstring."""

    def __init__(self, base: int, start: int, end: int) -> None:
        """Bits of the offsets `start` to `end - 1`, none of them set. `base`: the lowest offset
        that may be asked for later (`reach_down`).
        """
        self.start = start
        self.base = base + (start - base & ~7)
        """The offset of the first bit."""
        self.data = bytearray((end - self.base + 7) // 8)

    def reach_down(self, base: int) -> None:
        """Begin at `base`, which was named before."""
        self.data = bytearray((self.base - base) // 8) + self.data
        self.base = self.start = base

    def set(self, offsets: Offsets) -> None:
        """Set the bits of some offsets."""
        places = offsets - self.base
        bits = np.frombuffer(self.data, np.uint8)
        np.bitwise_or.at(bits, places >> 3, np.left_shift(1, places & 7).astype(np.uint8))

    def unset(self, offsets: Offsets) -> Flags:
        """1 for each of some ascending offsets whose bit is not set, else 0. There is one offset
        at least.
        """
        first, last = int(offsets[0]) - self.base, int(offsets[-1]) - self.base
        part = np.frombuffer(self.data, np.uint8, (last >> 3) - (first >> 3) + 1, first >> 3)
        begin = first & 7
        bits = 1 - np.unpackbits(part, bitorder="little")[begin : begin + last - first + 1]
        return bits if len(bits) == len(offsets) else np.take(bits, offsets - offsets[0])

    def set_count(self, start: int, end: int) -> int:
        """Number of set bits of the offsets `start` to `end - 1`, without up to 14 at the edges. 0
        below the first bit.
        """
        if start < self.start:
            return 0
        first, last = start - self.base + 7 >> 3, end - self.base >> 3
        if first >= last:
            return 0
        return int.from_bytes(memoryview(self.data)[first:last], "little").bit_count()

    def are_set(self, start: int, end: int) -> bool:
        """True if the bits of all offsets `start` to `end - 1` are set."""
        if start < self.start:
            return False
        bits, start, end = self.data, start - self.base, end - self.base
        first, last = -(-start >> 3), end >> 3
        if first > last:  # in one byte
            mask = (1 << end - start) - 1
            return bits[last] >> (start & 7) & mask == mask
        head, tail = 0xFF >> (start & 7), (1 << (end & 7)) - 1
        return (
            not (start & 7 and bits[first - 1] >> (start & 7) != head)
            and not (tail and bits[last] & tail != tail)
            and bits.count(0xFF, first, last) == last - first
        )
