"""`view=latest`: one row for each key, whatever the tasks are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import spark_bridge
from spark_bridge.datasource import TailraceDataSource
from spark_bridge.source.read_options import parse_options
from spark_bridge.source.reader import read_task
from spark_bridge.stream.options import parse_stream_options
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidSettingError
from tailrace.embedded_appliance import EmbeddedAppliance

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    """users: 40 keys in 2 partitions, of which every fourth is deleted; flights: typed."""
    frame = pa.table({"tail": ["a", "b", "a"], "n": pa.array([1, 2, 3], pa.int64())})
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=1024) as producer,
    ):
        admin.create_topics([NewTopic("users", 2), NewTopic("flights", schema=frame)])
        for number in range(1_000):
            producer.send("users", b"%d" % number, b"k%d" % (number % 40))
        for number in range(0, 40, 4):
            producer.send("users", None, b"k%d" % number)
        producer.send("users", b"no key")
        producer.send_arrow("flights", frame, partition=0).result(60)
        producer.flush(60)
    return appliance


EXPECTED = {b"k%d" % n: b"%d" % (960 + n) for n in range(40) if n % 4}


@pytest.mark.parametrize(
    "options",
    [{}, {"minPartitions": "7"}, {"fromFiles": "false"}, {"failOnDataLoss": "false"}],
    ids=str,
)
def test_the_tasks_together_have_one_row_for_each_key(
    filled: EmbeddedAppliance, options: dict[str, str]
) -> None:
    source = TailraceDataSource(
        {"bootstrap": filled.address, "subscribe": "users", "view": "latest", **options}
    )
    tasks: Any = source.reader(source.schema()).partitions()
    rows = [row for task in tasks for batch in read_task(task.task) for row in batch.to_pylist()]
    assert sorted((row["key"], row["value"]) for row in rows) == sorted(EXPECTED.items())


def test_spark_reads_the_latest(filled: EmbeddedAppliance, spark: Any) -> None:
    def read(topic: str, **options: str) -> Any:
        reader = spark.read.format("tailrace").option("bootstrap", filled.address)
        return reader.options(subscribe=topic, view="latest", **options).load()

    users = read("users")
    assert {bytes(row.key): bytes(row.value) for row in users.collect()} == EXPECTED
    assert users.count() == len(EXPECTED)
    flights = read("flights", keyColumn="tail").orderBy("tail").collect()
    assert [(row.tail, row.n) for row in flights] == [("a", 3), ("b", 2)]
    scanned = spark_bridge.scan(spark, "users", filled.address, latest=True, tasks=3)
    assert {bytes(row.key): bytes(row.value) for row in scanned.collect()} == EXPECTED


def test_wrong_options_are_named() -> None:
    for options, words in (
        ({"view": "newest"}, "view is 'newest'"),
        ({"keyColumn": "tail"}, "keyColumn is for view=latest"),
        ({"view": "latest", "latestMemoryBytes": "12"}, "latestMemoryBytes is '12'"),
    ):
        with pytest.raises(InvalidSettingError, match=words):
            parse_options({"subscribe": "users", **options})
    with pytest.raises(InvalidSettingError, match="batch reads"):
        parse_stream_options({"subscribe": "users", "view": "latest"})
