"""Ids that no other process makes, in order of time: 64 bits, as Twitter's Snowflake lays them out.

Layout, from the highest bit:

    0 | 41 bits: milliseconds since 2020-01-01 UTC | 10 bits: instance | 12 bits: sequence within
    the millisecond

They are positive until 2089, sort by time, and fit a signed 64-bit column. Source:
https://github.com/twitter-archive/snowflake/tree/snowflake-2010

Owner: a generator is one process's; its threads share it.
Invariants: each id of a generator is larger than the one before, whatever the clock does: where the
clock stands still or goes back, the generator keeps its time and counts on, and where a millisecond
is used up it takes the next. Ids of two generators differ when their instances do.
Crash: what a generator knows is gone. The same instance, made anew, can repeat ids if the clock was
set back meanwhile or the generator was ahead of it (more than 4,096 ids a millisecond): `after`
takes the largest id that is known. Fork: a child goes on with another instance where it was
derived; where it was given, the child is refused.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tailrace.core.errors import InvalidRequestError
from tailrace.core.fork import forked_error
from tailrace.core.validation import whole

EPOCH_MS = 1_577_836_800_000
"""2020-01-01 UTC."""
_SEQUENCE_BITS = 12
_INSTANCE_BITS = 10
_TIME_SHIFT = _INSTANCE_BITS + _SEQUENCE_BITS
INSTANCE_MAX = (1 << _INSTANCE_BITS) - 1
SEQUENCE_MAX = (1 << _SEQUENCE_BITS) - 1
COUNT_MAX = 1 << 41 + _SEQUENCE_BITS
TAKE_MAX = 1_000_000


class IdParts(NamedTuple):
    """What an id says."""

    timestamp: int
    """Milliseconds since 1970 UTC."""
    instance: int
    sequence: int

    @property
    def datetime(self) -> dt.datetime:
        """The time as an aware UTC datetime."""
        return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=self.timestamp)


def derived_instance() -> int:
    """An instance number from host, process and chance. Two processes have the same one with the
    odds of 1 to 1,024; of 10 processes some two with 4 %, of 38 with one half. Where that is too
    much, number the processes.
    """
    seed = f"{socket.gethostname()}/{os.getpid()}/".encode() + os.urandom(16)
    return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big") & INSTANCE_MAX


class IdGenerator:
    """Makes ids that are unique among all generators with other instances, each larger than the one
    before. Thread-safe, never blocks.

    ids = tailrace.IdGenerator(instance=7)
    next(ids), ids.take(100)
    """

    def __init__(
        self,
        instance: int | None = None,
        *,
        after: int | None = None,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`instance`: 0 to 1,023, another one in each process; None: one is derived from host,
        process and chance, see `derived_instance`. `after`: an id that is known (the largest in the
        database): all ids come behind it. `wall_ms`: the clock, milliseconds since 1970.

        Raises InvalidRequestError.
        """
        self._is_derived = instance is None
        self._instance = (
            derived_instance() if instance is None else whole("instance", instance, 0, INSTANCE_MAX)
        )
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._is_parents = False
        last = -1 if after is None else whole("after", after, 0)
        # Time and sequence in one number, so that to count on past the end of a millisecond is to
        # add one.
        self._last = -1 if last < 0 else (last >> _TIME_SHIFT) << _SEQUENCE_BITS | SEQUENCE_MAX
        _generators.add(self)

    @property
    def instance(self) -> int:
        """The number in all its ids."""
        return self._instance

    def __next__(self) -> int:
        """The next id. Raises ClientClosedError in a child of the process, where the instance was
        given.
        """
        return self.take(1)[0]

    def next_id(self) -> int:
        """The next id, as `next(generator)`."""
        return self.take(1)[0]

    def __iter__(self) -> Iterator[int]:
        """Ids without end."""
        return self

    def take(self, count: int) -> list[int]:
        """The next `count` ids (up to 1,000,000), ascending; of one after the other no other thread
        gets one between. Raises InvalidRequestError.
        """
        count = whole("count", count, 0, TAKE_MAX)
        with self._lock:
            if self._is_parents:
                raise forked_error("IdGenerator")
            first = max(self._last + 1, (self._wall_ms() - EPOCH_MS) << _SEQUENCE_BITS)
            if first + count > COUNT_MAX:
                raise InvalidRequestError(
                    "the clock, or the id that was given as after, lies beyond the year 2089: "
                    "such ids do not fit 63 bits"
                )
            if count:
                self._last = first + count - 1
        instance = self._instance << _SEQUENCE_BITS
        return [
            (n >> _SEQUENCE_BITS) << _TIME_SHIFT | instance | (n & SEQUENCE_MAX)
            for n in range(first, first + count)
        ]

    @staticmethod
    def parts(of: int) -> IdParts:
        """Time, instance and sequence of an id. Raises InvalidRequestError."""
        number = whole("an id", of, 0)
        return IdParts(
            (number >> _TIME_SHIFT) + EPOCH_MS,
            number >> _SEQUENCE_BITS & INSTANCE_MAX,
            number & SEQUENCE_MAX,
        )

    def after_fork(self) -> None:
        """In a child: go on with another instance where it was derived, else refuse to work."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        if self._is_derived:
            self._instance = derived_instance()
        else:
            self._is_parents = True


def parts(of: int) -> IdParts:
    """Time, instance and sequence of an id. Raises InvalidRequestError."""
    return IdGenerator.parts(of)


_generators: weakref.WeakSet[IdGenerator] = weakref.WeakSet()
"""Not among the live clients: those are not told of the fork of a child, and a derived instance is
another one in each generation.
"""


def _in_child() -> None:
    for generator in list(_generators):
        generator.after_fork()


os.register_at_fork(after_in_child=_in_child)
