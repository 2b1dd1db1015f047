"""Frames laid into messages from their buffers: pyarrow's bytes, whatever the columns and slices
are; kernel and reference alike; memory that anybody can still see is not used again.
"""

from __future__ import annotations

import datetime
import decimal
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.batch import frames as arrow_frames
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.batch.frame_encoder import default_rows
from tailrace.core.errors import SchemaMismatchError
from tailrace.format.crc32c import crc32c
from tailrace.format.record_batch.batch_header import HEADER_BYTES, BatchHeader
from tailrace.format.record_batch.header_stamps import fill_header, insert_header
from tailrace.format.schema import DEFAULT_SCHEMA, from_message, to_message
from tailrace.kernel import reference_frames
from tailrace.kernel import small_batch as few_rows
from tailrace.kernel.reference_arrow import default_rows as rows_by_arrow

SEED, STAMP_US = 7, 1_700_000_000_000_000
compiled_only = pytest.mark.skipif(
    kernel.compiled is None, reason="no compiled kernel is used here"
)
_TIMES = st.datetimes(
    min_value=datetime.datetime(1970, 1, 1), max_value=datetime.datetime(2100, 1, 1)
)
_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.timestamp("us", "UTC"): _TIMES.map(lambda time: time.replace(tzinfo=datetime.UTC)),
    pa.date32(): st.dates(),
    pa.decimal128(10, 2): st.integers(-9999, 9999).map(
        lambda number: decimal.Decimal(number) / 100
    ),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.binary(): st.binary(max_size=20),
    pa.utf8(): st.text(max_size=10),
    pa.bool_(): st.booleans(),
    pa.list_(pa.int32()): st.lists(st.integers(0, 9), max_size=3),
}
_KINDS = list(_VALUES)


