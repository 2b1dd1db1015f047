"""Segments that the cleaner replaces while a backup reads them: what is stored beside a segment is
that segment's. A restored segment with transactions has an index of them.
"""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.backup.errors import NotReadyError
from appliance.backup.manifest import Part, SegmentEntry
from appliance.backup.restore import _Restore
from appliance.backup.source import log_files
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import BatchHeader, verify_batch
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import file_name, schema_message_length, segment_bases
from tailrace.format.segments.transaction_index import decode_transaction_index
from tests.kit.batches import SEED
from tests.kit.log_files.compacted_logs import World, batches
from tests.kit.log_files.logs import bench
from tests.kit.matrices import short

STEPS = 6
"""Open, three files beside, the comparison, the bytes."""


class _Pieces:
    """A writer of backups that keeps what it is given, and calls `on_file` before a segment."""

    def __init__(self, on_file: Callable[[], None]) -> None:
        self.pieces: list[bytes] = []
        self._on_file = on_file

    def add_small(self, data: bytes, _previous: Part | None) -> Part:
        self.pieces.append(bytes(data))
        return Part(len(self.pieces) - 1, 0, len(data))

    def add_range(self, fd: int, start: int, length: int) -> Part:
        self._on_file()
        return self.add_small(os.pread(fd, length, start), None)

    def add_file(self, fd: int, _path: str, size: int) -> Part:
        return self.add_range(fd, 0, size)

    def of(self, parts: list[Part]) -> bytes:
        return b"".join(self.pieces[part.number] for part in parts)


class _Steps:
    """The steps of reading a segment and the files beside it; the cleaner works at one of them."""

    def __init__(self, world: World, at: int) -> None:
        self._world = world
        self._left = at

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._world.clean()

    def small_file(self, directory: str, name: str) -> bytes | None:
        self.step()
        return small_file(directory, name)

    def open(self, path: str, flags: int) -> int:
        if path.endswith(".arrows"):
            self.step()
        return os.open(path, flags)

    def lstat(self, path: str) -> os.stat_result:
        self.step()
        return os.lstat(path)


small_file = log_files.small_file


def headers(data: bytes, base: int) -> Iterator[tuple[int, BatchHeader]]:
    view = memoryview(data)
    at = schema_message_length(partial(_piece, view))
    while at < len(data) and (frame := frame_at(view, at, len(data))) and frame[0]:
        yield at, verify_batch(view[at : at + frame[0]], SEED)
        at += frame[0]


def _piece(data: memoryview, length: int, position: int) -> bytes:
    return bytes(data[position : position + length])


def check(entry: SegmentEntry, writer: _Pieces) -> None:
    """The files of an entry are those of its segment."""
    found = list(headers(writer.of(entry.parts), entry.base))
    assert found[0][1].base_offset == entry.base
    if any(header.is_transactional for _, header in found):
        assert entry.transactions is not None, f"segment {entry.base}"
        decode_transaction_index(writer.of([entry.transactions]), entry.base)
    if entry.offset_index is not None:
        index = segment_index.decode(writer.of([entry.offset_index]), entry.base)
        assert [(each.file_position, each.base_offset) for each in index or []] == [
            (position, header.base_offset) for position, header in found
        ]


def written(world: World) -> None:
    batches(world, 120)
    for who in list(world.pending):
        world.end(who, commits=False)
    world.settle()


@pytest.mark.parametrize("at", short(range(1, 2 * STEPS + 1), *range(0, 2 * STEPS, 2)))
@pytest.mark.parametrize("is_at_point", [False, True])
def test_a_segment_that_is_replaced_at_any_step_is_stored_with_its_own_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, at: int, *, is_at_point: bool
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(2))
        written(world)
        directory = f"{b.directory}/t-0"
        metadata = PartitionMetadata.decode(
            pathlib.Path(f"{directory}/partition.json").read_bytes()
        )
        assert metadata is not None
        before = segment_bases(os.listdir(directory))
        steps = _Steps(world, at)
        writer = _Pieces(steps.step)
        monkeypatch.setattr(log_files, "small_file", steps.small_file)
        monkeypatch.setattr(
            log_files,
            "os",
            SimpleNamespace(**{**vars(os), "open": steps.open, "lstat": steps.lstat}),
        )
        given: Any = writer
        try:
            if is_at_point:
                found, _ = log_files.segments_to(
                    directory, metadata, None, None, [], metadata.log_start_offset, given
                )
            else:
                found = log_files.whole_segments(directory, metadata, None, given)
        except NotReadyError:
            found = []  # taken again
        assert steps._left <= 0
        assert len(before) > 4
        for entry in found:
            check(entry, writer)


def test_a_segment_that_is_always_replaced_is_not_ready(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file_name(0)
    path.write_bytes(b"old")

    def replacing(directory: str, name: str) -> bytes | None:
        other = tmp_path / "cleaned"
        other.write_bytes(b"new")
        other.rename(path)
        return small_file(directory, name)

    monkeypatch.setattr(log_files, "small_file", replacing)
    given: Any = None
    metadata: Any = None
    with pytest.raises(NotReadyError, match="replaced faster"):
        log_files._whole(str(tmp_path), 0, 9, metadata, None, given)


def test_a_restored_segment_with_transactions_and_without_an_index_gets_one(
    tmp_path: pathlib.Path,
) -> None:
    """The backup lacks the index. The restore writes an empty one, and the first start makes it
    from the segment before anything is read: no aborted record is shown.
    """
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(2))
        written(world)
        directory = pathlib.Path(b.directory) / "t-0"
        b.kill_flusher()
        expected = {path.name: path.read_bytes() for path in directory.glob("*.txnindex")}
        decoded = {
            name: {
                (each.producer_id, each.producer_epoch, each.marker_offset)
                for each in decode_transaction_index(data, int(name.partition(".")[0]))
            }
            for name, data in expected.items()
        }
        assert sum(map(len, decoded.values())) > 3
        for name in expected:
            (directory / name).unlink()
        for path in directory.glob("checkpoint.*"):
            path.unlink()
        metadata = PartitionMetadata.decode((directory / "partition.json").read_bytes())
        assert metadata is not None
        restore = object.__new__(_Restore)
        restore._path, restore._written_bytes = str(tmp_path), 0
        for base in segment_bases(os.listdir(directory)):
            (directory / file_name(base, ".index")).unlink()
            size = (directory / file_name(base)).stat().st_size
            entry = SegmentEntry(base, size, 1 << 62, True, 0, 0, [], None, None, None)
            restore._write_sidecars(str(directory), entry, metadata)
        assert {path.name for path in directory.glob("*.txnindex")} == set(expected)
        b.is_running = False
        while not b.is_running:
            b.step_flusher()
        for name, entries in decoded.items():
            made = decode_transaction_index(
                (directory / name).read_bytes(), int(name.partition(".")[0])
            )
            got = {(each.producer_id, each.producer_epoch, each.marker_offset) for each in made}
            assert got == entries, name
