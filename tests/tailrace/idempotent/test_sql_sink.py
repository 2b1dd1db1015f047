"""Offsets in the transaction of the results: each record is applied once, over every kind of
connection and whatever two consumers do to each other.
"""

from __future__ import annotations

import itertools
import pathlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import duckdb
import pyarrow as pa
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st

from tailrace import (
    InvalidRequestError,
    InvalidSettingError,
    OffsetOutOfRangeError,
    Record,
    TopicBatch,
    TopicPartition,
)
from tailrace.idempotent import OffsetsMovedError, SqlSink
from tailrace.share.record import with_delivery_count
from tests.kit.hosts.databases import CONNECT, Databases, LogReader, record, write

ORDERS = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 1)
INSERT = "INSERT INTO sales (partition_number, record_offset) VALUES (?, ?)"


@pytest.fixture(params=CONNECT)
def databases(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Databases]:
    made = Databases(request.param, tmp_path)
    with_table(made)
    yield made
    made.close()


def with_table(databases: Databases) -> None:
    sink = SqlSink(databases.connect(), "schema")
    nothing: list[Record] = []
    with sink.transaction(nothing) as tx:
        write(tx.cursor, "CREATE TABLE sales (partition_number INTEGER, record_offset INTEGER)")


def applied(databases: Databases) -> list[tuple[int, int]]:
    return databases.rows("SELECT partition_number, record_offset FROM sales ORDER BY 1, 2")


def fails() -> None:
    raise ZeroDivisionError


def apply(
    sink: SqlSink,
    records: list[Record],
    meanwhile: Callable[[], object] = lambda: None,
    *,
    before: bool = False,
) -> list[int]:
    """The offsets that were new. `meanwhile` is called behind the changes, or before them."""
    with sink.transaction(records) as tx:
        if before:
            meanwhile()
        for item in tx.records:
            write(tx.cursor, INSERT, item.partition, item.offset)
        if not before:
            meanwhile()
    assert tx.skipped == len(records) - len(tx.records)
    return [item.offset for item in tx.records]


def test_what_was_applied_is_skipped_and_what_fails_leaves_nothing(databases: Databases) -> None:
    sink = SqlSink(databases.connect(), "billing")
    assert sink.positions([ORDERS, OTHER]) == {ORDERS: None, OTHER: None}
    assert apply(sink, [record(0), record(1), record(0, 1)]) == [0, 1, 0]
    assert apply(sink, [record(0), record(1)]) == []
    assert apply(sink, [record(1), record(2), record(3)]) == [2, 3]
    with pytest.raises(ZeroDivisionError):
        apply(sink, [record(4)], fails)
    assert applied(databases) == [(0, offset) for offset in range(4)] + [(1, 0)]
    assert sink.positions([ORDERS, OTHER]) == {ORDERS: 4, OTHER: 1}
    assert apply(sink, [record(4)]) == [4]
    # Another group has offsets of its own; a later process finds what this one has stored.
    assert SqlSink(databases.connect(), "audit").positions([ORDERS]) == {ORDERS: None}
    assert apply(SqlSink(databases.connect(), "billing"), [record(3), record(4), record(5)]) == [5]
    assert applied(databases) == [(0, offset) for offset in range(6)] + [(1, 0)]


def test_a_consumer_is_led_behind_what_is_applied_and_a_hole_is_refused(
    databases: Databases,
) -> None:
    logs = {ORDERS: [5, 6, 7, 9, 10], OTHER: []}
    reader, sink = LogReader(logs), SqlSink(databases.connect(), "billing")
    assert sink.seek(reader) == {ORDERS: 5, OTHER: 0}, "where the consumer would begin"
    # That is stored before anything is applied: a consumer that would begin further on the next
    # time is led back.
    late = LogReader(logs)
    late.seek(ORDERS, 9)
    again = SqlSink(databases.connect(), "billing")
    with pytest.raises(
        InvalidRequestError,
        match=r"applied up to offset 5, and this batch begins at 9.*Call seek\(consumer\)",
    ):
        apply(again, late.poll(ORDERS, 1))
    assert again.seek(late, [ORDERS]) == {ORDERS: 5}
    assert apply(again, late.poll(ORDERS, 3)) == [5, 6, 7]
    with pytest.raises(ZeroDivisionError):
        apply(again, [record(9)], fails)
    with pytest.raises(InvalidRequestError, match="this batch begins at 10"):
        apply(again, [record(10)])
    assert apply(again, late.poll(ORDERS, 1)) == [9], "offset 8 is the log's own hole"
    again.forget([ORDERS])
    with pytest.raises(InvalidRequestError, match="would be missed"):
        apply(again, [record(11)])
    assert apply(sink, reader.poll(ORDERS, 5)) == [10], "what the other has applied is skipped"
    assert applied(databases) == [(0, offset) for offset in (5, 6, 7, 9, 10)]


