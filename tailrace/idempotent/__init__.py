"""Effects of consumers that happen once, although a crash, a rebalance or a retry repeats records.

- `SqlSink`: effects in a SQL database. The offsets move in the transaction of the effects, so that
  each record is applied exactly once, wherever the process is killed.
- `DedupTable`: seen keys, in the transaction of the effects. It is for events that are in the log
  more than once. Each key is applied exactly once.
- `update_if_version`: a row that counts its versions. An update happens once, and never over a
  newer one.
- `RedisGuard`: effects elsewhere, with seen keys in Redis. With `first_time` no record is applied
  twice, and a kill may lose one. With `seen` and `mark` none is lost, and a kill may repeat one.

The caller's driver (sqlite3, any DB-API 2.0 module, SQLAlchemy, a Redis client) is used as it is.
Names are imported when they are first used.
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


if not TYPE_CHECKING:  # lets type checkers find misspelt names

    def __getattr__(name: str) -> Any:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module 'tailrace.idempotent' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tailrace.idempotent.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
