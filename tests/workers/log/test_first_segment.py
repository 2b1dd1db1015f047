"""The beginning of a segment: what is synced, and what a loss of power can bring back."""

from __future__ import annotations

import errno
import os
import pathlib
import random

import pytest

from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from tailrace.format.segments.segment_index import IndexEntry
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import bench
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.log.files import active_segment
from workers.segment.files import DiskFiles


class Syncs(DiskFiles):
    """Notes the names of what is synced."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._open: dict[int, str] = {}

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        fd = super().open_for_write(path, exclusive=exclusive)
        self._open[fd] = os.path.basename(path)
        return fd

    def sync_data(self, fd: int) -> None:
        self.names.append(self._open[fd])
        super().sync_data(fd)

    def sync_directory(self, path: str) -> None:
        self.names.append(os.path.basename(path))
        super().sync_directory(path)


def test_the_first_batch_of_a_partition_waits_for_five_syncs(tmp_path: pathlib.Path) -> None:
    files = Syncs()
    with bench(str(tmp_path), files) as flusher:
        flusher.settle()
        files.names.clear()
        flusher.send(make_batch(2))
        flusher.settle()
    segment = file_name(0)
    assert files.names == [segment, "partition.json", tmp_path.name, "t-0", segment]


@pytest.mark.parametrize("seed", range(8))
def test_a_beginning_that_failed_brings_no_old_index_entries_back(seed: int) -> None:
    directory = "/data/t-0"
    disk = SimDisk(("/data", directory))
    files = SimFiles(disk)
    index = f"{directory}/{file_name(0, INDEX_SUFFIX)}"
    fd = files.open_for_write(index)
    old = [IndexEntry(0, 4096, 1, 77), IndexEntry(2, 8192, 2, 77)]
    files.write_at(fd, [segment_index.encode_header(0) + segment_index.encode_entries(old)], 0)
    files.sync_data(fd)
    files.close(fd)
    files.sync_directory(directory)
    files.sync_directory("/data")
    is_full = True

    def fill(operation: str, path: str) -> None:
        if is_full and operation == "write" and path.endswith(".arrows"):
            raise OSError(errno.ENOSPC, "full")

    disk.hook = fill
    with pytest.raises(OSError, match="full"):
        active_segment.begin(files, directory, 0, b"schema--", 0)
    is_full = False
    active_segment.begin(files, directory, 0, b"schema--", 0)
    files.sync_directory(directory)
    after = disk.lose_power(random.Random(seed))
    found = after.names[index]
    assert found is not None
    assert not segment_index.decode(bytes(found.data), 0)
