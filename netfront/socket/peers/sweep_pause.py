"""Pause of the sweeps over connections: none is due while libzmq's I/O threads have done nothing.

Only a sweep detects a message without end, because libzmq's thread may read bytes that no
descriptor of the front reports. Reading them takes CPU time of that thread. Its clock therefore
tells, in one system call, that no connection can have changed since the last sweep. A front whose
clients are silent looks at that clock instead of sweeping.

Owner: one front.

Invariants:
- A sweep follows within SWEEP_INTERVAL_NS of the first byte that an I/O thread reads.
- Sweeps pause only after a whole round of them over an idle I/O thread, with nothing left to check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from netfront.socket.peers.connection_costs import SWEEP_PEERS
from netfront.socket.peers.connections import SWEEP_INTERVAL_NS
from shm.queues.doorbell import Pollable, spin_then_sleep

_PER_THREAD_CPU = 6
"""CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of the kernel: the low bits of a thread's clock id."""


def cpu_clock(find_threads: Callable[[], Sequence[int]]) -> Callable[[], int]:
    """Return a function that returns the CPU time of the I/O threads together, ns.

    It finds the threads when it is called, until there are some: a thread gives itself its name
    when it first runs, which may be after the socket listens. A connection shows that it has run.
    """
    clocks: list[int] = []

    def cpu_ns() -> int:
        if not clocks:
            clocks.extend((~thread << 3) | _PER_THREAD_CPU for thread in find_threads())
        return sum(map(time.clock_gettime_ns, clocks))

    return cpu_ns


class SweepPause:
    """Decides when sweeps pause, and when they go on."""

    def __init__(self, cpu_ns: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        """`cpu_ns`: CPU time of the I/O threads."""
        self._cpu_ns = cpu_ns
        self._monotonic_ns = monotonic_ns
        self._swept_cpu_ns = -1
        """CPU time when the last sweep began."""
        self._idle_sweeps = 0
        """Sweeps since the I/O threads last did something."""
        self._check_at_ns = 0
        self.is_paused = False

    def begin_sweep(self) -> None:
        """Note the I/O threads' time, before the sweep counts what they have received."""
        cpu_ns = self._cpu_ns()
        self._idle_sweeps = self._idle_sweeps + 1 if cpu_ns == self._swept_cpu_ns else 0
        self._swept_cpu_ns = cpu_ns

    def end_sweep(self, now_ns: int, peer_count: int, is_settled: bool) -> None:
        """Decide whether a further sweep is due. `is_settled`: this one left nothing to check."""
        self.is_paused = is_settled and self._idle_sweeps > peer_count // SWEEP_PEERS
        self._check_at_ns = now_ns + SWEEP_INTERVAL_NS

    def sleep(
        self, poll: Pollable, timeout_ms: float | None, busy_ns: int
    ) -> tuple[list[tuple[int, int]], bool]:
        """Sleep as `spin_then_sleep` does. Return the ready descriptors, and True if a sweep is
        due.
        """
        if not self.is_paused:
            return spin_then_sleep(poll, timeout_ms, busy_ns, self._monotonic_ns), False
        end_ns = None if timeout_ms is None else self._monotonic_ns() + int(timeout_ms * 1_000_000)
        while True:
            until_ns = self._check_at_ns if end_ns is None else min(self._check_at_ns, end_ns)
            left_ms = max(0, (until_ns - self._monotonic_ns() + 999_999) // 1_000_000)
            found = spin_then_sleep(poll, left_ms, busy_ns, self._monotonic_ns)
            busy_ns = 0
            now_ns = self._monotonic_ns()
            if now_ns >= self._check_at_ns:
                self._check_at_ns = now_ns + SWEEP_INTERVAL_NS
                if self._cpu_ns() != self._swept_cpu_ns:
                    self.is_paused = False
                    return found, True
            if found or (end_ns is not None and now_ns >= end_ns):
                return found, False
