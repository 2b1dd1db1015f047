"""Superseded records of segments that are not what their first batch says."""

from __future__ import annotations

import itertools
import pathlib
import random

import pytest

from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.format.segments.segment import file_name, segment_bases
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX
from tests.kit.batches import SEED
from tests.kit.log_files.compacted_logs import World, batches
from tests.kit.log_files.logs import bench
from workers.clean.sources import SourceReader
from workers.clean.superseded import Superseded
from workers.segment.cleaning_job import JobSegment


def segments_of(world: World) -> list[JobSegment]:
    directory, files = f"{world.b.directory}/t-0", world.b.files
    names = files.list(directory)
    bases = segment_bases(names)
    return [
        JobSegment(
            base, end, 1 << 20, is_cleaned=False,
            has_transactions=file_name(base, TRANSACTION_INDEX_SUFFIX) in names,
        )
        for base, end in itertools.pairwise(bases)
    ]  # fmt: skip


@pytest.mark.parametrize("dedupe_bytes", [24 * 40, 1 << 20], ids=["several ranges", "one range"])
def test_plain_batches_of_segments_that_count_as_cleaned_are_looked_up(
    tmp_path: pathlib.Path, dedupe_bytes: int
) -> None:
    """No cleaner writes such a segment. The bits of one range begin behind it."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(3))
        batches(world, 120, keys=50)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        segments = segments_of(world)
        assert len(segments) > 4
        segments[:2] = [each._replace(is_cleaned=True) for each in segments[:2]]
        reader = SourceReader(b.files, f"{b.directory}/t-0", {1: DEFAULT_SCHEMA}, SEED)
        superseded = Superseded(reader, "key", segments, dedupe_bytes)
        for _ in superseded.find():
            pass
        assert (superseded.range_count == 1) == (dedupe_bytes == 1 << 20)
        latest = {
            key: offset
            for offset, (key, _) in sorted(world.records.items())
            if segments[2].base <= offset < segments[-1].end
        }
        for segment in segments:
            for source in reader.read(segment):
                keys = [world.records[offset][0] for offset in source.offsets.tolist()]
                expected = [
                    key is None or latest.get(key, -1) <= offset
                    for key, offset in zip(keys, source.offsets.tolist(), strict=True)
                ]
                assert superseded.kept(source).tolist() == expected
