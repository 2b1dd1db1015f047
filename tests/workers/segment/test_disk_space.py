"""The reserve file of a data directory: it occupies what its length says."""

from __future__ import annotations

import os
import pathlib

from tailrace.format.directory.data_dir import RESERVE_FILE
from workers.segment.disk_space import CHECK_NS, DiskSpace
from workers.segment.files import DiskFiles

RESERVE_BYTES = 8 << 20
FILE_BYTES = RESERVE_BYTES // 8


class RoomyFiles(DiskFiles):
    """Files of a disk with room for the reserve, whatever the test's disk has left."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations = 0

    def free_bytes(self, path: str) -> int:
        return 1 << 40

    def total_bytes(self, path: str) -> int:
        return 1 << 40

    def allocate(self, path: str, size: int) -> None:
        self.allocations += 1
        super().allocate(path, size)


def test_a_reserve_that_a_copy_left_without_blocks_gets_them(tmp_path: pathlib.Path) -> None:
    reserve = tmp_path / RESERVE_FILE
    with reserve.open("wb") as file:
        file.truncate(FILE_BYTES)
    assert os.stat(reserve).st_blocks * 512 < FILE_BYTES
    space = DiskSpace(RoomyFiles(), str(tmp_path), RESERVE_BYTES)
    assert not space.check(CHECK_NS)
    found = os.stat(reserve)
    assert (found.st_size, found.st_blocks * 512 >= FILE_BYTES) == (FILE_BYTES, True)


def test_a_file_system_that_counts_no_blocks_for_zeros_is_asked_once(
    tmp_path: pathlib.Path,
) -> None:
    class Uncounted(RoomyFiles):
        def allocated(self, fd: int) -> int:
            return 512

    files = Uncounted()
    space = DiskSpace(files, str(tmp_path), RESERVE_BYTES)
    for turn in range(1, 6):
        space.check(turn * CHECK_NS)
    assert files.allocations <= 2  # made, and once for its holes
