"""Recovery: the table row by row; torn tails cut and counted; corruption told from a torn tail;
indexes made again.
"""

from __future__ import annotations

import pathlib
import random

import orjson
import pytest

from tailrace.format.directory.partition_metadata import DamagedRange, PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    CONTROL_DELAY_MARK,
    END_OF_STREAM,
    BatchHeader,
)
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.format.segments.segment import Ending, file_name
from tests.kit.batches import TIME_US, make_batch, stamped
from tests.kit.log_files.logs import assignment, bench
from tests.kit.log_files.recovered_logs import recover
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.log.files.active_segment import PendingBatch
from workers.log.partition_log import PartitionLog
from workers.log.producers.producer_snapshots import (
    decode_producers,
    encode_producers,
    record_producer,
)
from workers.log.producers.producer_state import ProducerTable
from workers.log.recovery.decision import Action, Hints, decide
from workers.segment.checkpoint import CHECKPOINT_FILES, SealedSegment
from workers.segment.files import DiskFiles


@pytest.mark.parametrize(
    ("ending", "elsewhere", "durable", "action"),
    [
        (Ending.SEALED, False, False, Action.BEGIN_NEW_SEGMENT),
        (Ending.SEALED, True, True, Action.BEGIN_NEW_SEGMENT),
        (Ending.CLEAN, False, False, Action.APPEND),
        (Ending.CLEAN, True, False, Action.APPEND),
        (Ending.CLEAN, True, True, Action.APPEND),
        (Ending.CLEAN, False, True, Action.QUARANTINE),
        (Ending.TORN, True, False, Action.CUT),
        (Ending.TORN, True, True, Action.CUT),
        (Ending.TORN, False, False, Action.CUT),
        (Ending.TORN, False, True, Action.QUARANTINE),
    ],
)
def test_the_table(ending: Ending, elsewhere: bool, durable: bool, action: Action) -> None:
    assert decide(ending, elsewhere=elsewhere, durable=durable) is action


def segment(
    tmp_path: pathlib.Path, counts: tuple[int, ...] = (3, 4, 5), *, settle_each: bool = True
) -> pathlib.Path:
    """A live segment with batches of these many records."""
    with bench(str(tmp_path)) as b:
        sequence = 0
        for count in counts:
            b.send(make_batch(count, producer_id=1, sequence=sequence))
            sequence += count
            if settle_each:
                b.settle()
        b.settle()
        b.flusher.close()
    return tmp_path / "t-0" / ("0" * 20 + ".arrows")


class SyncCountingFiles(DiskFiles):
    def __init__(self) -> None:
        self.sync_count = 0

    def sync_data(self, fd: int) -> None:
        self.sync_count += 1
        super().sync_data(fd)


