"""Recovery of cleaned segments: sealed ones are taken over. The newest one is never taken for an
ordinary segment, whatever its first and its last bytes are.
"""

from __future__ import annotations

import pathlib

import pytest

from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.record_batch.sparse_batch import cleaned_schema_message
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tests.kit.appliances.cleaned_segments import clean_segment
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import bench
from tests.kit.log_files.recovered_logs import recover

COUNT = 24
KEPT = {3, 4, 9, 20}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """The newest segment of a log, sealed and cleaned: three sparse batches of two each."""
    with bench(str(tmp_path)) as b:
        for number in range(6):
            b.send(make_batch(4, producer_id=1, sequence=4 * number))
        b.settle()
        b.flusher.close()
    found = tmp_path / "t-0" / ("0" * 20 + ".arrows")
    with open(found, "ab") as file:
        file.write(END_OF_STREAM)
    assert clean_segment(found.parent, 0, KEPT.__contains__, united=2) == sorted(KEPT)
    return found


def offsets(path: pathlib.Path) -> list[int]:
    """The ranges of the batches that a scan finds in the segment."""
    known = read_partition_file(str(path.parent))
    assert known is not None
    source = LocalSource(str(path.parent), known, headers_only=False, schema=DEFAULT_SCHEMA)
    return [frame.header.base_offset for frame in source.frames(0, COUNT)]


@pytest.mark.parametrize("with_index", [True, False])
def test_the_newest_segment_is_sealed_and_keeps_its_end(
    path: pathlib.Path, with_index: bool
) -> None:
    if not with_index:
        path.with_suffix(".index").unlink()
    before = path.read_bytes()
    found = recover(path)
    assert (found.next_offset, found.live_base, found.damage) == (COUNT, -1, [])
    assert (found.sealed[0].size, found.sealed[0].batch_count) == (len(before), 3)
    assert path.read_bytes() == before
    assert offsets(path) == [0, 8, 16]


def test_a_cleaned_segment_without_its_mark_gets_it_and_is_not_appended_to(
    path: pathlib.Path,
) -> None:
    before = path.read_bytes()
    for torn in (b"", b"\xff\xff\xff\xff", b"\0" * 300):
        path.write_bytes(before[: -len(END_OF_STREAM)] + torn)
        found = recover(path)
        assert (found.next_offset, found.live_base, found.damage) == (COUNT, -1, [])
        assert path.read_bytes()[: len(before)] == before


def test_a_damaged_schema_message_is_written_again(path: pathlib.Path) -> None:
    before = path.read_bytes()
    length = len(cleaned_schema_message(DEFAULT_SCHEMA))
    for at in (0, 4, 5, 40, length - 1):
        bent = bytearray(before)
        bent[at] ^= 0xFF
        path.write_bytes(bent)
        assert offsets(path) == [0, 8, 16], "a scan does not need it"
        found = recover(path)
        assert (found.next_offset, found.damage) == (COUNT, [])
        assert path.read_bytes() == before, at


def test_a_lost_batch_in_the_middle_is_damage_and_no_gap(path: pathlib.Path) -> None:
    before = path.read_bytes()
    bent = bytearray(before)
    middle = len(before) // 2
    bent[middle] ^= 0xFF
    path.write_bytes(bent)
    found = recover(path)
    assert found.next_offset == COUNT
    assert [(damage.start, damage.end) for damage in found.damage] == [(8, 16)]
