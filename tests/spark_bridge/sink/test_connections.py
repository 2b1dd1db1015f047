"""Connections that a process of Spark keeps: lent again, to one user at a time, and whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_bridge.sink import connections
from spark_bridge.sink.connections import IDLE_MAX, borrowed, give_back, take
from tailrace.core.errors import ClientClosedError


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(connections, "_idle", [])
    return f"ipc://{tmp_path}/nobody"


def test_a_connection_is_lent_again_and_never_to_two(address: str) -> None:
    with borrowed(address) as first, borrowed(address) as second:
        assert first is not second
    with borrowed(address) as again:
        assert again in (first, second)
    with borrowed(f"{address}-other") as other:
        assert other not in (first, second)
    for _, connection in connections._idle:
        connection.close()


def test_a_connection_whose_user_failed_is_closed(address: str) -> None:
    with pytest.raises(ZeroDivisionError), borrowed(address) as broken:
        raise ZeroDivisionError
    with pytest.raises(ClientClosedError):
        broken.check_usable()
    assert connections._idle == []


def test_of_too_many_idle_connections_the_oldest_is_closed(address: str) -> None:
    made = [take(address) for _ in range(IDLE_MAX + 1)]
    for connection in made:
        give_back(address, connection)
    with pytest.raises(ClientClosedError):
        made[0].check_usable()
    made[1].check_usable()
    for connection in made[1:]:
        connection.close()


def test_a_forked_process_makes_connections_of_its_own(address: str) -> None:
    connection = take(address)
    give_back(address, connection)
    child = os.fork()
    if not child:
        own = take(address)
        is_own = own is not connection
        own.close()
        os._exit(0 if is_own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    connection.close()
