"""Descriptor index: the descriptors of each partition in a worker's ring, found in one pass.

Owner: one worker, for its own ring.

Invariants:
- Each descriptor is read once while the ring does not wrap, not once for each partition.
- At most 2 x capacity numbers of 8 bytes are held.

Crash: derived from the ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from shm.queues.ring import Descriptor, RingWriter


class DescriptorIndex:
    """Descriptor numbers of batches, by slot."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._numbers: dict[int, array[int]] = {}
        self._count = 0
        self._end = 0

    def batches_of(self, slot: int, since: int = 0) -> Iterator[Descriptor]:
        """Yield the descriptors of batches of `slot` that the ring still has, oldest first, from
        the number `since` on.
        """
        self._catch_up()
        ring = self._ring
        oldest = max(since, ring.next_number - ring.capacity)
        for number in self._numbers.get(slot, ()):
            if number >= oldest:
                yield ring.descriptor(number)

    def _catch_up(self) -> None:
        """Index descriptors published since the last call."""
        ring = self._ring
        if self._count > ring.capacity:
            # many of the indexed descriptors have been reused: start over
            self._numbers, self._count, self._end = {}, 0, 0
        for number in range(max(self._end, ring.next_number - ring.capacity), ring.next_number):
            descriptor = ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                numbers = self._numbers.get(descriptor.slot)
                if numbers is None:
                    numbers = self._numbers[descriptor.slot] = array("Q")
                numbers.append(number)
                self._count += 1
        self._end = ring.next_number
