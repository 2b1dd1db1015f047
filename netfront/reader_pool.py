"""A few threads that bring cold pages into the page cache, so that a cold read never stalls a warm one.

The front reads with RWF_NOWAIT; what is not in memory is read here once, thrown away, and read again by the front, now warm. So no buffer is ever
shared between threads.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

_PIECE_BYTES = 1 << 20


class ReadAhead(Protocol):
    """What serving fetches needs of a pool."""

    def submit(self, fd: int, position: int, length: int, token: object) -> None: ...
    def completed(self) -> list[object]: ...


class ReaderPool:
    """`submit` from the front, `completed` by the front; threads are started with the first cold read."""

    def __init__(self, wake: Callable[[], None], thread_count: int = 2) -> None:
        self._wake = wake
        self._thread_count = thread_count
        self._tasks: queue.SimpleQueue[tuple[int, int, int, object] | None] = queue.SimpleQueue()
        self._done: deque[object] = deque()
        self._threads: list[threading.Thread] = []

    def submit(self, fd: int, position: int, length: int, token: object) -> None:
        """Read `length` bytes at `position` of a duplicate of `fd`; `token` comes back from `completed`."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, name=f"reader-{i}", daemon=True) for i in range(self._thread_count)]
            for thread in self._threads:
                thread.start()
        self._tasks.put((os.dup(fd), position, length, token))

    def completed(self) -> list[object]:
        """Tokens of reads that are done (or failed: the front's own read then meets the error)."""
        tokens = []
        while self._done:
            tokens.append(self._done.popleft())
        return tokens

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            fd, position, length, token = task
            try:
                while length > 0:
                    got = len(os.pread(fd, min(length, _PIECE_BYTES), position))
                    if not got:
                        break
                    position += got
                    length -= got
            except OSError:
                pass  # the front reads the same place next and reports what it meets
            finally:
                os.close(fd)
            self._done.append(token)
            self._wake()
