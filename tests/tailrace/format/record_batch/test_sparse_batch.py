"""Sparse batches: golden bytes, round trips, and everything that contradicts itself refused."""

from __future__ import annotations

import pathlib
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.batch import arrow_codec
from tailrace.core.errors import CorruptBatchError, UnsupportedBatchError
from tailrace.format.record_batch import batch_header as bh
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_validation import validate_batch
from tailrace.format.record_batch.sparse_batch import (
    RANGE_MAX,
    cleaned_schema_message,
    decode_sparse_batch,
    encode_sparse_batch,
    sparse_schema,
    split_offsets,
)
from tailrace.format.record_batch.sparse_layout import (
    is_cleaned_schema,
    offset_column_name,
    sparse_layout,
)
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tests.kit.batches import SEED, TIME_US, reseal, rows
from tests.kit.log_files.schemas import SCHEMAS

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
LAYOUT = read_schema(to_message(DEFAULT_SCHEMA))


def sparse(
    offsets: list[int],
    *,
    base_offset: int = 1000,
    next_offset: int = 1010,
    compression: str = "none",
    frame: pa.RecordBatch | None = None,
    **more: Any,
) -> bytearray:
    """A sparse batch of the default schema, with a row for each offset."""
    return encode_sparse_batch(
        rows(len(offsets)) if frame is None else frame,
        offsets,
        base_offset=base_offset,
        next_offset=next_offset,
        seed=SEED,
        schema_id=1,
        compression=compression,
        max_timestamp_us=TIME_US + 100,
        append_time_us=TIME_US + 200,
        leader_epoch=4,
        **more,
    )


def bent(data: bytearray, **fields: int) -> bytearray:
    """The batch with other fields in its header, and both checksums right."""
    header = bh.read_header(data)
    for name, value in fields.items():
        setattr(header, name, value)
    position = bh.header_position(data)
    data[position : position + bh.HEADER_BYTES] = header.to_bytes()
    return reseal(data)


def test_the_header_of_a_sparse_batch_is_the_golden_one_of_version_3() -> None:
    data = sparse([1001, 1004, 1009])
    position = bh.header_position(data)
    golden = (GOLDEN / "batch_header_v3.bin").read_bytes()
    assert data[position + 4 : position + 8] == golden[4:8]
    assert data[position + 16 : position + bh.HEADER_BYTES] == golden[16:]


def test_the_golden_sparse_batch_is_read() -> None:
    data = (GOLDEN / "sparse_batch_v3.bin").read_bytes()
    header = bh.verify_batch(memoryview(data), SEED)
    assert (header.base_offset, header.next_offset, header.record_count) == (1000, 1010, 3)
    assert (header.producer_id, header.leader_epoch, header.durable_offset) == (-1, 4, 1000)
    found, offsets = decode_sparse_batch(data, header, DEFAULT_SCHEMA)
    assert found.schema == DEFAULT_SCHEMA
    assert offsets.to_pylist() == [1001, 1004, 1009]
    assert found.column(2).to_pylist() == [b"value-0", b"value-1", b"value-2"]


