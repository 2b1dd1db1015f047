"""What simulated processes that were killed leave open: a kernel would close it, here the test's
end does.

Owner: one test's bench. Invariants: a descriptor that its user has closed is not closed again: its
    number may mean another file by then.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def close_with(owner: object, files: Any) -> Callable[[], object]:
    """Have what was opened through `files` (`DiskReadFiles`, or one of its kind) and is open still
    be closed when `owner` goes, or the result is called.
    """
    opened: set[int] = set()

    def noting(real: Callable[..., int]) -> Callable[..., int]:
        def opening(*arguments: Any, **named: Any) -> int:
            fd = real(*arguments, **named)
            opened.add(fd)
            return fd

        return opening

    for name in ("open_for_read", "open_for_write"):
        if hasattr(files, name):
            setattr(files, name, noting(getattr(files, name)))
    close = files.close

    def closing(fd: int) -> None:
        opened.discard(fd)
        close(fd)

    files.close = closing
    return weakref.finalize(owner, _close_all, opened)


def _close_all(opened: set[int]) -> None:
    while opened:
        os.close(opened.pop())
