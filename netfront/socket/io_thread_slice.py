"""Time slice of libzmq's I/O thread: short while a front is nearly idle, the kernel's default under
load.

A thread woken on its waker's core starts only when the waker sleeps. The front spins for up to 60
us before it sleeps, which delayed every ack. From Linux 6.12 on, the thread with the shorter time
slice runs first. A thread may set its own slice without privilege (sched_setattr(2),
`sched_runtime`). Under load a short slice causes more context switches (10 % of CPU for batches of
64 KiB), so the default is used then. Older kernels accept the call and ignore it.

Owner: one front.

Invariants:
- Policy and nice value are never changed.
- Nothing is set under a scheduling policy other than SCHED_OTHER.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

SHORT_SLICE_NS = 100_000
"""Shortest slice that Linux accepts."""
BUSY_PER_S = 1_500
"""Messages per second, or pages of 4 KiB, above which the front counts as busy."""
SAMPLE_MIN_NS = 20_000_000
_SYS_SCHED_SETATTR = 314
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime, deadline, period."""


class IoThreadSlice:
    """Switches the slice by samples of the traffic."""

    def __init__(self, set_slice_ns: Callable[[int], bool]) -> None:
        """`set_slice_ns` sets the thread's slice (0: the kernel's default) and
        returns False if it cannot.
        """
        self._set_slice_ns = set_slice_ns
        self._is_short = False
        self._can_be_set = True
        self._sampled_ns = self._moved = 0

    def sample(self, now_ns: int, moved: int) -> None:
        """Sample the traffic. `moved` counts messages and pages since the front began."""
        elapsed_ns = now_ns - self._sampled_ns
        if not self._can_be_set or elapsed_ns < SAMPLE_MIN_NS:
            return
        is_short = (moved - self._moved) * 1_000_000_000 < BUSY_PER_S * elapsed_ns
        self._sampled_ns, self._moved = now_ns, moved
        if is_short is not self._is_short:
            self._can_be_set = self._set_slice_ns(SHORT_SLICE_NS if is_short else 0)
            self._is_short = is_short


def io_threads() -> list[int]:
    """Return the ids of the I/O threads of this process's libzmq contexts."""
    found = []
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/comm", encoding="ascii", errors="replace") as file:
                if "/IO/" in file.read():
                    found.append(int(name))
        except OSError:
            continue  # this thread has ended
    return found


def set_slice_ns(threads: list[int], slice_ns: int) -> bool:
    """Set the time slice of these threads. Return False if one of them cannot be set."""
    syscall = ctypes.CDLL(None).syscall
    for thread in threads:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
        if syscall(_SYS_SCHED_SETATTR, thread, attributes, 0):
            return False
    return True