def test_a_cleaned_segment_is_an_arrow_stream_with_one_more_column() -> None:
    stream = (
        cleaned_schema_message(DEFAULT_SCHEMA)
        + bytes(sparse([1000, 1009]))
        + bytes(sparse([], base_offset=1010, next_offset=1020))
        + bytes(sparse([1020, 1021], base_offset=1020, next_offset=1030, compression="zstd"))
        + bh.END_OF_STREAM
    )
    table = pa.ipc.open_stream(stream).read_all()
    assert table.column_names == [*DEFAULT_SCHEMA.names, "offset"]
    assert table.column("offset").to_pylist() == [1000, 1009, 1020, 1021]
    assert not table.schema.field("offset").nullable


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_rows_and_offsets_of_any_schema_come_back(name: str, compression: str) -> None:
    schema = SCHEMAS[name]
    frame = pa.RecordBatch.from_arrays([pa.nulls(5, field.type) for field in schema], schema=schema)
    offsets = np.array([3, 4, 6, 8, 9])
    data = sparse(offsets, base_offset=2, next_offset=20, compression=compression, frame=frame)  # type: ignore[arg-type]
    header = bh.verify_batch(memoryview(data), SEED)
    assert (header.is_sparse, header.last_offset_delta, header.record_count) == (True, 17, 5)
    layout = read_schema(to_message(schema))
    validate_batch(data, header, layout, is_ours=True)
    found, numbers = decode_sparse_batch(data, header, schema)
    assert found.equals(frame)
    assert numbers.to_pylist() == [3, 4, 6, 8, 9]
    assert is_cleaned_schema(cleaned_schema_message(schema), layout)
    assert not is_cleaned_schema(to_message(schema), layout)
    assert read_schema(cleaned_schema_message(schema)) == sparse_layout(layout)


def test_a_batch_without_rows_stands_for_its_range() -> None:
    for compression in ("none", "lz4"):
        data = sparse([], base_offset=7, next_offset=9, compression=compression)
        header = bh.verify_batch(memoryview(data), SEED)
        assert (header.base_offset, header.next_offset, header.record_count) == (7, 9, 0)
        validate_batch(data, header, LAYOUT, is_ours=True)
        found, offsets = decode_sparse_batch(data, header, DEFAULT_SCHEMA)
        assert (found.num_rows, offsets.to_pylist()) == (0, [])


@given(st.data(), st.integers(0, 2**40), st.integers(1, 200))
def test_any_offsets_of_a_range_come_back(draw: st.DataObject, base: int, length: int) -> None:
    chosen = draw.draw(st.lists(st.integers(0, length - 1), unique=True, max_size=length))
    offsets = sorted(base + number for number in chosen)
    data = sparse(offsets, base_offset=base, next_offset=base + length)
    header = bh.verify_batch(memoryview(data), SEED)
    found, numbers = decode_sparse_batch(data, header, DEFAULT_SCHEMA)
    assert numbers.to_pylist() == offsets
    assert found.equals(rows(len(offsets)))


@pytest.mark.parametrize(
    ("offsets", "base", "end"),
    [
        ([5, 5], 0, 10),
        ([6, 5], 0, 10),
        ([4], 5, 10),
        ([10], 5, 10),
        ([], 5, 5),
        ([], -1, 5),
        ([], 0, RANGE_MAX + 1),
        ([None], 0, 5),
    ],
)
def test_offsets_that_do_not_ascend_in_their_range_are_not_encoded(
    offsets: list[int], base: int, end: int
) -> None:
    with pytest.raises(ValueError, match="offsets"):
        sparse(offsets, base_offset=base, next_offset=end)


def test_more_or_fewer_offsets_than_rows_are_not_encoded() -> None:
    with pytest.raises(ValueError, match="2 offsets for 3 rows"):
        sparse([1, 2], base_offset=0, frame=rows(3))


def test_a_batch_above_the_given_size_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="encode fewer rows"):
        sparse([1000], max_bytes=100)


@pytest.mark.parametrize(
    "fields",
    [
        {"producer_id": 7},
        {"attributes": bh.ATTRIBUTE_SPARSE | bh.ATTRIBUTE_TRANSACTIONAL},
        {"attributes": bh.ATTRIBUTE_SPARSE | bh.ATTRIBUTE_CONTROL},
        {"record_count": 11},
        {"attributes": 0},
        {"last_offset_delta": 1},
    ],
)
def test_headers_that_contradict_a_sparse_batch_are_refused(fields: dict[str, int]) -> None:
    data = bent(sparse([1000, 1001, 1009]), **fields)
    with pytest.raises(bh.BatchFormatError):
        bh.verify_batch(memoryview(data), SEED)


