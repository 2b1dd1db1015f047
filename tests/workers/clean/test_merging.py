"""Small batches that grow together: what a segment says before and after its merge, for random
batches, transactions and compressions, at kills at every step. Flusher and cleaner are stepped by
hand.
"""

from __future__ import annotations

import errno
import pathlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from shm.crash_points import armed
from shm.memory.layout import ProcessWord, Role
from shm.tables.control import Control
from tailrace.batch import arrow_codec
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchHeader,
    verify_batch,
)
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.format.segments.segment import file_name, schema_message_length, segment_bases
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    decode_transaction_index,
)
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import SEED, TIME_US, TOPIC_ID
from tests.kit.log_files.compacted_logs import (
    CLEANER_POINTS,
    SWAP_POINTS,
    Killed,
    World,
    batches,
    die,
)
from tests.kit.log_files.logs import Bench, assignment, bench, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.matrices import short
from workers.clean.sources import SourceReader, UnreadableError
from workers.flush.cleaning.chores import Chores
from workers.flush.cleaning.segment_heads import SegmentHeads
from workers.flush.cleaning.watched_log import has_segments_to_merge
from workers.flush.flusher_settings import FlusherSettings
from workers.log.retention import merging_rules
from workers.log.retention.merging_rules import has_small_batches
from workers.segment.cleaning_job import JobSegment
from workers.segment.files import read_whole
from workers.segment.segment_swap import (
    CLEANED_INDEX_SUFFIX,
    CLEANED_SUFFIX,
    SWAP_FILE,
    CleanedRun,
)

TYPED = pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())])
TIMED = pa.schema([("timestamp", pa.timestamp("us", "UTC")), ("id", pa.int64())])


@pytest.fixture(autouse=True)
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of some KiB are worth a job."""
    monkeypatch.setattr(merging_rules, "SEGMENT_MIN_BYTES", 2_048)


def merging(schema: pa.Schema | None = None, **settings: Any) -> Any:
    given = {"small_batch_bytes": 16_384, "retention_ms": -1, **settings}
    made = assignment(**given)
    made.settings["segment.bytes"] = 24_576
    if schema is None:
        return made
    return replace(made, schema=to_message(schema), typed=True)


class Seen(NamedTuple):
    """One record as a reader has it."""

    row: Any
    time_us: int
    timestamp_type: int
    leader_epoch: int
    schema_id: int
    is_committed: bool


class Stored(NamedTuple):
    records: dict[int, Seen]
    specials: dict[int, tuple[Any, ...]]
    """Headers of markers and of delivered batches, by offset."""
    batch_count: int
    sizes: list[int]


def stored_headers(b: Bench) -> Iterator[tuple[BatchHeader, bytes, AbortedBatches]]:
    directory, files = f"{b.directory}/t-0", b.files
    bases = segment_bases(files.list(directory))
    following = b.table.read(0).log_start_offset
    for number, base in enumerate(bases):
        end = bases[number + 1] if number + 1 < len(bases) else 1 << 62
        index = f"{directory}/{file_name(base, TRANSACTION_INDEX_SUFFIX)}"
        aborted = AbortedBatches([])
        if files.exists(index):
            aborted = AbortedBatches(decode_transaction_index(read_whole(files, index), base))
        data = memoryview(read_whole(files, f"{directory}/{file_name(base)}"))
        at = schema_message_length(partial(_piece, data))
        while at < len(data) and (frame := frame_at(data, at, len(data))) and frame[0]:
            header = verify_batch(data[at : at + frame[0]], SEED)
            if header.base_offset >= end:
                break
            assert header.base_offset == following, "the ranges touch"
            assert not header.is_transactional or files.exists(index)
            following = header.next_offset
            yield header, bytes(data[at : at + frame[0]]), aborted
            at += frame[0]
    assert following == b.table.read(0).log_end_offset


def _piece(data: memoryview, length: int, position: int) -> bytes:
    return bytes(data[position : position + length])


def stored(b: Bench, schema: pa.Schema | None = None) -> Stored:
    """All that readers and the appliance's own books take from the segments."""
    records: dict[int, Seen] = {}
    specials: dict[int, tuple[Any, ...]] = {}
    count = 0
    for header, data, aborted in stored_headers(b):
        count += 1
        is_aborted = header.is_transactional and aborted.has(
            header.producer_id, header.producer_epoch, header.base_offset
        )
        if header.is_control or header.attributes & ATTRIBUTE_DELAYED or is_aborted:
            specials[header.base_offset] = (
                header.attributes, header.producer_id, header.producer_epoch,
                header.base_sequence, header.control_type, header.delay_position,
                header.min_tick, header.due_us, header.previous_position, header.append_time_us,
            )  # fmt: skip
        if header.is_control:
            continue
        _, rows = arrow_codec.decode(memoryview(data), schema or DEFAULT_SCHEMA, SEED)
        made = arrow_codec.to_records("t", 0, header.base_offset, rows, header, schema is not None)
        for record in made:
            records[record.offset] = Seen(
                (record.key, record.value, record.headers), record.timestamp_us,
                record.timestamp_type, header.leader_epoch, header.schema_id, not is_aborted,
            )  # fmt: skip
    sizes = (
        [b.files.size(b.files.open_for_read(path)) for path in b.segment_paths()]
        if (not isinstance(b.files, SimFiles))
        else []
    )
    return Stored(records, specials, count, sizes)


