"""Statements in every driver's style, keys that are seen once, updates of the version that was
read.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import pickle
import sqlite3
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import InvalidRequestError, InvalidSettingError, Record
from tailrace.core.records import TopicName
from tailrace.idempotent import DedupTable, update_if_version
from tailrace.idempotent.dbapi import bound, is_integrity_error, key_bytes, paramstyle_of
from tests.kit.hosts.databases import CONNECT, Databases, record, write


@pytest.fixture(params=CONNECT)
def databases(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Databases]:
    made = Databases(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("style", "text", "is_named"),
    [
        ("qmark", "UPDATE t SET a = ? WHERE b = ?", False),
        ("format", "UPDATE t SET a = %s WHERE b = %s", False),
        ("numeric", "UPDATE t SET a = :1 WHERE b = :2", False),
        ("numeric_dollar", "UPDATE t SET a = $1 WHERE b = $2", False),
        ("named", "UPDATE t SET a = :p1 WHERE b = :p2", True),
        ("pyformat", "UPDATE t SET a = %(p1)s WHERE b = %(p2)s", True),
    ],
)
def test_a_statement_is_written_as_its_driver_reads_it(
    style: str, text: str, is_named: bool
) -> None:
    values = {"p1": 5, "p2": "x"} if is_named else (5, "x")
    assert bound("UPDATE t SET a = ? WHERE b = ?", [5, "x"], style) == (text, values)


def test_the_style_is_that_of_the_connections_module_or_of_one_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = types.ModuleType("some_driver")
    driver.paramstyle = "pyformat"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_driver", driver)
    of_driver = type("connection", (), {"__module__": "some_driver.extensions.deep"})
    assert paramstyle_of(of_driver()) == "pyformat"
    assert paramstyle_of(type("Mine", (of_driver,), {})()) == "pyformat", (
        "a subclass in the user's program"
    )
    with pytest.raises(InvalidSettingError, match="give paramstyle= as its driver's module has it"):
        paramstyle_of(type("Pooled", (), {"__module__": "some_pool"})())


def test_a_violated_key_is_known_by_the_exceptions_name_or_by_its_sqlstate() -> None:
    error = type("DatabaseError", (Exception,), {})
    with_state = type("DatabaseError", (Exception,), {"sqlstate": "23505"})
    assert is_integrity_error(sqlite3.IntegrityError("UNIQUE constraint failed"))
    assert is_integrity_error(type("UniqueViolation", (sqlite3.IntegrityError,), {})())
    assert is_integrity_error(with_state())
    assert is_integrity_error(error({"C": "23505", "M": "duplicate key"}))
    assert not is_integrity_error(error({"C": "40001"}))
    assert not is_integrity_error(sqlite3.OperationalError("database is locked"))
    assert not is_integrity_error(error())


@given(
    keys=st.lists(
        st.one_of(st.binary(max_size=300), st.text(max_size=80), st.integers()), max_size=40
    )
)
def test_of_equal_keys_the_first_is_new(keys: list[Any]) -> None:
    connection = sqlite3.connect(":memory:")
    table, seen = DedupTable(connection), set()
    for key in keys:
        assert table.first_time(key) == (key_bytes(key) not in seen)
        seen.add(key_bytes(key))
    connection.close()


def test_a_key_is_new_until_its_transaction_is_committed_and_again_when_it_has_expired(
    databases: Databases,
) -> None:
    now_ms = 1_000_000
    given_one = databases.connect()
    table = DedupTable(given_one, "seen_orders", wall_ms=lambda: now_ms)

    def ask(key: Any, end: str) -> bool:
        if databases.kind == "sqlalchemy":
            with given_one.connect() as connection:
                answer = table.first_time(key, connection)
                getattr(connection, end)()
                return answer
        if databases.kind in ("duckdb", "sqlite3 in autocommit"):
            given_one.execute("BEGIN TRANSACTION")
        answer = table.first_time(key)
        getattr(given_one, end)()
        return answer

    assert ask(b"o-1", "rollback")
    assert ask("o-1", "commit"), "what was rolled back was not seen"
    assert not ask(b"o-1", "commit")
    assert ask(record(7), "commit")
    assert not ask(record(7), "commit")
    assert ask(record(7, 1), "commit")
    now_ms += 60_000
    assert ask("late", "commit")
    assert table.expire(dt.timedelta(minutes=2)) == 0
    assert table.expire(dt.timedelta(seconds=59)) == 3
    assert ask("o-1", "commit")
    assert not ask("late", "commit")
    # Another process, and a table that is there already.
    assert not DedupTable(databases.connect(), "seen_orders").expire(dt.timedelta(days=36500))


def read(offset: int, topic_id: bytes, created_us: int = 0) -> Record:
    """A record that a consumer has read."""
    return record(offset, topic=TopicName("orders", topic_id, created_us))


def test_a_record_of_a_topic_that_was_made_again_is_another(tmp_path: pathlib.Path) -> None:
    """Its key was topic, partition and offset: of the new topic's records none was applied."""
    connection = sqlite3.connect(tmp_path / "results")
    table = DedupTable(connection)
    old, new = ([read(offset, bytes([number]) * 16) for offset in range(10)] for number in (1, 2))
    assert [table.first_time(one) for one in (*old, *old, *new, *new)] == [True] * 10 + [
        False
    ] * 10 + [True] * 10 + [False] * 10
    assert key_bytes(old[3]) != key_bytes(new[3])
    assert old[3] == record(3), "a name equals the plain text"
    connection.close()


