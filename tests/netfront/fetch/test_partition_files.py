"""Open files of a partition whose segments were replaced."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.fetch.log.partition_files import PartitionFiles
from shm.memory.layout import SlotState
from shm.tables.partition_table import PartitionState
from tests.kit.log_files.logs import assignment
from tests.kit.log_files.simdisk import SimDisk, SimFiles


def test_files_of_before_a_swap_are_closed_also_where_the_list_of_segments_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A front that goes on with the old file would serve superseded records."""
    route: Any = assignment()
    files = SimFiles(SimDisk())
    files.make_directory(f"/data/{route.directory_name}")
    of_partition = PartitionFiles(files, ["/data"], 8)
    state = PartitionState.empty(route.topic_id, route.partition, SlotState.ONLINE, 1)
    of_partition.bases(route, state)
    of_partition.forget_segments(route)
    closed: list[Any] = []
    monkeypatch.setattr(of_partition, "close", closed.append)
    of_partition.bases(route, state._replace(files_version=1))
    assert closed == [route]
