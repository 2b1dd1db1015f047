"""Records straight out of a fetched batch are those that Arrow decodes it to; what is damaged,
contradicts itself or is rare is left to Arrow.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record
from tailrace.format.record_batch.arrow_metadata import read_record_batch
from tailrace.format.record_batch.batch_header import compute_body_crc, header_position, read_header
from tailrace.format.record_batch.header_stamps import seal_header, stamp_appended
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.kernel.reference_arrow import default_rows

SEED, BASE, EPOCH = 77, 1_000, 5
compiled_only = pytest.mark.skipif(not kernel.IS_COMPILED, reason="the reference has no quick way")
CELL = st.none() | st.binary(max_size=20)
RECORDS = st.lists(st.tuples(st.integers(0, 2**50), CELL, CELL), min_size=1, max_size=40)
Rows = list[tuple[int, bytes | None, bytes | None]]


def batch_of(rows: Rows, headers: list[Any] | None = None, compression: str = "none") -> bytearray:
    """As the worker appends it."""
    stamps = [row[0] for row in rows]
    columns = default_rows(stamps, [row[1] for row in rows], [row[2] for row in rows], headers)
    batch = arrow_batch.encode(
        columns,
        schema_id=1,
        seed=SEED,
        compression=compression,
        first_timestamp_us=stamps[0],
        max_timestamp_us=max(stamps),
    )
    position, header = header_position(batch), read_header(batch)
    stamp_appended(
        memoryview(batch),
        position,
        header,
        base_offset=BASE,
        append_time_us=9,
        leader_epoch=EPOCH,
        durable_offset=0,
        seed=SEED,
    )
    return batch


def resealed(batch: bytearray) -> bytearray:
    """With checksums over what stands there now."""
    position = header_position(batch)
    struct.pack_into("<I", batch, position + 8, compute_body_crc(memoryview(batch), position, 0))
    seal_header(memoryview(batch), position, 0, SEED)
    return batch


def by_arrow(batch: bytearray, position: int | None) -> list[Record]:
    """The records from `position` on. Raises TailraceError."""
    header, rows = arrow_batch.decode(memoryview(bytes(batch)), DEFAULT_SCHEMA, SEED)
    found = arrow_batch.to_records("topic", 3, header.base_offset, rows, header, False)
    return [record for record in found if position is None or record.offset >= position]


def quickly(batch: bytearray, position: int | None) -> list[Record] | None:
    found = arrow_batch.plain_rows(memoryview(bytes(batch)), SEED, "topic", 3, position)
    if found is None:
        return None
    rows, end, epoch = found
    made: list[Record] = []
    assert rows.next_offset == end - len(rows)
    rows.take(made, len(rows))
    assert epoch == EPOCH
    assert rows.next_offset == end
    return made


@compiled_only
@given(RECORDS, st.data())
def test_records_are_those_that_arrow_decodes(rows: Rows, data: st.DataObject) -> None:
    batch = batch_of(rows)
    position = data.draw(st.none() | st.integers(BASE, BASE + len(rows) - 1))
    assert quickly(batch, position) == by_arrow(batch, position)


@compiled_only
@given(RECORDS, st.data())
def test_a_batch_with_any_bit_changed_is_left_to_arrow(rows: Rows, data: st.DataObject) -> None:
    batch = batch_of(rows)
    bit = data.draw(st.integers(0, 8 * len(batch) - 1))
    batch[bit >> 3] ^= 1 << (bit & 7)
    assert quickly(batch, None) is None


@compiled_only
@given(RECORDS, st.data())
def test_what_contradicts_itself_under_good_checksums_is_taken_only_as_arrow_takes_it(
    rows: Rows, data: st.DataObject
) -> None:
    batch = batch_of(rows)
    position = header_position(batch)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, position - 1) | st.integers(position + 136, len(batch) - 1))
        batch[at] = data.draw(st.sampled_from([0, 1, 4, 127, 128, 255]))
    found = quickly(resealed(batch), None)
    if found is not None:
        assert found == by_arrow(batch, None)


@compiled_only
@pytest.mark.parametrize("wild", [(0, 3, 2**30), (-8, 3, 6), (0, 5, 3), (0, -1, 6)])
@pytest.mark.parametrize("buffer", [3, 6, 9])
def test_wild_offsets_are_left_to_arrow_which_refuses_them(
    buffer: int, wild: tuple[int, ...]
) -> None:
    batch = batch_of([(1, b"one", b"val"), (2, b"two", b"ues")])
    places = read_record_batch(batch, 8).buffers
    struct.pack_into("<3i", batch, header_position(batch) + 136 + places[2 * buffer], *wild)
    assert quickly(resealed(batch), None) is None
    with pytest.raises(TailraceError, match="is inconsistent"):
        by_arrow(batch, None)


@compiled_only
@pytest.mark.parametrize(
    "wild", [(34, 3), (34, 127), (20, 1), (16, 127), (16, 128), (17, 4), (17, 255)]
)
def test_a_message_whose_root_arrow_refuses_is_left_to_it(wild: tuple[int, int]) -> None:
    batch = batch_of([(1, b"one", b"val"), (2, b"two", b"ues")])
    at, byte = wild
    assert (batch[16], batch[20], batch[34]) == (12, 6, 4), (
        "length of the root's table of fields, place of the version in it, the version"
    )
    batch[at] = byte
    if wild != (34, 3):  # the version before, whose records are the same
        with pytest.raises(TailraceError):
            by_arrow(resealed(batch), None)
    assert quickly(resealed(batch), None) is None


@compiled_only
def test_rows_keep_their_memory_when_the_view_they_were_made_of_is_released() -> None:
    batch = batch_of([(1, b"one", b"val")])
    memory = bytearray(batch)
    view = memoryview(memory)
    found = arrow_batch.plain_rows(view, SEED, "topic", 3, None)
    assert found is not None
    view.release()
    with pytest.raises(BufferError):
        memory.clear()
    made: list[Record] = []
    found[0].take(made, 1)
    assert made == by_arrow(batch, None)


@compiled_only
def test_rarer_forms_and_positions_outside_are_left_to_arrow() -> None:
    rows: Rows = [(1, b"a", b"b"), (2, None, b"c")]
    batch = batch_of(rows)
    assert quickly(batch, None) is not None
    for position in (0, BASE - 1, BASE + 2, 2**62):
        assert quickly(batch, position) is None
    assert quickly(batch_of(rows, [[("h", b"x")], None]), None) is None
    assert quickly(batch_of(rows, compression="lz4"), None) is None
    assert arrow_batch.plain_rows(memoryview(bytes(batch)), SEED + 1, "topic", 3, None) is None, (
        "of another partition"
    )
    assert quickly(batch + bytes(8), None) is None
    typed = pa.record_batch({"n": pa.array([1, 2], pa.int64())})
    other = arrow_batch.encode(
        typed, schema_id=1, seed=SEED, compression="none", first_timestamp_us=1, max_timestamp_us=1
    )
    assert quickly(other, None) is None


@compiled_only
def test_rows_keep_the_memory_that_they_lie_in() -> None:
    found = arrow_batch.plain_rows(
        memoryview(bytes(batch_of([(7_000, b"key", b"value")] * 500))), SEED, "topic", 3, None
    )
    assert found is not None
    churn = [bytes(100_000) for _ in range(50)]
    made: list[Record] = []
    found[0].take(made, 500)
    assert len(churn) == 50
    assert {(record.key, record.value, record.timestamp) for record in made} == {
        (b"key", b"value", 7)
    }
