"""Reader pool: threads that load cold pages into the page cache, so that cold reads never stall
warm ones.

The front reads with RWF_NOWAIT. A read that misses the page cache is done here once and discarded,
and the front reads again. No buffer is shared between threads.

Owner: one front.

Invariants:
- Reads of one file share one duplicate of its descriptor. Descriptors in use are bounded by the
  number of files being read.
- Each token is returned exactly once, also after a failed read.
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
    """Duplicate of a descriptor, with the number of its pending reads."""

    __slots__ = ("fd", "key", "users")

    def __init__(self, fd: int, key: tuple[int, int]) -> None:
        self.fd = fd
        self.key = key
        self.users = 0


class AsyncReader(Protocol):
    """Interface of a reader pool to the fetch service."""

    def submit(self, fd: int, position: int, length: int, token: object) -> None: ...
    def completed(self) -> list[object]: ...


class ReaderPool:
    """Threads that read ahead of a front. The first cold read starts them."""

    def __init__(self, wake: Callable[[], None], thread_count: int = 2) -> None:
        self._wake = wake
        self._thread_count = thread_count
        self._tasks: queue.SimpleQueue[tuple[_Shared, int, int, object] | None] = (
            queue.SimpleQueue()
        )
        self._shared: dict[tuple[int, int], _Shared] = {}
        """The open duplicates by (device, inode). Each is closed with its last read."""
        self._lock = threading.Lock()
        self._done: deque[object] = deque()
        self._threads: list[threading.Thread] = []

    def submit(self, fd: int, position: int, length: int, token: object) -> None:
        """Read `length` bytes at `position` of a duplicate of `fd`.

        `completed` returns `token` later.
        """
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"reader-{i}", daemon=True)
                for i in range(self._thread_count)
            ]
            for thread in self._threads:
                thread.start()
        try:
            shared = self._take(fd)
        except OSError as error:
            # No descriptor is free. The front retries, and in the end blocks on the disk itself.
            logger.warning("read_ahead_failed error=%r", str(error))
            self._done.append(token)
            self._wake()
            return
        self._tasks.put((shared, position, length, token))

    def completed(self) -> list[object]:
        """Return the tokens of finished reads.

        After a failed one, the front's own read reports the error.
        """
        tokens = []
        while self._done:
            tokens.append(self._done.popleft())
        return tokens

    def close(self) -> None:
        """Make the threads end after their current reads."""
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

    def _release_waiting(self, shared: _Shared) -> None:
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
                pass  # the front reads the same place next and reports the error
            finally:
                self._release_waiting(shared)
            self._done.append(token)
            self._wake()
