"""A bit flipped in every byte of a small log's files: found or harmless, never served; what is good
around it still comes out. `make test` takes every fifth byte of the segment.
"""

from __future__ import annotations

import logging
import random

import pytest

from tailrace.format.directory.partition_metadata import PARTITION_FILE
from tests.kit.log_files.simdisk import Inode, SimDisk
from tests.kit.log_files.workload import Workload, boot, read_log
from tests.kit.matrices import short
from workers.log.index_scrubber import scrub_one_index
from workers.log.partition_log import PartitionLog
from workers.log.recovery.decision import Hints


def small_log() -> tuple[SimDisk, Workload]:
    disk = SimDisk()
    workload = Workload(boot(disk, 0, 1), random.Random(5), producers=1, batch_records=2)
    for _ in range(14):
        workload.send()
        workload.settle()
    workload.bench.flusher.close()
    return disk, workload


SEGMENT_STRIDE = 5
"""Odd: over the bytes of a segment, each of the eight bits is flipped in fields of every kind."""


@pytest.mark.parametrize("harm", ["flip", "truncate"])
@pytest.mark.parametrize(
    ("suffix", "stride"),
    short(
        [
            (".arrows", SEGMENT_STRIDE), (".index", 1), (".producers", 1), (PARTITION_FILE, 1),
            ("checkpoint.0", 1), ("checkpoint.1", 1), (".arrows", 1),
        ],
        *range(6),
    ),
)  # fmt: skip
def test_a_flipped_bit_or_a_lost_end_is_never_served_and_the_rest_is(
    suffix: str, stride: int, harm: str
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        disk, workload = small_log()
        item = workload.bench.assignments[0]
        good = dict(read_log(workload.bench.files, "/data/t-0", 10**9))
        paths = [
            name
            for name, inode in disk.names.items()
            if inode is not None and name.endswith(suffix)
        ]
        assert paths
        originals = {
            name: bytes(inode.data) for name, inode in disk.names.items() if inode is not None
        }
        for path in paths:
            for index in range(0, len(originals[path]), stride):
                for name, content in originals.items():
                    disk.names[name] = Inode(content)
                changed = disk.names[path]
                assert changed is not None
                if harm == "flip":
                    changed.data[index] ^= 1 << (index % 8)
                else:
                    del changed.data[index:]
                log = PartitionLog(workload.bench.files, "/data", item)
                log.open("flip", hints=Hints(quarantine="/data/quarantine"))
                while log.sealed.unscrubbed:
                    scrub_one_index(log)
                lost = {
                    offset
                    for damage in log.file.damage
                    for offset in range(damage.start, damage.end)
                }
                walked = dict(_readable(workload, log))
                assert all(good[offset] == value for offset, value in walked.items()), (
                    f"{path} byte {index}: something else is served"
                )
                missing = set(good) - set(walked) - lost
                if suffix == ".index":
                    assert changed.data == originals[path], (
                        f"{path} byte {index}: the index was not made again"
                    )
                if suffix != ".arrows":
                    assert not missing, (
                        f"{path} byte {index}: good records are gone: {sorted(missing)}"
                    )
                if harm == "flip":
                    assert len(missing) + len(lost) <= 4, (
                        f"{path} byte {index}: more than the damaged batch is gone"
                    )
                assert log.next_offset == max(good) + 1, f"{path} byte {index}: the log's end moved"
                for name in [
                    name
                    for name in disk.names
                    if name not in originals and disk.names[name] is not None
                ]:
                    del disk.names[name]
    finally:
        logging.disable(logging.NOTSET)


def _readable(workload: Workload, log: PartitionLog) -> list[tuple[int, bytes]]:
    """Records of a reader that proves every batch and jumps over what is damaged."""
    from tailrace.format.segments.segment import (
        Ending,
        Walk,
        file_name,
        find_behind,
        segment_bases,
        walk_batches,
    )
    from tests.kit.log_files.workload import decode_values
    from workers.segment.files import read_whole

    files = workload.bench.files
    found: list[tuple[int, bytes]] = []
    for base in segment_bases(files.list(log.directory)):
        data = read_whole(files, f"{log.directory}/{file_name(base)}")

        def read_at(length: int, position: int, data: bytes = data) -> bytes:
            return data[position : position + length]

        walk = Walk(len(log.assignment.schema), base)
        while True:
            for position, header in walk_batches(read_at, len(data), walk, log.file.seed):
                values = decode_values(data[position : position + header.batch_length])
                found += [(header.base_offset + n, value) for n, value in enumerate(values)]
            behind = (
                find_behind(read_at, len(data), walk.position, log.file.seed, walk.next_offset)
                if walk.ending is Ending.TORN
                else None
            )
            if behind is None or behind.position >= len(data):
                break
            walk.position, walk.next_offset, walk.ending = (
                behind.position,
                behind.offset,
                Ending.CLEAN,
            )
    return found
