"""Transactions and statements on a SQL connection of any driver.

A connection is of DB-API 2.0 (PEP 249) or of SQLAlchemy. An engine makes connections. Statements
are written with `?` and rendered in the driver's parameter style.

Owner: the caller. A connection is one thread's, and has no open transaction when
    `Database.transaction` is entered.
Invariants:
- Statements inside `Database.transaction` are committed together, or not at all. A connection that
  commits each statement by itself is refused.
- The transaction is the same from `Session.watch` to `Session.end_watch`. A statement or a method
  of the driver that ended it is found.
Crash: the database rolls back a transaction that did not reach its commit.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailrace.core.errors import InvalidRequestError, InvalidSettingError, NotSupportedError
from tailrace.core.records import Record

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OUTER, _INNER = "tailrace_transaction", "tailrace_block"
"""Savepoints. The inner one is released before the offsets are stored: without it the transaction
has ended. A driver may then still be in one as far as it knows, and the database commit each
statement by itself (psycopg2 after "ROLLBACK"). The outer one is released last.
"""
_TRANSACTION_ID = {"duckdb": "SELECT txid_current()", "mssql": "SELECT CURRENT_TRANSACTION_ID()"}
"""Database without RELEASE SAVEPOINT -> query for the id of the transaction."""
_ENDED = (
    "the transaction was ended inside the block, so effects and offsets are not committed "
    "together; call neither commit() nor rollback() there, write no "
    "COMMIT, ROLLBACK, OR ROLLBACK and no statement that commits by itself (DDL on MySQL), and no "
    "`with connection:`, which commits"
)
_STYLES = ("qmark", "format", "pyformat", "numeric", "numeric_dollar", "named")


def identifier(label: str, given: object, parts_max: int = 1) -> str:
    """A name that needs no quotes in a statement. `parts_max` 2 allows `schema.table`. Raises
    InvalidSettingError.
    """
    parts = given.split(".") if isinstance(given, str) else []
    if not 1 <= len(parts) <= parts_max or not all(_IDENTIFIER.fullmatch(part) for part in parts):
        raise InvalidSettingError(
            f"{label} is {given!r:.100}; it takes letters, digits and underscores, and no digit "
            "first"
        )
    return ".".join(parts)


def key_bytes(key: object) -> bytes:
    """A key of the user's as bytes: text as UTF-8, a number in decimal, a Record as its topic's id,
    partition and offset. A recreated topic has another id. Raises InvalidRequestError.
    """
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, Record):
        return f"{key.topic_id.hex() or key.topic}/{key.partition}/{key.offset}".encode()
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key).encode()
    raise InvalidRequestError(
        f"a key is {key!r:.100}; it takes bytes, text, a whole number or a Record"
    )


def earlier_key_bytes(record: Record) -> bytes:
    """The bytes of a record in version 0.1, which wrote the topic's name instead of its id."""
    return f"{record.topic}/{record.partition}/{record.offset}".encode()


def bound(statement: str, values: Sequence[Any], style: str) -> tuple[str, Any]:
    """Render a statement with `?` and its values in a driver's parameter style."""
    if style == "qmark":
        return statement, tuple(values)
    if style == "format":
        return statement.replace("?", "%s"), tuple(values)
    marks = {"pyformat": "%(p{})s", "named": ":p{}", "numeric": ":{}", "numeric_dollar": "${}"}[
        style
    ]
    pieces = statement.split("?")
    text = pieces[0] + "".join(
        marks.format(number) + piece for number, piece in enumerate(pieces[1:], 1)
    )
    if style in ("numeric", "numeric_dollar"):
        return text, tuple(values)
    return text, {f"p{number}": value for number, value in enumerate(values, 1)}


def is_integrity_error(error: BaseException) -> bool:
    """True if a unique key or another constraint was violated.

    DB-API prescribes the name of the exception, but not its module. Drivers that raise another one
    (pg8000) have an SQLSTATE of class 23.
    """
    if any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__):
        return True
    first = error.args[0] if error.args else None
    state = getattr(error, "sqlstate", None) or (
        first.get("C") if isinstance(first, dict) else None
    )
    return isinstance(state, str) and state.startswith("23")


def _is_sqlalchemy(given: object) -> bool:
    return hasattr(given, "dialect") and (
        hasattr(given, "exec_driver_sql") or hasattr(given, "begin")
    )


def paramstyle_of(connection: Any) -> str:
    """The parameter style of the module that a connection comes from. Raises
    InvalidSettingError.
    """
    if _is_sqlalchemy(connection):
        return str(connection.dialect.paramstyle)
    for kind in type(connection).__mro__:
        module = kind.__module__
        while module:
            style = getattr(sys.modules.get(module), "paramstyle", None)
            if style in _STYLES:
                return str(style)
            module = module.rpartition(".")[0]
    raise InvalidSettingError(
        f"the parameter style of {type(connection).__module__}.{type(connection).__qualname__} is "
        "not known; "
        f"give paramstyle= as its driver's module has it, or a SQLAlchemy engine"
    )


