"""How soon libzmq's I/O thread gets the core when a front has given it an answer: at once while there is little to do, in its turn under load.

A thread that is woken on its waker's core (a virtual machine whose other cores are halted, or busy ones) begins when the waker sleeps: the front's last 60 us,
in which it only looks whether there is more, were part of each ack. Linux from 6.12 on lets the thread with the shorter time slice go first, and a thread may
say its own (sched_setattr(2), `sched_runtime`; no privilege). Under load that would cost more switches for smaller groups (10 % of CPU for batches of 64 KiB),
so then the slice is the kernel's default. Older kernels take the call and ignore it.

Owner: one front. Invariants: policy and nice value stay as they are; where a service's manager chose another policy than SCHED_OTHER, nothing is set.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

SHORT_SLICE_NS = 100_000
"""The shortest that Linux takes."""
BUSY_PER_S = 1_500
"""Messages, and as many pages of 4 KiB, a second."""
LOOK_MIN_NS = 20_000_000
_SYS_SCHED_SETATTR = 314
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime, deadline, period."""


class IoSlice:
    """Told what has moved, from time to time."""

    def __init__(self, set_slice_ns: Callable[[int], bool]) -> None:
        """`set_slice_ns`: of the thread, 0 being the kernel's default; False: it cannot be set."""
        self._set_slice_ns = set_slice_ns
        self._is_short = False
        self._can_be_set = True
        self._looked_ns = self._moved = 0

    def look(self, now_ns: int, moved: int) -> None:
        """`moved`: messages and pages since the front began."""
        elapsed_ns = now_ns - self._looked_ns
        if not self._can_be_set or elapsed_ns < LOOK_MIN_NS:
            return
        is_short = (moved - self._moved) * 1_000_000_000 < BUSY_PER_S * elapsed_ns
        self._looked_ns, self._moved = now_ns, moved
        if is_short is not self._is_short:
            self._can_be_set = self._set_slice_ns(SHORT_SLICE_NS if is_short else 0)
            self._is_short = is_short


def io_threads() -> list[int]:
    """The I/O threads of this process's libzmq contexts."""
    found = []
    for name in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{name}/comm", encoding="ascii", errors="replace") as file:
            if "/IO/" in file.read():
                found.append(int(name))
    return found


def set_slice_ns(threads: list[int], slice_ns: int) -> bool:
    """Of these threads; False where one of them cannot be."""
    syscall = ctypes.CDLL(None).syscall
    for thread in threads:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
        if syscall(_SYS_SCHED_SETATTR, thread, attributes, 0):
            return False
    return True
