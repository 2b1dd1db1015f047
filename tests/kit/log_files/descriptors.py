"""Descriptors that simulated processes leave open when they are killed: a kernel would close it,
here the end of the files that they share does.

Owner: the `files` of one test.
Invariants: a descriptor is closed once. Its number may mean another file afterwards.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_closings: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()
"""Closers of the rest, for each `files` that is watched. Two benches of one directory share it:
each with a set of its own would close the other's descriptors again.
"""


def close_with(files: Any) -> Callable[[], object]:
    """Have what was opened through `files` (`DiskReadFiles`, or one of its kind) and is open still
    be closed when `files` goes, or the result is called.
    """
    if files in _closings:
        return _closings[files]
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
    weakref.finalize(files, _close_all, opened)
    _closings[files] = lambda: _close_all(opened)
    return _closings[files]


def _close_all(opened: set[int]) -> None:
    while opened:
        os.close(opened.pop())
