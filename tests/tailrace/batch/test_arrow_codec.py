"""Records to batches and back; schemas made canonical; what does not fit refused by name."""

from __future__ import annotations

import datetime as dt

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidSchemaError,
    SchemaMismatchError,
)
from tailrace.core.records import to_timestamp_us
from tailrace.format.schema import DEFAULT_SCHEMA, canonical, conform, schema_of
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import SEED, make_batch, with_wild_buffer

HEADER = st.tuples(st.text(max_size=5), st.binary(max_size=5))
ROW = st.tuples(
    st.integers(-(2**50), 2**50),
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=50),
    st.lists(HEADER, max_size=3),
)


@settings(max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=20), st.sampled_from(["none", "lz4", "zstd"]))
def test_rows_survive_a_round_trip(
    rows: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes]]]], compression: str
) -> None:
    stamps, keys, values, headers = (list(column) for column in zip(*rows, strict=True))
    batch = default_rows(stamps, keys, values, headers)
    data = arrow_batch.encode(
        batch,
        schema_id=1,
        seed=SEED,
        compression=compression,
        first_timestamp_us=0,
        max_timestamp_us=0,
    )
    header, decoded = arrow_batch.decode(memoryview(data), DEFAULT_SCHEMA, SEED)
    records = arrow_batch.to_records("t", 2, 10, decoded, header, typed=False)
    assert [(r.timestamp_us, r.key, r.value, r.headers) for r in records] == rows
    assert [r.offset for r in records] == list(range(10, 10 + len(rows)))
    assert all(r.timestamp == r.timestamp_us // 1000 for r in records)


def test_a_right_checksum_over_wild_offsets_is_refused_by_the_reader_too() -> None:
    # In the broker `tailrace.format.record_batch.batch_validation` refuses it; a reader that meets
    # one in a file does as well, without crashing.
    with pytest.raises((CorruptBatchError, InvalidRecordError)):
        arrow_batch.decode(memoryview(with_wild_buffer(make_batch(50))), DEFAULT_SCHEMA, SEED)


def test_wild_string_offsets_inside_a_buffer_are_refused_by_the_reader() -> None:
    from tests.kit.batches import reseal

    data = make_batch(50)
    # The last int32 offset of the value column lies before its data: "value-0" begins right behind
    # the padding.
    at = bytes(data).index(b"value-0value-1")
    position = data.rindex(
        (len(b"".join(b"value-%d" % n for n in range(50)))).to_bytes(4, "little"), 0, at
    )
    data[position : position + 4] = (2**30).to_bytes(4, "little")
    reseal(data)
    with pytest.raises(CorruptBatchError, match="is inconsistent"):
        arrow_batch.decode(memoryview(data), DEFAULT_SCHEMA, SEED)


def test_parts_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(InvalidRecordError):
        default_rows([1], [b"k"], [3.5], None)  # type: ignore[list-item]


def test_schemas_become_canonical() -> None:
    given_schema = pa.schema(
        [
            pa.field(
                "d", pa.dictionary(pa.int8(), pa.large_utf8()), nullable=False, metadata={"a": "b"}
            ),
            pa.field("t", pa.timestamp("ns", "Europe/Berlin")),
            pa.field("l", pa.large_list(pa.string_view())),
            pa.field("s", pa.struct([pa.field("x", pa.large_binary())])),
        ]
    )
    result = canonical(given_schema)
    assert result == pa.schema(
        [
            ("d", pa.utf8()),
            ("t", pa.timestamp("us", "UTC")),
            ("l", pa.list_(pa.utf8())),
            ("s", pa.struct([("x", pa.binary())])),
        ]
    )
    assert canonical(result) == result


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (pa.schema([]), "has no columns"),
        (pa.schema([("n", pa.null())]), "column 'n'"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "used twice"),
    ],
)
def test_schemas_that_cannot_be_are_refused_with_the_column(
    schema: pa.Schema, sentence: str
) -> None:
    with pytest.raises(InvalidSchemaError, match=sentence):
        canonical(schema)


def test_frames_of_every_kind_have_the_same_schema_and_conform() -> None:
    columns = {"a": [1, 2], "b": ["x", None]}
    frames = [
        pd.DataFrame(columns),
        pl.DataFrame(columns),
        pa.table(columns),
        pa.RecordBatch.from_pydict(columns),
    ]
    schemas = [schema_of(frame) for frame in frames]
    assert all(schema == schemas[0] for schema in schemas)
    table = pa.table({"b": ["y"], "a": pa.array([3], pa.int8())})
    assert conform(table, schemas[0]).to_pydict() == {"a": [3], "b": ["y"]}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"a": [1]}, "missing b"),
        ({"a": [1], "b": ["x"], "c": [1]}, "not in the topic: c"),
        ({"a": ["word"], "b": ["x"]}, "column 'a' is string"),
    ],
)
def test_frames_that_do_not_match_are_refused_by_column(
    columns: dict[str, list[object]], sentence: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=sentence):
        conform(pa.table(columns), pa.schema([("a", pa.int64()), ("b", pa.utf8())]))


def test_timestamps_are_taken_as_kafka_clients_give_them() -> None:
    moment = dt.datetime(2013, 1, 1, 12, tzinfo=dt.UTC)
    assert (
        to_timestamp_us(moment)
        == to_timestamp_us(moment.replace(tzinfo=None))
        == 1_357_041_600_000_000
    )
    assert to_timestamp_us(5) == 5000
    for wrong in ("now", 1.5, True):
        with pytest.raises(TypeError):
            to_timestamp_us(wrong)


def test_records_without_headers_cost_no_bytes_for_them() -> None:
    batch = default_rows([0] * 1000, [None] * 1000, [b"x" * 100] * 1000, None)
    # Timestamp, value, and the offsets of key, value and headers.
    assert len(batch.serialize()) < 1000 * (8 + 100 + 3 * 4) + 2000


@pytest.mark.parametrize(
    "column",
    [pa.nulls(100_000, pa.list_(pa.struct([("a", pa.utf8())]))), pa.array([[1, 2]] * 100_000)],
)
def test_a_piece_of_a_large_nested_column_is_sent_without_the_rest(column: pa.Array) -> None:
    batch = pa.RecordBatch.from_arrays([column], names=["c"])
    assert len(arrow_batch.cut_out(batch, 500, 100).serialize()) < 5000
