"""The streaming reader as Spark calls it, on a real appliance, without Spark: positions go through
JSON, tasks through pickle.
"""

from __future__ import annotations

import json
import pathlib
import sqlite3
from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from spark_bridge.stream import byte_limit as stream_bytes
from spark_bridge.stream import reader as stream_reader
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import (
    InvalidSettingError,
    NotReachableError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.lakes.spark_reads import Query, running

pytestmark = pytest.mark.spark
LEASES = "SELECT count(*) FROM leases WHERE ends_us > 0"


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """As Spark stops what it has begun."""
    yield
    while running:
        running.pop().stop()


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> Iterator[str]:
    """A topic of two partitions in small segments."""
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2, {"segment.bytes": 64 << 10})])
    yield topic
    with Admin(appliance.address) as admin:
        if topic in admin.list_topics():
            admin.delete_topics(topic)


def send(
    appliance: EmbeddedAppliance, topic: str, count: int, *, size: int = 10, partitions: int = 2
) -> None:
    with Producer(appliance.address, batch_size=4096) as producer:
        for number in range(count):
            producer.send(topic, b"x" * size, partition=number % partitions)


def offsets(start: int, end: int, *partitions: int) -> list[tuple[int, int]]:
    return [(partition, offset) for partition in partitions for offset in range(start, end)]


# ---- what a batch takes --------------------------------------------------------------------------


def test_batches_follow_each_other_without_a_gap_and_say_how_far_behind_they_are(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 100)
    query = Query(appliance, made, maxOffsetsPerTrigger="60")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(60)
    assert query.batch() == offsets(0, 30, 0, 1)
    assert (query.metrics["offsetsBehindLatest"], query.metrics["maxOffsetsBehindLatest"]) == (
        40,
        20,
    )
    assert query.metrics["estimatedTotalBytesBehindLatest"] > 0
    assert query.batch() == offsets(30, 50, 0, 1)
    assert query.plan() is None
    assert query.metrics["offsetsBehindLatest"] == 0
    send(appliance, made, 2)
    assert query.batch() == offsets(50, 51, 0, 1)