def test_a_topic_made_again_begins_anew_and_a_log_that_lost_records_is_refused(
    databases: Databases,
) -> None:
    sink = SqlSink(databases.connect(), "billing")
    reader = LogReader({ORDERS: [0, 1, 2]})
    sink.seek(reader)
    apply(sink, reader.poll(ORDERS, 3))
    with pytest.raises(
        OffsetOutOfRangeError, match="applied up to offset 3, and its log ends at 2"
    ):
        sink.seek(LogReader({ORDERS: [0, 1]}))
    topic_recreation = LogReader({ORDERS: [0, 1]}, topic_id=b"2" * 16)
    assert sink.seek(topic_recreation) == {ORDERS: 0}
    assert apply(sink, topic_recreation.poll(ORDERS, 2)) == [0, 1]
    sink.move({ORDERS: 1, OTHER: 40})
    assert sink.positions([ORDERS, OTHER]) == {ORDERS: 1, OTHER: 40}
    assert apply(sink, [record(0), record(1)]) == [1]


def test_columns_are_cut_where_what_was_applied_ends(databases: Databases) -> None:
    def batch(offsets: list[int]) -> TopicBatch:
        return TopicBatch(
            "orders",
            0,
            offsets[0],
            pa.record_batch({"n": offsets}),
            pa.array(offsets, pa.int64()),
            0,
            0,
            schema_id=7,
        )

    sink = SqlSink(databases.connect(), "billing")
    with sink.transaction(batch([0, 1, 2])) as tx:
        assert tx.records.offsets.to_pylist() == [0, 1, 2]
    with sink.transaction(batch([1, 2, 4, 5])) as tx:  # 3 is a hole in the log
        assert (tx.records.batch.to_pydict(), tx.records.offsets.to_pylist()) == (
            {"n": [4, 5]},
            [4, 5],
        )
        assert (tx.records.base_offset, tx.skipped, tx.records.schema_id) == (4, 2, 7)
    with sink.transaction([batch([4, 5]), batch([6, 7])]) as several:
        assert [part.offsets.to_pylist() for part in several.records] == [[6, 7]]
    with sink.transaction(batch([6, 7])) as tx:
        assert len(tx.records) == 0
    assert sink.positions([ORDERS]) == {ORDERS: 8}


@pytest.mark.parametrize("kind", ["another driver", "sqlalchemy", "duckdb"])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_transactions_over_the_same_records_one_is_rolled_back(
    kind: str, is_first: bool, tmp_path: pathlib.Path
) -> None:
    databases = Databases(kind, tmp_path)
    with_table(databases)
    zombie, successor = (
        SqlSink(databases.connect(), "billing"),
        SqlSink(databases.connect(), "billing"),
    )
    if not is_first:
        apply(zombie, [record(0)])
    with pytest.raises(
        (OffsetsMovedError, duckdb.Error)
    ) as raised:  # DuckDB alone lets two write at once
        apply(
            zombie,
            [record(1), record(2)],
            lambda: apply(successor, [record(1)]),
            before=kind != "duckdb",
        )
    if kind != "duckdb":
        assert isinstance(raised.value, OffsetsMovedError)
        assert "another consumer of 'billing' has moved the offset of orders-0" in str(raised.value)
        assert "call seek(consumer)" in str(raised.value)
    assert applied(databases) == [(0, 0)] * (not is_first) + [(0, 1)]
    assert apply(zombie, [record(1), record(2)]) == [2], (
        "what the successor has not applied is free"
    )
    databases.close()


def test_a_connection_that_makes_something_else_of_its_rows_is_read_all_the_same(
    tmp_path: pathlib.Path,
) -> None:
    connection = sqlite3.connect(tmp_path / "results")
    sink = SqlSink(connection, "billing")
    with sink.transaction([record(7)]):
        pass
    for made in (
        sqlite3.Row,
        lambda cursor, row: dict(
            zip([column[0] for column in cursor.description], row, strict=True)
        ),
    ):
        connection.row_factory = made
        assert sink.positions([ORDERS]) == {ORDERS: 8}
    connection.close()


def test_two_consumers_that_begin_a_partition_at_once_begin_at_the_same_offset(
    tmp_path: pathlib.Path,
) -> None:
    databases = Databases("another driver", tmp_path)
    connection = databases.connect()
    sink, other = SqlSink(connection, "billing"), SqlSink(databases.connect(), "billing")
    connection.before_insert = lambda: other.seek(LogReader({ORDERS: [4, 5]}))
    late = LogReader({ORDERS: [4, 5]})
    late.seek(ORDERS, 5)
    assert sink.seek(late) == {ORDERS: 4}
    assert late.position(ORDERS) == 4
    databases.close()


