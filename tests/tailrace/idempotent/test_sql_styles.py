"""The SQL helpers over drivers of each parameter style, as strict as those of PostgreSQL and MySQL,
and over SQLAlchemy's dialects.
"""

from __future__ import annotations

import pathlib
import re
import sqlite3
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sqlalchemy

from tailrace import TopicPartition
from tailrace.idempotent import DedupTable, OffsetsMovedError, SqlSink, update_if_version
from tailrace.idempotent.dbapi import _INNER, _OUTER
from tests.kit.hosts.databases import LogReader, record

ORDERS = TopicPartition("orders", 0)
MARKS = {
    "qmark": r"\?",
    "format": r"%s",
    "pyformat": r"%\((\w+)\)s",
    "named": r":(\w+)",
    "numeric": r":(\d+)",
    "numeric_dollar": r"\$(\d+)",
}


class Error(Exception):
    """DB-API's."""


class DatabaseError(Error):
    """DB-API's."""


class IntegrityError(DatabaseError):
    """DB-API's."""


class Cursor:
    """Takes one style only, and nothing after a failure, as PostgreSQL does."""

    def __init__(self, owner: Driver) -> None:
        self._owner = owner
        self._cursor = owner.real.cursor()
        self.rowcount = -1

    def execute(self, text: str, values: Any = None) -> None:
        if self._owner.has_failed:
            raise DatabaseError(
                "current transaction is aborted, commands ignored until end of transaction block"
            )
        text, given = self._owner.translated(text, values)
        try:
            self._cursor.execute(text, given)
        except sqlite3.Error as error:
            self._owner.has_failed = True
            raise (IntegrityError if isinstance(error, sqlite3.IntegrityError) else DatabaseError)(
                str(error)
            ) from error
        self.rowcount = self._cursor.rowcount

    def fetchall(self) -> list[Any]:
        rows = self._cursor.fetchall()
        names = [column[0] for column in self._cursor.description]
        return (
            [dict(zip(names, row, strict=True)) for row in rows]
            if self._owner.makes_dicts
            else rows
        )

    def close(self) -> None:
        self._cursor.close()


class Driver:
    """A connection, with MySQL's autocommit methods."""

    def __init__(self, path: str, style: str, *, makes_dicts: bool = False) -> None:
        self.real = sqlite3.connect(path, timeout=0)
        self.style = style
        self.makes_dicts = makes_dicts
        self.has_failed = False

    def translated(self, text: str, values: Any) -> tuple[str, Any]:
        """For SQLite. What is not of this style is refused, as a driver would."""
        for style, mark in MARKS.items():
            if style != self.style and not (
                style in ("numeric", "named") and self.style in ("numeric", "named")
            ):
                assert not re.search(mark, text), f"{text!r} has a mark of {style}"
        found = re.findall(MARKS[self.style], text)
        if values is None:
            assert not found
            return text, ()
        if self.style in ("pyformat", "named"):
            assert isinstance(values, Mapping)
            assert set(found) == set(values)
            return re.sub(MARKS[self.style], r":\1", text), values
        assert isinstance(values, tuple)
        assert len(found) == len(values)
        if self.style.startswith("numeric"):
            assert found == [str(number) for number in range(1, len(values) + 1)]
        return re.sub(MARKS[self.style], "?", text), values

    def stand_aside(self, commit: Callable[[], None]) -> None:
        """Another connection commits while this one's transaction is open, as a database allows
        that has several writers at a time. SQLite has one.
        """
        self.real.rollback()
        commit()
        for savepoint in (_OUTER, _INNER):
            self.real.execute(f"SAVEPOINT {savepoint}")

    def cursor(self) -> Cursor:
        return Cursor(self)

    def get_autocommit(self) -> bool:
        return False

    def autocommit(self, _value: bool) -> None:
        """A method, as PyMySQL has it."""

    def commit(self) -> None:
        assert not self.has_failed, "PostgreSQL would roll back here"
        self.real.commit()

    def rollback(self) -> None:
        self.has_failed = False
        self.real.rollback()

    def close(self) -> None:
        self.real.close()


