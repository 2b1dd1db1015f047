"""Unique ids of 64 bits in order of time, in the layout of Twitter's Snowflake.

Layout, from the highest bit:

    0 | 41 bits: milliseconds since 2020-01-01 UTC | 10 bits: instance | 12 bits: sequence within
    the millisecond

They are positive until 2089, sort by time, and fit a signed 64-bit column. Source:
https://github.com/twitter-archive/snowflake/tree/snowflake-2010

Owner: a generator belongs to one process, whose threads share it.
Invariants:
- Each id of a generator is larger than the one before. If the clock stands still or goes back, the
  generator keeps its time and counts on. After 4,096 ids in a millisecond it uses the next one.
- Ids of two generators with different instances differ.
Crash: a generator's state is lost. A new one of the same instance can repeat ids if the clock was
    set back, or if the old one was ahead of the clock. `after` takes the largest known id.
Fork: a child uses another instance if it was derived. If it was given, the child raises.
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
    """The parts of an id."""

    timestamp: int
    """Milliseconds since 1970 UTC."""
    instance: int
    sequence: int

    @property
    def datetime(self) -> dt.datetime:
        """The time as an aware UTC datetime."""
        return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=self.timestamp)


def derived_instance() -> int:
    """An instance number from host, process id and random bytes.

    Two processes get the same one with a probability of 1/1,024. Among 10 processes some two do
    with 4 %, among 38 with 50 %. Number the processes if that is too much.
    """
    seed = f"{socket.gethostname()}/{os.getpid()}/".encode() + os.urandom(16)
    return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big") & INSTANCE_MAX


class IdGenerator:
    """Makes ids that are unique among generators of different instances. Each is larger than the
    one before. Thread-safe, never blocks.

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
        """`instance`: 0 to 1,023, another one in each process. None: see `derived_instance`.
        `after`: a known id, such as the largest in the database. All ids are larger. `wall_ms`: the
        clock, in milliseconds since 1970.

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
        # Time and sequence in one number: adding one counts on past the end of a millisecond.
        self._last = -1 if last < 0 else (last >> _TIME_SHIFT) << _SEQUENCE_BITS | SEQUENCE_MAX
        _generators.add(self)

    @property
    def instance(self) -> int:
        """The instance number in all its ids."""
        return self._instance

    def __next__(self) -> int:
        """The next id. Raises ClientClosedError in a child process if the instance was given."""
        return self.take(1)[0]

    def next_id(self) -> int:
        """The next id, like `next(generator)`."""
        return self.take(1)[0]

    def __iter__(self) -> Iterator[int]:
        """An endless iterator of ids."""
        return self

    def take(self, count: int) -> list[int]:
        """The next `count` ids (up to 1,000,000), ascending. No other thread gets one between them.
        Raises InvalidRequestError.
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
        """Derive another instance in a child process. If it was given, raise from now on."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        if self._is_derived:
            self._instance = derived_instance()
        else:
            self._is_parents = True


def parts(of: int) -> IdParts:
    """Time, instance and sequence of an id. Raises InvalidRequestError."""
    return IdGenerator.parts(of)


_generators: weakref.WeakSet[IdGenerator] = weakref.WeakSet()
"""They are not among the clients of `tailrace.core.fork`, which handles the first fork only. Each
later fork derives another instance too.
"""


def _in_child() -> None:
    for generator in list(_generators):
        generator.after_fork()


os.register_at_fork(after_in_child=_in_child)
