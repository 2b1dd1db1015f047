"""Doorbells: Linux eventfds on which a process sleeps until another has work for it.

Owner: the supervisor creates one per process and passes all of them to every child, also to a
restarted one. An eventfd keeps its count across the death of its reader.

Invariants:
- Ring **unconditionally, once per group**, after publishing. `shm.queues.settled_notifications` is
  the one exception, with its proof.
- Call `clear()` before checking the queue, never after.

With an "asleep" flag and no fence instead, both sides can miss each other: total store order lets a
load overtake an earlier store.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Protocol


class Pollable(Protocol):
    """A `select.poll` object."""

    def poll(self, timeout_ms: float | None = None, /) -> list[tuple[int, int]]: ...


def spin_then_sleep(
    poll: Pollable, timeout_ms: float | None, busy_ns: int, monotonic_ns: Callable[[], int]
) -> list[tuple[int, int]]:
    """Poll for up to `busy_ns` without sleeping, then sleep for up to `timeout_ms` (None: for
    ever). Return the ready descriptors.

    Ringing a process that is polling costs no wake-up, which the ringing side would mostly pay. No
    event is missed: both phases poll the same descriptors.
    """
    if busy_ns:
        started_ns = monotonic_ns()
        limit_ns = busy_ns if timeout_ms is None else min(busy_ns, int(timeout_ms * 1_000_000))
        while True:
            found = poll.poll(0)
            if found:
                return found
            if monotonic_ns() - started_ns >= limit_ns:
                break
    return poll.poll(timeout_ms)


class Doorbell:
    """Doorbell of one process."""

    __slots__ = ("_poll", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll: select.poll | None = None

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wake the owner, or let its next poll return at once. About 1 us."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the count is at its maximum: the bell is ringing

    def clear(self) -> None:
        """Clear earlier rings. Call it before checking what they may announce."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def wait(self, timeout_ms: float | None, busy_ns: int = 0) -> None:
        """Poll for `busy_ns`, then sleep until rung for at most `timeout_ms` (None: for ever).
        Clear the bell.
        """
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.fd, select.POLLIN)
        spin_then_sleep(self._poll, timeout_ms, busy_ns, time.monotonic_ns)
        self.clear()
