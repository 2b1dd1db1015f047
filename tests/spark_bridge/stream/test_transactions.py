"""Spark reads what was committed: batches over ZeroMQ and from files, and a stream that runs beside
an open transaction.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tailrace import Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.transactional.committed_topics import fill

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


def test_a_batch_and_a_stream_show_what_was_committed_and_a_stream_goes_on_at_the_commit(
    spark: Any, appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    model, address = fill(appliance.address, topic), appliance.address
    batches: list[list[bytes]] = []

    def keep(frame: Any, _number: int) -> None:
        batches.append([bytes(row.value) for row in frame.orderBy("offset").collect()])

    def streamed() -> list[bytes]:
        batches.clear()
        source = spark.readStream.format("tailrace").option("bootstrap", address)
        query = (
            source.option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [value for batch in batches for value in batch]

    def read(from_files: str) -> list[bytes]:
        reader = spark.read.format("tailrace").option("bootstrap", address)
        rows = reader.option("subscribe", topic).option("fromFiles", from_files).load()
        return [bytes(row.value) for row in rows.orderBy("offset").collect()]

    with Producer(address, transactional_id=topic) as producer:
        producer.begin_transaction()
        producer.send(topic, b"open")
        producer.flush()
        assert read("true") == read("false") == model
        assert streamed() == model
        assert streamed() == []
        producer.commit_transaction()
        with producer.transaction():
            producer.send(topic, b"next")
        producer.begin_transaction()
        producer.send(topic, b"aborted")
        producer.flush()
        producer.abort_transaction()
    assert read("true") == read("false") == [*model, b"open", b"next"]
    assert streamed() == [b"open", b"next"]
    assert streamed() == []
