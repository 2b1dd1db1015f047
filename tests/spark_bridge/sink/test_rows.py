"""Options and rows of the Spark sink: pure, without a Spark session."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.sink import rows as sink_rows
from spark_bridge.sink.options import parse_sink_options
from tailrace.client.records.partitioners import partition_for_key
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRecordError, InvalidSettingError, SchemaMismatchError
from tailrace.core.hash_slots import STAYS, owners_after, ranges_of, slot_of
from tailrace.format.schema import DEFAULT_SCHEMA, to_message

KEYS = st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1, max_size=60)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def topic(
    partitions: int = 4, schema: pa.Schema | None = None, hash_slots: bool = False
) -> TopicInfo:
    """A topic that no appliance has."""
    described: dict[str, Any] = {
        "name": "t", "topic_id": "00" * 16, "version": 1, "typed": schema is not None,
        "schema_id": 1, "settings": {}, "partitions": [{}] * partitions,
        "schema": base64.b64encode(to_message(DEFAULT_SCHEMA if schema is None else schema)),
    }  # fmt: skip
    if hash_slots:
        ranges = ranges_of(owners_after((partitions,)))
        described |= {
            "slot_map_version": 1,
            "partitions": [{"slots": ranges[p]} for p in range(partitions)],
        }
    return TopicInfo(described)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"topc": "t"}, "did you mean topic"),
    ({"kafka.acks": "all"}, r"unknown option 'kafka\.acks'"), ({"topic": " "}, "topic is empty"),
     ({"txnAppId": "a"}, "belong together"),
     ({"txnAppId": "a", "txnVersion": "x"}, "txnVersion is 'x'"),
     ({"publishTimeoutMs": "0"}, "publishTimeoutMs"),
     ({"transactionTimeoutMs": "1h"}, "transactionTimeoutMs is '1h'"),
     ({"bootstrap": "tcp://a:1", "kafka.bootstrap.servers": "tcp://b:1"}, "name two appliances")],
)  # fmt: skip
def test_wrong_options_of_a_write_name_the_option(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        parse_sink_options(options)


def test_options_are_taken_in_any_case_and_under_kafkas_names() -> None:
    options = parse_sink_options(
        {"Kafka.Bootstrap.Servers": "tcp://a:1", "PATH": "orders", "checkpointLocation": "/tmp/c"}
    )
    assert (options.bootstrap, options.topic) == ("tcp://a:1", "orders")


# ---- keys ----------------------------------------------------------------------------------------


@given(KEYS, st.integers(0, 5), st.integers(1, 300))
def test_keys_go_where_a_producer_sends_them(
    keys: list[bytes | None], start: int, partitions: int
) -> None:
    column = pa.array(keys, pa.binary()).slice(min(start, len(keys) - 1))
    requested = [
        sink_rows.NO_KEY if key is None else partition_for_key(key, partitions)
        for key in column.to_pylist()
    ]
    assert sink_rows.key_routes(column, topic(partitions)).partitions.tolist() == requested
    assert sink_rows.key_routes(column, topic(partitions)).slots is None


@given(KEYS)
def test_keys_of_hash_slots_go_to_the_owner_of_their_slot(keys: list[bytes | None]) -> None:
    owners = owners_after((5,))
    requested = [sink_rows.NO_KEY if key is None else owners[slot_of(key)] for key in keys]
    routes = sink_rows.key_routes(pa.array(keys, pa.binary()), topic(5, hash_slots=True))
    assert routes.partitions.tolist() == requested
    assert routes.slots is not None
    assert routes.slots.tolist() == [STAYS if key is None else slot_of(key) for key in keys]


def test_rows_of_a_partition_keep_their_order() -> None:
    batch = pa.record_batch({"n": list(range(100))})
    pieces = {
        number: sink_rows.joined([part]).batch()
        for number, part in sink_rows.split(batch, sink_rows.Routes(np.arange(100) % 7))
    }
    assert {number: piece.column("n").to_pylist() for number, piece in pieces.items()} == {
        p: list(range(p, 100, 7)) for p in range(7)
    }


@given(st.lists(st.tuples(KEYS, st.integers(1, 4), st.integers(0, 60)), min_size=1, max_size=4))
def test_a_piece_has_the_rows_of_its_parts_wherever_they_are_cut(
    given_parts: list[tuple[list[bytes | None], int, int]],
) -> None:
    parts: list[sink_rows.Part] = []
    requested: list[Any] = []
    for keys, partitions, at in given_parts:
        batch = pa.record_batch({"key": pa.array(keys, pa.binary()), "n": range(len(keys))})
        numbers = np.arange(len(keys)) * 7 % partitions
        requested += [
            row for row, number in zip(batch.to_pylist(), numbers, strict=True) if number == 0
        ]
        part = dict(sink_rows.split(batch, sink_rows.Routes(numbers, np.arange(len(keys)))))[0]
        parts += [piece for piece in part.cut(min(at, part.row_count)) if piece.row_count]
    assert sink_rows.joined(parts).batch().to_pylist() == requested
    slots = sink_rows.slots_of(parts)
    assert slots is not None
    assert slots.tolist() == [row["n"] for row in requested]


def test_a_batch_of_one_partition_is_not_copied() -> None:
    batch = pa.record_batch({"value": [b"a", b"b"]})
    routes = sink_rows.Routes(np.array([3, 3]))
    parts = [part for _, part in sink_rows.split(batch, routes)]
    assert sink_rows.joined(parts).batch() is batch


# ---- columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "has_topic", "sentence"),
    [({"value": pa.string()}, False, "topic option required when no 'topic' attribute is present"),
    ({"key": pa.binary()}, True, "'value' not found"),
     ({"value": pa.int64()}, True, "value attribute unsupported type int64"),
     ({"value": pa.string(), "key": pa.int32()}, True, "key attribute"),
     ({"value": pa.string(), "topic": pa.int32()}, False, "topic attribute"),
     ({"value": pa.string(), "partition": pa.int64()}, True, "partition attr"),
     ({"value": pa.string(), "headers": pa.list_(pa.string())}, True, "headers attribute")],
)  # fmt: skip
def test_columns_that_kafkas_sink_refuses_are_refused_by_name(
    columns: dict[str, pa.DataType], has_topic: bool, sentence: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=sentence):
        sink_rows.check_columns(pa.schema(columns.items()), topic() if has_topic else None, None)


def test_columns_of_kafkas_sink_are_taken() -> None:
    columns = pa.schema(
        [
            ("key", pa.string()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("headers", HEADERS),
            ("x", pa.int8()),
        ]
    )
    sink_rows.check_columns(columns, None, None)
    sink_rows.check_columns(columns, topic(), None)


@pytest.mark.parametrize(
    ("columns", "key_column", "sentence"),
    [({"n": pa.int64()}, None, "missing word"),
    ({"n": pa.int64(), "word": pa.string(), "more": pa.int8()}, None, "not in the topic: more"),
     ({"n": pa.list_(pa.int8()), "word": pa.string()}, None, "column 'n'"),
     ({"n": pa.int64(), "word": pa.string()}, "wrd", "keyColumn is 'wrd'")],
)  # fmt: skip
def test_what_does_not_fit_a_typed_topic_is_named(
    columns: dict[str, pa.DataType], key_column: str | None, sentence: str
) -> None:
    typed = topic(schema=pa.schema([("n", pa.int64()), ("word", pa.utf8())]))
    with pytest.raises(SchemaMismatchError, match=sentence):
        sink_rows.check_columns(pa.schema(columns.items()), typed, key_column)


def test_a_partition_or_a_topic_that_is_not_there_is_refused() -> None:
    batch = pa.record_batch({"value": [b"a", b"b"], "partition": pa.array([1, 4], pa.int32())})
    with pytest.raises(
        InvalidRecordError,
        match=r"has partition 4 .*, which has 0 to 3; without the column `partition` the key",
    ):
        sink_rows.routed_parts(sink_rows.default_rows(batch), batch, topic(4), None)
    with pytest.raises(InvalidRecordError, match="null topic present in the data"):
        sink_rows.by_topic(
            pa.record_batch({"value": [b"a"], "topic": pa.array([None], pa.string())})
        )


def test_a_row_without_a_partition_of_its_own_goes_by_its_key() -> None:
    batch = pa.record_batch(
        {
            "key": [b"k", b"k", None],
            "value": [b"a"] * 3,
            "partition": pa.array([3, None, None], pa.int32()),
        }
    )
    for hash_slots in (False, True):
        info = topic(4, hash_slots=hash_slots)
        parts = sink_rows.routed_parts(sink_rows.default_rows(batch), batch, info, None)
        owner = owners_after((4,))[slot_of(b"k")] if hash_slots else partition_for_key(b"k", 4)
        assert {number: rows_of(part) for number, part in parts} == {
            3: [0, *([1] if owner == 3 else [])],
            **({owner: [1]} if owner != 3 else {}),
            sink_rows.NO_KEY: [2],
        }
        slots = [sink_rows.slots_of([part]) for _, part in parts]
        if hash_slots:
            assert sorted(slot for part in slots if part is not None for slot in part.tolist()) == (
                sorted([STAYS, slot_of(b"k"), STAYS])
            )
        else:
            assert slots == [None] * len(parts)


@pytest.mark.parametrize("hash_slots", [False, True])
@given(KEYS, st.integers(1, 5))
def test_parts_have_each_row_once_at_the_partition_of_its_key(
    hash_slots: bool, keys: list[bytes | None], partitions: int
) -> None:
    batch = pa.record_batch({"key": pa.array(keys, pa.binary()), "value": [b"v"] * len(keys)})
    info = topic(partitions, hash_slots=hash_slots)
    found = {
        row: number
        for number, part in sink_rows.routed_parts(batch, batch, info, None)
        for row in rows_of(part)
    }
    owners = owners_after((partitions,))
    assert found == {
        row: sink_rows.NO_KEY
        if key is None
        else owners[slot_of(key)]
        if hash_slots
        else partition_for_key(key, partitions)
        for row, key in enumerate(keys)
    }


def rows_of(part: sink_rows.Part) -> list[int]:
    return list(range(part.batch.num_rows)) if part.rows is None else part.rows.tolist()


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}])
def test_a_header_without_a_key_is_refused_as_a_producer_refuses_it(
    header: dict[str, Any] | None,
) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

    def rows_with(*headers: Any) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.array([b"v"] * len(headers)), pa.array(headers, kind)], ["value", "headers"]
        )

    fine = sink_rows.default_rows(
        rows_with([{"key": "", "value": None}, {"key": "", "value": b"2"}], None, [])
    )
    assert fine.column("headers").to_pylist() == [
        [{"key": "", "value": None}, {"key": "", "value": b"2"}],
        None,
        [],
    ]
    with pytest.raises(InvalidRecordError, match="a header without a key in the column headers"):
        sink_rows.default_rows(rows_with([], [header]))
