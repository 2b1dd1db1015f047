"""Records that are removed between a front's look at the log's start and its read of the files."""

from __future__ import annotations

import pathlib

import pytest

from netfront.fetch.log.file_reader import DiskFileReader
from netfront.fetch.log.isolation import Isolation
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError
from tailrace.core.error_codes import ErrorCode
from tests.kit.log_files.logs import Bench, assignment, bench
from tests.kit.transactional.transactions import RingFiller


def settle(b: Bench) -> None:
    """Step the flusher until there is nothing to do."""
    while b.step_flusher() or not b.is_running:
        pass
    b.ring.cursors[0].store(b.ring.settled.load())


def test_a_read_behind_a_removal_is_out_of_range_and_no_damage(
    tmp_path: pathlib.Path,
) -> None:
    route = assignment(retention_bytes=0)
    route.settings["segment.bytes"] = 16_384
    target = memoryview(bytearray(1 << 20))
    with bench(str(tmp_path)) as b:
        b.assignments = [route]
        b.kill_flusher()
        filler = RingFiller(b.regions["ring"])

        filler.data(30)
        settle(b)
        reader = LogReader(DiskFileReader(), [str(tmp_path)], [b.table])
        former = reader.state(route)
        assert not former.log_start_offset
        for _ in range(24):
            filler.data(30)
            settle(b)
        assert b.table.read(0).log_start_offset > 0
        with pytest.raises(LogReadError, match="was removed") as raised:
            reader.read(route, former, 0, None, target, True, Isolation.UNCOMMITTED)
        assert raised.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
