"""Databases of a test's own, as `tailrace.idempotent` is given them; and a log without an
appliance, to read from.
"""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import duckdb
import sqlalchemy

from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition

paramstyle = "named"
"""This module is a driver's, too: that of `OtherDriver`."""


class OtherCursor:
    """A cursor of another driver: its style is this module's, and each of its own faults is
    DB-API's.
    """

    def __init__(self, connection: OtherDriver) -> None:
        self._owner = connection
        self._cursor = connection.real.cursor()

    def execute(self, text: str, values: Mapping[str, Any] | None = None) -> None:
        assert "?" not in text, "a driver gets its own parameter style"
        if text.startswith("INSERT"):
            before_insert, self._owner.before_insert = self._owner.before_insert, None
            if before_insert is not None:
                before_insert()
        self._cursor.execute(text, values or {})

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._cursor.fetchall()

    def close(self) -> None:
        self._cursor.close()


class OtherDriver:
    """A connection of DB-API 2.0 and nothing more: begins with the first change, takes its
    parameters by name.
    """

    def __init__(self, path: str) -> None:
        self.real = sqlite3.connect(path, timeout=0)
        self.before_insert: Callable[[], object] | None = None
        """Called just before the next row is inserted."""

    def cursor(self) -> OtherCursor:
        return OtherCursor(self)

    def begin(self) -> None:
        """Begin a transaction before a statement."""

    def commit(self) -> None:
        self.real.commit()

    def rollback(self) -> None:
        self.real.rollback()

    def close(self) -> None:
        self.real.close()


class CountingCursor(OtherCursor):
    """A cursor of a driver that begins transactions by itself."""

    def execute(self, text: str, values: Mapping[str, Any] | None = None) -> None:
        self._owner.begin()
        super().execute(text, values)


class CountingDriver(OtherDriver):
    """A connection that knows of its own commits alone, as psycopg2's: after the statement ROLLBACK
    it begins no other transaction, and the database commits each statement by itself.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.real.isolation_level = None
        self._has_begun = False

    def cursor(self) -> OtherCursor:
        return CountingCursor(self)

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.real.execute("BEGIN")

    def commit(self) -> None:
        self._has_begun = False
        super().commit()

    def rollback(self) -> None:
        self._has_begun = False
        super().rollback()


def _sqlite(path: str) -> Any:
    return sqlite3.connect(path, timeout=0)


def _sqlite_autocommit(path: str) -> Any:
    return sqlite3.connect(path, timeout=0, isolation_level=None)


def _engine(path: str) -> Any:
    return sqlalchemy.create_engine(
        f"sqlite:///{path}", poolclass=sqlalchemy.pool.NullPool, connect_args={"timeout": 0}
    )


def _duckdb(path: str) -> Any:
    return duckdb.connect(path)


CONNECT: dict[str, Callable[[str], Any]] = {
    "sqlite3": _sqlite,
    "sqlite3 in autocommit": _sqlite_autocommit,
    "another driver": OtherDriver,
    "a driver that counts transactions": CountingDriver,
    "sqlalchemy": _engine,
    "duckdb": _duckdb,
}


class Databases:
    """Connections to one database, each as a process of its own would have it."""

    def __init__(self, kind: str, directory: pathlib.Path) -> None:
        self.kind = kind
        self._path = str(directory / "results")
        self._opened: list[Any] = []

    def connect(self) -> Any:
        self._opened.append(CONNECT[self.kind](self._path))
        return self._opened[-1]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The committed rows."""
        with_cursor = _duckdb(self._path) if self.kind == "duckdb" else sqlite3.connect(self._path)
        try:
            return [tuple(row) for row in with_cursor.execute(query).fetchall()]
        finally:
            with_cursor.close()

    def close(self) -> None:
        for connection in self._opened:
            connection.dispose() if hasattr(connection, "dispose") else connection.close()


def write(cursor: Any, statement: str, *values: Any) -> None:
    """A change of the test's own, in the style of whatever cursor this is."""
    if hasattr(cursor, "exec_driver_sql"):
        cursor.exec_driver_sql(statement, tuple(values))
    elif isinstance(cursor, OtherCursor):
        names = [f"v{number}" for number in range(len(values))]
        for name in names:
            statement = statement.replace("?", f":{name}", 1)
        cursor.execute(statement, dict(zip(names, values, strict=True)))
    else:
        cursor.execute(statement, tuple(values))


def record(offset: int, partition: int = 0, topic: str = "orders") -> Record:
    return Record(topic, partition, offset, 0, 0, None, b"%d" % offset, [], 0)


class LogReader:
    """As much of a Consumer as a sink uses, over logs that are lists of offsets."""

    def __init__(
        self, logs: Mapping[TopicPartition, Sequence[int]], topic_id: bytes = b"1" * 16
    ) -> None:
        self._logs = logs
        self.topic_id = topic_id
        self.positions: dict[TopicPartition, int] = {}

    @property
    def _fetch_loop(self) -> Any:
        """As a Consumer's: the cursors of what is assigned, which know their topic."""
        cursor = SimpleNamespace(info=SimpleNamespace(topic_id=self.topic_id))
        return SimpleNamespace(cursors=dict.fromkeys(self._logs, cursor))

    def assignment(self) -> list[TopicPartition]:
        return list(self._logs)

    def seek(self, key: TopicPartition, offset: int) -> None:
        self.positions[key] = offset

    def position(self, key: TopicPartition) -> int:
        return self.positions.setdefault(key, self._logs[key][0] if self._logs[key] else 0)

    def end_offsets(self, keys: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {key: self._logs[key][-1] + 1 if self._logs[key] else 0 for key in keys}

    def poll(self, key: TopicPartition, count: int) -> list[Record]:
        found = [offset for offset in self._logs[key] if offset >= self.position(key)][:count]
        if found:
            self.positions[key] = found[-1] + 1
        return [record(offset, key.partition, key.topic) for offset in found]