def check(world: World, before: Stored, *, merged: bool = True, schema: Any = None) -> Stored:
    """Everything is as it was, in fewer batches."""
    after = stored(world.b, schema)
    assert after.records == before.records
    assert after.specials == before.specials
    if merged:
        assert after.batch_count < before.batch_count
    return after


def markers_of(world: World) -> None:
    for who in list(world.pending):
        world.end(who, commits=True)
    world.settle()
    world.b.now_ns += 1


@pytest.mark.parametrize("seed", short([1, 2]))
@pytest.mark.parametrize("compression", ["producer", "none", "lz4", "zstd"])
def test_merged_segments_have_the_records_markers_and_times_of_before(
    tmp_path: pathlib.Path, compression: str, seed: int
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(seed), merging(compression_type=compression))
        for round_number in range(2):
            batches(world, 60)
            world.settle()
            log = b.flusher._logs.all()[0]
            log.begin_epoch(f"run {round_number}")
            world.filler.leader_epoch = log.file.leader_epoch
            batches(world, 60)
            markers_of(world)
            before = stored(b)
            world.clean()
            after = check(world, before)
            versions = b.table.read(0).files_version
            assert versions > 0
            world.clean()
            assert b.table.read(0).files_version == versions, "nothing is merged twice"
            assert stored(b) == after
        b.kill_flusher()
        world.settle()
        world.clean()
        assert b.table.read(0).files_version == 0, "nor after a restart"
        assert stored(b) == after
        assert not b.flusher._logs.all()[0].file.damage
        world.check()


