"""A block that ends its transaction by itself, and records that come in more than one: no offset
moves without the effects before it, over every driver.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace import InvalidRequestError, TopicPartition
from tailrace.idempotent import SqlSink
from tests.kit.hosts.databases import CONNECT, Databases, LogReader, record, write

ORDERS = TopicPartition("orders", 0)
COMMIT_BY_THEMSELVES = ("duckdb", "sqlite3 in autocommit", "a driver that counts transactions")
INSERT = "INSERT INTO sales (partition_number, record_offset) VALUES (?, ?)"


@pytest.fixture(params=CONNECT)
def databases(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Databases]:
    made = Databases(request.param, tmp_path)
    with SqlSink(made.connect(), "schema").transaction([record(0, topic="none")]) as tx:
        write(
            tx.cursor,
            "CREATE TABLE sales (partition_number INTEGER, record_offset INTEGER PRIMARY KEY)",
        )
    yield made
    made.close()


def ended_by(how: str, tx: Any) -> None:
    if how in ("commit()", "rollback()"):
        method = getattr(tx.connection, how[:-2])
        if hasattr(
            tx.connection, "exec_driver_sql"
        ):  # SQLAlchemy refuses its own: the driver's is beneath it
            method = getattr(tx.connection.connection.dbapi_connection, how[:-2])
        method()
    else:
        with contextlib.suppress(Exception):  # a violated key
            write(tx.cursor, how)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    "how",
    ["rollback()", "commit()", "ROLLBACK", "COMMIT", "INSERT OR ROLLBACK INTO sales VALUES (0, 0)"],
)
def test_a_block_that_ends_its_transaction_moves_no_offset(
    databases: Databases, how: str, goes_on: bool
) -> None:
    """Offset 10 was stored, with five of ten rows, and no error."""
    if databases.kind == "duckdb" and "OR ROLLBACK" in how:
        pytest.skip("DuckDB has no OR ROLLBACK")
    sink = SqlSink(databases.connect(), "billing")
    with sink.transaction([record(0)]) as tx:
        write(tx.cursor, INSERT, 0, 0)
    with pytest.raises(InvalidRequestError, match="the transaction was ended inside the block"):
        apply_ten(sink, how, goes_on=goes_on)
    assert sink.positions([ORDERS]) == {ORDERS: 1}
    commits_by_itself = (
        databases.kind in COMMIT_BY_THEMSELVES and goes_on
    )  # behind the end of the transaction
    if how.lower() not in ("commit", "commit()") and not commits_by_itself:
        assert databases.rows("SELECT record_offset FROM sales") == [(0,)]
    with sink.transaction([]):
        pass


def apply_ten(sink: SqlSink, how: str, *, goes_on: bool) -> None:
    with sink.transaction([record(n) for n in range(1, 11)]) as tx:
        for item in tx.records[:5]:
            write(tx.cursor, INSERT, 0, item.offset)
        ended_by(how, tx)
        for item in tx.records[5:] if goes_on else ():  # in another transaction, or in none
            write(tx.cursor, INSERT, 0, item.offset)


def test_savepoints_of_the_block_itself_are_its_own(databases: Databases) -> None:
    if databases.kind == "duckdb":
        pytest.skip("DuckDB has no savepoints")
    sink = SqlSink(databases.connect(), "billing")
    with sink.transaction([record(0), record(1)]) as tx:
        write(tx.cursor, "SAVEPOINT mine")
        write(tx.cursor, INSERT, 0, 0)
        write(tx.cursor, "ROLLBACK TO SAVEPOINT mine")
        write(tx.cursor, INSERT, 0, 1)
    assert databases.rows("SELECT record_offset FROM sales") == [(1,)]
    assert sink.positions([ORDERS]) == {ORDERS: 2}


def test_one_poll_applied_in_two_transactions_is_refused(databases: Databases) -> None:
    """The odd ones moved the offset behind the even ones, which were taken for applied."""
    sink, reader = SqlSink(databases.connect(), "billing"), LogReader({ORDERS: range(10)})
    sink.seek(reader)
    polled = reader.poll(ORDERS, 10)
    with sink.transaction([item for item in polled if item.offset % 2]) as tx:
        for item in tx.records:
            write(tx.cursor, INSERT, 0, item.offset)
    even = [item for item in polled if item.offset % 2 == 0]
    with (
        pytest.raises(
            InvalidRequestError, match="offset 0 of orders-0 was left out of an earlier transaction"
        ),
        sink.transaction(even),
    ):
        raise AssertionError("the block is not begun")
    with (
        pytest.raises(InvalidRequestError, match="offset 8 of orders-0 was left out"),
        sink.transaction(even[-1:]),
    ):
        raise AssertionError("the block is not begun")
    sink.move({ORDERS: 0})
    write_all(sink, databases, even)
    assert sorted(databases.rows("SELECT record_offset FROM sales")) == [
        (offset,) for offset in range(10)
    ]


def write_all(sink: SqlSink, databases: Databases, records: list[Any]) -> None:
    with sink.transaction(records) as tx:
        for item in tx.records:
            write(tx.cursor, INSERT, 0, item.offset)


def test_one_poll_applied_in_two_transactions_one_behind_the_other_is_right(
    databases: Databases,
) -> None:
    sink, reader = SqlSink(databases.connect(), "billing"), LogReader({ORDERS: [0, 1, 3, 4, 7]})
    sink.seek(reader)
    polled = reader.poll(ORDERS, 10)
    for part in (polled[:2], polled[2:], polled):
        write_all(sink, databases, part)
    assert databases.rows("SELECT record_offset FROM sales ORDER BY 1") == [
        (0,),
        (1,),
        (3,),
        (4,),
        (7,),
    ]
