"""A worker that loads producers while the cleaner replaces segments: at any access to a file, what
it loads is what it would have loaded before and after.
"""

from __future__ import annotations

import random

import pytest

from tests.kit.log_files.compacted_logs import World, batches, compacted
from tests.kit.log_files.logs import bench
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.log.producers import producer_snapshots
from workers.log.producers.producer_snapshots import load_producers


class _Cleaning(SimFiles):
    """Files of a worker; at one of its accesses the active segment is sealed and cleaned."""

    def __init__(self, disk: SimDisk, world: World, at: int) -> None:
        super().__init__(disk)
        self.left = at
        self._world = world

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._world.b.now_us += 120_000_000  # segment.ms
            self._world.clean()

    def list(self, path: str) -> list[str]:
        self._step()
        return super().list(path)

    def open_for_read(self, path: str) -> int:
        self._step()
        return super().open_for_read(path)


def loaded(world: World, files: SimFiles) -> list[object]:
    item, end = world.b.assignments[0], world.b.table.read(0).log_end_offset
    return list(load_producers(files, world.b.directory, item, end, lambda us: us).to_snapshot())


@pytest.mark.parametrize("at", range(1, 9))
def test_producers_are_whole_where_their_segment_is_replaced_meanwhile(at: int) -> None:
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(4), compacted(**{"segment.ms": 60_000}))
        batches(world, 120)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        before = loaded(world, SimFiles(disk))
        names = set(b.files.list(f"{b.directory}/t-0"))
        cleaning = _Cleaning(disk, world, at)
        try:
            found = loaded(world, cleaning)
        except FileNotFoundError:  # the worker tries again
            found = loaded(world, SimFiles(disk))
        assert found == before
        assert loaded(world, SimFiles(disk)) == before
        assert cleaning.left > 0 or not names <= set(b.files.list(f"{b.directory}/t-0")), "cleaned"


def test_a_segment_that_is_always_replaced_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_snapshots, "_load_once", lambda *_: None)
    with bench("/data", SimFiles(SimDisk())) as b, pytest.raises(OSError, match="faster than read"):
        loaded(World(b, random.Random(4)), SimFiles(SimDisk()))
