"""Regions of real shared memory for tests, with names of their own, removed at the end. Every
published store is checked (`shm.tables.invariants`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import LaneLayout, RegionKind, RingLayout, TableLayout
from shm.memory.region import Region, RegionHeader, remove
from shm.tables.invariants import checked

INSTANCE = bytes(16)


@contextmanager
def region(kind: RegionKind, size: int, first: int, second: int = 0) -> Iterator[Region]:
    name = f"/tailrace-test-{os.urandom(6).hex()}"
    created = Region.create(name, kind, size, INSTANCE, 1, first, second)
    try:
        yield checked(created)
    finally:
        remove(name)


@contextmanager
def ring_region(ring_bytes: int = 1 << 16, descriptors: int = 64) -> Iterator[Region]:
    with region(
        RegionKind.RING, RingLayout(ring_bytes, descriptors).size, ring_bytes, descriptors
    ) as created:
        yield created


@contextmanager
def lane_region(lane_bytes: int = 1 << 14) -> Iterator[Region]:
    with region(RegionKind.LANE, LaneLayout(lane_bytes).size, lane_bytes) as created:
        yield created


@contextmanager
def table_region(slots: int = 16) -> Iterator[Region]:
    with region(RegionKind.TABLE, TableLayout(slots).size, slots) as created:
        yield created


def simulated(
    kind: RegionKind, size: int, first: int, second: int = 0, *, is_checked: bool = True
) -> Region:
    """A region in this process's own memory: it outlives the simulated processes that use it, and
    costs no system call. One that is not checked is used by the compiled kernel, where there is
    one.
    """
    header = RegionHeader(kind, bytes(16), INSTANCE, 1, size, first, second)
    region = Region("/simulated", bytearray(size), header)  # type: ignore[arg-type]
    return checked(region) if is_checked else region


def spin_until(cell: AtomicCounter, value: int) -> None:
    """Until it is that at least: awake for a moment, so that both processes go on at once; then
    others may have the core.
    """
    spins = 0
    while cell.load() < value:
        spins += 1
        if spins > 200:
            os.sched_yield()
