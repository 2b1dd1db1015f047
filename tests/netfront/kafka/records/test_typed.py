"""Rows of typed topics as JSON or Arrow, and back."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest

from netfront.kafka.records.errors import KafkaError, KafkaRecordsError
from netfront.kafka.records.incoming import ConvertedBatch, to_batches
from netfront.kafka.records.outgoing import from_batch
from netfront.kafka.records.typed import TypedRows, _stream_of
from tailrace.batch.arrow_codec import decode, encode
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import ATTRIBUTE_LOG_APPEND_TIME
from tailrace.format.record_batch.sparse_batch import encode_sparse_batch
from tailrace.format.schema import canonical, to_message
from tests.netfront.kafka.records.batches import (
    NOW_US,
    SEED,
    DefaultRecordBatch,
    Row,
    kafka_batch,
    read_kafka,
)

UTC = dt.UTC
ALL = canonical(
    pa.schema(
        {
            "id": pa.int64(), "small": pa.uint8(), "ratio": pa.float64(), "half": pa.float32(),
            "ok": pa.bool_(), "name": pa.utf8(), "raw": pa.binary(), "fixed": pa.binary(3),
            "at": pa.timestamp("us", "UTC"), "day": pa.date32(), "hour": pa.time64("us"),
            "lasted": pa.duration("us"), "price": pa.decimal128(12, 2),
            "tags": pa.list_(pa.utf8()), "pair": pa.list_(pa.int32(), 2),
            "place": pa.struct({"city": pa.utf8(), "raw": pa.binary()}),
            "scores": pa.map_(pa.utf8(), pa.timestamp("us", "UTC")),
            "by_id": pa.map_(pa.int64(), pa.utf8()),
        }
    )
)  # fmt: skip
FULL: dict[str, Any] = {
    "id": 2**62, "small": 255, "ratio": 0.1, "half": 0.5, "ok": True, "name": "Zoë \"x\"",
    "raw": b"\x00\xff", "fixed": b"abc",
    "at": dt.datetime(2026, 11, 27, 1, 2, 3, 4, UTC), "day": dt.date(1969, 7, 20),
    "hour": dt.time(23, 59, 1, 5), "lasted": dt.timedelta(microseconds=7),
    "price": decimal.Decimal("-12.50"), "tags": ["a", None, "b"], "pair": [1, 2],
    "place": {"city": "Bern", "raw": b"\x01"},
    "scores": [("x", dt.datetime(2000, 1, 1, tzinfo=UTC))], "by_id": [(5, "five")],
}  # fmt: skip
NAMED = canonical(pa.schema({"id": pa.int64(), "name": pa.utf8()}))


def our_rows(rows: list[dict[str, Any]], schema: pa.Schema, **numbers: int) -> bytes:
    frame = pa.RecordBatch.from_pylist(rows, schema=schema)
    times = {"first_timestamp_us": 5_000, "max_timestamp_us": 9_000, **numbers}
    return bytes(encode(frame, schema_id=0, seed=SEED, compression="none", **times))


def served(batch: bytes, schema: pa.Schema, **settings: Any) -> list[tuple[int, Row]]:
    message = to_message(schema)
    typed = TypedRows(message, **settings)
    return read_kafka(from_batch(batch, seed=SEED, schema=read_schema(message), typed=typed))


def taken(
    values: list[Any], schema: pa.Schema, *, keys: list[bytes | None] | None = None,
    max_message_bytes: int = 1 << 20, requires_key: bool = False, **settings: Any,
) -> list[ConvertedBatch]:  # fmt: skip
    encoded = [
        value if value is None or isinstance(value, bytes) else orjson.dumps(value)
        for value in values
    ]
    records = kafka_batch(
        [(keys[row] if keys else None, value, 7 + row, []) for row, value in enumerate(encoded)],
        producer=(9, 1, 40),
    )
    return to_batches(
        records, seed=SEED, now_us=NOW_US, max_message_bytes=max_message_bytes,
        requires_key=requires_key, typed=TypedRows(to_message(schema), **settings),
    )  # fmt: skip


def rows_in(batches: list[ConvertedBatch], schema: pa.Schema) -> list[dict[str, Any]]:
    return [
        row
        for batch in batches
        for row in decode(memoryview(batch.data), schema, SEED)[1].to_pylist()
    ]


@pytest.mark.parametrize("value_format", ["json", "arrow"])
def test_each_type_comes_back_as_it_was(value_format: str) -> None:
    rows = [FULL, dict.fromkeys(FULL), FULL]
    found = served(our_rows(rows, ALL), ALL, value_format=value_format)
    assert [offset for offset, _ in found] == [0, 1, 2]
    values = [row[1] for _, row in found]
    assert rows_in(taken(values, ALL, value_format=value_format), ALL) == rows


def test_json_of_each_type_is_readable() -> None:
    ((_, (key, value, time_ms, headers)),) = served(our_rows([FULL], ALL), ALL)
    assert (key, time_ms, headers) == (None, 9, [])
    assert value is not None
    assert orjson.loads(value) == {
        "id": 2**62, "small": 255, "ratio": 0.1, "half": 0.5, "ok": True, "name": "Zoë \"x\"",
        "raw": "AP8=", "fixed": "YWJj", "at": "2026-11-27T01:02:03.000004Z", "day": "1969-07-20",
        "hour": "23:59:01.000005", "lasted": 7, "price": "-12.50", "tags": ["a", None, "b"],
        "pair": [1, 2], "place": {"city": "Bern", "raw": "AQ=="},
        "scores": {"x": "2000-01-01T00:00:00.000000Z"}, "by_id": [[5, "five"]],
    }  # fmt: skip


def test_other_spellings_of_json_are_taken() -> None:
    schema = canonical(
        pa.schema(
            {
                "at": pa.timestamp("us"),
                "price": pa.decimal128(9, 2),
                "n": pa.int32(),
                "x": pa.utf8(),
            }
        )
    )
    values: list[Any] = [
        {"at": 1_500, "price": 12.5, "n": 3.0},
        {"schema": {"type": "struct"}, "payload": {"at": "2026-01-01", "price": "1", "x": "y"}},
    ]
    assert rows_in(taken(values, schema), schema) == [
        {
            "at": dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC),
            "price": decimal.Decimal("12.50"),
            "n": 3,
            "x": None,
        },
        {
            "at": dt.datetime(2026, 1, 1, tzinfo=UTC),
            "price": decimal.Decimal("1.00"),
            "n": None,
            "x": "y",
        },
    ]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "JSON of type list"),
        (None, "null value"),
        ({"id": "x"}, "'x' in column 'id', which takes int64"),
        ({"id": 1.5}, "not a whole number"),
        ({"id": 2**63}, "column 'id'"),
        ({"id": True}, "column 'id'"),
        ({"name": 5}, "column 'name'"),
        ({"nmae": "x"}, "'nmae', which is no column"),
    ],
)
def test_a_bad_row_is_refused_by_its_index(bad: Any, sentence: str) -> None:
    with pytest.raises(KafkaRecordsError, match=f"record 1 of the batch .*{sentence}") as refused:
        taken([{"id": 1}, bad, {"id": 2}], NAMED)
    assert (refused.value.code, refused.value.record_index) == (KafkaError.INVALID_RECORD, 1)


@pytest.mark.parametrize("bad", [b"no stream", b"", None])
def test_a_bad_arrow_stream_is_refused_by_its_index(bad: bytes | None) -> None:
    with pytest.raises(KafkaRecordsError, match="record 0 of the batch") as refused:
        taken([bad], NAMED, value_format="arrow")
    assert refused.value.code == KafkaError.INVALID_RECORD


def test_an_arrow_stream_of_several_rows_is_refused() -> None:
    sink = pa.BufferOutputStream()
    rows = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}], schema=NAMED)
    with pa.ipc.new_stream(sink, NAMED) as writer:
        writer.write_batch(rows)
    with pytest.raises(KafkaRecordsError, match="a record is one row"):
        taken([sink.getvalue().to_pybytes()], NAMED, value_format="arrow")


def test_key_column_is_the_key_of_a_record() -> None:
    rows: list[dict[str, Any]] = [{"id": 5, "name": "a"}, {"id": None, "name": None}]
    assert [row[0] for _, row in served(our_rows(rows, NAMED), NAMED, key_column="id")] == [
        b"5",
        None,
    ]
    assert [row[0] for _, row in served(our_rows(rows, NAMED), NAMED, key_column="name")] == [
        b"a",
        None,
    ]


def test_a_row_without_its_key_takes_that_of_the_record() -> None:
    values = [{"id": 1, "name": "a"}, {"id": 2}, {"id": 3, "name": "c"}]
    made = taken(values, NAMED, keys=[b"a", b"b", None], key_column="name", requires_key=True)
    assert [row["name"] for row in rows_in(made, NAMED)] == ["a", "b", "c"]
    made = taken([{"name": "x"}], NAMED, keys=[b"77"], key_column="id")
    assert rows_in(made, NAMED) == [{"id": 77, "name": "x"}]


@pytest.mark.parametrize(
    ("value", "key", "sentence"),
    [
        ({"id": 1}, b"2", "send them equal"),
        ({}, b"two", "not a value of column 'id'"),
        ({}, None, "no value in column 'id'"),
    ],
)
def test_a_key_that_is_none_of_the_row_is_refused(
    value: dict[str, Any], key: bytes | None, sentence: str
) -> None:
    with pytest.raises(KafkaRecordsError, match=sentence) as refused:
        taken([value], NAMED, keys=[key], key_column="id", requires_key=True)
    assert refused.value.code == KafkaError.INVALID_RECORD


def test_rows_are_split_with_consecutive_sequences() -> None:
    values = [{"id": row, "name": "x" * 100} for row in range(500)]
    made = taken(values, NAMED, max_message_bytes=8192)
    assert len(made) == 8
    assert [batch.base_sequence for batch in made] == [40 + batch.first_record for batch in made]
    assert rows_in(made, NAMED) == values
    with pytest.raises(KafkaRecordsError, match="is too large") as refused:
        taken([{"id": 1}, {"name": "x" * 9000}], NAMED, max_message_bytes=8192)
    assert (refused.value.code, refused.value.record_index) == (KafkaError.MESSAGE_TOO_LARGE, 1)


def test_the_column_timestamp_is_the_time_of_a_record() -> None:
    schema = canonical(pa.schema({"timestamp": pa.timestamp("us", "UTC"), "n": pa.int64()}))
    made = taken([{"n": 1}, {"n": 2, "timestamp": 1000}], schema)
    assert [row["timestamp"].timestamp() for row in rows_in(made, schema)] == [0.007, 1.0]
    assert [row[2] for _, row in served(bytes(made[0].data), schema)] == [7, 1000]


OLDER = canonical(pa.schema([("key", pa.utf8()), ("carrier", pa.utf8()), ("delay", pa.int32())]))
NEWER = canonical(
    pa.schema(
        [
            pa.field("key", pa.utf8(), metadata={"tailrace.default": '"none"'}),
            pa.field("airline", pa.utf8(), metadata={"tailrace.alias": "carrier"}),
            pa.field("delay", pa.int64(), metadata={"tailrace.default": "-1"}),
            pa.field("gate", pa.utf8(), metadata={"tailrace.default": '"?"'}),
        ]
    )
)
VERSIONS = [(3, to_message(OLDER)), (5, to_message(NEWER))]


def test_rows_of_an_earlier_version_become_rows_of_the_newest_and_left_out_columns_defaults() -> (
    None
):
    """Kafka's clients go on over an altered schema, as our own do."""
    values = [
        {"key": "a", "carrier": "AA", "delay": 5}, {"carrier": "AB"}, {"airline": "AC"},
        {"airline": "AD", "gate": None, "delay": None}, {},
    ]  # fmt: skip
    keys = [None, b"b", b"c", b"d", None]
    made = taken(values, NEWER, keys=keys, key_column="key", versions=VERSIONS)
    assert rows_in(made, NEWER) == [
        {"key": "a", "airline": "AA", "delay": 5, "gate": "?"},
        {"key": "b", "airline": "AB", "delay": -1, "gate": "?"},
        {"key": "c", "airline": "AC", "delay": -1, "gate": "?"},
        {"key": "d", "airline": "AD", "delay": None, "gate": None},
        {"key": "none", "airline": None, "delay": -1, "gate": "?"},
    ]
    with pytest.raises(KafkaRecordsError, match="'nosuch', which is no column"):
        taken([{"nosuch": 1}], NEWER, versions=VERSIONS)


