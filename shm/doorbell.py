"""Doorbells: how a process sleeps until another has work for it (Linux eventfds, inherited by every process).

Owner: the supervisor makes one per process and passes all of them to each child, also to a restarted one: an eventfd keeps its count
across the death of whoever was to read it.
Invariants: ring **unconditionally, once per group**, after publishing (one exception, with its proof: `shm.settled_news`); `clear()` before looking at the
queue, never after. With an "am I asleep" flag and no fence
instead, both sides missed each other in 12 % of a litmus run: total store order lets a load overtake an earlier store.
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


def look_then_sleep(poll: Pollable, timeout_ms: float | None, busy_ns: int, monotonic_ns: Callable[[], int]) -> list[tuple[int, int]]:
    """What `poll` finds, at once or within `busy_ns`, asking again and again; then asleep, until `timeout_ms` (None: for ever) have passed.

    A process that looks is not asleep to the kernel: ringing it costs no wake-up, of which the one that rings pays the greater part. Nothing can be missed: the
    descriptors are those that it sleeps on.
    """
    if busy_ns:
        begun_ns = monotonic_ns()
        limit_ns = busy_ns if timeout_ms is None else min(busy_ns, int(timeout_ms * 1_000_000))
        while True:
            found = poll.poll(0)
            if found:
                return found
            if monotonic_ns() - begun_ns >= limit_ns:
                break
    return poll.poll(timeout_ms)


class Doorbell:
    """One process's bell."""

    __slots__ = ("_poll", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll: select.poll | None = None

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wake the owner, or let it find out when it looks. About 1 us."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the count is at its maximum: it is ringing

    def clear(self) -> None:
        """Forget earlier rings. Call before looking at what they may announce."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def wait(self, timeout_ms: float | None, busy_ns: int = 0) -> None:
        """Sleep until rung, for at most `timeout_ms` (None: for ever), then clear. First look for `busy_ns`, without sleeping."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.fd, select.POLLIN)
        look_then_sleep(self._poll, timeout_ms, busy_ns, time.monotonic_ns)
        self.clear()
