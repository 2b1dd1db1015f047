"""The guard over a real Redis: a key is new once within its time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from tailrace import InvalidRequestError, InvalidSettingError
from tailrace.idempotent import RedisGuard
from tests.kit.hosts.databases import record
from tests.kit.hosts.redis_server import redis_server
from tests.kit.processes import wait_until


@pytest.fixture(scope="module")
def socket_path() -> Iterator[str]:
    with redis_server() as path:
        yield path


@pytest.fixture
def client(socket_path: str) -> Iterator[Any]:
    with redis.Redis(unix_socket_path=socket_path) as made:
        yield made
        made.flushall()


def test_a_key_is_new_once_for_all_clients_with_its_prefix(client: Any, socket_path: str) -> None:
    guard = RedisGuard(client, "orders:", ttl=dt.timedelta(hours=1))
    assert [
        guard.first_time(key) for key in (b"a", "a", 5, "5", record(3), record(3), record(4))
    ] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert guard.first_times(["a", "b", "b", record(4)]) == [False, True, False, False]
    assert 3_590_000 < client.pttl(b"orders:a") <= 3_600_000
    with redis.Redis(unix_socket_path=socket_path, decode_responses=True) as other:
        assert not RedisGuard(other, "orders:").first_time("b")
        assert RedisGuard(other, "payments:").first_time("b")
    guard.forget("b")
    assert guard.first_time("b")


def test_a_key_that_is_marked_is_seen_until_its_time_is_over(client: Any) -> None:
    guard = RedisGuard(client, ttl="50ms")
    assert not guard.seen("a")
    RedisGuard(client, ttl="1h").mark("a")
    assert guard.seen("a")
    assert not guard.first_time("a")
    guard.mark("a")
    wait_until(lambda: not guard.seen("a"), "the key expires")
    assert guard.first_time("a")


def test_a_mark_in_the_transaction_of_the_effect_comes_with_it(client: Any) -> None:
    guard = RedisGuard(client)
    effect = client.pipeline(transaction=True)
    effect.incr("total")
    guard.mark("a", effect)
    assert not guard.seen("a")
    effect.execute()
    assert (guard.seen("a"), client.get("total")) == (True, b"1")


def test_a_server_that_is_gone_is_an_error_and_no_answer() -> None:
    guard = RedisGuard(redis.Redis(unix_socket_path="/nowhere/socket", retry=Retry(NoBackoff(), 0)))
    for ask in (guard.first_time, guard.seen, guard.mark):
        with pytest.raises(redis.ConnectionError):
            ask("a")


def test_a_client_that_answers_later_is_refused_and_not_believed(client: Any) -> None:
    with pytest.raises(InvalidSettingError, match="returned Pipeline, no answer of Redis"):
        RedisGuard(client.pipeline()).first_time("a")
    with pytest.raises(InvalidSettingError, match="returned coroutine, no answer of Redis"):
        RedisGuard(redis.asyncio.Redis(unix_socket_path="/nowhere/socket")).first_time("a")


def test_bad_settings_are_refused() -> None:
    client = redis.Redis(unix_socket_path="/nowhere/socket")
    for ttl in (0, -1, "soon", "", True, None, dt.timedelta(0), 1e-9):
        with pytest.raises(InvalidSettingError, match="ttl is"):
            RedisGuard(client, ttl=ttl)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="no Redis client"):
        RedisGuard("redis://localhost")
    with pytest.raises(InvalidSettingError, match="prefix is 5"):
        RedisGuard(client, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="a key is None"):
        RedisGuard(client).first_time(None)
