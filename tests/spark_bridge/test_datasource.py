"""The data source in a real Spark: discovered by name, right columns, right rows, nothing left
behind.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    frame = pa.table(
        {"n": pa.array(range(1000), pa.int64()), "word": [f"w{i % 3}" for i in range(1000)]}
    )
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic("plain", 2),
                NewTopic("typed", 2, schema=frame),
                NewTopic("empty"),
                NewTopic("other", schema=pa.schema([("x", pa.int8())])),
            ]
        )
        with Producer(appliance.address, batch_size=4096) as producer:
            for number in range(1000):
                producer.send(
                    "plain",
                    b"%d" % number,
                    b"k%d" % (number % 5),
                    [("h", b"v")],
                    partition=number % 2,
                    timestamp=number,
                )
            producer.send_arrow("typed", frame, key_column="word").result(60)
    return appliance


def load(spark: Any, appliance: EmbeddedAppliance, **options: str) -> Any:
    reader = spark.read.format("tailrace").option("bootstrap", appliance.address)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def test_a_session_in_which_nobody_has_registered_it_finds_it_by_its_name(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    """Through `pyspark_tailrace`. Spark looks again when its looking has failed: on a busy machine
    its Python process may come too late.
    """
    other = spark.newSession()

    def is_found() -> bool:
        reader = (
            other.read.format("tailrace")
            .option("bootstrap", filled.address)
            .option("subscribe", "plain")
        )
        try:
            return bool(reader.load().columns)
        except AnalysisException as error:
            if error.getCondition() != "DATA_SOURCE_NOT_FOUND":
                raise
            return False

    wait_until(is_found, "the format is found")


def test_what_the_jvm_and_its_workers_write_goes_into_a_file_of_the_sessions(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    from spark_bridge.session import LOG_FILE

    assert load(spark, filled, subscribe="plain").count() == 1000
    (jvm,) = [child for child in psutil.Process().children() if child.name() == "java"]
    # Its workers write into a pipe that it copies to the same place.
    path = os.readlink(f"/proc/{jvm.pid}/fd/2")
    assert path.endswith(f"/{LOG_FILE}")
    with open(path, encoding="utf-8") as log:
        assert "log level" not in log.read()


def test_a_default_topic_has_kafkas_columns(spark: Any, filled: EmbeddedAppliance) -> None:
    frame = load(spark, filled, subscribe="plain", includeHeaders="true")
    assert [(f.name, f.dataType.simpleString()) for f in frame.schema.fields] == [
        ("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "int"),
        ("offset", "bigint"), ("timestamp", "timestamp"),
        ("timestampType", "int"), ("headers", "array<struct<key:string,value:binary>>"),
    ]  # fmt: skip
    rows = frame.orderBy("partition", "offset").collect()
    assert [int(r.value) for r in rows] == [*range(0, 1000, 2), *range(1, 1000, 2)]
    assert {(r.topic, r.timestampType, bytes(r.headers[0].value)) for r in rows} == {
        ("plain", 0, b"v")
    }
    assert rows[3].timestamp.timestamp() == 0.006


def test_a_typed_topic_has_its_own_columns(spark: Any, filled: EmbeddedAppliance) -> None:
    frame = load(spark, filled, subscribe="typed")
    assert frame.columns == ["n", "word"]
    counted = {
        row.word: (row["count(1)"], row["sum(n)"])
        for row in frame.groupBy("word").agg({"*": "count", "n": "sum"}).collect()
    }
    assert counted == {f"w{i}": (len(range(i, 1000, 3)), sum(range(i, 1000, 3))) for i in range(3)}


def test_ranges_of_offsets_are_exact_and_plans_do_not_poison_each_other(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    frame = load(
        spark,
        filled,
        assign='{"plain": [0]}',
        startingOffsets='{"plain": {"0": 37}}',
        endingOffsets='{"plain": {"0": 137}}',
    )
    assert sorted(r.offset for r in frame.collect()) == list(range(37, 137))
    assert frame.filter("offset < 40").count() == 3
    assert frame.count() == 100


def test_columns_can_be_chosen(spark: Any, filled: EmbeddedAppliance) -> None:
    frame = (
        spark.read.format("tailrace")
        .schema("offset bigint")
        .option("bootstrap", filled.address)
        .option("subscribe", "plain")
        .load()
    )
    assert frame.columns == ["offset"]
    assert frame.agg({"offset": "max"}).collect()[0][0] == 499


def test_a_job_of_kafkas_source_reads_with_its_own_options(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    reader = spark.read.format("tailrace").option(
        "kafka.bootstrap.servers", filled.address.removeprefix("tcp://")
    )
    frame = (
        reader.option("subscribePattern", "pl.*")
        .option("startingTimestamp", "990")
        .option("minPartitions", "4")
        .load()
    )
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(int(row.value) for row in frame.select("value").collect()) == list(
        range(990, 1000)
    )


def test_what_the_log_knows_of_a_typed_topic_comes_on_request(
    spark: Any, filled: EmbeddedAppliance
) -> None:
    frame = load(spark, filled, subscribe="typed", includeMetadata="true")
    assert frame.columns == ["n", "word", "_topic", "_partition", "_offset", "_timestamp"]
    assert frame.select("_partition", "_offset").distinct().count() == 1000


def test_an_empty_topic_gives_no_rows(spark: Any, filled: EmbeddedAppliance) -> None:
    assert load(spark, filled, subscribe="empty").count() == 0


def test_what_is_wrong_is_said(spark: Any, filled: EmbeddedAppliance) -> None:
    for options, sentence in (
        ({"subscribe": "nosuch"}, "there is no topic"),
        ({"subscribe": "typed,other"}, "have different columns"),
        (
            {"subscribe": "plain", "startingOffsets": '{"plain": {"0": 9999}}'},
            "asks for offset 9999",
        ),
        ({"subscribe": "plain", "startingOfsets": "latest"}, "did you mean startingOffsets"),
        (
            {"subscribe": "plain", "startingOffsets": "latest"},
            "startingOffsets can't be latest for batch queries",
        ),
    ):
        with pytest.raises(Exception, match=sentence):
            load(spark, filled, **options).count()
