"""A few threads that bring cold pages into the page cache, so that a cold read never stalls a warm one.

The front reads with RWF_NOWAIT; what is not in memory is read here once, thrown away, and read again by the front, now warm. So no buffer is ever
shared between threads.

Owner: one front. Invariants: reads of one file share one duplicate of its descriptor, so that however many wait, descriptors in use are bounded by the
files that are read; a token comes back exactly once, also when nothing could be read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20


class _Shared:
    """A duplicate of a descriptor, and how many reads want it."""

    __slots__ = ("fd", "key", "users")

    def __init__(self, fd: int, key: tuple[int, int]) -> None:
        self.fd = fd
        self.key = key
        self.users = 0


class ReadAhead(Protocol):
    """What serving fetches needs of a pool."""

    def submit(self, fd: int, position: int, length: int, token: object) -> None: ...
    def completed(self) -> list[object]: ...


class ReaderPool:
    """`submit` from the front, `completed` by the front; threads are started with the first cold read."""

    def __init__(self, wake: Callable[[], None], thread_count: int = 2) -> None:
        self._wake = wake
        self._thread_count = thread_count
        self._tasks: queue.SimpleQueue[tuple[_Shared, int, int, object] | None] = queue.SimpleQueue()
        self._shared: dict[tuple[int, int], _Shared] = {}
        """(device, inode) -> the file that is being read; closed with its last read."""
        self._lock = threading.Lock()
        self._done: deque[object] = deque()
        self._threads: list[threading.Thread] = []

    def submit(self, fd: int, position: int, length: int, token: object) -> None:
        """Read `length` bytes at `position` of a duplicate of `fd`; `token` comes back from `completed`."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, name=f"reader-{i}", daemon=True) for i in range(self._thread_count)]
            for thread in self._threads:
                thread.start()
        try:
            shared = self._take(fd)
        except OSError as error:  # no descriptor is left: the front tries again, and in the end waits for the disk itself
            logger.warning("read_ahead_failed error=%r", str(error))
            self._done.append(token)
            self._wake()
            return
        self._tasks.put((shared, position, length, token))

    def completed(self) -> list[object]:
        """Tokens of reads that are done (or failed: the front's own read then meets the error)."""
        tokens = []
        while self._done:
            tokens.append(self._done.popleft())
        return tokens

    def close(self) -> None:
        """Have the threads end with what they are doing."""
        for _ in self._threads:
            self._tasks.put(None)

    def _take(self, fd: int) -> _Shared:
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(os.dup(fd), key)
            shared.users += 1
        return shared

    def _let_go(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            if not shared.users:
                del self._shared[shared.key]
                os.close(shared.fd)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            shared, position, length, token = task
            try:
                while length > 0:
                    got = len(os.pread(shared.fd, min(length, _PIECE_BYTES), position))
                    if not got:
                        break
                    position += got
                    length -= got
            except OSError:
                pass  # the front reads the same place next and reports what it meets
            finally:
                self._let_go(shared)
            self._done.append(token)
            self._wake()
