"""`spark_bridge.scan` in a real Spark: the rows of `tailrace.scan` as a DataFrame, in as many tasks
as are asked for, from files and over ZeroMQ.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pyarrow as pa
import pytest

import spark_bridge
import tailrace
from spark_bridge.source import arrow_scan
from spark_bridge.source.tasks import divided
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import InvalidSettingError, NotSupportedError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.scanning import retention_lease as lease
from tailrace.scanning.options import Bounds, build_settings
from tailrace.scanning.planner import plan

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]
ROWS = 1_000


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    frame = pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()), "word": [f"w{i % 3}" for i in range(ROWS)],
            "at": pa.array(range(ROWS), pa.timestamp("ms", "UTC")),
        }
    )  # fmt: skip
    odd = pa.table({"n": pa.array([1], pa.int64()), "u": pa.array([1], pa.uint64())})
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=2048) as producer,
    ):
        admin.create_topics(
            [
                NewTopic("plain", 3),
                NewTopic("typed", schema=frame),
                NewTopic("odd", schema=odd),
                NewTopic("empty"),
            ]
        )
        for n in range(ROWS):
            producer.send(
                "plain",
                b"%d" % n,
                b"k" if n % 2 else None,
                [("h", b"v")],
                partition=n % 3,
                timestamp=n,
            )
        producer.send_arrow("typed", frame)
        producer.send_arrow("odd", odd)
        producer.flush(60)
    return appliance


@pytest.mark.parametrize(
    ("tasks", "from_files"),
    [(None, True), (7, True), (2, False)],
    ids=["files", "7 tasks", "ZeroMQ"],
)
def test_a_topic_is_the_dataframe_of_its_rows(
    spark: Any, filled: EmbeddedAppliance, tasks: int | None, from_files: bool
) -> None:
    frame = spark_bridge.scan(spark, "plain", filled.address, tasks=tasks, from_files=from_files)
    assert [(f.name, f.dataType.simpleString()) for f in frame.schema.fields] == [
        ("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "int"),
        ("offset", "bigint"), ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]  # fmt: skip
    assert frame.rdd.getNumPartitions() == (tasks or 1)
    found = frame.toArrow().sort_by([("partition", "ascending"), ("offset", "ascending")])
    scanned = tailrace.scan("plain", filled.address, columns=frame.columns).read_all()
    assert found.cast(scanned.schema).equals(scanned)


def test_columns_and_bounds_are_those_of_a_scan(spark: Any, filled: EmbeddedAppliance) -> None:
    frame = spark_bridge.scan(
        spark,
        "plain",
        filled.address,
        columns=["_offset", "headers", "value"],
        start=10,
        end={0: 12, 1: 11, 2: 10},
    )
    rows = frame.orderBy("value").collect()
    assert [(row._offset, bytes(row.value), row.headers[0].key) for row in rows] == [
        (10, b"30", "h"),
        (10, b"31", "h"),
        (11, b"33", "h"),
    ]
    assert frame.filter("_offset > 10").count() == 1
    assert frame.count() == 3


def test_types_that_spark_does_not_take_are_made_into_ones_that_it_does_or_named(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    frame = spark_bridge.scan(spark, "typed", filled.address)
    assert [f.dataType.simpleString() for f in frame.schema.fields] == [
        "bigint",
        "string",
        "timestamp",
    ]
    row = frame.filter("n = 999").collect()[0]
    assert (row.word, row["at"].microsecond) == ("w0", 999_000)
    with pytest.raises(NotSupportedError, match="column 'u' is uint64"):
        spark_bridge.scan(spark, "odd", filled.address)
    assert spark_bridge.scan(spark, "odd", filled.address, columns=["n"]).collect()[0].n == 1


def test_it_is_an_ordinary_dataframe_of_the_rows_that_were_there(
    spark: Any, filled: EmbeddedAppliance, topic: str
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        producer.send(topic, b"1").result(60)
        frame = spark_bridge.scan(spark, topic, filled.address)
        producer.send(topic, b"2").result(60)
    assert frame.count() == 1
    frame.createOrReplaceTempView("scanned")
    assert spark.sql("select decode(value, 'UTF-8') v from scanned").collect()[0].v == "1"
    other = spark_bridge.scan(spark, "typed", filled.address)
    assert frame.crossJoin(other.groupBy("word").count()).count() == 3
    assert spark_bridge.scan(spark, "empty", filled.address).count() == 0


def test_a_directory_of_a_stopped_appliance_is_read_too(
    spark: Any, filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    with (
        tailrace.embedded(data_dir=str(tmp_path / "data")) as running,
        Producer(running.address) as producer,
    ):
        for n in range(5):
            producer.send("orders", b"%d" % n).result(60)
    assert spark_bridge.scan(spark, tmp_path / "data/orders", tasks=2).count() == 5


def test_what_is_wrong_is_said_by_the_call(spark: Any, filled: EmbeddedAppliance) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (UnknownTopicError, "did you mean 'plain'", {"topic": "plian"}),
        (InvalidSettingError, "did you mean 'value'", {"columns": ["vaule"]}),
        (InvalidSettingError, "tasks is 0", {"tasks": 0}),
        (InvalidSettingError, "did you mean columns", {"colums": ["key"]}),
    ]  # fmt: skip
    for error, sentence, asked in cases:
        with pytest.raises(error, match=sentence):
            spark_bridge.scan(spark, asked.pop("topic", "plain"), filled.address, **asked)


def test_a_topic_that_is_deleted_meanwhile_is_named_by_the_action(
    spark: Any, filled: EmbeddedAppliance, topic: str
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        producer.send(topic, b"1").result(60)
        frame = spark_bridge.scan(spark, topic, filled.address)
        admin.delete_topics([topic])
    with pytest.raises(Exception, match=f"topic '{topic}'.*deleted|there is no topic"):
        frame.count()


def test_a_task_renews_the_lease_of_the_whole_scan_and_not_only_of_its_own_range(
    filled: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease has one offset for each partition: a later task's would let retention have what an
    earlier one is yet to read.
    """
    made = plan(
        "plain",
        filled.address,
        ["offset"],
        Bounds("start", 5),
        Bounds("end", None),
        build_settings({}),
    )
    renewed = []
    monkeypatch.setattr(lease, "RENEWED_AFTER_S", 0.0)
    monkeypatch.setattr(
        lease, "acquire", lambda _admin, name, offsets, **_: renewed.append((name, dict(offsets)))
    )
    pieces = divided(made, 9, 1)
    rows = arrow_scan._reader(made, pieces, None, made.schema)
    assert sum(batch.num_rows for batch in rows(iter([pa.record_batch({"id": [8]})]))) == sum(
        r.end - r.start for r in pieces[8].ranges
    )
    assert renewed == [(made.lease, {TopicPartition("plain", p): 5 for p in range(3)})]