def polled(reader: LogReader, sink: SqlSink, key: TopicPartition) -> list[int]:
    return apply(sink, reader.poll(key, 3))


STEP = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["apply", "fail", "overtaken", "seek", "restart"]),
    st.integers(0, 1),
    st.integers(1, 4),
)


@given(steps=st.lists(STEP, max_size=25))
def test_whatever_two_consumers_do_each_record_is_applied_once_and_none_is_missed(
    steps: list[tuple[int, str, int, int]],
) -> None:
    logs = {ORDERS: list(range(30)), OTHER: [n for n in range(30) if n % 7]}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        databases = Databases("another driver", pathlib.Path(directory))
        with_table(databases)
        pairs = [(LogReader(logs), SqlSink(databases.connect(), "g")) for _ in range(2)]
        for first_reader, first_sink in pairs:
            first_sink.seek(first_reader)
        for who, what, partition, count in steps:
            reader, sink = pairs[who]
            key = (ORDERS, OTHER)[partition]
            if what == "seek":
                sink.seek(reader)
            elif what == "restart":
                pairs[who] = LogReader(logs), SqlSink(databases.connect(), "g")
                pairs[who][1].seek(pairs[who][0])
            else:
                happens: dict[str, Callable[[], object]] = {
                    "fail": fails,
                    "overtaken": partial(polled, *pairs[1 - who], key),
                }
                try:
                    apply(sink, reader.poll(key, count), happens.get(what, list), before=True)
                except (
                    OffsetsMovedError,
                    ZeroDivisionError,
                    InvalidRequestError,
                ):  # the last: another sink, behind a hole, is not led there
                    sink.seek(reader)
        for key, end in pairs[0][1].positions(list(logs)).items():
            found = [
                offset for partition, offset in applied(databases) if partition == key.partition
            ]
            assert found == [offset for offset in logs[key] if end is not None and offset < end]
        databases.close()


class AsyncReader:
    async def seek(self, key: TopicPartition, offset: int) -> None: ...


def test_bad_input_is_refused_with_a_sentence(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "results")
    connection = sqlite3.connect(path)
    sink = SqlSink(connection, "billing")
    for given_batch, says in (
        ("orders", "takes what poll"),
        ([record(1), record(0)], "comes behind 1; give records in the order"),
        ([record(0), record(0)], "comes behind 0"),
        ([b"0"], "takes Records, or TopicBatches"),
        (with_delivery_count([record(0)], 1), "records of a share group come in no order"),
    ):
        with pytest.raises(InvalidRequestError, match=says), sink.transaction(given_batch):  # type: ignore[type-var]
            pytest.fail("refused before the block")
    for arguments, says in (
        ((connection, ""), "group is ''"),
        ((connection, "g" * 250), "1 to 249"),
        (("sqlite:///x", "g"), "is no connection"),
        (
            (sqlalchemy.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT"), "g"),
            "commits each statement by itself",
        ),
    ):
        with pytest.raises(InvalidSettingError, match=says):
            SqlSink(*arguments)
    for table in ("a-b", "a.b.c", "x; DROP TABLE y", "1a", "", None):
        with pytest.raises(InvalidSettingError, match="table is"):
            SqlSink(connection, "g", table=table)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="paramstyle is 'percent'"):
        SqlSink(connection, "g", paramstyle="percent")
    connection.execute("CREATE TABLE mine (n INTEGER)")
    connection.execute("INSERT INTO mine VALUES (1)")
    with (
        pytest.raises(InvalidRequestError, match="has an open transaction"),
        sink.transaction([record(0)]),
    ):
        pytest.fail("the caller's transaction is not ours to commit")
    connection.rollback()
    with (
        pytest.raises(InvalidRequestError, match="was ended inside the block"),
        sink.transaction([record(0)]) as tx,
        tx.connection,
    ):
        tx.cursor.execute("INSERT INTO mine VALUES (2)")
    assert sink.positions([ORDERS]) == {ORDERS: None}
    with pytest.raises(InvalidRequestError, match="an offset is -1"):
        sink.move({ORDERS: -1})
    with pytest.raises(InvalidRequestError, match=r"write `await sink.seek_async\(consumer\)`"):
        sink.seek(AsyncReader())
    connection.close()


def test_a_hundred_partitions_of_two_topics_are_moved_at_once(tmp_path: pathlib.Path) -> None:
    databases = Databases("sqlalchemy", tmp_path)
    sink = SqlSink(databases.connect(), "billing", table="tailrace_offsets_2")
    keys = [
        TopicPartition(topic, partition)
        for topic, partition in itertools.product(("a", "b"), range(600))
    ]
    with sink.transaction([record(7, key.partition, key.topic) for key in keys]):
        pass
    assert sink.positions(keys) == dict.fromkeys(keys, 8)
    databases.close()
