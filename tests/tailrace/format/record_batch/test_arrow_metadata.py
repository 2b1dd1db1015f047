"""Walking Arrow's flatbuffers without Arrow: the same numbers as pyarrow's, never a crash."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    read_record_batch,
    read_schema,
)
from tailrace.format.schema import DEFAULT_SCHEMA, delay_schema, to_message

TYPES = [
    pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.binary(), pa.utf8(),
    pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"),
    pa.timestamp("us", "UTC"), pa.duration("us"), pa.decimal128(10, 2), pa.decimal256(50, 2),
    pa.binary(7), pa.list_(pa.int32()), pa.list_(pa.utf8(), 3),
    pa.struct([("a", pa.int32()), ("b", pa.list_(pa.binary()))]), pa.map_(pa.utf8(), pa.int64()),
    pa.month_day_nano_interval(),
]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_layout_of_every_type_matches_what_pyarrow_writes(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("before", pa.int64()), pa.field("x", kind)])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3]), pa.nulls(3, kind)], schema=schema)
    layout = read_schema(to_message(schema))
    metadata = read_record_batch(batch.serialize().to_pybytes())
    assert metadata.row_count == 3
    assert len(metadata.nodes) == 2 * len(layout.nodes)
    assert len(metadata.buffers) == 2 * layout.buffer_count
    assert metadata.body_length == len(pa.ipc.read_message(batch.serialize()).body)
    assert [node.name for node in layout.nodes if node.top_level] == ["before", "x"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.utf8()),
        pa.large_utf8(),
        pa.large_binary(),
        pa.large_list(pa.int8()),
        pa.string_view(),
        pa.binary_view(),
    ],
    ids=str,
)
def test_types_that_are_not_canonical_are_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(ArrowMetadataError, match="column 'odd'"):
        read_schema(pa.schema([pa.field("odd", kind)]).serialize().to_pybytes())


def test_the_controllers_default_schema_is_the_clients() -> None:
    assert to_message(DEFAULT_SCHEMA) == DEFAULT_SCHEMA_MESSAGE
    assert to_message(delay_schema(DEFAULT_SCHEMA)) == DEFAULT_DELAY_SCHEMA_MESSAGE


@given(st.binary(max_size=300))
def test_random_bytes_never_crash(data: bytes) -> None:
    for read in (
        lambda: read_schema(b"\xff\xff\xff\xff" + data),
        lambda: read_record_batch(data, 0),
    ):
        try:
            read()
        except ArrowMetadataError:
            continue


@given(st.integers(0, 407), st.integers(0, 255))
def test_bent_schemas_never_crash(index: int, value: int) -> None:
    bent = bytearray(DEFAULT_SCHEMA_MESSAGE)
    bent[index] = value
    try:
        layout = read_schema(bytes(bent))
    except ArrowMetadataError:
        return
    assert layout.nodes
