"""Keys that were seen, in Redis: for effects that go elsewhere than a database.

Redis and the effect are two systems: between the guard's word and the effect a process can die. So
there are two orders, and the caller chooses:

    if guard.first_time(key): effect()            # at most once: killed in between, the effect is missed
    if not guard.seen(key): effect(); guard.mark(key)   # at least once: killed in between, the effect comes again

Owner: the keys are everyone's who has the prefix. Each key ends by itself after `ttl`.
Invariants: of all calls of `first_time` for a key within `ttl` one returns True, as long as Redis
keeps what it has acknowledged: with `appendonly yes` and `appendfsync always` also over a kill of
Redis; a failover to a replica can forget.
Crash: as above; a Redis that cannot be reached raises the client's error, and the record is to be
    handled again.
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
    """Says whether a key comes for the first time within `ttl`. As thread-safe as the client."""

    def __init__(
        self, client: Any, prefix: str = "tailrace:seen:", ttl: dt.timedelta | float | str = "7d"
    ) -> None:
        """`client`: of redis-py, or another with its `set`, `exists` and `delete`; not an asyncio
        client. `prefix`: of all keys. `ttl`: how long a key is remembered, a timedelta, text such
        as "7d", or seconds: longer than a record can come again after.

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
        """Remember the key (bytes, text, a whole number or a Record); whether it was not known.
        Before the effect: at most once.
        """
        return _was_set(self._client.set(self._name(key), b"1", nx=True, px=self._ttl_ms))

    def first_times(self, keys: Sequence[Any]) -> list[bool]:
        """`first_time` of each in order, in one exchange with Redis. The client needs
        `pipeline`.
        """
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.set(self._name(key), b"1", nx=True, px=self._ttl_ms)
        return [_was_set(answer) for answer in pipeline.execute()]

    def seen(self, key: Any) -> bool:
        """Whether the key is remembered. Before the effect, with `mark` behind it: at least
        once.
        """
        return bool(int(self._client.exists(self._name(key))))

    def mark(self, key: Any, pipeline: Any = None) -> None:
        """Remember the key: its effect is done. `pipeline`: the transaction (MULTI) of an effect
        that is in Redis itself: both happen, or neither.
        """
        (self._client if pipeline is None else pipeline).set(self._name(key), b"1", px=self._ttl_ms)

    def forget(self, key: Any) -> None:
        """Take back a `first_time` whose effect has failed: the key is new again."""
        self._client.delete(self._name(key))

    def _name(self, key: Any) -> bytes:
        return self._prefix + key_bytes(key)


def _was_set(answer: object) -> bool:
    """What SET NX says. Anything else is no answer yet, of a pipeline or an asyncio client, and is
    not to be taken for one.
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
            f"ttl is {ttl!r:.100}; it takes a timedelta, a time such as 12h or 7d, or seconds, "
            "more than none"
        )
    return result