def test_producers_go_on_behind_merged_batches(tmp_path: pathlib.Path) -> None:
    """Sequences are known as before, after everything was started anew."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(3), merging())
        batches(world, 120)
        markers_of(world)
        world.clean()
        known = b.flusher._logs.all()[0].producers.to_snapshot()
        b.kill_flusher()
        world.settle()
        assert b.flusher._logs.all()[0].producers.to_snapshot() == known


@pytest.mark.parametrize("point", SWAP_POINTS + CLEANER_POINTS)
def test_a_kill_at_any_point_of_a_merge_leaves_the_old_segment_or_the_new(
    tmp_path: pathlib.Path, point: str
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(4), merging())
        batches(world, 120)
        markers_of(world)
        before = stored(b)
        with armed(point, die, 1), pytest.raises(Killed):
            world.clean()
        if point.startswith("flusher"):
            b.kill_flusher()
            world.settle()
        else:
            world.cleaner = world.new_cleaner()
        check(world, before, merged=False)
        world.clean()
        check(world, before)
        names = b.files.list(f"{b.directory}/t-0")
        assert not [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]
        assert SWAP_FILE not in names


def test_power_lost_at_any_step_of_a_merge_leaves_every_record() -> None:
    for point in SWAP_POINTS:
        disk = SimDisk()
        with bench("/data", SimFiles(disk)) as b:
            world = World(b, random.Random(5), merging())
            batches(world, 120)
            markers_of(world)
            before = stored(b)
            with armed(point, die, 2), pytest.raises(Killed):
                world.clean()
            after = SimFiles(disk.lose_power(random.Random(6)))
        again = Bench(
            "/data", simulated_regions(), after, FlusherSettings(journal_bytes=1 << 20),
            assignments=[merging()], run="second", lost_memory=True,
        )  # fmt: skip
        while not again.is_running:
            again.step_flusher()
        world.b = again
        check(world, before, merged=False)
        assert not again.flusher._logs.all()[0].file.damage
        again.release()


def test_a_full_disk_in_the_middle_leaves_the_segment_and_the_next_job_merges_it() -> None:
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(7), merging())
        batches(world, 120)
        markers_of(world)
        before = stored(b)

        def fails(operation: str, path: str) -> None:
            if operation == "write" and path.endswith(CLEANED_SUFFIX):
                raise OSError(errno.ENOSPC, "no space", path)

        disk.hook = fails
        world.clean()
        assert b.table.read(0).files_version == 0
        disk.hook = None
        world.clean()
        check(world, before)


def test_a_lease_keeps_a_segment_from_its_merge(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(8), merging())
        batches(world, 120)
        markers_of(world)
        before = stored(b)
        lease = {
            "topic_id": TOPIC_ID.hex(), "partition": 0, "lease": "scan", "offset": 0,
            "ttl_ms": 3_600_000,
        }  # fmt: skip
        b.flusher._log_cleaner.leases.apply(lease, b.now_ns)
        world.clean()
        assert b.table.read(0).files_version == 0
        b.flusher._log_cleaner.leases.apply({**lease, "ttl_ms": 0}, b.now_ns)
        world.clean()
        check(world, before)


def test_a_segment_with_a_damaged_batch_stays_and_the_others_are_merged(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(9), merging())
        batches(world, 200)
        markers_of(world)
        paths = b.segment_paths()
        data = bytearray(pathlib.Path(paths[1]).read_bytes())
        data[9_000] ^= 0xFF
        pathlib.Path(paths[1]).write_bytes(data)
        others = [pathlib.Path(path).stat().st_size for path in paths]
        world.clean()
        assert pathlib.Path(paths[1]).read_bytes() == data
        for number in (0, 2):
            assert pathlib.Path(paths[number]).stat().st_size < others[number]
        assert (
            not Control(b.regions["control"]).process(Role.FLUSHER, 0).load(ProcessWord.CLEANING)
        ), "it is not tried again and again"


def test_the_switch_is_a_setting_that_acts_at_once(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(10), merging(small_batch_bytes=0))
        batches(world, 120)
        markers_of(world)
        before = stored(b)
        world.clean()
        assert b.table.read(0).files_version == 0
        assert b.flusher._log_cleaner.compaction is None, "nothing is paid for it"
        b.flusher._feed.apply_from_ring(replace(merging(), version=2).encode())
        world.clean()
        check(world, before)


def special(world: World, rows: pa.RecordBatch, schema: pa.Schema | None, **fields: int) -> None:
    header = BatchHeader(
        record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1, schema_id=1, **fields
    )
    world.filler.batch(arrow_codec.encode_as(rows, header, SEED, "none"), rows.num_rows)


def some_rows(number: int) -> pa.RecordBatch:
    headers: Any = [[("trace", b"%d" % number)]] if number % 3 else None
    return default_rows([TIME_US + number], [b"k"], [b"v%d" % number], headers)


def test_delivered_batches_keep_their_marks_and_log_append_times_stay(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(11), merging())
        for number in range(160):
            fields = {"first_timestamp_us": TIME_US + number, "max_timestamp_us": TIME_US + number}
            if number % 40 == 7:
                fields.update(
                    attributes=ATTRIBUTE_DELAYED, delay_position=number,
                    min_tick=9, due_us=5, previous_position=3,
                )  # fmt: skip
            elif number > 120:  # pairs have one time
                fields.update(
                    attributes=ATTRIBUTE_LOG_APPEND_TIME, append_time_us=TIME_US + number // 2,
                    first_timestamp_us=TIME_US + number // 2,
                    max_timestamp_us=TIME_US + number // 2,
                )  # fmt: skip
            special(world, some_rows(number), None, **fields)
            world.settle()
        before = stored(b)
        assert len(before.specials) == 4
        world.clean()
        check(world, before)


@pytest.mark.parametrize("schema", [TYPED, TIMED], ids=["times of headers", "a column"])
def test_rows_of_a_typed_topic_keep_their_times(tmp_path: pathlib.Path, schema: pa.Schema) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(12), merging(schema))
        for number in range(120):
            time_us = TIME_US + number // 4
            row: dict[str, Any] = {"id": number, "name": "n", "price": float("nan")}
            if number % 30:
                row["timestamp"] = time_us + 7
            rows = pa.RecordBatch.from_pylist(
                [{name: row.get(name) for name in schema.names}], schema=schema
            )
            special(world, rows, schema, first_timestamp_us=time_us, max_timestamp_us=time_us)
            world.settle()
        before = stored(b, schema)
        world.clean()
        after = stored(b, schema)
        assert repr(after.records) == repr(before.records)  # NaN
        assert after.batch_count < before.batch_count


def test_a_segment_without_its_transaction_index_is_merged_when_the_index_was_made_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its aborted records would count as committed."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1), merging())
        batches(world, 120)
        markers_of(world)
        before = stored(b)
        assert not all(record.is_committed for record in before.records.values())
        b.kill_flusher()
        remove_transaction_indexes(b)
        with monkeypatch.context() as patched:
            patched.setattr(Chores, "run_idle_work", lambda _: 0)  # the flusher is never idle
            world.settle()
            world.clean()
            assert b.table.read(0).files_version == 0
        world.clean()
        assert b.table.read(0).files_version > 0
        check(world, before)


def test_a_transactional_batch_of_a_segment_without_an_index_is_unreadable(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1), merging())
        batches(world, 120)
        markers_of(world)
        log = b.flusher._logs.all()[0]
        first = log.sealed.oldest_first()[0]
        reader = SourceReader(b.files, log.directory, {1: DEFAULT_SCHEMA}, SEED)
        segment = JobSegment(
            first.base, log.following_base(first.base), first.size, is_cleaned=False,
            has_transactions=True,
        )  # fmt: skip
        assert len(list(reader.read(segment))) == first.batch_count
        without = segment._replace(has_transactions=False)
        for read in (reader.read, reader.read_bytes):
            with pytest.raises(UnreadableError, match="the segment has no index of them"):
                list(read(without))


def test_a_merged_segment_that_the_scrubber_has_not_met_is_still_checked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(8), merging())
        batches(world, 120)
        markers_of(world)
        world.settle()
        log = b.flusher._logs.all()[0]
        swap = log.swap

        def swap_unscrubbed(run: CleanedRun) -> bool:
            log.sealed.unscrubbed.append(run.base)
            return swap(run)

        monkeypatch.setattr(log, "swap", swap_unscrubbed)
        monkeypatch.setattr(Chores, "run_idle_work", lambda _: 0)
        world.clean()
        assert log.sealed.files_version > 0
        assert (
            log.sealed.unscrubbed
            == [s.base for s in log.sealed.oldest_first() if s.has_transactions][
                : len(log.sealed.unscrubbed)
            ]
        )
        assert log.sealed.unscrubbed


def test_heads_are_read_once_and_an_unreadable_segment_has_one_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(9), merging())
        batches(world, 200)
        markers_of(world)
        path = pathlib.Path(b.segment_paths()[1])
        data = bytearray(path.read_bytes())
        data[9_000] ^= 0xFF
        path.write_bytes(data)
        world.clean()
        caplog.clear()
        cleaner = b.flusher._log_cleaner
        (log,) = b.flusher._logs.all()
        assert has_segments_to_merge(log), "by what is known without reading"
        monkeypatch.setattr(SegmentHeads, "_read", lambda _, base: pytest.fail(f"read {base}"))
        jobs = cleaner_jobs(b)
        for _ in range(3):
            cleaner.retain(log)
            world.clean()
        assert cleaner_jobs(b) == jobs
        assert "segment_not_merged" not in caplog.text


def test_only_segments_with_small_batches_have_their_heads_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(9), merging(small_batch_bytes=1_000))
        for number in range(40):
            rows = some_rows(number)
            if number >= 25:
                rows = default_rows([TIME_US], [b"k"], [b"v" * 8_000], None)
            special(world, rows, None, first_timestamp_us=TIME_US, max_timestamp_us=TIME_US)
            world.settle()
        log = b.flusher._logs.all()[0]
        segments = log.sealed.oldest_first()
        small = [each.base for each in segments if has_small_batches(each, 1_000)]
        assert 0 < len(small) < len(segments)
        read, lengths = list[int](), list[int]()
        head, read_at = SegmentHeads._read, b.files.read_at

        def counted(heads: SegmentHeads, base: int) -> Any:
            read.append(base)
            with monkeypatch.context() as patched:
                patched.setattr(b.files, "read_at", measured)
                return head(heads, base)

        def measured(fd: int, length: int, position: int) -> bytes:
            lengths.append(length)
            return read_at(fd, length, position)

        monkeypatch.setattr(SegmentHeads, "_read", counted)
        world.clean()
        assert sorted(read) == small
        assert max(lengths) < 4_096, "no more than the metadata of the first batch"


def cleaner_jobs(b: Bench) -> int:
    flusher = Control(b.regions["control"]).process(Role.FLUSHER, 0)
    return flusher.load(ProcessWord.CLEANING_JOBS)


def remove_transaction_indexes(b: Bench) -> None:
    """Remove the indexes of all sealed segments, and what a start knows of them."""
    directory = pathlib.Path(b.directory) / "t-0"
    for path in sorted(directory.glob(f"*{TRANSACTION_INDEX_SUFFIX}"))[:-1]:
        path.unlink()
    for path in directory.glob("checkpoint*"):
        path.unlink()
