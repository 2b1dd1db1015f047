"""Scans of many segments: a directory is listed once, and again when names in it have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tests.kit.log_files.transaction_logs import TransactionLog


def log_of(directory: Path, segment_count: int) -> TransactionLog:
    """A log of segments with one batch of two records each."""
    log = TransactionLog(directory)
    for number in range(segment_count):
        if number:
            log.roll()
        log.append(2)
    return log


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