def test_version_and_sparse_attribute_must_agree() -> None:
    for version in (1, 2, 4):
        data = sparse([1000])
        struct.pack_into("<H", data, bh.header_position(data) + bh.OFFSET_VERSION, version)
        with pytest.raises(bh.BatchFormatError, match="version"):
            bh.read_header(data)


def test_offsets_outside_of_the_header_are_found_by_the_reader() -> None:
    for fields in ({"base_offset": 1002}, {"base_offset": 900}):
        data = bent(sparse([1000, 1009]), **fields)
        header = bh.verify_batch(memoryview(data), SEED)
        with pytest.raises(bh.BatchFormatError, match="inconsistent"):
            decode_sparse_batch(data, header, DEFAULT_SCHEMA)


def test_descending_offsets_and_another_count_are_found_by_the_reader() -> None:
    header = bh.read_header(sparse([1000, 1009]))
    for offsets in ([1009, 1000], [1000, 1000], [1000, 1001, 1002]):
        frame = rows(len(offsets)).columns
        batch = pa.RecordBatch.from_arrays(
            [*frame, pa.array(offsets)], schema=sparse_schema(DEFAULT_SCHEMA)
        )
        with pytest.raises(bh.BatchFormatError, match="inconsistent"):
            split_offsets(header, batch)


def test_every_flipped_bit_is_detected() -> None:
    data = sparse([1000, 1009])
    for index in range(len(data)):
        other = bytearray(data)
        other[index] ^= 1 << (index % 8)
        with pytest.raises(bh.BatchFormatError):
            bh.verify_batch(memoryview(other), SEED)


def test_a_client_may_not_send_a_sparse_batch() -> None:
    data = sparse([1000, 1009])
    with pytest.raises(bh.BatchFormatError, match="only the appliance"):
        validate_batch(data, bh.verify_batch(memoryview(data), SEED), LAYOUT)


def test_a_batch_without_the_column_is_not_sparse() -> None:
    from tests.kit.batches import make_batch

    data = bent(make_batch(3), attributes=bh.ATTRIBUTE_SPARSE)
    header = bh.verify_batch(memoryview(data), SEED)
    with pytest.raises(ValueError, match="the topic's schema has"):
        validate_batch(data, header, LAYOUT, is_ours=True)


def test_a_topic_with_a_column_offset_gets_another_name() -> None:
    assert offset_column_name(["a"]) == "offset"
    assert offset_column_name(["offset", "a"]) == "@offset"
    assert offset_column_name(["offset", "@offset"]) == "@@offset"
    schema = pa.schema([("offset", pa.utf8())])
    assert sparse_schema(schema).names == ["offset", "@offset"]
    assert is_cleaned_schema(cleaned_schema_message(schema), read_schema(to_message(schema)))


def test_a_time_is_that_of_its_row_also_with_log_append_time() -> None:
    data = sparse([1000], attributes=bh.ATTRIBUTE_LOG_APPEND_TIME)
    header = bh.verify_batch(memoryview(data), SEED)
    assert not header.has_one_time(is_typed=False)
    assert header.has_one_time(is_typed=True)


def test_a_reader_without_offsets_refuses_a_sparse_batch_and_names_it() -> None:
    data = memoryview(sparse([1000, 1009]))
    with pytest.raises(UnsupportedBatchError, match="is sparse"):
        arrow_codec.decode(data, DEFAULT_SCHEMA, SEED)
    _, found, offsets = arrow_codec.decode_with_offsets(data, DEFAULT_SCHEMA, SEED)
    assert found.schema == DEFAULT_SCHEMA
    assert offsets is not None
    assert offsets.to_pylist() == [1000, 1009]


def test_offsets_that_contradict_the_header_are_damage_also_in_a_trusted_batch() -> None:
    data = memoryview(bent(sparse([1000, 1009]), base_offset=1002))
    for trust in (True, False):
        with pytest.raises(CorruptBatchError, match="do not ascend from 1002"):
            arrow_codec.decode_with_offsets(data, DEFAULT_SCHEMA, SEED, trust=trust)
