"""Floats that a producer's version of a schema rounds, and the topic's newer version does not."""

from __future__ import annotations

import base64
import math
from typing import Any, cast

import pyarrow as pa
import pytest

from tailrace.batch import frames
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.schema import to_message
from tailrace.producer.batches.batch_split import rerouted, split_in_halves
from tailrace.producer.batches.producer_batch import Completion, ProducerBatch

PRICES = [19.99, 0.1, None, math.inf, 0.5, 1e300]
FIRST = pa.schema([("id", pa.int64()), ("price", pa.float32()), ("rate", pa.float32())])
SECOND = pa.schema(
    [
        pa.field("cost", pa.float64(), metadata={"tailrace.alias": "price"}),
        ("rate", pa.float32()),
        ("id", pa.int64()),
    ]
)
NOBODY = cast("Completion", None)


def encoded(schema: pa.Schema) -> str:
    return base64.b64encode(to_message(schema)).decode()


def topic(*schemas: pa.Schema, **more: Any) -> TopicInfo:
    numbers = range(1, len(schemas) + 1)
    older = {
        str(number): encoded(each) for number, each in zip(numbers, schemas[:-1], strict=False)
    }
    described: dict[str, Any] = {
        "name": "t", "topic_id": "00" * 16, "version": 1, "typed": True, "settings": {},
        "partitions": [{}, {}], "schema_id": numbers[-1], "schema": encoded(schemas[-1]),
        "schema_ids": [*numbers], "older_schemas": older, **more,
    }  # fmt: skip
    return TopicInfo(described)


def rows_of(batch: ProducerBatch) -> list[dict[str, Any]]:
    assert batch.sent_as is not None
    message = pa.ipc.read_message(pa.py_buffer(bytes(batch.encode("none"))))
    rows: list[dict[str, Any]] = pa.ipc.read_record_batch(message, batch.sent_as.schema).to_pylist()
    return rows


def of_rows(info: TopicInfo) -> ProducerBatch:
    batch = ProducerBatch(NOBODY, info, 0, 0, (1,))
    batch.room = 1 << 20
    for number, price in enumerate(PRICES):
        batch.add(None, {"id": number, "price": price, "rate": 0.1}, 1, None, 10)
    batch.close()
    return batch


def of_frame(info: TopicInfo) -> ProducerBatch:
    numbers = range(len(PRICES))
    columns = {"id": numbers, "price": PRICES, "rate": [0.1] * len(PRICES)}
    (piece,) = frames.cut(pa.table(columns), info, None, 0, lambda *_: 0, 1 << 20, 1)
    return ProducerBatch.of_frame(NOBODY, info, piece, 0, (1,))


@pytest.mark.parametrize("make", [of_rows, of_frame])
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_batch_that_is_converted_has_the_given_floats(make: Any, is_sent: bool) -> None:
    batch = make(topic(FIRST))
    if is_sent:
        batch.encode("none")
    batch.convert_for(topic(FIRST, SECOND))
    found = rows_of(batch)
    assert [row["cost"] for row in found] == PRICES
    assert [row["id"] for row in found] == [*range(len(PRICES))]
    assert {row["rate"] for row in found} == {pa.scalar(0.1, pa.float32()).as_py()}
    batch.convert_for(topic(FIRST, SECOND, SECOND.append(pa.field("more", pa.int8()))))
    assert [row["cost"] for row in rows_of(batch)] == PRICES


@pytest.mark.parametrize("make", [of_rows, of_frame])
def test_parts_of_a_batch_have_the_given_floats(make: Any) -> None:
    batch = make(topic(FIRST))
    batch.encode("none")
    halves = split_in_halves(batch)
    assert halves is not None
    for half in halves:
        half.convert_for(topic(FIRST, SECOND))
    assert [row["cost"] for half in halves for row in rows_of(half)] == PRICES
    half = halves[1]
    half.slots = [0, 1, 0]
    slots = [{"slots": "0"}, {"slots": "1"}]
    newest = topic(FIRST, SECOND, partitions=slots)
    newest.owners = bytes([0, 1])
    parts = rerouted(half, newest)
    assert parts is not None
    assert [[row["cost"] for row in rows_of(part)] for part in parts] == [[math.inf, 1e300], [0.5]]


def test_floats_that_nothing_rounds_are_not_kept() -> None:
    table = pa.table({"id": [1], "price": pa.array([0.1], pa.float32()), "rate": [0.5]})
    (piece,) = frames.cut(table, topic(FIRST), None, 0, lambda *_: 0, 1 << 20, 1)
    assert piece.exact is None
    wide = pa.schema([("id", pa.int64()), ("price", pa.float64()), ("rate", pa.float64())])
    assert not topic(wide).narrow_floats


def test_a_frame_of_an_earlier_version_has_its_floats_in_a_wider_column() -> None:
    """The columns that stay narrow are rounded once, where the frame is cut."""
    info = topic(FIRST, SECOND)
    table = pa.table({"id": [1], "price": pa.array([19.99]).dictionary_encode(), "rate": [0.1]})
    found = frames.fitting(table, info, None)
    assert found is not None
    (piece,) = frames.cut(found[0], info, None, 0, lambda *_: 0, 1 << 20, 1)
    batch = ProducerBatch.of_frame(NOBODY, info, piece, 0, (1,))
    assert batch.rebuilt_frame().column("cost").to_pylist() == [19.99]
    third = pa.schema([("cost", pa.float64()), ("rate", pa.float64()), ("id", pa.int64())])
    batch.convert_for(topic(FIRST, SECOND, third))
    assert rows_of(batch) == [{"cost": 19.99, "rate": 0.1, "id": 1}]
