"""The sink in a real Spark: batch and streaming writes, what is refused, replayed batches, and
kills of the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import tailrace
from spark_bridge.sink.crash_points import AFTER_DECISION, BEFORE_DECISION
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.crash import spark_sink
from tests.kit.processes import HANG_LIMIT_S, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


def make(appliance: EmbeddedAppliance, *topics: NewTopic) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(topics)


def write(frame: Any, appliance: EmbeddedAppliance, **options: str) -> None:
    writer = (
        frame.write.format("tailrace")
        .option("kafka.bootstrap.servers", appliance.address)
        .mode("append")
    )
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def rows_of(appliance: EmbeddedAppliance, topic: str, *columns: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        tailrace.scan(topic, appliance.address, columns=list(columns) or None)
        .read_all()
        .to_pylist()
    )
    return found


def test_a_batch_write_has_kafkas_columns(
    spark: Any, appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, NewTopic(topic, 4))
    frame = spark.range(1000).selectExpr(
        "cast(id as string) as key",
        "cast(id * 2 as string) as value",
        "array(named_struct('key', 'h', 'value', cast('v' as binary))) as headers",
    )
    write(frame, appliance, topic=topic)
    rows = rows_of(appliance, topic, "key", "value", "headers", "partition", "offset")
    assert sorted((int(r["key"]), int(r["value"])) for r in rows) == [
        (n, 2 * n) for n in range(1000)
    ]
    assert rows[0]["headers"] == [{"key": "h", "value": b"v"}]
    with Producer(appliance.address) as producer:
        requested = {
            n: producer.send(topic, b"", b"%d" % n).result(HANG_LIMIT_S).partition
            for n in range(0, 1000, 50)
        }
    assert {int(r["key"]): r["partition"] for r in rows if int(r["key"]) % 50 == 0} == requested


def test_the_column_topic_says_where_rows_go_and_partition_which(
    spark: Any, appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, NewTopic(f"{topic}-0", 2), NewTopic(f"{topic}-1", 2))
    frame = spark.range(200).selectExpr(
        f"concat('{topic}-', cast(id % 2 as string)) as topic",
        "cast(id as string) as value",
        "cast(1 as int) as partition",
    )
    write(frame, appliance)
    for number in (0, 1):
        rows = rows_of(appliance, f"{topic}-{number}", "value", "partition")
        assert sorted(int(r["value"]) for r in rows) == list(range(number, 200, 2))
        assert {r["partition"] for r in rows} == {1}


def test_a_typed_topic_takes_its_columns_by_name(
    spark: Any, appliance: EmbeddedAppliance, topic: str
) -> None:
    make(
        appliance,
        NewTopic(
            topic,
            2,
            schema=pa.schema(
                [("n", pa.int64()), ("word", pa.utf8()), ("at", pa.timestamp("us", "UTC"))]
            ),
        ),
    )
    frame = spark.range(300).selectExpr(
        "concat('w', cast(id % 3 as string)) as word", "timestamp_micros(id) as at", "id as n"
    )
    write(frame, appliance, topic=topic, keyColumn="word")
    rows = rows_of(appliance, topic, "n", "word", "at", "_partition")
    assert sorted((r["n"], r["word"]) for r in rows) == [(n, f"w{n % 3}") for n in range(300)]
    assert len({(r["word"], r["_partition"]) for r in rows}) == 3


def test_what_is_wrong_is_said_before_a_row_is_written(
    spark: Any, appliance: EmbeddedAppliance, topic: str
) -> None:
    make(
        appliance,
        NewTopic(topic, schema=pa.schema([("n", pa.int64()), ("word", pa.utf8())])),
        NewTopic(f"{topic}-plain"),
    )
    for columns, options, sentence in (
        (["id as n"], {"topic": topic}, "missing word"),
        (["id as n", "array(id) as word"], {"topic": topic}, "column 'word' is"),
        (["id as value"], {"topic": f"{topic}-plain"}, "value attribute unsupported type int64"),
        (["'a' as value"], {}, "topic option required when no 'topic' attribute is present"),
        (["'a' as value"], {"topic": f"{topic}-plain", "topc": "x"}, "did you mean topic"),
        (["'a' as value"], {"topic": f"{topic}-none"}, "there is no topic"),
    ):
        with pytest.raises(Exception, match=sentence):
            write(spark.range(3).selectExpr(*columns), appliance, **options)
    with pytest.raises(Exception, match="a topic is a log, which is appended to"):
        spark.range(3).selectExpr("'a' as value").write.format("tailrace").option(
            "topic", topic
        ).mode("overwrite").save()


def test_a_named_batch_write_that_is_repeated_writes_nothing_and_a_failed_one_leaves_nothing(
    spark: Any, appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, NewTopic(topic, 2))
    frame = spark.range(50).selectExpr("cast(id as string) as value")
    for version in ("7", "7", "8"):
        write(frame, appliance, topic=topic, txnAppId=topic, txnVersion=version)
    assert len(rows_of(appliance, topic, "value")) == 100
    with pytest.raises(Exception, match="boom"):
        write(
            spark.range(50).selectExpr(
                "cast(if(id = 40, raise_error('boom'), id) as string) as value"
            ),
            appliance,
            topic=topic,
        )
    assert len(rows_of(appliance, topic, "value")) == 100


def test_a_stream_restarted_from_its_checkpoint_writes_each_row_once_though_its_last_batch_comes_again(  # noqa: E501
    spark: Any, appliance: EmbeddedAppliance, topic: str, tmp_path: Path
) -> None:
    make(appliance, NewTopic(topic, 3))
    for number in range(3):
        spark_sink.write_input(tmp_path / "in", number, 100)
        spark_sink.run_query(spark, appliance.address, topic, tmp_path)
    commits = tmp_path / "checkpoint" / "commits"
    last = max((name for name in os.listdir(commits) if name.isdecimal()), key=int)
    for name in (last, f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)
    # Its batch is planned again, and the rows that have come since are not in it.
    spark_sink.write_input(tmp_path / "in", 3, 100)
    spark_sink.run_query(spark, appliance.address, topic, tmp_path)
    assert spark_sink.counted(appliance.address, topic) == Counter(range(400))


@pytest.mark.long
@pytest.mark.parametrize("place", [BEFORE_DECISION, AFTER_DECISION])
def test_a_driver_killed_in_its_commit_and_started_again_writes_each_row_once(
    spark: Any, appliance: EmbeddedAppliance, topic: str, tmp_path: Path, place: str
) -> None:
    """test_commit.py kills without Spark; here everything of Spark dies with it, and another Spark
    goes on.
    """
    make(appliance, NewTopic(topic, 3))
    for number in range(2):
        spark_sink.write_input(tmp_path / "in", number, 200)
    killed = spark_sink.start_driver(appliance.address, topic, tmp_path, crash=f"{place}:1")
    assert killed.wait() != 0
    assert spark_sink.committed(tmp_path) < spark_sink.planned(tmp_path), (
        tmp_path / "driver.log"
    ).read_text()
    spark_sink.run_query(spark, appliance.address, topic, tmp_path)
    assert spark_sink.counted(appliance.address, topic) == Counter(range(400))


@pytest.mark.long
def test_python_workers_and_the_appliance_killed_under_a_stream_cost_no_row_and_repeat_none(
    spark: Any, topic: str, tmp_path: Path
) -> None:
    """tests/crash/spark_sink.py kills at random."""
    address = f"ipc://{tmp_path}/socket"

    def start() -> EmbeddedAppliance:
        return start_embedded(
            auto_create_topics=False, data_dir=str(tmp_path / "data"), listen=address
        )

    running = start()
    try:
        make(running, NewTopic(topic, 3))
        for number in range(8):
            spark_sink.write_input(tmp_path / "in", number, 500)
        query = spark_sink.start_query(spark, address, topic, tmp_path)
        wait_until(lambda: spark_sink.committed(tmp_path) >= 2, "two batches are committed", 120)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(part.startswith("pyspark.") for part in process.cmdline()):
                    process.kill()
        ended(query)
        query = spark_sink.start_query(spark, address, topic, tmp_path)
        wait_until(
            lambda: spark_sink.committed(tmp_path) >= 4 or not query.isActive, "two more", 120
        )
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        running = start()
        ended(query)
        for _ in range(10):  # Spark's pool may still hold connections to workers that were killed
            if spark_sink.committed(tmp_path) == 8:
                break
            ended(spark_sink.start_query(spark, address, topic, tmp_path))
        assert spark_sink.counted(address, topic) == Counter(range(4000))
    finally:
        running.stop()


def ended(query: Any) -> None:
    """Wait for the end of a query, of whatever kind."""
    with contextlib.suppress(Exception):
        query.awaitTermination()
    query.stop()
