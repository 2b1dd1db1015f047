"""Spark reads a topic whose schema is altered: batches with the newest columns, streams with
those of their start.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, IntegerType, LongType, StringType, StructType

from spark_bridge.sink import rows as sink_rows
from spark_bridge.stream.options import parse_stream_options
from spark_bridge.stream.reader import TopicStreamReader
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidSettingError, SchemaMismatchError, UnsupportedBatchError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.lakes.spark_reads import Read, running

pytestmark = pytest.mark.spark
FIRST = pa.schema([("id", pa.int32()), ("name", pa.utf8())])
SECOND = pa.schema(
    [
        ("id", pa.int64()),
        pa.field("title", pa.utf8(), metadata={"tailrace.alias": "name"}),
        ("price", pa.float64()),
    ]
)
COLUMNS = StructType().add("id", IntegerType()).add("name", StringType())
FIRST_ROW, NEW_ROW = {"id": 1, "name": "a"}, {"id": 2, "title": "b", "price": 2.5}


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    while running:
        running.pop().stop()


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> Iterator[str]:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, schema=FIRST))
        producer.send(topic, FIRST_ROW).result(60)
        yield topic
        admin.delete_topics(topic)


def alter(appliance: EmbeddedAppliance, topic: str, *rows: dict[str, Any]) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.alter_topics(schema={topic: SECOND})
        for row in rows:
            producer.send(topic, row).result(60)


class Stream:
    """A stream's reader, as Spark uses it."""

    def __init__(self, appliance: EmbeddedAppliance, topic: str, **options: str) -> None:
        given = {"bootstrap": appliance.address, "subscribe": topic, **options}
        self.reader = TopicStreamReader(
            parse_stream_options({"startingOffsets": "earliest", **given}), COLUMNS
        )
        running.append(self.reader)
        self.at = self.reader.initialOffset()

    def rows(self) -> list[dict[str, Any]]:
        until = self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
        tasks = pickle.loads(pickle.dumps(self.reader.partitions(self.at, until)))
        self.at = until
        return [row for task in tasks for b in self.reader.read(task) for row in b.to_pylist()]


@pytest.mark.parametrize("from_files", ["true", "false"])
def test_a_batch_read_has_the_columns_of_its_planning(
    appliance: EmbeddedAppliance, made: str, from_files: str
) -> None:
    alter(appliance, made, NEW_ROW)
    read = Read(appliance.address, subscribe=made, fromFiles=from_files)
    assert read.schema == StructType().add("id", LongType()).add("title", StringType()).add(
        "price", DoubleType()
    )
    assert [row for batch in read.batches() for row in batch.to_pylist()] == [
        {"id": 1, "title": "a", "price": None},
        NEW_ROW,
    ]


def test_a_stream_goes_on_with_the_columns_of_its_start(
    appliance: EmbeddedAppliance, made: str
) -> None:
    stream = Stream(appliance, made)
    assert stream.rows() == [FIRST_ROW]
    alter(appliance, made, NEW_ROW)
    assert stream.rows() == [{"id": 2, "name": "b"}]
    with Producer(appliance.address) as producer:
        producer.send(made, {**NEW_ROW, "id": 1 << 40}).result(60)
    with pytest.raises(UnsupportedBatchError, match="column 'id' has a value of type int64"):
        stream.rows()


def test_a_stream_stops_at_a_change_and_says_what_to_do(
    appliance: EmbeddedAppliance, made: str
) -> None:
    stream = Stream(appliance, made, schemaChange="stop")
    assert stream.rows() == [FIRST_ROW]
    alter(appliance, made, NEW_ROW)
    with pytest.raises(SchemaMismatchError, match="start the query again, which reads the new"):
        stream.rows()
    with pytest.raises(InvalidSettingError, match="schemaChange is 'x'; it takes keep or stop"):
        parse_stream_options({"bootstrap": "tcp://a:1", "subscribe": made, "schemaChange": "x"})


def test_rows_of_an_older_dataframe_are_written_to_the_altered_topic(
    appliance: EmbeddedAppliance, made: str
) -> None:
    alter(appliance, made)
    with Admin(appliance.address) as admin:
        info = admin.topic_info([made])[made]
    older = pa.RecordBatch.from_pylist([FIRST_ROW], schema=FIRST)
    sink_rows.check_columns(FIRST, info, "name")
    assert sink_rows.typed_rows(older, info).to_pylist() == [{"id": 1, "title": "a", "price": None}]
    with pytest.raises(SchemaMismatchError, match="missing id, title, price"):
        sink_rows.check_columns(pa.schema([("other", pa.int8())]), info, None)
