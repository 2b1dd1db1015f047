"""A front that reads while segments are replaced by a cleaned one.

At each step of the swap it finds each record that is left, whatever it has open, and has no damage
to report.
"""

from __future__ import annotations

import pathlib
import random

import pytest

from netfront.fetch.log.file_reader import DiskFileReader
from netfront.fetch.log.isolation import Isolation
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError, Span
from netfront.fetch.lookup.timestamp_lookup import TimestampLookup
from shm.crash_points import armed
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import read_header
from tailrace.format.record_batch.header_peek import frame_at
from tests.kit.batches import TIME_US
from tests.kit.log_files.compacted_logs import SWAP_POINTS, World, batches, compacted
from tests.kit.log_files.logs import bench


def read_all(reader: LogReader, end: int, step: int) -> None:
    """Read from many offsets up to the end. Each read goes on where the one before ended; what is
    being replaced may be NOT_READY.
    """
    route, target = compacted(), memoryview(bytearray(1 << 20))
    for first in range(0, end, step):
        offset, hint = first, None
        while offset < end:
            state = reader.state(route)
            try:
                found = reader.read(route, state, offset, hint, target, True, Isolation.UNCOMMITTED)
            except LogReadError as error:
                if error.code is ErrorCode.NOT_READY:
                    return
                raise
            assert isinstance(found, Span)
            at, following = found.start, None
            while at < found.end:
                frame = frame_at(target, at, found.end)
                assert frame is not None
                header = read_header(target[at : at + frame[0]])
                assert following is not None or header.base_offset <= offset
                assert following in (None, header.base_offset), "ranges touch"
                following = header.next_offset
                at += frame[0]
            assert found.following.offset > offset
            offset, hint = found.following.offset, found.following


@pytest.mark.parametrize("point", SWAP_POINTS)
@pytest.mark.parametrize("visit", [1, 2, 3])
def test_a_front_reads_on_at_every_step_of_a_swap(
    tmp_path: pathlib.Path, point: str, visit: int
) -> None:
    with bench(str(tmp_path)) as b:
        # Without expiry all runs are one.
        policy = "compact" if visit == 1 else "compact,delete"
        world = World(b, random.Random(20), compacted(**{"cleanup.policy": policy}))
        batches(world, 60)
        world.settle()
        tables = [b.table]
        warm = LogReader(DiskFileReader(), [str(tmp_path)], tables)
        small = LogReader(DiskFileReader(), [str(tmp_path)], tables, 2)
        end = b.table.read(0).last_stable_offset
        read_all(warm, end, 7)
        reads = []

        def read() -> None:
            for reader in (warm, small, LogReader(DiskFileReader(), [str(tmp_path)], tables)):
                read_all(reader, end, 13)
                lookup = TimestampLookup(reader).find(
                    compacted(), reader.state(compacted()), TIME_US + 3, Isolation.UNCOMMITTED
                )
                for _ in lookup:
                    pass
            reads.append(point)

        with armed(point, read, visit):
            world.clean()
        assert reads
        read_all(warm, end, 7)
        read_all(small, end, 7)
        world.check(cleaned=True)
