"""File descriptors of a forked process: kept, renumbered or closed as its specification says.

Owner: the process itself.

Invariants:
- A descriptor that is not requested is closed.
- A requested number refers to the descriptor given for it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Sequence

STANDARD = (0, 1, 2)


def retain(kept: Collection[int]) -> None:
    """Close all descriptors except standard input, output and error, and `kept`."""
    with os.scandir("/proc/self/fd") as entries:
        found = [int(entry.name) for entry in entries]
    for fd in found:
        if fd not in STANDARD and fd not in kept:
            try:
                os.close(fd)
            except OSError:
                pass  # the descriptor of the listing itself


def renumber(given: Sequence[int], requested: Sequence[int]) -> None:
    """Move each descriptor to its requested number. Close all others except the standard ones.

    Requested numbers are distinct and not standard ones. One free descriptor is needed. Raises
    OSError.
    """
    waiting = dict(zip(given, requested, strict=True))
    while waiting:
        fd, number = waiting.popitem()
        if fd == number:
            continue
        if number in waiting:  # in use by a descriptor that is still to be moved: move that aside
            waiting[fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(STANDARD) + 1)] = waiting.pop(
                number
            )
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
    retain(requested)
