"""Streaming queries in a real Spark: what `test_stream_reader` shows of the reader alone holds when
Spark calls it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from spark_bridge.stream.progress import metrics
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    return topic


def send(appliance: EmbeddedAppliance, topic: str, *numbers: int) -> None:
    with Producer(appliance.address) as producer:
        for number in numbers:
            producer.send(topic, b"%d" % number, partition=number % 2)


def stream(spark: Any, appliance: EmbeddedAppliance, topic: str, **options: str) -> Any:
    reader = (
        spark.readStream.format("tailrace")
        .option("bootstrap", appliance.address)
        .option("subscribe", topic)
    )
    for name, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, value)
    return reader.load()


class Output:
    """Rows of the batches of a query."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}
        self.before: Callable[[int], None] = lambda _number: None

    def __call__(self, frame: Any, number: int) -> None:
        self.before(number)
        self.batches[number] = sorted(int(row.value) for row in frame.select("value").collect())

    @property
    def rows(self) -> list[int]:
        return sorted(row for rows in self.batches.values() for row in rows)


def start(frame: Any, output: Output, checkpoint: pathlib.Path, **trigger: Any) -> Any:
    return (
        frame.writeStream.foreachBatch(output)
        .option("checkpointLocation", str(checkpoint))
        .trigger(**trigger)
        .start()
    )


def test_an_option_out_of_range_is_named_by_the_query_that_fails(
    spark: Any, appliance: EmbeddedAppliance, made: str, tmp_path: pathlib.Path
) -> None:
    query = start(
        stream(spark, appliance, made, maxOffsetsPerTrigger="0"),
        Output(),
        tmp_path,
        availableNow=True,
    )
    with pytest.raises(
        Exception, match="option maxOffsetsPerTrigger is '0'; it takes a whole number from 1 on"
    ) as caught:
        query.awaitTermination(120)
    assert "UnboundLocalError" not in str(caught.value)


def test_a_query_reads_what_there_was_in_batches_and_goes_on_from_its_checkpoint(
    spark: Any, appliance: EmbeddedAppliance, made: str, tmp_path: pathlib.Path
) -> None:
    send(appliance, made, *range(100))
    output = Output()
    output.before = lambda number: send(
        appliance, made, 100 + number
    )  # which comes too late for Trigger.AvailableNow
    query = start(
        stream(spark, appliance, made, maxOffsetsPerTrigger="40"),
        output,
        tmp_path,
        availableNow=True,
    )
    assert query.awaitTermination(120)
    assert output.rows == list(range(100))
    assert [len(rows) for rows in output.batches.values()] == [40, 40, 20]
    assert [metrics(progress)[0]["offsetsBehindLatest"] for progress in query.recentProgress] == [
        60,
        20,
        0,
    ]
    (source,) = json.loads(query.lastProgress.json)["sources"]
    assert source["endOffset"][made] == {"0": 50, "1": 50}
    first = json.loads((tmp_path / "offsets/0").read_text().splitlines()[-1])
    with Admin(appliance.address) as admin:
        assert first["@topicIds"] == {made: admin.topic_info([made])[made].topic_id.hex()}

    output.before = lambda _number: None
    output.batches.clear()
    query = start(stream(spark, appliance, made), output, tmp_path, availableNow=True)
    assert query.awaitTermination(120)
    assert output.batches == {3: [100, 101, 102]}


def test_a_batch_that_failed_is_repeated_with_the_same_rows_also_the_first_of_all(
    spark: Any, appliance: EmbeddedAppliance, made: str, tmp_path: pathlib.Path
) -> None:
    """The first batch of a query that begins at the end: Spark's checkpoint does not say where that
    was.
    """
    send(appliance, made, 0, 1)
    output = Output()

    def fails(number: int) -> None:
        send(appliance, made, 4, 5)
        raise ValueError("on purpose")

    output.before = fails
    frame = stream(spark, appliance, made, startingOffsets="latest")
    query = start(frame, output, tmp_path, processingTime="100 milliseconds")
    with pytest.raises(Exception, match="on purpose"):
        query.awaitTermination(120)
    send(appliance, made, 6, 7)
    output.before = lambda _number: None
    query = start(
        stream(spark, appliance, made, startingOffsets="latest"),
        output,
        tmp_path,
        availableNow=True,
    )
    assert query.awaitTermination(120)
    assert output.batches == {0: [], 1: [4, 5, 6, 7]}


def test_a_running_query_takes_partitions_that_are_added_and_outlives_a_restart_of_the_appliance(
    spark: Any, tmp_path: pathlib.Path
) -> None:
    data, address = str(tmp_path / "data"), f"ipc://{tmp_path}/socket"
    appliance = start_embedded(data_dir=data, listen=address, auto_create_topics=False)
    query = None
    try:
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic("t", 2)])
        send(appliance, "t", 0, 1)
        output = Output()
        query = start(
            stream(spark, appliance, "t"),
            output,
            tmp_path / "checkpoint",
            processingTime="0 seconds",
        )
        query.processAllAvailable()
        with Admin(appliance.address) as admin:
            admin.create_partitions({"t": 3})
        with Producer(appliance.address) as producer:
            producer.send("t", b"2", partition=2)
        query.processAllAvailable()
        assert output.rows == [0, 1, 2]
        appliance.stop()
        appliance = start_embedded(data_dir=data, listen=address, auto_create_topics=False)
        send(appliance, "t", 3, 4)
        query.processAllAvailable()
        assert output.rows == [0, 1, 2, 3, 4]
        with Admin(appliance.address) as admin:
            admin.delete_topics("t")
        with pytest.raises(
            Exception, match=r"topic 't', which the query reads, was deleted.*failOnDataLoss"
        ):
            query.awaitTermination(120)
    finally:
        if query is not None:
            query.stop()
        appliance.stop()


def test_what_is_wrong_with_a_stream_is_said_by_spark(
    spark: Any, appliance: EmbeddedAppliance, made: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(
        Exception, match=r"unknown option 'maxoffsetpertrigger'.*did you mean maxOffsetsPerTrigger"
    ):
        stream(spark, appliance, made, maxOffsetPerTrigger="5")
    frame = stream(spark, appliance, made)
    output = Output()
    assert start(frame, output, tmp_path, availableNow=True).awaitTermination(120)
    with Admin(appliance.address) as admin:
        admin.delete_topics(made)
        admin.create_topics([NewTopic(made, 2)])
    with pytest.raises(Exception, match=r"was deleted and created again.*new checkpointLocation"):
        start(frame, output, tmp_path, availableNow=True).awaitTermination(120)
