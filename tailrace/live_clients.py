"""What a child process inherits over fork() and must not use: clients, and appliances started here.

A child has its parent's memory, but not its threads, and it shares the parent's sockets: a client that it used would take the parent's answers, a lock that
another thread held stays locked for good, and the data directory of an embedded appliance belongs to the program that started it. So everything of this
kind is marked in the child, at the fork: it refuses to work at once, with one sentence, and its end there touches nothing of the parent's.

Owner: each client adds itself here, once. Only weak references are kept.
Invariants: `after_fork` of every live client runs in the child before anything else of the child does; it takes no lock and makes no call that can block.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

from tailrace.client_log import logger
from tailrace.errors import ClientClosedError


class Inherited(Protocol):
    """Something that a child must not use."""

    def after_fork(self) -> None:
        """Called in the child, first of all: refuse to work from now on, and take no lock."""
        ...


_live: weakref.WeakSet[Inherited] = weakref.WeakSet()
_kept: list[Any] = []
"""In a child: the parent's sockets. Their destructors belong to the parent; nothing here may run them."""


def add(client: Inherited) -> None:
    """From now on `client.after_fork()` is called in every child of this process."""
    _live.add(client)


def keep_for_parent(thing: object) -> None:
    """In a child: hold something of the parent's until the child ends, so that it is not destroyed here."""
    _kept.append(thing)


def forked_error(what: str) -> ClientClosedError:
    """What such a thing raises in a child; `what` is its name for the sentence."""
    return ClientClosedError(f"this {what} was made before fork() and cannot be used in the child; create one there")


def free_in_child(lock: threading.RLock) -> None:
    """In a child: a lock that another thread of the parent held is free; one that this thread holds stays so."""
    held: Any = lock
    if held.acquire(blocking=False):
        held.release()
    else:
        held._at_fork_reinit()  # as the standard library does with its own


def _after_fork() -> None:
    for client in list(_live):
        try:
            client.after_fork()
        except Exception:
            logger.exception("a client could not be put aside in a forked child")
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