def test_an_intact_live_segment_is_appended_to(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    found = recover(path)
    assert (found.next_offset, found.cut_bytes, found.live_base, found.damage) == (12, 0, 0, [])


def test_a_tail_torn_at_every_byte_of_the_last_batch_is_cut_and_counted(
    tmp_path: pathlib.Path,
) -> None:
    path = segment(tmp_path, settle_each=False)
    whole = path.read_bytes()
    batch = len(make_batch(5))
    for length in range(len(whole) - batch + 1, len(whole), 7):
        path.write_bytes(whole[:length])
        found = recover(path)
        assert (found.next_offset, found.cut_bytes, found.live_base) == (
            7,
            length - (len(whole) - batch),
            0,
        )
        assert path.stat().st_size == len(whole) - batch


def test_zeroes_and_garbage_behind_the_last_batch_are_cut(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    whole = path.read_bytes()
    for junk in (bytes(4096), random.Random(1).randbytes(5000), whole[500:900]):
        path.write_bytes(whole + junk)
        found = recover(path)
        assert (found.next_offset, found.cut_bytes, found.damage) == (12, len(junk), [])
        assert path.read_bytes() == whole


def test_a_damaged_middle_is_corruption_where_a_later_batch_knows_it_was_durable(
    tmp_path: pathlib.Path,
) -> None:
    path = segment(tmp_path)
    whole = path.read_bytes()
    data = bytearray(whole)
    at = whole.index(b"value-0value-1")
    data[at] ^= 1
    path.write_bytes(data)
    found = recover(path, hints=Hints(quarantine=str(tmp_path / "quarantine")))
    first = len(to_message(DEFAULT_SCHEMA))
    end = first + len(make_batch(3))
    assert found.damage == [DamagedRange(0, first, end, 0, 3)]
    assert (found.next_offset, found.cut_bytes, found.live_base, found.valid_end) == (
        12,
        0,
        0,
        len(whole),
    ), "the log goes on"
    assert path.read_bytes() == data, "a corrupt file is kept as it is"
    kept = tmp_path / "quarantine" / f"t-0-{0:020d}-{first}"
    assert kept.with_suffix(".bytes").read_bytes() == data[first:end]
    assert orjson.loads(kept.with_suffix(".json").read_bytes())["last_offset"] == 2


def test_a_last_batch_that_a_checkpoint_knew_is_reported_as_lost_not_cut(
    tmp_path: pathlib.Path,
) -> None:
    path = segment(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    found = recover(path, checkpoint=True)
    assert [(d.start, d.end) for d in found.damage] == [(7, 12)]
    assert (found.next_offset, found.cut_bytes, found.live_base) == (12, 0, -1), (
        "the next batch begins a new segment behind what is lost"
    )


def test_what_the_journal_or_a_ring_holds_is_cut_and_not_called_corruption(
    tmp_path: pathlib.Path,
) -> None:
    path = segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(b"value-0value-1")] ^= 1
    path.write_bytes(data)
    found = recover(path, hints=Hints(elsewhere=frozenset({0})))
    assert (found.next_offset, found.damage) == (0, [])


def test_only_what_follows_the_checkpoint_is_read_and_a_damaged_one_falls_back_to_the_other(
    tmp_path: pathlib.Path,
) -> None:
    path = segment(tmp_path)
    found = recover(path, checkpoint=True)
    assert found.next_offset == 12
    assert found.read_bytes < 2048
    newest = max(
        (path.with_name(name) for name in CHECKPOINT_FILES if path.with_name(name).exists()),
        key=lambda p: orjson.loads(p.read_bytes())["content"]["number"],
    )
    good = newest.read_bytes()
    for index in range(0, len(good), 3):
        bent = bytearray(good)
        bent[index] ^= 4
        newest.write_bytes(bent)
        again = recover(path, checkpoint=True)
        assert (again.next_offset, again.damage, again.cut_bytes) == (12, [], 0)


def test_a_segment_is_synced_unless_its_checkpoint_covers_all_of_it(
    tmp_path: pathlib.Path,
) -> None:
    """With 1,000 partitions these are 1,000 syncs of a start behind a clean stop."""
    path = segment(tmp_path)
    files = SyncCountingFiles()
    assert recover(path, checkpoint=True, files=files).next_offset == 12
    assert files.sync_count == 0
    with path.open("ab") as file:
        file.write(bytes(3))
    recover(path, checkpoint=True, files=files)
    assert files.sync_count >= 1, "a tail is cut, and the cut is synced"
    files.sync_count = 0
    recover(path, files=files)
    assert files.sync_count == 1, "nothing says that its batches were durable"


def test_a_segment_killed_before_its_schema_is_removed(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    path.with_name("0" * 18 + "12.arrows").write_bytes(b"\xff\xff\xff\xff\x10")
    found = recover(path)
    assert (found.next_offset, found.cut_bytes) == (12, 5)
    assert not path.with_name("0" * 18 + "12.arrows").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "wrong", "empty"])
def test_an_index_that_is_not_right_is_made_again(tmp_path: pathlib.Path, damage: str) -> None:
    path = segment(tmp_path)
    index = path.with_suffix(".index")
    good = index.read_bytes()
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes(
            {"short": good[:-5], "wrong": good[:-8] + b"\xff" * 8, "empty": b""}[damage]
        )
    recover(path)
    assert index.read_bytes() == good


def test_a_damaged_producer_snapshot_is_recognised() -> None:
    table = ProducerTable()
    table.record(1, 0, 0, 4, 0, 5, 7)
    data = encode_producers(table)
    again = decode_producers(data)
    assert again is not None
    assert again.to_snapshot() == table.to_snapshot()
    for index in range(len(data)):
        bent = bytearray(data)
        bent[index] ^= 1
        assert decode_producers(bytes(bent)) is None


class CountingFiles(DiskFiles):
    """Files that count the bytes that are read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read_at(self, fd: int, length: int, position: int) -> bytes:
        data = super().read_at(fd, length, position)
        self.read_bytes += len(data)
        return data


def test_recovery_of_50_gb_reads_little_more_than_what_follows_the_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    segment_bytes, segment_count, segment_records = 256 << 20, 200, 1000
    item = assignment()
    log = PartitionLog(DiskFiles(), str(tmp_path), item)
    log.open("first")
    log.next_offset = log.high_watermark = segment_count * segment_records
    log.roll()
    for number in range(
        segment_count
    ):  # sparse, but for the mark at the end: what is sealed is not read
        base = number * segment_records
        with open(tmp_path / "t-0" / file_name(base), "wb") as file:
            file.write(item.schema)
            file.seek(segment_bytes - len(END_OF_STREAM))
            file.write(END_OF_STREAM)
        log.sealed[base] = SealedSegment(base, segment_bytes, segment_records, TIME_US, TIME_US)
    for number in range(3):
        if number == 2:
            log.checkpoint(sync=True)
        offset = log.next_offset
        log.place(
            PendingBatch(offset, offset + 100, TIME_US, TIME_US, stamped(make_batch(100), offset))
        )
        log.write_pending()
        log.sync()
        log.settled()
    files = CountingFiles()
    again = PartitionLog(files, str(tmp_path), item)
    recovered = again.open("second")
    assert (again.next_offset, len(again.sealed), recovered.damage) == (
        segment_count * segment_records + 300,
        segment_count,
        [],
    )
    assert again.size_bytes > 50_000_000_000
    assert files.read_bytes < 100_000, (
        "recovery must not read what was sealed or lies before the checkpoint"
    )


def test_what_a_loss_of_power_takes_of_a_partition_without_a_segment_is_made_again_and_what_was_synced_since_is_there() -> (  # noqa: E501
    None
):
    for seed in range(300):
        rng = random.Random(seed)
        disk = SimDisk()
        first = PartitionLog(SimFiles(disk), "/data", assignment())
        first.open("first")
        first.change(assignment(version=2, retention_ms=1000), replay=False)
        disk = disk.lose_power(rng)

        second = PartitionLog(SimFiles(disk), "/data", assignment(version=2, retention_ms=1000))
        recovered = second.open("second")
        assert (second.next_offset, second.refusal, recovered.damage, second.file.damage) == (
            0,
            "",
            [],
            [],
        )
        second.roll()
        second.place(PendingBatch(0, 100, TIME_US, TIME_US, stamped(make_batch(100), 0)))
        second.write_pending()
        second.sync()
        disk = disk.lose_power(rng)

        third = PartitionLog(SimFiles(disk), "/data", assignment(version=2, retention_ms=1000))
        described = disk.names["/data/t-0/partition.json"]
        assert described is not None
        known = PartitionMetadata.decode(bytes(described.durable))
        assert known is not None
        assert known.topic_id == third.assignment.topic_id
        assert (third.open("third").damage, third.next_offset, third.refusal) == ([], 100, "")


def test_a_control_record_of_another_type_closes_nothing() -> None:
    table = ProducerTable()
    for control_type, expected in ((1, 0), (CONTROL_DELAY_MARK, 77)):
        record_producer(
            table, BatchHeader(attributes=ATTRIBUTE_CONTROL, control_type=control_type, min_tick=77)
        )
        assert table.open_ordinal == expected
