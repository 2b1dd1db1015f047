"""Connections of a Python process of Spark, which Spark uses for many tasks and commits.

Owner: this process. A borrowed connection has one user.
Invariants: a connection whose user raised is closed, and not lent again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spark_bridge.sink.options import CLIENT_ID
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import SYSTEM
from tailrace.core.errors import TailraceError

IDLE_MAX = 4
_lock = threading.Lock()
_idle: list[tuple[str, Connection]] = []


def take(bootstrap: str) -> Connection:
    """A connection to an appliance: one that was given back, else a new one."""
    with _lock:
        for index, (address, _) in enumerate(_idle):
            if address == bootstrap:
                _, connection = _idle.pop(index)
                break
        else:
            return Connection(bootstrap, CLIENT_ID, SYSTEM, "sink")
    try:
        connection.check_usable()
    except TailraceError:  # after a fork it is the parent's
        return Connection(bootstrap, CLIENT_ID, SYSTEM, "sink")
    return connection


def give_back(bootstrap: str, connection: Connection) -> None:
    """Keep a connection for the next user. Of too many the oldest is closed."""
    with _lock:
        _idle.append((bootstrap, connection))
        surplus = [_idle.pop(0)[1] for _ in range(len(_idle) - IDLE_MAX)]
    for one in surplus:
        one.close()


@contextmanager
def borrowed(bootstrap: str) -> Iterator[Connection]:
    """A connection for the block."""
    connection = take(bootstrap)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    give_back(bootstrap, connection)
