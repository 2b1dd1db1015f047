"""Consumers whose effects happen once, although records can come twice: after a crash, a rebalance,
a retry.

`SqlSink`: effects in a SQL database; the offsets move in the transaction of the effects. Killed
anywhere: each record is applied exactly once. `DedupTable`: keys that were seen, in the transaction
of the effects, for events that are in the log more than once. Each key is applied exactly once.
`update_if_version`: a row that counts its versions. An update is made once, and never over a newer
one. `RedisGuard`: effects elsewhere, with Redis beside them. With `first_time` none comes twice,
and a kill can miss the record in hand; with `seen` and `mark` none is missed, and a kill can repeat
the record in hand.

Nothing here opens a connection: the caller's driver (sqlite3, any DB-API 2.0 module, SQLAlchemy, a
Redis client) is used as it is. Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.idempotent.dedup_table import DedupTable
    from tailrace.idempotent.offset_table import OffsetsMovedError
    from tailrace.idempotent.optimistic_lock import update_if_version
    from tailrace.idempotent.redis_dedup import RedisGuard
    from tailrace.idempotent.sql_sink import SqlSink, SqlTransaction

_HOMES = {
    "DedupTable": "dedup_table",
    "OffsetsMovedError": "offset_table",
    "RedisGuard": "redis_dedup",
    "SqlSink": "sql_sink",
    "SqlTransaction": "sql_sink",
    "update_if_version": "optimistic_lock",
}

__all__ = [
    "DedupTable",
    "OffsetsMovedError",
    "RedisGuard",
    "SqlSink",
    "SqlTransaction",
    "update_if_version",
]


if not TYPE_CHECKING:  # a type checker is to find a misspelt name

    def __getattr__(name: str) -> Any:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module 'tailrace.idempotent' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tailrace.idempotent.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