def info_of(schema: pa.Schema, *, typed: bool) -> Any:
    return SimpleNamespace(
        schema=schema,
        schema_message=to_message(schema),
        typed=typed,
        delay_of="",
        settings={},
        slot_map_version=0,
    )


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Batches of any types, with nulls or without, from the middle of longer columns or not."""
    kinds = draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=4))
    count = draw(st.integers(1, 40))
    columns = []
    for kind in kinds:
        cells = _VALUES[kind] if draw(st.booleans()) else st.none() | _VALUES[kind]
        columns.append(pa.array(draw(st.lists(cells, min_size=count, max_size=count)), kind))
    batch = pa.RecordBatch.from_arrays(
        columns, schema=pa.schema([(f"c{number}", kind) for number, kind in enumerate(kinds)])
    )
    if draw(st.booleans()):
        return batch
    start = draw(st.integers(0, count - 1))
    return batch.slice(start, draw(st.integers(1, count - start)))


def is_whole(batch: pa.RecordBatch) -> bool:
    """True if its buffers hold its rows and no others."""
    fresh = pa.RecordBatch.from_arrays(
        [pa.concat_arrays([column]) for column in batch.columns], schema=batch.schema
    )
    return pa.ipc.get_record_batch_size(fresh) == pa.ipc.get_record_batch_size(batch) and bool(
        fresh.serialize().equals(batch.serialize())
    )


def cut(frame: Any, info: Any, target_bytes: int = 1 << 20) -> list[arrow_frames.FrameSlice]:
    return list(
        arrow_frames.cut(frame, info, None, 0, lambda key, count: 0, target_bytes, STAMP_US)
    )


def encoded(rows: Any) -> bytes:
    header = BatchHeader(record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1)
    if isinstance(rows, EncodedRows):
        message, body_crc = rows.message(HEADER_BYTES)
        return bytes(fill_header(message, header, SEED, body_crc))
    return bytes(insert_header(rows.serialize(), header, SEED))


@given(batches())
def test_the_message_of_a_typed_frame_is_the_one_that_pyarrow_makes(batch: pa.RecordBatch) -> None:
    info = info_of(from_message(to_message(batch.schema)), typed=True)
    (piece,) = cut(batch, info)
    found = encoded(piece.rows)
    assert len(found) == piece.byte_count + HEADER_BYTES
    # Of a part of longer columns pyarrow also sends what lies behind it, up to the next multiple of
    # 8 or 64.
    theirs = encoded(arrow_batch.cut_out(batch, 0, batch.num_rows))
    assert found == theirs if is_whole(batch) else len(found) <= len(theirs)
    _, decoded = arrow_batch.decode(memoryview(found), info.schema, SEED)
    assert decoded.equals(batch)
    if isinstance(piece.rows, EncodedRows):
        assert piece.rows.batch().equals(batch)


DEFAULT_COLUMNS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=9),
        st.none() | st.binary(max_size=30),
        st.integers(0, STAMP_US),
    ),
    min_size=1,
    max_size=40,
)


@given(DEFAULT_COLUMNS, st.sets(st.sampled_from(["key", "timestamp"])), st.data())
def test_the_message_of_a_frame_for_the_default_schema_is_the_one_that_pyarrow_makes(
    rows: list[tuple[Any, ...]], names: set[str], data: st.DataObject
) -> None:
    columns = {"value": pa.array([row[1] for row in rows], pa.binary())}
    if "key" in names:
        columns["key"] = pa.array([row[0] for row in rows], pa.binary())
    if "timestamp" in names:
        columns["timestamp"] = pa.array([row[2] for row in rows], DEFAULT_SCHEMA.field(0).type)
    start = data.draw(st.integers(0, len(rows) - 1))
    frame = pa.record_batch(columns).slice(start)
    (piece,) = cut(frame, info_of(DEFAULT_SCHEMA, typed=False))
    stamps = [row[2] if "timestamp" in names else STAMP_US for row in rows[start:]]
    keys = [row[0] if "key" in names else None for row in rows[start:]]
    truth = rows_by_arrow(stamps, keys, [row[1] for row in rows[start:]], None)
    if isinstance(piece.rows, EncodedRows):
        assert encoded(piece.rows) == encoded(truth)
    assert piece.stamps_us == (
        (stamps[0], max(stamps)) if "timestamp" in names else (STAMP_US, STAMP_US)
    )
    if isinstance(piece.rows, EncodedRows):
        assert piece.rows.batch().equals(truth)


@pytest.mark.parametrize("has_nulls", [False, True])
def test_a_long_frame_is_cut_into_pieces_that_hold_its_rows_once_and_are_no_larger_than_asked(
    has_nulls: bool,
) -> None:
    values = [
        None if has_nulls and number % 7 == 3 else b"%d" % number * 9 for number in range(5_000)
    ]
    info = info_of(DEFAULT_SCHEMA, typed=False)
    pieces = cut(pa.table({"value": pa.array(values, pa.binary())}), info, target_bytes=20_000)
    assert len(pieces) > 5
    found: list[Any] = []
    for piece in pieces:
        assert piece.byte_count <= 20_000
        data = encoded(piece.rows)
        assert len(data) == piece.byte_count + HEADER_BYTES
        _, batch = arrow_batch.decode(memoryview(data), DEFAULT_SCHEMA, SEED)
        found += batch.column("value").to_pylist()
        assert set(batch.column("timestamp").cast(pa.int64()).to_pylist()) == {STAMP_US}
    assert found == values


@pytest.mark.parametrize("names", [["value", "value"], ["value", "other"], ["key"]])
def test_a_frame_of_other_columns_takes_the_long_way_and_is_refused_there(names: list[str]) -> None:
    frame = pa.RecordBatch.from_arrays([pa.array([b"x"], pa.binary())] * len(names), names=names)
    with pytest.raises((SchemaMismatchError, pa.ArrowException, KeyError, ValueError)):
        cut(frame, info_of(DEFAULT_SCHEMA, typed=False))


def test_offsets_that_leave_their_data_are_not_followed() -> None:
    offsets = np.array([0, 2, 4], np.int32)
    wild = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"four")]
    )
    frame = pa.record_batch({"value": wild})
    offsets[2] = 4000
    assert default_rows(frame, ["value"], STAMP_US, lambda: None) is None


# ---- kernel and reference ------------------------------------------------------------------------

PIECES = st.lists(st.integers(0, 300) | st.binary(max_size=300), min_size=17, max_size=17)


@compiled_only
@given(
    PIECES,
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**40), min_size=14, max_size=14),
    st.sampled_from([0, 8, HEADER_BYTES]),
)
def test_both_lay_the_same_message_and_its_checksum(
    pieces: list[Any], count: int, nodes: list[int], gap: int
) -> None:
    ours = kernel.lay_message(few_rows.template(), count, nodes, pieces, gap)
    assert ours == reference_frames.lay_message(few_rows.template(), count, nodes, pieces, gap)
    size = len(few_rows.template().metadata)
    assert ours[1] == crc32c(bytes(ours[0][:size]) + bytes(ours[0][size + gap :]))


@compiled_only
def test_large_pieces_are_checked_in_parts_as_the_reference_checks_them_whole() -> None:
    pieces: list[Any] = [b"ab" * 200_001, 100_003, *[0] * 13, memoryview(b"xyz" * 300_000)[5:], 1]
    assert kernel.lay_message(
        few_rows.template(), 1, [1] * 14, pieces, 8
    ) == reference_frames.lay_message(few_rows.template(), 1, [1] * 14, pieces, 8)


@pytest.mark.parametrize("lay", [kernel.lay_message, reference_frames.lay_message])
def test_more_columns_than_the_metadata_has_room_for_are_refused(lay: Any) -> None:
    template = few_rows.template()
    for nodes, pieces in (([1] * 14, [b""] * 900), ([1] * 900, [b""] * 17)):
        with pytest.raises(ValueError, match="no room for"):
            lay(template, 1, nodes, pieces, 0)


# ---- memory that is used again -------------------------------------------------------------------


def message_of(byte: bytes, size: int = 300_000) -> bytearray:
    message, _ = kernel.lay_message(few_rows.template(), 1, [1] * 14, [byte * size, *[0] * 16], 0)
    return message


def test_memory_of_a_message_that_somebody_can_still_see_is_not_given_to_another() -> None:
    kept = message_of(b"a")
    truth = bytes(kept)
    kernel.keep_message(kept)
    others = [message_of(b"b") for _ in range(6)]
    assert kept == truth
    with memoryview(kept) as view:
        del kept
        others += [message_of(b"c") for _ in range(6)]
        assert view == truth
    assert len({id(other) for other in others}) == len(others)
    for number, other in enumerate(others):
        assert other == message_of(b"b" if number < 6 else b"c")


@compiled_only
def test_memory_of_a_message_that_nobody_sees_is_given_to_the_next_and_holds_only_that() -> None:
    for _ in range(9):  # whatever other tests have left there goes
        kernel.keep_message(message_of(b"z"))
    message = message_of(b"a", 300_000)
    place = id(message)
    kernel.keep_message(message)
    kernel.keep_message(message)  # twice is once
    del message
    gc.collect()
    taken = [message_of(b"b", 299_001) for _ in range(4)]
    assert place in map(id, taken)
    truth, _ = reference_frames.lay_message(
        few_rows.template(), 1, [1] * 14, [b"b" * 299_001, *[0] * 16], 0
    )
    assert all(other == truth for other in taken)


@compiled_only
@pytest.mark.parametrize("what", [b"bytes", None, memoryview(b"x" * 300_000), bytearray(10)])
def test_what_is_no_large_message_is_not_kept(what: Any) -> None:
    kernel.keep_message(what)
    assert len({id(message_of(b"a")) for _ in range(2)})
