"""Scans of many segments: a directory is listed once, and again when names in it have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tailrace.core.errors import StorageError
from tailrace.format.directory.data_dir import SWAP_FILE
from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.format.unfinished_swap import CLEANED_SUFFIX
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tests.kit.log_files.half_swapped import half_swapped_log, log_of
from tests.kit.log_files.transaction_logs import TransactionLog


def source_of(log: TransactionLog) -> LocalSource:
    known = read_partition_file(str(log.directory))
    assert known is not None
    return LocalSource(str(log.directory), known, headers_only=False, schema=DEFAULT_SCHEMA)


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that were listed."""
    found: list[str] = []
    listdir = os.listdir

    def noted(path: str) -> list[str]:
        found.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", noted)
    return found


def test_a_directory_that_stays_is_listed_once(tmp_path: Path, listings: list[str]) -> None:
    log = log_of(tmp_path, 8)
    os.utime(log.directory, (1_000_000, 1_000_000))
    listings.clear()
    frames = source_of(log).frames(0, 16)
    assert [frame.header.base_offset for frame in frames] == list(range(0, 16, 2))
    assert listings == [str(log.directory)]


def test_a_change_in_the_tick_of_another_one_is_seen(tmp_path: Path) -> None:
    """The third segment comes behind the first listing, and the directory's time stays."""
    log = log_of(tmp_path, 2)
    now_ns = time.time_ns()
    os.utime(log.directory, ns=(now_ns, now_ns))
    source = source_of(log)
    frames = source.frames(0, 6)
    found = [next(frames).header.base_offset]
    log.roll()
    log.append(2)
    os.utime(log.directory, ns=(now_ns, now_ns))
    found += [frame.header.base_offset for frame in frames]
    assert found == [0, 2, 4]


def test_segments_that_others_were_united_with_are_found_in_the_middle_of_a_scan(
    tmp_path: Path,
) -> None:
    """The third and fourth become one, when a scan is in the second."""
    log = log_of(tmp_path, 6)
    third, fourth = log.path(4), log.path(6)
    frames = source_of(log).frames(0, 12)
    found = [next(frames).header.base_offset for _ in range(2)]
    united = third.read_bytes().removesuffix(END_OF_STREAM)
    made = tmp_path / "made"
    made.write_bytes(united + fourth.read_bytes().removeprefix(log.schema))
    made.replace(third)
    fourth.unlink()
    found += [frame.header.base_offset for frame in frames]
    assert found == list(range(0, 12, 2))


@pytest.fixture(params=[[2, 2], [4]], ids=["a batch for each", "one batch"])
def half_swapped(tmp_path: Path, request: pytest.FixtureRequest) -> TransactionLog:
    return half_swapped_log(tmp_path, request.param)


def test_a_swap_that_a_kill_interrupted_is_read_as_if_it_were_finished(
    half_swapped: TransactionLog,
) -> None:
    frames = [frame.header for frame in source_of(half_swapped).frames(0, 10)]
    assert sum(header.record_count for header in frames) == 10
    assert [header.next_offset for header in frames[:-1]] == [
        header.base_offset for header in frames[1:]
    ]
    assert [f.header.next_offset for f in source_of(half_swapped).frames(7, 10)][-1] == 10


def test_a_swap_that_was_decided_and_not_begun_leaves_the_old_segments(
    half_swapped: TransactionLog,
) -> None:
    half_swapped.path(4, CLEANED_SUFFIX).touch()
    assert list(source_of(half_swapped).bases()) == [0, 2, 4, 6, 8]


def test_an_intent_that_cannot_be_read_is_named(half_swapped: TransactionLog) -> None:
    (half_swapped.directory / SWAP_FILE).write_bytes(b"{}")
    with pytest.raises(StorageError, match=SWAP_FILE):
        list(source_of(half_swapped).frames(0, 10))


def test_a_batch_of_a_united_segment_is_read_once_while_the_others_are_removed(
    tmp_path: Path,
) -> None:
    """The segments are united behind the listing, while a scan is in the first."""
    log, cleaned = log_of(tmp_path / "live", 4), TransactionLog(tmp_path / "cleaned")
    cleaned.append(4)
    frames = source_of(log).frames(0, 8)
    log.path(0).write_bytes(cleaned.path(0).read_bytes() + END_OF_STREAM)
    found = [frame.header.base_offset for frame in frames]
    assert found == [0, 4, 6]