def _module_of(connection: Any) -> str:
    """The driver's top module. It is found for subclasses of its connection too."""
    homes = [kind.__module__.partition(".")[0].lstrip("_") for kind in type(connection).__mro__]
    return next((home for home in homes if home in ("sqlite3", "duckdb")), homes[0])


def commits_each_statement(connection: Any) -> bool:
    """True if the driver is known to commit every statement by itself (autocommit)."""
    driver = connection.connection.dbapi_connection if _is_sqlalchemy(connection) else connection
    if _module_of(driver) == "sqlite3":
        # From Python 3.12 on. With -1 isolation_level decides, as before.
        autocommit = getattr(driver, "autocommit", -1)
        return (
            autocommit is True or (autocommit == -1 and driver.isolation_level is None)
        ) and not driver.in_transaction
    get_autocommit = getattr(driver, "get_autocommit", None)
    return getattr(driver, "autocommit", None) is True or (
        callable(get_autocommit) and bool(get_autocommit())
    )


class Session:
    """Statements on one connection, in its present transaction."""

    def __init__(self, connection: Any, paramstyle: str | None = None) -> None:
        if paramstyle is not None and paramstyle not in _STYLES:
            raise InvalidSettingError(
                f"paramstyle is {paramstyle!r:.100}; it takes one of {', '.join(_STYLES)}"
            )
        self.connection = connection
        self._style = paramstyle or paramstyle_of(connection)
        self._is_sqlalchemy = _is_sqlalchemy(connection)
        # DuckDB's cursor() is a connection of its own, outside of the transaction.
        self._is_its_own_cursor = not self._is_sqlalchemy and _module_of(connection) == "duckdb"
        self.is_begun_here = False
        self._question = ""
        """Query for the transaction's id. Empty: a savepoint is used."""
        self._transaction_id: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def cursor(self) -> Iterator[Any]:
        """A cursor in this connection's transaction. With SQLAlchemy, which has no cursors, it is
        the connection.
        """
        if self._is_sqlalchemy or self._is_its_own_cursor:
            yield self.connection
        else:
            with contextlib.closing(self.connection.cursor()) as cursor:
                yield cursor

    def watch(self) -> None:
        """Let `refuse_ended` and `end_watch` find from now on that the transaction has ended.
        Raises NotSupportedError for a database without savepoints and transaction ids.
        """
        self._question = _TRANSACTION_ID.get(self._dialect(), "")
        if self._question:
            self._transaction_id = self.rows(self._question)
            return
        try:
            self.define(f"SAVEPOINT {_OUTER}")
            self.define(f"SAVEPOINT {_INNER}")
        except Exception as error:
            raise NotSupportedError(
                f"the database refuses SAVEPOINT ({error!s:.200}), by which it is found that a "
                "block has ended its transaction"
            ) from error

    def refuse_ended(self) -> None:
        """Raise InvalidRequestError if the transaction of `watch` has ended: by COMMIT, ROLLBACK, a
        method of the driver, `OR ROLLBACK` of SQLite, or the implicit commit of a DDL statement.
        The caller then rolls back the transaction that may have begun meanwhile. Call it once,
        before offsets are stored.
        """
        is_over = self.is_begun_here and getattr(self.connection, "in_transaction", True) is False
        if is_over or (self._question and self.rows(self._question) != self._transaction_id):
            raise InvalidRequestError(_ENDED)
        self._release(_INNER)

    def end_watch(self) -> None:
        """Give up the savepoint of `watch`. Call it last. Some SQLite drivers begin a transaction
        with the first change only. The savepoint is then the transaction, and this commits it.
        """
        self._release(_OUTER)

    def _release(self, savepoint: str) -> None:
        """Release a savepoint. Raises InvalidRequestError if it is gone."""
        if self._question:
            return
        try:
            self.define(f"RELEASE SAVEPOINT {savepoint}")
        except Exception as error:
            # PostgreSQL, MySQL and SQLite name a missing savepoint.
            if "savepoint" not in str(error).lower():
                raise
            raise InvalidRequestError(_ENDED) from error

    def _dialect(self) -> str:
        """The database's name, as in _TRANSACTION_ID."""
        if self._is_sqlalchemy:
            return str(self.connection.dialect.name)
        module = _module_of(self.connection)
        return "mssql" if module == "pymssql" else module

    def change(self, statement: str, *values: Any) -> int:
        """Run a statement. Returns the number of changed rows. Raises NotSupportedError if the
        driver does not report it.
        """
        with self._done(statement, values) as result:
            count = int(result.rowcount)
        if count < 0:
            raise NotSupportedError(
                f"{type(self.connection).__module__} does not say how many rows a statement has "
                "changed; use SQLAlchemy over it"
            )
        return count

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query. Returns all its rows."""
        with self._done(statement, values) as result:
            # A connection may return dicts as rows. Iterating over one gives its columns' names.
            return [
                tuple(row.values() if isinstance(row, Mapping) else row)
                for row in result.fetchall()
            ]

    def define(self, statement: str) -> None:
        """Run a DDL statement, or another one without a result."""
        with self._done(statement, ()):
            pass

    @contextlib.contextmanager
    def _done(self, statement: str, values: Sequence[Any]) -> Iterator[Any]:
        text, given = bound(statement, values, self._style)
        if self._is_sqlalchemy:
            with contextlib.closing(self.connection.exec_driver_sql(text, given)) as result:
                yield result
            return
        with self.cursor() as cursor:
            cursor.execute(*((text, given) if values else (text,)))
            yield cursor


class Database:
    """Transactions on the user's connection or engine."""

    def __init__(self, given: Any, paramstyle: str | None = None) -> None:
        if hasattr(given, "sync_engine"):
            raise InvalidSettingError(
                "an asynchronous engine cannot be used here; give its sync_engine, and call from "
                "asyncio.to_thread"
            )
        if not _is_sqlalchemy(given) and not all(
            hasattr(given, name) for name in ("cursor", "commit", "rollback")
        ):
            raise InvalidSettingError(
                f"{given!r:.100} is no connection; give one of DB-API 2.0 (sqlite3, psycopg, "
                "...), or a SQLAlchemy engine"
            )
        self.given = given
        self.is_engine = _is_sqlalchemy(given) and not hasattr(given, "exec_driver_sql")
        self._paramstyle = paramstyle
        if not self.is_engine:
            Session(given, paramstyle)  # raises now if it cannot be used

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Session]:
        """Run one transaction. It is committed at the end of the block, and rolled back if that
        raises. Raises InvalidRequestError, InvalidSettingError, and what the driver raises.
        """
        if self.is_engine or _is_sqlalchemy(self.given):
            with self.given.begin() if self.is_engine else self._of_connection() as connection:
                session = Session(connection, self._paramstyle)
                _refuse_autocommit(session.connection)
                yield session
            return
        explicit = self._begin()
        try:
            session = Session(self.given, self._paramstyle)
            session.is_begun_here = bool(explicit)
            yield session
            self.given.execute("COMMIT") if explicit else self.given.commit()
        except BaseException as error:
            self._roll_back(error, explicit)
            raise

    @contextlib.contextmanager
    def _of_connection(self) -> Iterator[Any]:
        with self.given.begin():
            yield self.given

    def _begin(self) -> str:
        """Begin a transaction, if the driver does not do it by itself or does it too late. Returns
        the statement that began it, or "".

        SQLite may refuse a reader that becomes a writer. The transaction is a writer's from the
        start.
        """
        module = _module_of(self.given)
        if module == "sqlite3" and getattr(self.given, "autocommit", -1) is not False:
            if self.given.in_transaction:
                raise InvalidRequestError(
                    "the connection has an open transaction; commit it or roll it back first"
                )
            explicit = "BEGIN IMMEDIATE"
        elif module == "duckdb":
            explicit = "BEGIN TRANSACTION"
        else:
            _refuse_autocommit(self.given)
            return ""
        self.given.execute(explicit)
        return explicit

    def _roll_back(self, error: BaseException, explicit: str) -> None:
        try:
            if not explicit:
                self.given.rollback()
            elif getattr(self.given, "in_transaction", True):
                self.given.execute("ROLLBACK")
        except Exception as second:  # a lost connection cannot be rolled back
            error.add_note(f"and the rollback failed: {second!r}")

    def make_table(self, table: str, definition: str) -> None:
        """Create a table if it is missing. A user without that permission needs an existing table.
        Raises what the driver raises.
        """
        if self._has(table):
            return
        try:
            with self.transaction() as session:
                session.define(f"CREATE TABLE {table} ({definition})")
        except Exception:
            if not self._has(table):  # else another process has created it meanwhile
                raise

    def _has(self, table: str) -> bool:
        try:
            with self.transaction() as session:
                session.rows(f"SELECT 1 FROM {table} WHERE 1 = 0")
        except Exception as error:
            if not any(kind.__name__ == "DatabaseError" for kind in type(error).__mro__):
                raise
            return False
        return True


def _refuse_autocommit(connection: Any) -> None:
    if commits_each_statement(connection):
        raise InvalidSettingError(
            "the connection commits each statement by itself; turn its autocommit off"
        )


def joined(connection: Any, paramstyle: str | None = None) -> Session:
    """Statements inside a transaction of the caller's. Raises InvalidRequestError if the connection
    is known to be in autocommit.
    """
    session = Session(connection, paramstyle)
    if commits_each_statement(connection):
        raise InvalidRequestError(
            "the connection commits each statement by itself; begin a transaction first"
        )
    return session