def test_a_query_that_begins_at_the_end_repeats_its_first_batch_from_there(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Spark writes no initial offset down: a restart asks for "latest" again, which is later by
    then.
    """
    send(appliance, made, 20)
    killed = Query(appliance, made, startingOffsets="latest")
    killed.reader.initialOffset()
    send(appliance, made, 6)
    assert killed.plan() is not None
    send(appliance, made, 4)
    restarted = Query(appliance, made, startingOffsets="latest").again(killed)
    assert restarted.run() == offsets(10, 13, 0, 1)
    assert restarted.batch() == offsets(13, 15, 0, 1)


def test_a_repeated_batch_has_the_same_rows_whatever_came_since(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 10)
    killed = Query(appliance, made)
    assert killed.batch() == offsets(0, 5, 0, 1)
    send(appliance, made, 10)
    killed.plan()
    send(appliance, made, 10)
    restarted = Query(appliance, made).again(killed)
    assert restarted.run() == offsets(5, 10, 0, 1)
    assert restarted.batch() == offsets(10, 15, 0, 1)


def test_too_few_offsets_make_no_batch_until_there_are_enough(
    appliance: EmbeddedAppliance, made: str
) -> None:
    query = Query(appliance, made, minOffsetsPerTrigger="10", maxTriggerDelay="1h")
    assert query.reader.getDefaultReadLimit() == ReadMinRows(10)
    assert query.batch() == []
    send(appliance, made, 8)
    assert query.batch() == offsets(0, 4, 0, 1)  # the first batch is not held back
    send(appliance, made, 8)
    assert query.plan() is None
    assert query.metrics["offsetsBehindLatest"] == 8
    send(appliance, made, 2)
    assert query.batch() == offsets(4, 9, 0, 1)
    send(appliance, made, 2)
    last = Query(appliance, made, minOffsetsPerTrigger="10", available_now=True).again(
        query
    )  # which ends, and does not wait
    assert last.batch() == offsets(9, 10, 0, 1)


@pytest.mark.parametrize("from_files", [True, False])
def test_a_limit_of_bytes_is_kept_within_a_batch_of_the_log(
    appliance: EmbeddedAppliance, made: str, from_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(appliance, made, 200, size=1_000)  # about four records in a batch of the log
    query = Query(appliance, made, maxBytesPerTrigger="40000")
    assert query.reader.getDefaultReadLimit() == ReadMaxBytes(40_000)
    if not from_files:
        monkeypatch.setattr(stream_bytes, "_counted", lambda *_arguments: None)
    rows, counts = [], []
    while query.plan() is not None:
        rows += query.run()
        counts.append(sum(query.committed[made].values()))
    assert sorted(rows) == offsets(0, 100, 0, 1)
    taken = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert len(taken) >= 5
    assert max(taken) <= 40
    assert all(taken)
    # ReadAllAvailable means what it says, as Trigger.Once asks for it.
    assert query.reader.latestOffset(
        Query(appliance, made).reader.initialOffset(), ReadAllAvailable()
    )[made] == {"0": 100, "1": 100}


def test_with_available_now_nothing_is_read_that_came_later(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 20)
    query = Query(appliance, made, available_now=True, maxOffsetsPerTrigger="12")
    send(appliance, made, 20)
    with Admin(appliance.address) as admin:
        admin.create_partitions({made: 3})
    assert query.batch() == offsets(0, 6, 0, 1)
    assert query.batch() == offsets(6, 10, 0, 1)
    assert query.plan() is None


def test_partitions_that_are_added_are_read_from_their_beginning(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 4)
    query = Query(appliance, made, startingOffsets="latest")
    assert query.batch() == []
    with Admin(appliance.address) as admin:
        admin.create_partitions({made: 4})
    send(appliance, made, 8, partitions=4)
    assert query.batch() == sorted([*offsets(2, 4, 0, 1), *offsets(0, 2, 2, 3)])


def test_a_small_batch_is_one_task_and_more_are_made_when_they_are_asked_for(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 40)
    query = Query(appliance, made)
    query.batch()
    assert len(query.tasks) == 1
    query = Query(appliance, made, minPartitions="4")
    assert query.batch() == offsets(0, 20, 0, 1)
    assert len(query.tasks) == 4
    query = Query(appliance, made, maxRecordsPerPartition="7")
    assert query.batch() == offsets(0, 20, 0, 1)
    assert len(query.tasks) == 6


def test_only_partitions_that_are_assigned_are_read(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 4)
    assert Query(appliance, made, assign=json.dumps({made: [1]})).batch() == offsets(0, 2, 1)
    with pytest.raises(
        PartitionOutOfRangeError,
        match=f"option assign names {made}-7; topic '{made}' has partitions 0 to 1",
    ):
        Query(appliance, made, assign=json.dumps({made: [7]})).batch()


def test_topics_that_match_a_pattern_are_read_also_those_that_come_later(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    first, second = f"{topic}-a", f"{topic}-b"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(first), NewTopic(f"other-{topic}")])
        send(appliance, first, 2, partitions=1)
        query = Query(appliance, "", subscribePattern=f"{topic}-.*", startingOffsets="latest")
        assert query.batch() == []
        admin.create_topics([NewTopic(second)])
        send(appliance, second, 3, partitions=1)
        assert query.batch() == offsets(0, 3, 0)
        assert query.committed[first] == {"0": 2}
        assert query.committed[second] == {"0": 3}


def test_a_query_begins_at_a_time(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address) as producer:
        for number in range(10):
            producer.send(made, b"x", partition=number % 2, timestamp=1_000 + number)
    assert Query(appliance, made, startingTimestamp="1004").batch() == offsets(2, 5, 0, 1)


def test_starting_offsets_are_held_against_the_log(appliance: EmbeddedAppliance, made: str) -> None:
    send(appliance, made, 10)
    told = json.dumps({made: {"0": 3, "1": -1}})
    assert Query(appliance, made, startingOffsets=told).batch() == offsets(3, 5, 0)
    with pytest.raises(InvalidSettingError, match=f"startingOffsets asks for offset 6 of {made}-1"):
        Query(appliance, made, startingOffsets=json.dumps({made: {"1": 6}})).batch()
    with pytest.raises(UnknownTopicError, match="there is no topic 'nosuch'"):
        Query(appliance, "nosuch").batch()


# ---- what is not there any more ------------------------------------------------------------------


def cut(appliance: EmbeddedAppliance, topic: str, offset: int) -> None:
    """Partition 0 begins here now; its segments below are gone."""
    with Admin(appliance.address) as admin:
        assert admin.delete_records({TopicPartition(topic, 0): offset}) == {
            TopicPartition(topic, 0): offset
        }


def test_what_retention_took_while_the_query_was_down_fails_it_or_is_counted(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 20)
    before = Query(appliance, made, maxOffsetsPerTrigger="10")
    assert before.batch() == offsets(0, 5, 0, 1)
    cut(appliance, made, 8)
    strict = Query(appliance, made).again(before)
    with pytest.raises(
        OffsetOutOfRangeError,
        match=f"offsets 5 to 7 of {made}-0 were deleted .* failOnDataLoss=false",
    ):
        strict.batch()
    lenient = Query(appliance, made, failOnDataLoss="false").again(before)
    assert lenient.batch() == sorted([*offsets(8, 10, 0), *offsets(5, 10, 1)])
    assert lenient.metrics["offsetsLost"] == 3


def test_what_retention_takes_from_under_a_task_fails_it_or_is_left_out(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 600, size=1_000)  # several segments
    for lenient in (False, True):
        query = Query(appliance, made, failOnDataLoss=str(not lenient))
        query.plan()
        tasks = query.reader.partitions(query.reader.initialOffset(), query.planned)
        cut(appliance, made, 200 + lenient)
        if lenient:
            rows = [
                offset
                for task in tasks
                for batch in query.reader.read(task)
                for offset in batch.column("offset").to_pylist()
            ]
            assert rows == [*range(201, 300), *range(300)]
        else:
            with pytest.raises(
                OffsetOutOfRangeError, match=rf"{made}-0 begins at offset 200 (.|\n)*failOnDataLoss"
            ):
                [batch for task in tasks for batch in query.reader.read(task)]


def test_a_topic_that_is_deleted_fails_the_query_or_leaves_it_with_the_others(
    appliance: EmbeddedAppliance, made: str
) -> None:
    other = f"{made}-other"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(other)])
        send(appliance, made, 4)
        send(appliance, other, 2, partitions=1)
        queries = [
            Query(appliance, f"{made},{other}", failOnDataLoss=text, maxOffsetsPerTrigger="3")
            for text in ("true", "false")
        ]
        for query in queries:
            query.batch()
        admin.delete_topics(made)
        strict, lenient = queries
        with pytest.raises(
            UnknownTopicError, match=f"topic '{made}', which the query reads, was deleted"
        ):
            strict.batch()
        rows = lenient.batch()
        send(appliance, other, 2, partitions=1)
        assert rows + lenient.batch() == offsets(1, 4, 0)
        assert list(lenient.committed) == [other, "@topicIds"]
        admin.delete_topics(other)


def test_the_checkpoint_of_another_topic_of_the_same_name_is_refused_or_begun_anew(
    appliance: EmbeddedAppliance, made: str
) -> None:
    send(appliance, made, 20)
    before = Query(appliance, made)
    before.batch()
    with Admin(appliance.address) as admin:
        admin.delete_topics(made)
        admin.create_topics([NewTopic(made, 2)])
    send(appliance, made, 30)
    with pytest.raises(
        UnknownTopicError,
        match=f"'{made}' was deleted and created again .* new checkpointLocation",
    ):
        Query(appliance, made).again(before).batch()
    assert Query(appliance, made, failOnDataLoss="false").again(before).batch() == offsets(
        0, 15, 0, 1
    )


def test_a_log_that_ends_before_the_checkpoint_fails_the_query_before_it_plans_a_batch(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Spark writes down each batch that is planned, and repeats it: one that ends before it begins
    would have the query read twice when the log is whole again.
    """
    send(appliance, made, 20)
    whole = Query(appliance, made)
    whole.batch()
    whole.committed = {**whole.committed, made: {"0": 10, "1": 15}}
    with pytest.raises(
        OffsetOutOfRangeError,
        match=f"{made}-1 ends at offset 10, and the query's checkpoint is at 15: .* older copy",
    ):
        Query(appliance, made).again(whole).plan()
    send(appliance, made, 14)
    assert Query(appliance, made).again(whole).batch() == sorted(
        [*offsets(10, 17, 0), *offsets(15, 17, 1)]
    )
    short = Query(appliance, made, failOnDataLoss="false").again(whole)
    short.committed = {**whole.committed, made: {"0": 17, "1": 30}}
    assert short.batch() == []
    send(appliance, made, 2)
    assert short.batch() == offsets(17, 18, 0, 1)


# ---- leases --------------------------------------------------------------------------------------


def leases(appliance: EmbeddedAppliance) -> int:
    with sqlite3.connect(
        f"file:{pathlib.Path(appliance.data_dir, 'coordinator.db')}?mode=ro", uri=True
    ) as database:
        found = int(database.execute(LEASES).fetchone()[0])
    database.close()
    return found


def test_what_a_query_reads_is_leased_until_it_stops(
    appliance: EmbeddedAppliance, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = leases(appliance)
    send(appliance, made, 20)
    query = Query(appliance, made, maxOffsetsPerTrigger="10")
    query.batch()
    assert leases(appliance) == before + 2  # of two partitions
    assert {task.parts[0].plan.lease for task in query.tasks} == {query.reader._lease}
    query.batch()
    assert query.reader._leased == {
        TopicPartition(made, 0): 0,
        TopicPartition(made, 1): 0,
    }  # not moved with each batch
    monkeypatch.setattr(stream_reader, "LEASE_MOVED_AFTER_S", 0)
    send(appliance, made, 2)
    query.batch()
    assert query.reader._leased == {TopicPartition(made, 0): 10, TopicPartition(made, 1): 10}
    query.reader.stop()
    assert leases(appliance) == before


# ---- the appliance goes away ---------------------------------------------------------------------


def test_a_query_waits_for_an_appliance_that_is_restarted_and_not_for_ever(
    tmp_path: pathlib.Path,
) -> None:
    address = f"ipc://{tmp_path}/socket"
    appliance = start_embedded(data_dir=str(tmp_path / "data"), listen=address)
    try:
        with Admin(address) as admin:
            admin.create_topics([NewTopic("t", 2)])
        send(appliance, "t", 10)
        query = Query(appliance, "t")
        assert query.batch() == offsets(0, 5, 0, 1)
        send(appliance, "t", 4)
        query.plan()
        appliance.stop()
        appliance = start_embedded(data_dir=str(tmp_path / "data"), listen=address)
        assert query.run() == offsets(5, 7, 0, 1)
        send(appliance, "t", 2)
        assert query.batch() == offsets(7, 8, 0, 1)
        query.reader.stop()
        impatient = Query(appliance, "t", requestTimeoutMs="300").again(query)
        impatient.plan()
    finally:
        appliance.stop()
    for _ in range(2):  # connected before, and not
        with pytest.raises(
            NotReachableError,
            match=f"the appliance at {address} has not answered the query for requestTimeoutMs=300",
        ):
            impatient.batch()
