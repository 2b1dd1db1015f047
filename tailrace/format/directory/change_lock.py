"""A lock on a small file that several processes read, change and replace.

Owner: the process that changes the file, from before it is read until it is replaced. The kernel
releases the lock when the process ends.

Invariants: the lock is on the file that is at the path. Only accounts that can read it can hold it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 5.0
_RETRY_S = 0.01


@contextmanager
def changing(path: str, wait_s: float = WAIT_S) -> Iterator[None]:
    """Change the file at `path`, or the one that a link there points to, in the block. Others who
    change it wait. Raises TimeoutError if they hold the lock for `wait_s`, OSError.
    """
    import fcntl  # most clients change nothing

    until_s = time.monotonic() + wait_s
    while True:
        fd = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = os.path.samestat(os.fstat(fd), os.stat(path))
            except BlockingIOError:
                is_locked = False
            if is_locked:
                yield
                return
        finally:
            os.close(fd)
        if time.monotonic() >= until_s:
            raise TimeoutError(f"another process changes {path}; try again")
        time.sleep(_RETRY_S)
