"""Swaps of segments that are decided when the disk fails, and a topic that changes before it works
again: the swap is finished, and retention goes on.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.kit.log_files.compacted_logs import World, batches, compacted
from tests.kit.log_files.logs import assignment, bench
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.log.partition_log import PartitionLog
from workers.log.retention import merging_rules
from workers.segment.segment_swap import CLEANED_INDEX_SUFFIX, CLEANED_SUFFIX, SWAP_FILE


@pytest.fixture(autouse=True)
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of some KiB are worth a job."""
    monkeypatch.setattr(merging_rules, "SEGMENT_MIN_BYTES", 2_048)


def merging() -> Any:
    made = assignment(small_batch_bytes=16_384, retention_ms=-1)
    made.settings["segment.bytes"] = 24_576
    return made


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "merged": (merging, {}),
    "not merged any more": (merging, {"small.batch.bytes": 0}),
    "compacted": (compacted, {"cleanup.policy": "compact,delete"}),
    "not compacted any more": (compacted, {"cleanup.policy": "delete"}),
}


def is_swapping(log: PartitionLog) -> bool:
    return log.sealed.is_swapping


@pytest.mark.parametrize("case", CASES)
def test_a_decided_swap_is_finished_although_the_topic_was_changed(case: str) -> None:
    of, changed = CASES[case]
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(7), of())
        batches(world, 120)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        log = b.flusher._logs.all()[0]

        def fails(operation: str, path: str) -> None:
            if log.sealed.is_swapping and "checkpoint" in path:
                raise OSError(errno.ENOSPC, "no space", path)

        disk.hook = fails
        world.clean()
        assert is_swapping(log)
        settings = {**of().settings, "retention.bytes": 0, **changed}
        b.flusher._feed.apply_from_ring(replace(of(), version=2, settings=settings).encode())
        world.clean()
        assert is_swapping(log), "the disk still fails"
        start, version = log.log_start_offset, log.sealed.files_version
        assert start > 0
        disk.hook = None
        world.clean()
        assert not is_swapping(log)
        assert log.sealed.files_version > version
        names = b.files.list("/data/t-0")
        assert not [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]
        assert SWAP_FILE not in names
        assert all(log.following_base(s.base) > start for s in log.sealed.oldest_first())


def test_an_unexpected_error_does_not_abandon_a_decided_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench("/data", SimFiles(SimDisk())) as b:
        world = World(b, random.Random(7), merging())
        batches(world, 120)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        log = b.flusher._logs.all()[0]
        checkpoint = log.checkpoint

        def fails(*, sync: bool) -> None:
            if log.sealed.is_swapping:
                raise ValueError("unexpected")
            checkpoint(sync=sync)

        with monkeypatch.context() as patched:
            patched.setattr(log, "checkpoint", fails)
            world.clean()
            assert is_swapping(log)
        version = log.sealed.files_version
        world.clean()
        assert not is_swapping(log)
        assert log.sealed.files_version > version
        assert SWAP_FILE not in b.files.list("/data/t-0")


def test_an_intent_whose_sync_has_failed_is_finished() -> None:
    """Its name is in the directory: a start would carry it out, without the cleaned segment."""
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(7), compacted())
        batches(world, 120)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        log = b.flusher._logs.all()[0]
        intent = f"/data/t-0/{SWAP_FILE}"

        def fails(operation: str, path: str) -> None:
            if operation == "sync_directory" and path == "/data/t-0" and intent in disk.names:
                raise OSError(errno.EIO, "injected", path)

        disk.hook = fails
        world.clean()
        assert intent in disk.names
        assert is_swapping(log)
        assert cleaned_files(b.files), "they stay for the swap"
        disk.hook = None
        version = log.sealed.files_version
        world.clean()
        assert not is_swapping(log)
        assert log.sealed.files_version > version
        assert intent not in disk.names
        assert not cleaned_files(b.files)
        world.check()


def cleaned_files(files: Any) -> list[str]:
    names: list[str] = files.list("/data/t-0")
    return [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]