def test_an_arrow_stream_of_an_earlier_version_becomes_a_row_of_the_newest() -> None:
    older = [{"key": "a", "carrier": "AA", "delay": 5}, {"key": "b", "carrier": None, "delay": 6}]
    batches = taken(older, OLDER)
    rows = decode(memoryview(batches[0].data), OLDER, SEED)[1]
    streams = [_stream_of(rows.slice(row, 1)) for row in range(2)]
    made = taken(streams, NEWER, value_format="arrow", key_column="key", versions=VERSIONS)
    assert rows_in(made, NEWER) == [
        {"key": "a", "airline": "AA", "delay": 5, "gate": "?"},
        {"key": "b", "airline": None, "delay": 6, "gate": "?"},
    ]


def test_sparse_rows_keep_their_offsets() -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}], schema=NAMED)
    for attributes, time_ms in ((0, 9), (ATTRIBUTE_LOG_APPEND_TIME, NOW_US // 1000)):
        batch = encode_sparse_batch(
            rows, [11, 15], base_offset=10, next_offset=20, seed=SEED, schema_id=0,
            compression="lz4", max_timestamp_us=9_000, append_time_us=NOW_US, leader_epoch=2,
            attributes=attributes,
        )  # fmt: skip
        found = served(bytes(batch), NAMED)
        assert [(offset, row[2]) for offset, row in found] == [(11, time_ms), (15, time_ms)]


def test_a_float_that_json_lacks_is_null() -> None:
    schema = canonical(pa.schema({"x": pa.float64()}))
    found = served(our_rows([{"x": float("nan")}, {"x": float("inf")}], schema), schema)
    assert [row[1] for _, row in found] == [b'{"x":null}'] * 2
    message = to_message(schema)
    batch = our_rows([{"x": 1.0}], schema)
    made = from_batch(
        batch, seed=SEED, schema=read_schema(message), typed=TypedRows(message), compression="lz4"
    )
    assert DefaultRecordBatch(bytes(made)).compression_type == 3
