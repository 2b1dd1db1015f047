"""Seen keys in Redis, for effects outside of a database.

Redis and the effect are two systems, and a process can die between them. The caller chooses one of
two orders:

    if guard.first_time(key): effect()                  # at most once: a kill in between loses the effect
    if not guard.seen(key): effect(); guard.mark(key)   # at least once: a kill in between repeats the effect

Owner: all users of the prefix share the keys. Each key expires after `ttl`.
Invariants: of all calls of `first_time` for a key within `ttl` one returns True, while Redis keeps
    what it has acknowledged. With `appendonly yes` and `appendfsync always` it does so over a kill.
    A failover to a replica may lose keys.
Crash: see the two orders above. An unreachable Redis raises the client's error. The record must
    then be handled again.
"""  # noqa: E501

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Sequence
from typing import Any

from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import duration_ms
from tailrace.idempotent.dbapi import key_bytes


class RedisGuard:
    """Tells new keys from those seen within `ttl`. It is thread-safe if the client is."""

    def __init__(
        self, client: Any, prefix: str = "tailrace:seen:", ttl: dt.timedelta | float | str = "7d"
    ) -> None:
        """`client`: of redis-py, or another with its `set`, `exists` and `delete`, and not of
        asyncio. `prefix`: of all keys. `ttl`: lifetime of a key, as a timedelta, text such as "7d",
        or seconds. It must cover the time in which a record may come again.

        Raises InvalidSettingError.
        """
        if not all(callable(getattr(client, name, None)) for name in ("set", "exists", "delete")):
            raise InvalidSettingError(
                f"{client!r:.100} is no Redis client; give redis.Redis(...), or another with set, "
                "exists and delete"
            )
        if not isinstance(prefix, str):
            raise InvalidSettingError(f"prefix is {prefix!r:.100}; it takes text")
        self._client = client
        self._prefix = prefix.encode()
        self._ttl_ms = _milliseconds(ttl)

    def first_time(self, key: Any) -> bool:
        """Mark the key (bytes, text, a whole number or a Record) as seen. True if it was new.
        Called before the effect: at most once.
        """
        return _was_set(self._client.set(self._name(key), b"1", nx=True, px=self._ttl_ms))

    def first_times(self, keys: Sequence[Any]) -> list[bool]:
        """Call `first_time` for each key in order, in one round trip. The client needs
        `pipeline`.
        """
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.set(self._name(key), b"1", nx=True, px=self._ttl_ms)
        return [_was_set(answer) for answer in pipeline.execute()]

    def seen(self, key: Any) -> bool:
        """True if the key is marked as seen. Called before the effect, with `mark` after it: at
        least once.
        """
        return bool(int(self._client.exists(self._name(key))))

    def mark(self, key: Any, pipeline: Any = None) -> None:
        """Mark the key as seen, after its effect. `pipeline`: the transaction (MULTI) of an effect
        in Redis itself. Both then happen, or neither.
        """
        (self._client if pipeline is None else pipeline).set(self._name(key), b"1", px=self._ttl_ms)

    def forget(self, key: Any) -> None:
        """Make the key new again, after an effect that failed."""
        self._client.delete(self._name(key))

    def _name(self, key: Any) -> bytes:
        return self._prefix + key_bytes(key)


def _was_set(answer: object) -> bool:
    """The result of SET NX. Raises InvalidSettingError for other objects, which a pipeline or an
    asyncio client returns.
    """
    if answer is None or answer is False:
        return False
    if answer is True or answer in ("OK", b"OK"):
        return True
    if inspect.iscoroutine(answer):
        answer.close()
    raise InvalidSettingError(
        f"the client's set() returned {type(answer).__name__}, no answer of Redis; give a plain "
        "client, no pipeline and none of asyncio"
    )


def _milliseconds(ttl: object) -> int:
    if isinstance(ttl, dt.timedelta):
        result: int | None = ttl // dt.timedelta(milliseconds=1)
    elif isinstance(ttl, str):
        result = duration_ms(ttl)
    else:
        result = (
            int(ttl * 1000)
            if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl < 1e12
            else None
        )
    if result is None or result < 1:
        raise InvalidSettingError(
            f"ttl is {ttl!r:.100}; it takes a timedelta, a time such as 12h or 7d, or seconds, of "
            "at least a millisecond"
        )
    return result
