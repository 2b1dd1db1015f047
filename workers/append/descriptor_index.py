"""Where in a worker's ring each partition's descriptors lie: found in one pass over the ring, however many partitions ask.

Owner: one worker, of its own ring.
Invariants: each descriptor is looked at once while the ring does not turn over, not once for each partition; at most 2 x capacity numbers of 8 bytes are held.
Crash: derived from the ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from shm.ring import Descriptor, RingWriter


class RingIndex:
    """Batches of partitions, by slot."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._numbers: dict[int, array[int]] = {}
        self._count = 0
        self._end = 0

    def batches_of(self, slot: int) -> Iterator[Descriptor]:
        """Descriptors of batches of the partition in `slot` that the ring still has, oldest first."""
        self._catch_up()
        ring = self._ring
        oldest = ring.next_number - ring.capacity
        for number in self._numbers.get(slot, ()):
            if number >= oldest:
                yield ring.descriptor(number)

    def _catch_up(self) -> None:
        """Look at what was appended since the last time."""
        ring = self._ring
        if self._count > ring.capacity:
            self._numbers, self._count, self._end = {}, 0, 0  # much of it has been written over: begin anew
        for number in range(max(self._end, ring.next_number - ring.capacity), ring.next_number):
            descriptor = ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                numbers = self._numbers.get(descriptor.slot)
                if numbers is None:
                    numbers = self._numbers[descriptor.slot] = array("Q")
                numbers.append(number)
                self._count += 1
        self._end = ring.next_number
