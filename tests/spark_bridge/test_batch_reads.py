"""Plans and reads of `spark.read`, through the data source as Spark calls it, without a JVM:
options, faults while it is read, types.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_bridge.source.reader import read_task
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidSettingError,
    NotReachableError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    RequestTimeoutError,
    SchemaMismatchError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, embedded, start_embedded
from tests.kit.lakes.spark_reads import Read

pytestmark = pytest.mark.spark
BATCH = 40


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    """plain: partition p holds records 0 to 99 of times 1000 * (p + 1) ms on, 1 ms apart; numbers:
    types that Spark has not.
    """
    frame = pa.table(
        {
            "n": pa.array([1, 2**63], pa.uint64()),
            "small": pa.array([1, 255], pa.uint8()),
            "at": pa.array([1, 2], pa.timestamp("us")),
        }
    )
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic("plain", 2),
                NewTopic("plain-too"),
                NewTopic("numbers", schema=frame),
                NewTopic("empty"),
            ]
        )
    with Producer(appliance.address, batch_size=1024) as producer:
        for number in range(100):
            for partition in range(2):
                producer.send(
                    "plain",
                    b"%d" % number,
                    b"k",
                    partition=partition,
                    timestamp=1000 * (partition + 1) + number,
                )
        producer.send("plain-too", b"x", timestamp=5)
        producer.send_arrow("numbers", frame).result(60)
        producer.flush(60)
    return appliance


def fill(address: str, topic: str, partitions: int = 1, rows: int = BATCH) -> None:
    """One record in each batch."""
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics([NewTopic(topic, partitions)])
        for number in range(rows):
            for partition in range(partitions):
                producer.send(topic, b"%d" % number, partition=partition).result(60)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ranges"),
    [({"subscribe": "plain"}, [(0, 0, 100), (1, 0, 100)]),
     ({"assign": '{"plain": [1]}'}, [(1, 0, 100)]),
     ({"subscribePattern": "pl.in"}, [(0, 0, 100), (1, 0, 100)]),
     ({"subscribe": "plain", "startingOffsets": '{"plain": {"0": 7, "1": -2}}',
     "endingOffsets": '{"plain": {"0": 9, "1": -1}}'}, [(0, 7, 9), (1, 0, 100)]),
     ({"subscribe": "plain", "startingTimestamp": "1050", "endingTimestamp": "2010"},
     [(0, 50, 100), (1, 0, 10)]),
     ({"subscribe": "plain", "startingTimestamp": "1050", "startingOffsets": "latest"},
     [(0, 50, 100), (1, 0, 100)]),
     ({"subscribe": "plain", "startingOffsetsByTimestamp": '{"plain": {"0": 1099, "1": 2001}}'},
     [(0, 99, 100), (1, 1, 100)]),
     ({"subscribe": "plain", "endingOffsetsByTimestamp": '{"plain": {"0": 1001, "1": 9999}}'},
     [(0, 0, 1), (1, 0, 100)]),
     ({"subscribe": "plain", "startingTimestamp": "1500",
     "startingOffsetsByTimestampStrategy": "latest"}, [(1, 0, 100)]),
     ({"subscribe": "plain", "startingOffsets": '{"plain": {"0": 900, "1": 5}}',
     "failOnDataLoss": "false"}, [(1, 5, 100)])],
)  # fmt: skip
def test_a_read_begins_and_ends_where_its_options_say(
    filled: EmbeddedAppliance, options: dict[str, str], ranges: list[Any]
) -> None:
    assert Read(filled.address, **options).ranges() == [("plain", *r) for r in ranges]


def test_several_topics_and_patterns_are_read_together(filled: EmbeddedAppliance) -> None:
    for options in ({"subscribe": "plain,plain-too"}, {"subscribePattern": "plain.*"}):
        found = pa.Table.from_batches(list(Read(filled.address, **options).batches()))
        assert sorted(set(found["topic"].to_pylist())) == ["plain", "plain-too"]
        assert found.num_rows == 201


@pytest.mark.parametrize("options", [{"subscribePattern": "nothing-.*"}, {"subscribe": "empty"}])
def test_nothing_to_read_is_no_rows_and_no_error(
    filled: EmbeddedAppliance, options: dict[str, str]
) -> None:
    read = Read(filled.address, **options)
    assert len(read.tasks) == 1
    assert list(read.batches()) == []
    assert read.schema.fieldNames()[:2] == ["key", "value"]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"minPartitions": "8"}, 8),
        ({"maxRecordsPerPartition": "30"}, 8),
        ({"minPartitions": "1"}, 2),
    ],
)
def test_ranges_are_divided_as_asked_and_each_row_is_read_once(
    filled: EmbeddedAppliance, options: dict[str, str], count: int
) -> None:
    read = Read(filled.address, subscribe="plain", columns="partition,offset", **options)
    assert len(read.tasks) == count
    rows = [
        (row["partition"], row["offset"]) for batch in read.batches() for row in batch.to_pylist()
    ]
    assert sorted(rows) == [(partition, offset) for partition in range(2) for offset in range(100)]


def test_a_task_renews_the_lease_of_the_whole_read(filled: EmbeddedAppliance) -> None:
    read = Read(filled.address, subscribe="plain", minPartitions="8")
    for task in read.tasks:
        assert task.task is not None
        assert set(task.task.leased.values()) == {0}


def test_columns_and_what_the_log_knows_come_on_request(filled: EmbeddedAppliance) -> None:
    read = Read(filled.address, subscribe="numbers", includeMetadata="true")
    assert read.schema.simpleString() == (
        "struct<n:decimal(20,0),small:smallint,at:timestamp,_topic:string,_partition:int,_offset:bigint,_timestamp:timestamp>"
    )
    assert [row["n"] for batch in read.batches() for row in batch.to_pylist()] == [1, 2**63]
    assert Read(
        filled.address, subscribe="numbers", columns="_offset,small"
    ).schema.fieldNames() == ["_offset", "small"]
    assert (
        Read(filled.address, subscribe="plain", includeHeaders="true").schema.fieldNames()[-1]
        == "headers"
    )


def test_small_batches_become_large_ones(filled: EmbeddedAppliance) -> None:
    assert [
        batch.num_rows
        for batch in Read(filled.address, subscribe="plain", minPartitions="2").batches()
    ] == [100, 100]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [({"subscribe": "plian"}, UnknownTopicError, "no topic 'plian'; did you mean 'plain'"),
     ({"assign": '{"plain": [0, 2]}'}, PartitionOutOfRangeError,
     ("names partition 2 of topic 'plain', "
                                                                 "which has 0 to 1")),
     ({"subscribe": "plain,numbers"}, SchemaMismatchError, ("different columns .*'plain' has "
                                                           "'timestamp'")),
     ({"subscribe": "plain", "startingOffsets": '{"plain": {"0": 101, "1": 0}}'},
     InvalidSettingError,
      ("startingOffsets asks for offset 101 of plain-0, which holds 0 to 100; with "
      "failOnDataLoss=false")),
     ({"subscribe": "plain", "endingOffsets": '{"plain": {"0": 5, "1": 101}}'}, InvalidSettingError,
     ("endingOffsets asks for offset 101 of "
                                                                                                     "plain-1")),
     ({"subscribe": "plain", "startingOffsets": '{"plain": {"0": 5}}'}, InvalidSettingError,
     "startingOffsets leaves out plain-1"),
     ({"subscribe": "plain", "endingOffsets": '{"plain": {"0": 5, "1": 5, "2": 5}}'},
     InvalidSettingError, "endingOffsets names plain-2"),
     ({"subscribe": "plain", "startingTimestamp": "1500"}, InvalidSettingError,
     "no record of plain-0 has the time 1500 or a later one, as startingTimestamp"),
     ({"subscribe": "plain", "startingOffsetsByTimestamp": '{"plain": {"1": 5}}'},
     InvalidSettingError, ("startingOffsetsByTimestamp leaves out "
                                                                                                        "plain-0")),
     ({"subscribe": "plain", "columns": "vaule"}, InvalidSettingError,
     ("option columns names 'vaule'.*did you "
                                                                       "mean value")),
     ({"subscribe": "plain", "groupIdPrefix": "x", "startingOffsets": "latest"},
     InvalidSettingError, "can't be latest for batch")],
)  # fmt: skip
def test_what_is_wrong_is_named(
    filled: EmbeddedAppliance, options: dict[str, str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Read(filled.address, **options)


def test_a_schema_that_does_not_fit_is_named_by_its_column(filled: EmbeddedAppliance) -> None:
    with pytest.raises(
        SchemaMismatchError,
        match=r"asks for column 'offset' as string; in topic 'plain' it is bigint",
    ):
        Read(filled.address, StructType([StructField("offset", StringType())]), subscribe="plain")
    with pytest.raises(InvalidSettingError, match="no column 'ofset'; did you mean 'offset'"):
        Read(filled.address, StructType([StructField("ofset", LongType())]), subscribe="plain")
    with Admin(filled.address) as admin:
        admin.create_topics(
            [
                NewTopic(
                    "months",
                    schema=pa.schema([("n", pa.int64()), ("m", pa.month_day_nano_interval())]),
                )
            ]
        )
    with pytest.raises(
        SchemaMismatchError,
        match=r"column 'm' is of type .*which Spark does not have; .option\('columns', 'n'\)",
    ):
        Read(filled.address, subscribe="months")


def test_no_appliance_is_named_after_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.datasource.CONNECT_TIMEOUT_MS", 200)
    with pytest.raises((NotReachableError, RequestTimeoutError), match=r"tcp://127\.0\.0\.1:9"):
        Read("tcp://127.0.0.1:9", subscribe="plain")


# ---- what goes on while it is read ---------------------------------------------------------------


@pytest.mark.parametrize("from_files", ["true", "false"])
def test_a_topic_deleted_while_it_is_read_is_an_error_or_the_end_of_its_rows(
    appliance: EmbeddedAppliance, topic: str, from_files: str
) -> None:
    for fail in ("true", "false"):
        fill(appliance.address, topic, 2)
        read = Read(
            appliance.address,
            subscribe=topic,
            failOnDataLoss=fail,
            fromFiles=from_files,
            minPartitions="2",
        )
        batches = read.batches()
        assert next(batches).num_rows == BATCH
        with Admin(appliance.address) as admin:
            admin.delete_topics([topic])
        with (
            pytest.raises(UnknownTopicError, match=topic)
            if fail == "true"
            else contextlib.nullcontext() as caught
        ):
            assert list(batches) == []
        if caught is not None:
            assert "failOnDataLoss" in "".join(caught.value.__notes__)


def test_what_was_deleted_meanwhile_is_an_error_or_left_out_and_counted(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(appliance.address, topic)
    reads = {
        fail: Read(appliance.address, subscribe=topic, failOnDataLoss=fail, columns="value")
        for fail in ("true", "false")
    }
    with Admin(appliance.address) as admin:
        admin.delete_records({TopicPartition(topic, 0): 15})
    with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-0"):
        list(reads["true"].batches())
    with caplog.at_level(logging.WARNING):
        values = [
            int(row["value"]) for batch in reads["false"].batches() for row in batch.to_pylist()
        ]
    assert values == list(range(15, BATCH))
    assert f"spark_read_skipped topic={topic} offsets=15 ranges=1" in caplog.text


def test_a_lease_that_ended_does_not_end_a_task_that_has_lost_nothing(
    appliance: EmbeddedAppliance,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(appliance.address, topic)
    first, second = Read(appliance.address, subscribe=topic, minPartitions="2").tasks
    monkeypatch.setattr("tailrace.scanning.retention_lease.RENEWED_AFTER_S", -1)
    with Admin(appliance.address) as admin:
        admin.delete_records({TopicPartition(topic, 0): BATCH // 2})
    assert first.task is not None
    assert second.task is not None
    with caplog.at_level(logging.WARNING):
        assert sum(batch.num_rows for batch in read_task(second.task)) == BATCH // 2
    assert "spark_read_lease_ended" in caplog.text
    with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-0"):
        list(read_task(first.task))


def test_a_corrupt_batch_is_an_error_with_its_range_or_skipped_and_counted(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False) as running:
        fill(running.address, "t", rows=10)
        with Admin(running.address) as admin:
            assert (
                admin.offsets({TopicPartition("t", 0): "latest"})[TopicPartition("t", 0)]["end"]
                == 10
            )
    (segment,) = (tmp_path / "data" / "t-0").glob("*.arrows")
    segment.write_bytes(_damaged(segment.read_bytes()))
    with embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False) as running:
        with pytest.raises(
            CorruptBatchError, match=r"t-0: offsets (\d+) to \1 are damaged"
        ) as caught:
            list(Read(running.address, subscribe="t").batches())
        assert "skipDamaged" in "".join(caught.value.__notes__)
        with caplog.at_level(logging.WARNING):
            rows = sum(
                batch.num_rows
                for batch in Read(running.address, subscribe="t", skipDamaged="true").batches()
            )
        assert rows == 9
        assert "spark_read_skipped topic=t offsets=1 ranges=1" in caplog.text
        assert (
            sum(
                batch.num_rows
                for batch in Read(running.address, subscribe="t", failOnDataLoss="false").batches()
            )
            == 9
        )


def _damaged(data: bytes) -> bytes:
    """One bit of the fifth batch's body."""
    from tailrace.format.record_batch.header_peek import frame_at
    from tailrace.format.segments.segment import schema_message_length

    position = schema_message_length(lambda length, at: data[at : at + length])
    for number in range(5):
        frame = frame_at(data, position, len(data))
        assert frame is not None
        last = position + frame[0] - 40
        position += frame[0] if number < 4 else 0
    return data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :]


def test_a_stopped_appliance_is_named_after_a_bounded_wait_and_a_restarted_one_is_read_on(
    tmp_path: pathlib.Path,
) -> None:
    address = f"ipc://{tmp_path}/front"
    options = {"subscribe": "t", "fromFiles": "false", "minPartitions": "2"}
    first = start_embedded(
        data_dir=str(tmp_path / "data"), listen=address, auto_create_topics=False
    )
    fill(address, "t", 2)
    impatient, patient = (
        Read(address, requestTimeoutMs="600", **options).batches(),
        Read(address, **options).batches(),
    )
    assert next(impatient).num_rows == next(patient).num_rows == BATCH
    assert first.stop() == 0
    with pytest.raises((NotReachableError, RequestTimeoutError), match=address):
        list(impatient)
    with embedded(data_dir=str(tmp_path / "data"), listen=address, auto_create_topics=False):
        assert [batch.num_rows for batch in patient] == [BATCH]


def test_tasks_read_without_what_the_driver_had(filled: EmbeddedAppliance) -> None:
    (task,) = Read(filled.address, subscribe="plain-too").tasks
    assert task.task is not None
    assert sum(batch.num_rows for batch in read_task(task.task)) == 1
