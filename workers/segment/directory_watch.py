"""Watch over a data directory: is it still the one that was opened?

A disk that is unplugged or unmounted leaves another directory, or none, at its path. Files that are
open go on to take writes, which no start would find.

Owner: the flusher of the directory.

Invariants:
- A directory that cannot be looked at for a shortage (descriptors, memory) counts as there.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tailrace.format.directory.files import is_shortage

CHECK_NS = 50_000_000

Identity = tuple[int, int]
"""Device and inode."""


def identity_of(path: str) -> Identity:
    """Identity of a directory. Raises OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


class DirectoryWatch:
    """See the module's docstring."""

    def __init__(self, path: str, identify: Callable[[str], Identity] = identity_of) -> None:
        """Raises OSError."""
        self._path = path
        self._identify = identify
        self._identity = identify(path)
        self._next_check_ns = 0
        self.reason = ""
        """The loss, in words; empty: the directory is there."""

    def check(self, now_ns: int) -> bool:
        """Look at the directory, if it is time. Return True if it was lost, or is back."""
        if now_ns < self._next_check_ns:
            return False
        self._next_check_ns = now_ns + CHECK_NS
        before = self.reason
        try:
            is_same = self._identify(self._path) == self._identity
            self.reason = "" if is_same else f"{self._path} is another directory: its disk is gone"
        except OSError as error:
            if not is_shortage(error):
                self.reason = f"{self._path} is gone: {error.strerror}"
        return bool(before) != bool(self.reason)
