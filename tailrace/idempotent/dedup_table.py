"""A SQL table of seen keys: each key is new once, in the transaction of its effect.

It is for events with a key of their own (an order's number, a request's id) that may be in the log
more than once. A Record as a key stands for its topic's id, partition and offset. Version 0.1 wrote
the topic's name instead of its id. Such a row belongs to the topic of the time when it was written.

Owner: all users of the table share the rows.
Invariants: of all transactions that ask for a key, one commits with the answer True.
Crash: the row is in the transaction of the effect. Both are stored, or neither.
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
    """A clock in milliseconds since 1970 that later changes of the system clock do not affect."""
    began_ms, began_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
    return lambda: began_ms + (time.monotonic_ns() - began_ns) // 1_000_000


class DedupTable:
    """Tells new keys from seen ones. For one thread at a time."""

    def __init__(
        self,
        connection: Any,
        table: str = "tailrace_seen",
        *,
        paramstyle: str | None = None,
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        """`connection`: of DB-API 2.0 without an open transaction, or an engine or connection of
        SQLAlchemy. `table`: created if it is missing. `wall_ms`: another clock, in milliseconds
        since 1970. The default one is not affected by changes of the system clock, so that `expire`
        removes nothing early.

        Raises InvalidSettingError, and what the driver raises.
        """
        self._database = Database(connection, paramstyle)
        self._paramstyle = paramstyle
        self._table = identifier("table", table, 2)
        self._wall_ms = _steady_clock() if wall_ms is None else wall_ms
        self._database.make_table(self._table, _COLUMNS)

    def first_time(self, key: Any, connection: Any = None) -> bool:
        """True if neither this transaction nor a committed one has asked for the key, which is
        bytes, text, a whole number or a Record. `connection`: the transaction's, if the table was
        made with an engine.

        When two transactions ask for a key at once, the second waits for the first's end. Some
        databases then raise the driver's IntegrityError instead of returning False. Roll back and
        repeat the transaction. Raises InvalidRequestError outside of a transaction.
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
        # ON CONFLICT and INSERT IGNORE differ between databases. An insert that fails would end a
        # transaction of PostgreSQL.
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
        """Delete keys that were seen longer ago, in a transaction of its own. Returns their number.

        Keep keys for as long as a record may come again. The topic's retention is always enough.
        """
        if not isinstance(older_than, dt.timedelta) or older_than < dt.timedelta(0):
            raise InvalidRequestError(f"older_than is {older_than!r:.100}; it takes a timedelta")
        before_ms = self._wall_ms() - older_than // dt.timedelta(milliseconds=1)
        with self._database.transaction() as session:
            return session.change(f"DELETE FROM {self._table} WHERE seen_ms < ?", before_ms)
