"""Writes of the sink's tasks, against a real appliance, without Spark: rows, partitions, order, and
what a task refuses.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

import tailrace
from spark_bridge.sink import task_writer
from spark_bridge.sink.commit import commit_tasks
from spark_bridge.sink.options import parse_sink_options
from spark_bridge.sink.task_writer import TaskWriter
from tailrace import Admin, NewTopic, Producer
from tailrace.client.topics.topic_metadata import INTERNAL_PREFIX
from tailrace.core.errors import InvalidRequestError, SchemaMismatchError, UnknownTopicError
from tailrace.core.hash_slots import owners_after, slot_of
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.lakes.sink import ROWS, check_once, make, options_of, rows_of_task, values_in, write
from tests.kit.processes import HANG_LIMIT_S


def test_rows_are_written_once_and_in_order_however_they_are_cut_into_pieces(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows, some without a key, and one partition that gets so few that the limit
    on buffered batches sends them.
    """
    monkeypatch.setattr(task_writer, "PIECE_BYTES", 300)
    monkeypatch.setattr(task_writer, "BUFFERED_MAX_BYTES", 4_000)
    make(appliance, topic, 3)
    options = options_of(appliance, topic)
    writer = TaskWriter(options, f"query:{topic}", "run-1", 0, 0)
    partitions = [2 if n == 7 else None if n % 3 else n % 2 for n in range(ROWS)]
    for first in range(0, ROWS, 100):
        chosen = range(first, first + 100)
        columns = [
            [b"0/%d" % n for n in chosen],
            pa.array([partitions[n] for n in chosen], pa.int32()),
        ]
        writer.add(pa.record_batch(columns, ["value", "partition"]))
    task = writer.finish()
    writer.close()
    assert task.branch is not None
    few = next(one for one in task.branch.partitions if one.partition == 2)
    assert few.batch_count > 1, "rows without a key were spread, and those that waited were sent"
    assert commit_tasks(options, [task], 0)
    check_once(appliance, topic, 1)
    read = (
        tailrace.scan(topic, appliance.address, columns=["partition", "value"])
        .read_all()
        .to_pylist()
    )
    for partition in (0, 1):
        own = [
            int(row["value"][2:])
            for row in read
            if row["partition"] == partition and partitions[int(row["value"][2:])] == partition
        ]
        assert own == [n for n in range(ROWS) if partitions[n] == partition]


@pytest.mark.parametrize("partitioner", ["producer", "hash_slots"])
def test_keys_lie_where_a_producer_puts_them_and_in_order(
    appliance: EmbeddedAppliance, topic: str, partitioner: str
) -> None:
    make(appliance, topic, 4, partitioner=partitioner)
    options = options_of(appliance, topic)
    commit_tasks(options, write(options, 0, f"query:{topic}", tasks=1), 0)
    with Producer(appliance.address) as producer:
        requested = {
            n: producer.send(topic, b"produced", b"%d" % n).result(HANG_LIMIT_S).partition
            for n in range(ROWS)
        }
    rows = (
        tailrace.scan(topic, appliance.address, columns=["key", "value", "partition", "offset"])
        .read_all()
        .to_pylist()
    )
    assert {
        int(row["key"]): row["partition"] for row in rows if row["value"] != b"produced"
    } == requested
    for partition in range(4):
        numbers = [
            int(row["key"])
            for row in rows
            if row["partition"] == partition and row["value"] != b"produced"
        ]
        assert numbers
        assert numbers == sorted(numbers)


def test_partitions_added_while_a_task_writes_move_its_other_rows_to_their_owners(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task has routed its rows by the hash slots of before."""
    monkeypatch.setattr(task_writer, "PIECE_BYTES", 1_000)
    make(appliance, topic, 2, partitioner="hash_slots")
    options = options_of(appliance, topic)
    writer = TaskWriter(options, f"query:{topic}", "run-1", 0, 0)
    rows = rows_of_task(0, 0, 1)
    writer.add(rows.slice(0, 250))
    with Admin(appliance.address) as admin:
        admin.create_partitions({topic: 3})
    writer.add(rows.slice(250))
    task = writer.finish()
    writer.close()
    assert commit_tasks(options, [task], 0)
    check_once(appliance, topic, 1)
    owners = owners_after((2, 3))
    found = tailrace.scan(topic, appliance.address, columns=["key", "partition"]).read_all()
    late = [row for row in found.to_pylist() if int(row["key"]) >= 250]
    assert {row["partition"] for row in late} == {0, 1, 2}
    assert all(row["partition"] == owners[slot_of(row["key"])] for row in late)


def test_a_topic_made_again_while_a_task_writes_fails_the_task(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The part of the batch that it had was lost with it."""
    make(appliance, topic)
    options, name = options_of(appliance, topic), f"query:{topic}"
    writer = TaskWriter(options, name, "run-1", 0, 0)
    writer.add(rows_of_task(0, 0, 2))
    with Admin(appliance.address) as admin:
        admin.delete_topics(topic)
        admin.create_topics(NewTopic(topic, 3))
    writer.add(rows_of_task(0, 1, 2))
    with pytest.raises(UnknownTopicError, match="was deleted and created again while a task"):
        writer.finish()
    writer.close()
    assert commit_tasks(options, write(options, 0, name), 0)
    check_once(appliance, topic, 1)


def test_a_topic_that_is_not_there_and_columns_that_do_not_fit_are_said_by_the_task(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with pytest.raises(UnknownTopicError, match="to write to"):
        write(options_of(appliance, f"no-{topic}"), 0, f"job:{topic}")
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=pa.schema([("n", pa.int64())])))
    with pytest.raises(SchemaMismatchError, match="do not fit the typed topic"):
        write(options_of(appliance, topic), 0, f"job:{topic}")


def test_the_column_topic_names_no_topic_of_the_appliances_own(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    options = parse_sink_options({"bootstrap": appliance.address})
    writer = TaskWriter(options, f"query:{topic}", "run-1", 0, 0)
    try:
        with pytest.raises(
            InvalidRequestError,
            match=f"topic '{INTERNAL_PREFIX}sink_x' is internal and cannot be written to",
        ):
            writer.add(
                pa.RecordBatch.from_arrays(
                    [pa.array([b"v"]), pa.array([f"{INTERNAL_PREFIX}sink_x"])], ["value", "topic"]
                )
            )
    finally:
        writer.close()


def test_a_task_without_rows_asks_nobody(appliance: EmbeddedAppliance, topic: str) -> None:
    options = parse_sink_options({"bootstrap": "ipc:///nowhere/socket", "topic": topic})
    writer = TaskWriter(options, f"query:{topic}", "run-1", 0, 0)
    writer.add(rows_of_task(0, 0, 1).slice(0, 0))
    task = writer.finish()
    writer.close()
    assert commit_tasks(options, [task], 0)


def test_a_task_waits_for_an_appliance_as_long_as_the_commit_does(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options = options_of(appliance, topic, publishTimeoutMs="500000")
    writer = TaskWriter(options, f"query:{topic}", "run-1", 0, 0)
    try:
        writer.add(rows_of_task(0, 0, 1))
        assert writer.finish().row_count == ROWS
        assert writer._producer is not None
        assert writer._producer.settings.delivery_timeout_ms == 500_000
        assert writer._producer.settings.max_block_ms == 500_000
    finally:
        writer.close()
    assert values_in(appliance, topic) == []