@pytest.fixture(params=MARKS)
def style(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The driver's module tells it, as DB-API prescribes."""
    module = types.ModuleType("strict_driver")
    module.paramstyle = request.param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strict_driver", module)
    monkeypatch.setattr(Driver, "__module__", "strict_driver.connections")
    return str(request.param)


def apply(sink: SqlSink, offset: int, meanwhile: Callable[[Any], None] = lambda _: None) -> None:
    """A transaction over one record, that was not applied yet."""
    with sink.transaction([record(offset)]) as tx:
        assert tx.records
        meanwhile(tx.cursor)


@pytest.mark.parametrize("makes_dicts", [False, True])
def test_offsets_keys_and_versions_with_every_style(
    style: str, makes_dicts: bool, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "results")
    one, two = (Driver(path, style, makes_dicts=makes_dicts) for _ in range(2))
    reader = LogReader({ORDERS: range(10)})
    sink, other = SqlSink(one, "billing"), SqlSink(two, "billing", paramstyle=style)
    assert sink.seek(reader) == {ORDERS: 0}
    seen = DedupTable(one)
    with sink.transaction([record(0), record(1)]) as tx:
        assert [item.offset for item in tx.records] == [0, 1]
        assert seen.first_time(b"a")
        assert not seen.first_time(b"a")
        tx.cursor.execute(
            "CREATE TABLE accounts (id INTEGER PRIMARY KEY, version INTEGER, balance INTEGER)"
        )
        tx.cursor.execute("INSERT INTO accounts VALUES (7, 1, 100)")
    assert sink.positions([ORDERS]) == {ORDERS: 2}
    with sink.transaction([record(1), record(2)]) as tx:
        assert [item.offset for item in tx.records] == [2]
        assert update_if_version(tx.connection, "accounts", 7, 1, {"balance": 90})
        assert not update_if_version(tx.connection, "accounts", 7, 1, {"balance": 80})

    def faster(_cursor: Any) -> None:
        two.stand_aside(lambda: apply(sink, 3))

    with pytest.raises(OffsetsMovedError):
        apply(other, 3, faster)
    with other.transaction([record(3), record(4)]) as tx:
        assert [item.offset for item in tx.records] == [4]
    with pytest.raises(DatabaseError, match="UNIQUE"):
        apply(sink, 5, lambda cursor: cursor.execute("INSERT INTO accounts VALUES (7, 1, 100)"))
    assert sink.positions([ORDERS]) == {ORDERS: 5}
    sink.move({ORDERS: 1})
    assert other.positions([ORDERS]) == {ORDERS: 1}
    for connection in (one, two):
        connection.close()


def test_two_who_begin_a_partition_at_once_with_every_style(
    style: str, tmp_path: pathlib.Path
) -> None:
    """A key that is violated fails PostgreSQL's transaction: it is rolled back, and the other's row
    is found.
    """
    path = str(tmp_path / "results")
    one, two = Driver(path, style), Driver(path, style)
    sink, other = SqlSink(one, "billing"), SqlSink(two, "billing")

    def faster(_cursor: Any) -> None:
        one.stand_aside(lambda: apply(other, 0))

    with pytest.raises(OffsetsMovedError):
        apply(sink, 0, faster)
    assert not one.has_failed
    assert sink.positions([ORDERS]) == {ORDERS: 1}
    for connection in (one, two):
        connection.close()


@pytest.mark.parametrize("dialect", ["qmark", "named"])
@pytest.mark.parametrize("is_engine", [True, False])
def test_sqlalchemy_in_the_style_of_its_dialect(
    dialect: Any, is_engine: bool, tmp_path: pathlib.Path
) -> None:
    engine = sqlalchemy.create_engine(
        f"sqlite:///{tmp_path}/results", paramstyle=dialect, poolclass=sqlalchemy.pool.NullPool
    )
    assert engine.dialect.paramstyle == dialect
    given: Any = engine if is_engine else engine.connect()
    sink, seen = SqlSink(given, "billing"), DedupTable(given)
    reader = LogReader({ORDERS: range(10)})
    sink.seek(reader)
    for first in (0, 2):
        with sink.transaction([record(first), record(first + 1)]) as tx:
            assert seen.first_time(record(first), tx.connection)
            assert not seen.first_time(record(first), tx.connection)
            tx.cursor.execute(
                sqlalchemy.text(
                    "CREATE TABLE IF NOT EXISTS accounts (id INTEGER, version INTEGER, balance "
                    "INTEGER)"
                )
            )
            tx.cursor.execute(
                sqlalchemy.text("INSERT INTO accounts VALUES (:id, 1, 100)"), {"id": first}
            )
            assert update_if_version(tx.connection, "accounts", first, 1, {"balance": 90})

    def fails(cursor: Any) -> None:
        cursor.execute(sqlalchemy.text("DELETE FROM accounts"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply(sink, 4, fails)
    with engine.connect() as connection:
        assert connection.exec_driver_sql(
            "SELECT id, version, balance FROM accounts ORDER BY id"
        ).fetchall() == [(0, 2, 90), (2, 2, 90)]
    assert SqlSink(engine, "billing").positions([ORDERS]) == {ORDERS: 4}
    if not is_engine:
        given.close()
    engine.dispose()
