"""Offsets by time: the first record at or after it, against a search through every record; and what
cannot be read is said not to be exact.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from netfront.fetch.log.file_reader import DiskFileReader
from netfront.fetch.log.isolation import Isolation
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.lookup import decompression as unpacking
from netfront.fetch.lookup.decompression import PIECE_BYTES, UnpackError, unpacker_for
from netfront.fetch.lookup.timestamp_lookup import FoundTime, TimestampLookup
from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.schedule.delays import TICK_BITS, TICK_US
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_SPARSE,
    END_OF_STREAM,
    BatchHeader,
    checksum_seed,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import stamp_appended
from tailrace.format.schema import DEFAULT_SCHEMA, delay_schema, to_message
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from tailrace.format.segments.segment_index import IndexEntry, encode_entries, encode_header
from tests.kit.log_files.descriptors import close_with

TOPIC_ID = bytes(range(16))
SEED = checksum_seed(TOPIC_ID, 0)
SCHEMAS = {
    "default": DEFAULT_SCHEMA,
    "delay log": delay_schema(DEFAULT_SCHEMA),
    "behind nested ones": pa.schema(
        [
            ("where", pa.struct([("x", pa.float64()), ("timestamp", pa.int32())])),
            ("tags", pa.list_(pa.utf8())),
            ("flag", pa.bool_()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("after", pa.int64()),
        ]
    ),
    "of another unit": pa.schema([("timestamp", pa.timestamp("ms", "UTC")), ("value", pa.int64())]),
    "without": pa.schema([("value", pa.int64())]),
}
Times = list[int | None]


class Log:
    """One partition's files, written as the flusher does, and what a search through every record
    finds in them.
    """

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self.route = Assignment("t", TOPIC_ID, 0, 1, 0, 1, 0, 0, 0, 0, to_message(schema), False)
        self._directory = directory / "t-0"
        self._directory.mkdir()
        self.state = PartitionState.empty(TOPIC_ID, 0, SlotState.ONLINE, 1)
        self.rows: list[tuple[int, int]] = []
        """(offset, time) of every record, in order."""
        self.ends = [0]
        """Offsets where batches end: where a watermark can be."""
        self._base = -1
        files = DiskFileReader()
        close_with(files)
        self.search = TimestampLookup(
            LogReader(files, [os.fspath(directory)], cast(Any, [self]), 4)
        )

    def read(self, _slot: int) -> PartitionState:
        """As the partition table does."""
        return self.state

    @property
    def segment_path(self) -> Path:
        return self._directory / file_name(self._base)

    @property
    def index_path(self) -> Path:
        return self._directory / file_name(self._base, INDEX_SUFFIX)

    def roll(self) -> None:
        """Seal the segment and begin the next."""
        if self._base == self.state.log_end_offset:
            return
        if self._base >= 0:
            with open(self.segment_path, "ab") as file:
                file.write(END_OF_STREAM)
        self._base = self.state.log_end_offset
        self.segment_path.write_bytes(to_message(self.schema))
        self.index_path.write_bytes(encode_header(self._base))
        self._largest = -(1 << 62)
        self.state = self.state._replace(
            active_segment_base=self._base, segment_count=self.state.segment_count + 1
        )

    def append(self, times: Times, compression: str = "none", attributes: int = 0) -> None:
        """A batch whose records have these times; none: a control batch."""
        count = len(times)
        known = [time for time in times if time is not None]
        largest = max(known, default=7)
        columns = [
            pa.array(
                [None if time is None else time // 1000 for time in times]
                if f.type.unit == "ms"
                else times,
                pa.int64(),
            ).view(f.type)
            if pa.types.is_timestamp(f.type)
            else pa.nulls(count, f.type)
            for f in self.schema
        ]
        header = BatchHeader(
            attributes=attributes, record_count=count, last_offset_delta=max(0, count - 1),
            first_timestamp_us=largest, max_timestamp_us=largest,
            schema_id=self.route.schema_id,
        )  # fmt: skip
        self.put(
            arrow_batch.encode_as(
                pa.RecordBatch.from_arrays(columns, schema=self.schema), header, SEED, compression
            )
        )
        has_times = (
            self.schema.field("timestamp").type == DEFAULT_SCHEMA.field(0).type
            if "timestamp" in self.schema.names
            else False
        )
        if not has_times or attributes & ATTRIBUTE_LOG_APPEND_TIME:
            times = [largest] * count
        start = self.state.high_watermark - max(1, count)
        self.rows += [
            (start + number, largest if time is None else time) for number, time in enumerate(times)
        ]

    def put(self, batch: bytearray) -> None:
        if self._base < 0:
            self.roll()
        with memoryview(batch) as view:
            header = verify_batch(view, SEED)
            base_offset = self.state.log_end_offset
            stamp_appended(
                view,
                header_position(view),
                header,
                base_offset=base_offset,
                append_time_us=1,
                leader_epoch=0,
                durable_offset=0,
                seed=SEED,
            )
        position = self.segment_path.stat().st_size
        self._largest = max(self._largest, header.max_timestamp_us)
        with open(self.segment_path, "ab") as file:
            file.write(batch)
        with open(self.index_path, "ab") as file:
            file.write(
                encode_entries([IndexEntry(base_offset, position, self._largest, len(batch))])
            )
        following = base_offset + header.last_offset_delta + 1
        self.state = self.state._replace(log_end_offset=following, high_watermark=following)
        self.ends.append(following)

    def found(self, time: int) -> FoundTime | None:
        return result_of(self.search.find(self.route, self.state, time, Isolation.UNCOMMITTED))

    def expected(self, time: int) -> FoundTime | None:
        state = self.state
        matching = (
            row
            for row in self.rows
            if state.log_start_offset <= row[0] < state.high_watermark and row[1] >= time
        )
        first = next(matching, None)
        return None if first is None else FoundTime(*first, True)


def result_of(search: Generator[int, None, FoundTime | None]) -> FoundTime | None:
    while True:
        try:
            next(search)
        except StopIteration as end:
            return cast("FoundTime | None", end.value)


@pytest.fixture(params=SCHEMAS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    return Log(tmp_path, SCHEMAS[request.param])


def random_times(rng: random.Random) -> Times:
    """Few values, so that many are equal; in no order; some null."""
    nulls = rng.choice([0.0, 0.0, 0.1, 1.0])
    count = rng.choice([1, 2, 7, 8, 9, 64, 100])
    return [None if rng.random() < nulls else rng.randrange(60) * 1000 for _ in range(count)]


def fill(log: Log, rng: random.Random, batches: int) -> None:
    for _ in range(batches):
        if rng.random() < 0.15:
            log.roll()
        kind = rng.random()
        if kind < 0.1:
            log.append([], attributes=ATTRIBUTE_CONTROL)
        else:
            log.append(
                random_times(rng),
                rng.choice(["none", "lz4", "zstd"]),
                ATTRIBUTE_LOG_APPEND_TIME if kind > 0.9 else 0,
            )


def test_the_first_record_at_or_after_a_time_is_found_wherever_it_lies(log: Log) -> None:
    rng = random.Random(1)
    fill(log, rng, 40)
    whole = log.state
    for _ in range(12):
        end = rng.choice(log.ends)
        start = rng.randrange(end + 1)
        log.state = whole._replace(log_start_offset=start, high_watermark=end)
        for time in (
            -(1 << 62),
            *(rng.randrange(-2, 62) * 1000 + rng.randrange(-1, 2) for _ in range(25)),
            1 << 62,
        ):
            assert log.found(time) == log.expected(time), (start, end, time)


def test_an_empty_log_has_no_record_at_any_time(log: Log) -> None:
    assert log.found(0) is None
    log.roll()
    assert log.found(0) is None


def test_occurrences_in_a_typed_topic_have_their_own_time_whatever_the_column_says(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path, SCHEMAS["behind nested ones"])
    columns = pa.RecordBatch.from_pylist([{"timestamp": 5}, {"timestamp": 6}], schema=log.schema)
    for tick, first_us in ((7, 7_000), (8, 6_000)):
        header = BatchHeader(
            attributes=ATTRIBUTE_DELAYED, record_count=2, last_offset_delta=1,
            first_timestamp_us=first_us, max_timestamp_us=tick * TICK_US,
            schema_id=log.route.schema_id, min_tick=3 << TICK_BITS | tick,
        )  # fmt: skip
        assert header.has_one_time(is_typed=True) == (tick == 7)
        assert not header.has_one_time(is_typed=False)
        log.put(arrow_batch.encode_as(columns, header, SEED, "none"))
    assert log.found(6_000) is None, "a default topic's column is right"
    log.route = replace(log.route, typed=True)
    assert log.found(6_000) == FoundTime(0, 7_000, True)
    assert log.found(7_001) is None, "delivered, and no occurrences: the column"


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("at", [0, 1, 8 * 1024, 100_001, 149_999])
def test_a_batch_of_many_pieces_is_looked_through_piece_by_piece(
    tmp_path: Path, compression: str, at: int
) -> None:
    """Times that a codec packs badly, or very well, with the record wanted in any piece; nulls
    behind it, and records before the log's start.
    """
    log = Log(tmp_path, DEFAULT_SCHEMA)
    rng = random.Random(at)
    times: Times = [rng.randrange(1 << 40) if at % 2 else 0 for _ in range(150_000)]
    times[at] = 1 << 50
    log.append(list(times), compression)
    times[-1] = None
    log.append(times, compression)
    for start in (0, 100, 100_000):
        log.state = log.state._replace(log_start_offset=start)
        assert log.found(1 << 50) == log.expected(1 << 50)
        steps = list(log.search.find(log.route, log.state, 1 << 50, Isolation.UNCOMMITTED))
        assert start or len(steps) > 8 * at // PIECE_BYTES, "the loop was held by all of it"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_host_without_a_codec_says_which_batch_to_look_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(unpacking, "_library", lambda _name: None)
    log = Log(tmp_path, DEFAULT_SCHEMA)
    log.append([1, 2, 3])
    log.append([4, 9, 5], compression)
    log.append([10])
    assert log.found(2) == FoundTime(1, 2, True)
    assert log.found(5) == FoundTime(3, -1, False)
    assert log.found(10) == FoundTime(6, 10, True)


def damages(log: Log, position: int) -> Iterator[tuple[str, bytes]]:
    data = log.segment_path.read_bytes()
    header = header_position(data, position)
    for name, at in (
        ("prefix", position),
        ("metadata", position + 9),
        ("header", header + 40),
        ("magic", header + 133),
    ):
        yield name, data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
    yield "cut off", data[: position + 100]
    yield "nothing", data[:position]


def test_where_a_batch_is_damaged_its_reader_is_led_to_it(tmp_path: Path) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    log.append([1, 2, 3], "zstd")
    position = log.segment_path.stat().st_size
    log.append([4, 5, 6], "zstd")
    log.append([7, 8, 9])
    for name, data in damages(log, position):
        log.segment_path.write_bytes(data)
        assert log.found(2) == FoundTime(1, 2, True), name
        assert log.found(5) == FoundTime(3, -1, False), name


def test_bits_flipped_anywhere_in_a_segment_never_raise_and_never_lead_outside_it(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    for compression in ("none", "lz4", "zstd"):
        log.append([5, None, 3, 900, 70, 1], compression)
    data = log.segment_path.read_bytes()
    start = len(to_message(DEFAULT_SCHEMA))
    rng = random.Random(3)
    for _ in range(400):
        bent = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            bent[rng.randrange(start, len(bent))] ^= 1 << rng.randrange(8)
        log.segment_path.write_bytes(bent)
        for time in (0, 71, 900):
            found = log.found(time)
            assert found is None or 0 <= found.offset < 18


def test_a_damaged_index_costs_a_walk_and_nothing_else(tmp_path: Path) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    fill(log, random.Random(9), 20)
    log.index_path.write_bytes(b"?" * 100)
    for time in range(0, 60_000, 7_000):
        assert log.found(time) == log.expected(time)


def test_deleted_records_with_times_of_the_future_do_not_hide_what_follows(tmp_path: Path) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    for times in ([1 << 60], [5], [3], [8]):
        log.append(list(times))
    log.state = log.state._replace(log_start_offset=1)
    assert log.found(6) == FoundTime(3, 8, True)
    assert log.found(9) is None


def test_a_segment_that_retention_takes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    log.append([100])
    old = log.segment_path
    log.roll()
    log.append([100])
    search = log.search.find(log.route, log.state, 50, Isolation.UNCOMMITTED)
    next(search)
    old.unlink()
    log.state = log.state._replace(log_start_offset=1)
    assert result_of(search) == FoundTime(1, 100, True)


def test_a_sparse_batch_without_offsets_is_left_to_its_reader(tmp_path: Path) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    log.append([1, 2], attributes=ATTRIBUTE_SPARSE)
    assert log.found(2) == FoundTime(0, -1, False)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_whatever_a_frame_holds_a_codec_returns_or_refuses_it(codec: str) -> None:
    rng = random.Random(5)
    plain = bytes(rng.randrange(4) for _ in range(3_000)) * 100
    packed = bytes(pa.Codec(codec).compress(plain, asbytes=True))
    for _ in range(300):
        bent = bytearray(packed)
        for _ in range(rng.choice([0, 1, 4])):
            bent[rng.randrange(4, len(bent))] ^= 1 << rng.randrange(8)
        unpacker = unpacker_for(bytes(bent[:4]))
        assert unpacker is not None, "this machine has neither libzstd nor liblz4"
        try:
            step = rng.choice([1_000, 1 << 16])
            pieces = [
                piece
                for at in range(0, len(bent), step)
                for piece in unpacker.feed(bytes(bent[at : at + step]))
            ]
            assert bent != packed or b"".join(pieces) == plain
            assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)
        except UnpackError:
            assert bent != packed
        finally:
            unpacker.close()
    with pytest.raises(UnpackError):
        unpacker_for(b"none")


ZSTD_MAGIC, LZ4_MAGIC = bytes.fromhex("28b52ffd"), bytes.fromhex("04224d18")
EMPTY = {
    ZSTD_MAGIC: ZSTD_MAGIC + b"\x20\x00\x01\x00\x00",
    LZ4_MAGIC: LZ4_MAGIC + b"\x60\x40\x82" + bytes(4),
}
"""A frame of nothing, by codec."""
BEHIND = {
    "more of nothing": None,
    "one to skip": bytes.fromhex("502a4d18") + bytes(4),
    # libzstd hands it to its decoder for v0.7 of 2016, which takes the frame's word for 32 MiB.
    "an old version's": bytes.fromhex("27b52ffd") + b"\x00" + bytes([15 << 3]) + bytes(40),
}


@pytest.mark.parametrize("magic", EMPTY, ids=["zstd", "lz4"])
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("step", [1, PIECE_BYTES])
def test_behind_its_one_frame_a_buffer_has_nothing_to_unpack(
    magic: bytes, behind: str, step: int
) -> None:
    """A piece of thousands of frames that unpack to nothing would hold the loop for 0.1 s
    (measured).
    """
    tail = ((BEHIND[behind] or EMPTY[magic]) * 5_000)[:PIECE_BYTES]
    full = bytes(
        pa.Codec("zstd" if magic == ZSTD_MAGIC else "lz4").compress(
            bytes(PIECE_BYTES), asbytes=True
        )
    )  # its last call fills a piece
    for frame, unpacked in ((EMPTY[magic], b""), (full, bytes(PIECE_BYTES))):
        unpacker = unpacker_for(magic)
        assert unpacker is not None
        with closing(unpacker):
            assert (
                b"".join(
                    piece
                    for at in range(0, len(frame), step)
                    for piece in unpacker.feed(frame[at : at + step])
                )
                == unpacked
            )
            with pytest.raises(UnpackError, match="after its frame"):
                list(unpacker.feed(tail))
        unpacker = unpacker_for(magic)
        assert unpacker is not None
        with closing(unpacker), pytest.raises(UnpackError, match="after its frame"):
            list(unpacker.feed(frame + tail))


def time_at(log: Log, offset: int) -> FoundTime | None:
    return result_of(log.search.time_of(log.route, log.state, offset, Isolation.UNCOMMITTED))


def test_the_time_of_a_record_is_read_wherever_it_lies(log: Log) -> None:
    rng = random.Random(11)
    fill(log, rng, 40)
    whole = log.state
    for _ in range(12):
        end = rng.choice(log.ends)
        start = rng.randrange(end + 1)
        log.state = whole._replace(log_start_offset=start, high_watermark=end)
        for offset in (0, end - 1, end, end + 7, *(rng.randrange(end + 1) for _ in range(20))):
            following = next(
                ((o, time) for o, time in log.rows if max(start, offset) <= o < end), None
            )
            assert time_at(log, offset) == (
                None if following is None else FoundTime(*following, True)
            ), (start, end, offset)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_time_of_a_record_far_in_a_batch_is_read_in_pieces(
    tmp_path: Path, compression: str
) -> None:
    log = Log(tmp_path, DEFAULT_SCHEMA)
    rng = random.Random(2)
    log.append([rng.randrange(1 << 40) for _ in range(100_000)] + [None], compression)
    for offset in (0, 8_191, 99_999, 100_000):
        assert time_at(log, offset) == FoundTime(*log.rows[offset], True)
    steps = list(log.search.time_of(log.route, log.state, 99_999, Isolation.UNCOMMITTED))
    assert (len(steps) > 10) == (compression != "none"), (
        "what is not compressed is read at its place"
    )


def test_a_time_that_cannot_be_read_is_said_not_to_be_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_library", lambda _name: None)
    log = Log(tmp_path, DEFAULT_SCHEMA)
    log.append([1, 9, 3], "zstd")
    log.append([1, 2], attributes=ATTRIBUTE_SPARSE)
    position = log.segment_path.stat().st_size
    log.append([4, 5, 6])
    assert time_at(log, 2) == FoundTime(2, 9, False), "the batch's largest"
    assert time_at(log, 3) == FoundTime(3, 2, False)
    for name, data in damages(log, position):
        log.segment_path.write_bytes(data)
        assert time_at(log, 6) in (FoundTime(6, -1, False), FoundTime(6, 6, False)), name
    log.index_path.unlink()
    assert time_at(log, 0) == FoundTime(0, 9, False), "without an index it is walked to"
