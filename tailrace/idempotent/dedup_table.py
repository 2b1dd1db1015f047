"""A table of keys that were seen: each is new once, in the transaction of its effect.

For events that carry a key of their own (an order's number, a request's id) and can be in the log
more than once, under other offsets too. A Record as a key is its place in the log, with its topic's
id. Version 0.1 wrote the topic's name: such a row stands for the topic that there was when it was
written.

Owner: the rows are everyone's who uses the table.
Invariants: of all transactions that ask for a key, one commits with the answer True.
Crash: the row is in the transaction of the effect: both are there or neither.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from collections.abc import Callable
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import Record
from tailrace.idempotent.dbapi import Database, earlier_key_bytes, identifier, joined, key_bytes

_COLUMNS = "key_hash CHAR(64) NOT NULL PRIMARY KEY, seen_ms BIGINT NOT NULL"


def _steady_clock() -> Callable[[], int]:
    """Milliseconds since 1970: the computer's clock as it is now, and from then on the time that
    passes, wherever that clock is set.
    """
    began_ms, began_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
    return lambda: began_ms + (time.monotonic_ns() - began_ns) // 1_000_000


class DedupTable:
    """Says whether a key comes for the first time. For one thread at a time."""

    def __init__(
        self,
        connection: Any,
        table: str = "tailrace_seen",
        *,
        paramstyle: str | None = None,
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        """`connection`: of DB-API 2.0 without an open transaction, or an engine or connection of
        SQLAlchemy. `table`: made where it is missing. `wall_ms`: another clock, milliseconds since
        1970. The own one counts the time that passes: while a
            process lives, setting the computer's clock makes `expire` remove nothing early.

        Raises InvalidSettingError, and what the driver raises.
        """
        self._database = Database(connection, paramstyle)
        self._paramstyle = paramstyle
        self._table = identifier("table", table, 2)
        self._wall_ms = _steady_clock() if wall_ms is None else wall_ms
        self._database.make_table(self._table, _COLUMNS)

    def first_time(self, key: Any, connection: Any = None) -> bool:
        """Whether no committed transaction, nor this one, has asked for the key: bytes, text, a
        whole number or a Record. `connection`: the transaction's, where the table was made with an
        engine.

        When two transactions ask for a key at once, the second waits for the first's end; some
        databases then refuse it with the driver's IntegrityError in place of False: roll back and
        do it again. Raises InvalidRequestError outside of a transaction.
        """
        if connection is None and self._database.is_engine:
            raise InvalidRequestError(
                "the table was made with an engine; give the connection of the transaction: "
                "first_time(key, tx.connection)"
            )
        session = joined(
            self._database.given if connection is None else connection, self._paramstyle
        )
        name = hashlib.sha256(key_bytes(key)).hexdigest()
        earlier = (
            hashlib.sha256(earlier_key_bytes(key)).hexdigest() if isinstance(key, Record) else name
        )
        # Not ON CONFLICT or INSERT IGNORE: each database has its own words for that. Nor an insert
        # that fails: it would end a transaction of PostgreSQL.
        for found, seen_ms in session.rows(
            f"SELECT key_hash, seen_ms FROM {self._table} WHERE key_hash IN (?, ?)", name, earlier
        ):
            if str(found) == name or int(seen_ms) * 1000 >= getattr(key.topic, "created_us", 0):
                return False
        session.change(
            f"INSERT INTO {self._table} (key_hash, seen_ms) VALUES (?, ?)", name, self._wall_ms()
        )
        return True

    def expire(self, older_than: dt.timedelta) -> int:
        """Forget keys that were seen longer ago, in a transaction of its own; how many there were.
        Keep them for longer than a record can come again after: the topic's retention is always
        enough.
        """
        if not isinstance(older_than, dt.timedelta) or older_than < dt.timedelta(0):
            raise InvalidRequestError(f"older_than is {older_than!r:.100}; it takes a timedelta")
        before_ms = self._wall_ms() - older_than // dt.timedelta(milliseconds=1)
        with self._database.transaction() as session:
            return session.change(f"DELETE FROM {self._table} WHERE seen_ms < ?", before_ms)
