"""Scans of logs with transactions, from files and over a front: exactly the committed records."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tailrace
from tailrace.core.errors import StorageError
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.format.segments.transaction_index import HEADER, TRANSACTION_INDEX_SUFFIX
from tailrace.scanning.batch import Source
from tailrace.scanning.options import ScanSettings
from tailrace.scanning.sources import remote_source
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tailrace.scanning.sources.remote_source import RemoteSource
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.file_fronts import FileFront
from tests.kit.log_files.transaction_logs import TransactionLog, grow
from tests.kit.matrices import short


def local(log: TransactionLog, *, headers_only: bool = False) -> LocalSource:
    known = read_partition_file(str(log.directory))
    assert known is not None
    return LocalSource(str(log.directory), known, headers_only=headers_only, schema=DEFAULT_SCHEMA)


def offsets_of(source: Source, start: int, end: int) -> list[int]:
    found: list[int] = []
    for frame in source.frames(start, end):
        base = frame.header.base_offset
        found += range(base, base + frame.header.record_count)
    return [offset for offset in found if start <= offset < end]


@pytest.fixture
def grown(request: pytest.FixtureRequest, tmp_path: Path) -> FileFront:
    """A log with a history of this seed."""
    world = FileFront(tmp_path)
    rng = random.Random(request.param)
    world.logs[0].append()
    for _ in range(60):
        grow(rng, world.logs[0])
    return world


@pytest.mark.parametrize("grown", short(range(8), *range(3)), indirect=True)
@pytest.mark.parametrize("headers_only", [False, True])
def test_local_files_show_the_committed_records(grown: FileFront, headers_only: bool) -> None:
    log = grown.logs[0]
    end = log.state.last_stable_offset
    for start in range(0, end, 3):
        model = [offset for offset, _ in log.committed(start)]
        assert offsets_of(local(log, headers_only=headers_only), start, end) == model


@pytest.mark.parametrize("grown", short(range(8), *range(3)), indirect=True)
def test_a_front_shows_the_committed_records_to_a_scan(
    grown: FileFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_source, "SYSTEM", grown.runtime())
    log = grown.logs[0]
    end = log.state.last_stable_offset
    for start in (0, end // 3, end // 2):
        source = RemoteSource("tcp://127.0.0.1:1", "t", TOPIC_ID, 0, ScanSettings(), DEFAULT_SCHEMA)
        assert offsets_of(source, start, end) == [offset for offset, _ in log.committed(start)]
        source.close()


@pytest.mark.parametrize("grown", short(range(8), *range(3)), indirect=True)
@pytest.mark.parametrize("with_indexes", [True, False])
def test_a_stopped_appliances_directory_is_read_up_to_its_oldest_open_transaction(
    grown: FileFront, tmp_path: Path, with_indexes: bool
) -> None:
    log = grown.logs[0]
    if not with_indexes:  # all but one are empty, as a loss of power may leave them
        for base in log.bases:
            index = log.path(base, TRANSACTION_INDEX_SUFFIX)
            if index.exists():
                index.write_bytes(index.read_bytes()[: HEADER.size])
    table = tailrace.scan(tmp_path / "t", columns=["_offset", "value"]).read_all()
    rows = list(zip(table["_offset"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert rows == log.committed()


@pytest.mark.parametrize("harm", ["missing", "flipped"])
def test_a_transaction_without_an_intact_index_is_not_shown(tmp_path: Path, harm: str) -> None:
    log = TransactionLog(tmp_path)
    log.append()
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    if harm == "missing":
        log.remove(0, TRANSACTION_INDEX_SUFFIX)
    else:
        log.damage(0, TRANSACTION_INDEX_SUFFIX, HEADER.size + 3)
    frames = local(log).frames(0, 6)
    assert next(frames).header.base_offset == 0
    with pytest.raises(StorageError, match="aborted"):
        next(frames)


def test_no_body_of_an_aborted_batch_is_verified(tmp_path: Path) -> None:
    log = TransactionLog(tmp_path)
    log.append(1, (1, 0))
    log.append(1, (1, 0), value_bytes=1000)
    log.end((1, 0), commit=False)
    log.append(1)
    data = bytearray(log.path(0).read_bytes())
    at = data.index(b"x" * 900)
    data[at] ^= 1
    log.path(0).write_bytes(data)
    assert offsets_of(local(log), 0, 4) == [3]