def test_a_row_of_the_first_version_stands_for_the_topic_that_there_was_when_it_was_written(
    tmp_path: pathlib.Path,
) -> None:
    connection = sqlite3.connect(tmp_path / "results")
    table = DedupTable(connection, wall_ms=lambda: 5_000)
    assert table.first_time(b"orders/0/7"), "as the first version wrote record 7"
    assert not table.first_time(read(7, b"1" * 16, created_us=4_000_000))
    assert table.first_time(read(7, b"2" * 16, created_us=6_000_000)), "made again since"
    assert not table.first_time(record(7)), "of a topic that is not known"
    connection.close()


def test_a_clock_that_is_set_expires_nothing_early(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = sqlite3.connect(tmp_path / "results")
    table = DedupTable(connection)
    assert table.first_time("o-1")
    connection.commit()
    year_ns = 365 * 86_400 * 10**9
    for years in (8, -8):
        real = time.time_ns
        monkeypatch.setattr(
            time, "time_ns", lambda real=real, years=years: real() + years * year_ns
        )
        assert table.expire(dt.timedelta(days=7)) == 0
        assert not table.first_time("o-1")
        assert table.first_time(years)
        connection.commit()
        monkeypatch.undo()
        assert table.expire(dt.timedelta(days=7)) == 0
        assert not table.first_time(years)
        connection.commit()
    connection.close()


def test_a_topics_name_survives_pickling_with_its_id() -> None:
    (again,) = pickle.loads(pickle.dumps([read(7, b"1" * 16, 5)]))
    assert (again, again.topic_id, again.topic.created_us) == (record(7), b"1" * 16, 5)


def test_a_dedup_table_outside_of_a_transaction_is_refused(tmp_path: pathlib.Path) -> None:
    plain, engine = Databases("sqlite3 in autocommit", tmp_path), Databases("sqlalchemy", tmp_path)
    table = DedupTable(plain.connect())
    with pytest.raises(InvalidRequestError, match="begin a transaction first"):
        table.first_time("a")
    with pytest.raises(InvalidRequestError, match=r"first_time\(key, tx.connection\)"):
        DedupTable(engine.connect()).first_time("a")
    with pytest.raises(InvalidRequestError, match="older_than is 5"):
        table.expire(5)  # type: ignore[arg-type]
    for key in (None, 1.5, True, ("orders", 0)):
        with pytest.raises(
            InvalidRequestError, match="it takes bytes, text, a whole number or a Record"
        ):
            key_bytes(key)
    plain.close()
    engine.close()


def test_only_the_version_that_was_read_is_updated(databases: Databases) -> None:
    database = databases.connect()
    connection = database.connect() if databases.kind == "sqlalchemy" else database

    def change(*arguments: Any, **names: Any) -> bool:
        if databases.kind in ("duckdb", "sqlite3 in autocommit"):
            connection.execute("BEGIN TRANSACTION")
        answer = update_if_version(connection, *arguments, **names)
        connection.commit()
        return answer

    cursor = connection if databases.kind in ("sqlalchemy", "duckdb") else connection.cursor()
    write(
        cursor,
        "CREATE TABLE accounts (id INTEGER, branch VARCHAR(9), version INTEGER, balance INTEGER)",
    )
    write(cursor, "INSERT INTO accounts VALUES (7, 'north', 1, 100)")
    if databases.kind not in ("duckdb", "sqlite3 in autocommit"):
        connection.commit()
    assert change("accounts", 7, 1, {"balance": 90})
    assert not change("accounts", 7, 1, {"balance": 90}), "a second time it changes nothing"
    assert not change("accounts", 8, 2, {"balance": 0})
    assert change("accounts", {"id": 7, "branch": "north"}, 2, {"balance": 80})
    assert change(
        "accounts", "north", 3, {"balance": 70}, key_column="branch", version_column="version"
    )
    assert change("accounts", 7, 4, {}), "the version alone"
    assert databases.rows("SELECT id, version, balance FROM accounts") == [(7, 5, 70)]
    if connection is not database:
        connection.close()


def test_names_that_cannot_stand_in_a_statement_are_refused() -> None:
    connection = sqlite3.connect(":memory:")
    names: list[tuple[Any, ...]] = [
        ("a;b", 1, 1, {"x": 1}),
        ("a", {"x y": 1}, 1, {"x": 1}),
        ("a", 1, 1, {"x = 1 --": 1}),
    ]
    for arguments in names:
        with pytest.raises(InvalidSettingError, match="letters, digits and underscores"):
            update_if_version(connection, *arguments)
    others: list[tuple[Any, ...]] = [
        ("a", {}, 1, {"x": 1}),
        ("a", 1, 1, {"version": 1}),
        ("a", 1, "1", {"x": 1}),
        ("a", 1, 1, [1]),
    ]
    for arguments in others:
        with pytest.raises(InvalidRequestError):
            update_if_version(connection, *arguments)
    connection.close()
