"""Registry of objects that a child process inherits over fork() and must not use.

These are clients and embedded appliances. A child has its parent's memory but not its threads, and
it shares the parent's sockets. A client used there would receive the parent's responses, and a lock
held by another thread would never be released. The data directory of an embedded appliance belongs
to the process that started it. So each object is marked in the child right after the fork. Every
call on it then raises an error, and its destructor touches nothing of the parent's.

Owner: each client registers itself once. Only weak references are kept.

Invariants:
- `after_fork` of every live client runs before other code of the child.
- `after_fork` takes no lock and makes no blocking call.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

from tailrace.core.errors import ClientClosedError
from tailrace.core.log import logger


class Inherited(Protocol):
    """An object that a child process must not use."""

    def after_fork(self) -> None:
        """Called first in the child. Reject all later calls, and take no lock."""
        ...


_live: weakref.WeakSet[Inherited] = weakref.WeakSet()
_kept: list[Any] = []
"""The parent's sockets, held in a child so that their destructors never run there."""


def add(client: Inherited) -> None:
    """Register `client`: its `after_fork()` is called in every child of this process."""
    _live.add(client)


def keep_for_parent(resource: object) -> None:
    """Hold a resource of the parent until this child ends, so it is not destroyed here."""
    _kept.append(resource)


def forked_error(label: str) -> ClientClosedError:
    """The error that an inherited object raises in a child. `label` names it in the message."""
    return ClientClosedError(
        f"this {label} was made before fork() and cannot be used in the child; create one there"
    )


def free_in_child(lock: threading.RLock) -> None:
    """Free a lock, in a child, that another thread of the parent held.

    A lock that this thread holds stays held.
    """
    guard: Any = lock
    if guard.acquire(blocking=False):
        guard.release()
    else:
        guard._at_fork_reinit()  # as the standard library does with its own


def _after_fork() -> None:
    for client in list(_live):
        try:
            client.after_fork()
        except Exception:
            logger.exception("a client could not be invalidated in a forked child")
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
