"""Descriptors that killed processes of a bench leave open are closed once, even if others share the
files.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib

from tests.kit.batches import make_batch
from tests.kit.log_files.logs import bench


def test_a_restarted_bench_closes_no_file_that_has_taken_a_number_of_its_own(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as first:
        first.settle()
        second = first.restarted("second")
        second.send(make_batch(2))
        second.settle()
    with contextlib.ExitStack() as others:
        fds = []
        for _ in range(64):
            fds.append(os.open(os.devnull, os.O_RDONLY))
            others.callback(os.close, fds[-1])
        del first, second
        gc.collect()
        assert [os.fstat(fd).st_rdev for fd in fds] == [os.stat(os.devnull).st_rdev] * len(fds)


def test_a_bench_that_is_gone_leaves_its_successors_files_open(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as first:
        current = first
        for run in ("second", "third"):
            current = current.restarted(run)
            current.send(make_batch(2))
            current.settle()
        gc.collect()
        current.send(make_batch(2))
        current.settle()
        assert current.table.read(0).log_end_offset == 6
