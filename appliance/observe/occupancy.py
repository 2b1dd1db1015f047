"""Occupancy of rings and lanes, read from shared memory.

Owner: the console. It only reads, in any thread.

Invariants:
- A region is attached once: it lives as long as the appliance, and a worker's restart keeps it.
- Two positions are not read at one moment, so a value may be off by what passed in between. It is
  never negative and never above the size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import LaneLayout, RegionKind, Role
from shm.memory.region import Region, RegionError
from shm.queues.ring import Ring
from shm.runtime.agent_runner import process_name

Attach = Callable[[str, RegionKind], Region]
RING_PREFIX = "ring-"
LANE_SIGN = ">"


class Occupancy(NamedTuple):
    """The used bytes of a ring or a lane, and its size."""

    used_bytes: int
    size_bytes: int


class _Lane:
    def __init__(self, region: Region) -> None:
        layout = LaneLayout(region.header.first)
        self._size = layout.lane_bytes
        self._written = AtomicCounter(region.words, layout.producer_position)
        self._read = AtomicCounter(region.words, layout.consumer_position)

    def occupancy(self) -> Occupancy:
        used = self._written.load() - self._read.load()
        return Occupancy(min(max(0, used), self._size), self._size)


class OccupancyReader:
    """Reads all rings and lanes of the appliance."""

    def __init__(self, regions: Mapping[str, str], attach: Attach) -> None:
        """`regions`: logical names, also of regions that are made later. `attach` raises
        RegionError or OSError.
        """
        self._regions = regions
        self._attach = attach
        self._lock = threading.Lock()
        self._rings: dict[str, Ring] = {}
        self._lanes: dict[str, _Lane] = {}

    def rings(self) -> dict[str, Occupancy]:
        """Worker -> its ring: batches that the flusher or a front has not passed yet."""
        self._attach_new()
        return {
            process_name(Role.WORKER, int(name.removeprefix(RING_PREFIX))): Occupancy(
                min(ring.used(), ring.ring_bytes), ring.ring_bytes
            )
            for name, ring in self._rings.copy().items()
        }

    def lanes(self) -> dict[str, Occupancy]:
        """Process -> the fullest of the lanes that it reads."""
        self._attach_new()
        fullest: dict[str, Occupancy] = {}
        for name, lane in self._lanes.copy().items():
            reader = name.partition(LANE_SIGN)[2]
            found = lane.occupancy()
            if reader not in fullest or found.used_bytes > fullest[reader].used_bytes:
                fullest[reader] = found
        return fullest

    def _attach_new(self) -> None:
        with self._lock:
            for name in self._regions:
                try:
                    if name.startswith(RING_PREFIX) and name not in self._rings:
                        self._rings[name] = Ring(self._attach(name, RegionKind.RING))
                    elif LANE_SIGN in name and name not in self._lanes:
                        self._lanes[name] = _Lane(self._attach(name, RegionKind.LANE))
                except (RegionError, OSError):
                    continue  # it is made when it is first needed
