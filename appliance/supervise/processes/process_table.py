"""The table of child processes: starts, reaps, restarts and stops them.

Owner: the supervisor. In shared memory generations, pids and liveness.
Invariants:
- A replacement is never started before its predecessor is reaped.
- Every process of the table has a doorbell, which was made before the first start.
Crash: children die with the supervisor (PDEATHSIG).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from appliance.supervise.processes.child_processes import NS_PER_MS, Child
from appliance.supervise.processes.restart_policy import (
    HALTING,
    SETTLED_AFTER_MS,
    Action,
    ExitCode,
    Halt,
    decide,
)
from appliance.supervise.processes.spawner import Spawner
from shm.memory.layout import ProcessWord, Role
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import ProcessSpec
from shm.tables.control import Control

logger = logging.getLogger("appliance.supervise.supervisor")

_SERVED_WITHOUT = frozenset({Role.GROUPS, Role.CONSOLE, Role.CLEANER})
"""Processes without which everything else serves: their end, however often, ends nothing else."""
_STOP_ORDER = (
    Role.CONSOLE,
    Role.CLEANER,
    Role.FRONT,
    Role.GROUPS,
    Role.SCHEDULER,
    Role.WORKER,
    Role.FLUSHER,
    Role.CONTROLLER,
)
SPAWN_RETRY_MS = 1_000
KILL_TIMEOUT_MS = 2_000
"""Longest wait for killed processes to end."""


class ProcessTable:
    """The processes that should be running."""

    def __init__(
        self,
        children: list[Child],
        control: Control,
        spawner: Spawner,
        bells: dict[str, Doorbell],
        inherited_fds: Callable[[Child], Iterable[int]],
        spec_of: Callable[[Child], ProcessSpec],
        record_pids: Callable[[], None],
    ) -> None:
        """`inherited_fds`: returns the descriptors that a child gets beside its doorbells.
        `spec_of`: returns the specification of a child's next generation. `record_pids`: called
        when a process was started while others serve.
        """
        self.children = children
        self._control = control
        self._spawner = spawner
        self._bells = bells
        self._inherited_fds = inherited_fds
        self._spec_of = spec_of
        self._record_pids = record_pids

    def __iter__(self) -> Iterator[Child]:
        return iter(self.children)

    def is_known(self, pid: int) -> bool:
        """True for the pid of a child that is not reaped, or of the zygote."""
        return self._spawner.is_zygote(pid) or any(
            child.pid == pid and child.pidfd >= 0 for child in self.children
        )

    # ---- start -----------------------------------------------------------------------------------

    def spawn(self, child: Child) -> None:
        """Start `child`'s next generation. Main thread only: PDEATHSIG watches the thread that
        spawned.
        """
        slot = self._control.process(child.role, child.index)
        child.generation = slot.load(ProcessWord.GENERATION) + 1
        slot.store(ProcessWord.GENERATION, child.generation)
        slot.store(ProcessWord.LIVE, 1)
        spec = self._spec_of(child)
        inherited = [*(bell.fd for bell in self._bells.values()), *self._inherited_fds(child)]
        spec_fd = spec.to_inherited_file()
        try:
            child.pid, child.pidfd = self._spawner.start(child.module, spec_fd, inherited)
        finally:
            os.close(spec_fd)
        child.started_ns = child.beat_changed_ns = time.monotonic_ns()
        child.restart_at_ns = 0
        slot.store(ProcessWord.PID, child.pid)

    def try_spawn(self, child: Child) -> bool:
        """Start a process while the others serve. If it lacks memory, a process or a descriptor,
        retry later.
        """
        try:
            self.spawn(child)
        except OSError as error:
            logger.error(
                "not_started process=%s error=%r retry_ms=%d",
                child.name,
                str(error),
                SPAWN_RETRY_MS,
            )
            self._control.process(child.role, child.index).store(ProcessWord.LIVE, 0)
            child.restart_at_ns = time.monotonic_ns() + SPAWN_RETRY_MS * NS_PER_MS
            return False
        self._record_pids()
        return True

    def restart_due(self, now_ns: int) -> None:
        """Start the processes whose restart delay has passed."""
        for child in self.children:
            if child.restart_at_ns and now_ns >= child.restart_at_ns:
                if child.generation and not child.is_restarting:
                    slot = self._control.process(child.role, child.index)
                    slot.store(ProcessWord.RESTARTS, slot.load(ProcessWord.RESTARTS) + 1)
                child.is_restarting = False
                if self.try_spawn(child):
                    logger.info(
                        "restarted process=%s pid=%d generation=%d",
                        child.name,
                        child.pid,
                        child.generation,
                    )

    def begin_restart(self, child: Child) -> None:
        """Ask a process to end; its end is followed by its replacement at once."""
        child.is_restarting = True
        self._ask_to_end(child)

    # ---- end -------------------------------------------------------------------------------------

    def reap(self, child: Child, now_ns: int, stopping: bool = False) -> None:
        """Reap a child that has ended, and act by the policy.

        Raises: Halt.
        """
        _, status = os.waitpid(child.pid, 0)
        exit_status = os.waitstatus_to_exitcode(status)
        os.close(child.pidfd)
        child.pidfd = -1
        self._control.process(child.role, child.index).store(ProcessWord.LIVE, 0)
        stopping = stopping or child.is_dismissed
        if child.is_restarting and not stopping:
            child.restart_at_ns = now_ns
            return
        quick = now_ns - child.started_ns < SETTLED_AFTER_MS * NS_PER_MS
        had_served = child.has_served or child.role in _SERVED_WITHOUT
        decision = decide(
            exit_status,
            stopping=stopping,
            had_served=had_served,
            quick_failures=child.quick_failures,
        )
        child.quick_failures = child.quick_failures + 1 if quick else 0
        if stopping:
            if exit_status != 0:
                logger.warning("ended_badly process=%s status=%d", child.name, exit_status)
            if child.is_dismissed:
                self.children.remove(child)
            return
        logger.warning(
            "ended process=%s pid=%d status=%d action=%s delay_ms=%d",
            child.name, child.pid, exit_status, decision.action.name, decision.delay_ms,
        )  # fmt: skip
        if decision.action is Action.HALT:
            times = (
                f" {child.quick_failures} times before it ever served"
                if child.quick_failures > 1
                else ""
            )
            code = (
                exit_status
                if exit_status in (*HALTING, ExitCode.ADDRESS_IN_USE)
                else ExitCode.FAILED
            )
            raise Halt(
                code,
                f"{child.name} ended with status {exit_status}{times}, which a restart would "
                "not mend; its reason is in the log above.",
            )
        child.restart_at_ns = now_ns + decision.delay_ms * NS_PER_MS

    def stop(self, timeout_ms: int, while_waiting: Callable[[], None]) -> bool:
        """End the children in order. Those that do not end within the timeout are killed. False:
        some had to be killed.
        """
        deadline_ns = time.monotonic_ns() + timeout_ms * NS_PER_MS
        for role in _STOP_ORDER:
            group = [child for child in self.children if child.role is role and child.pidfd >= 0]
            for child in group:
                self._ask_to_end(child)
            self._await(group, deadline_ns, while_waiting)
        left = [child for child in self.children if child.pidfd >= 0]
        for child in left:
            logger.error("did_not_stop process=%s pid=%d action=KILL", child.name, child.pid)
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        self._await(left, time.monotonic_ns() + KILL_TIMEOUT_MS * NS_PER_MS, while_waiting)
        return not left

    def _ask_to_end(self, child: Child) -> None:
        self._control.process(child.role, child.index).store(ProcessWord.STOP, child.generation)
        self._bells[child.name].ring()

    def _await(
        self, group: list[Child], deadline_ns: int, while_waiting: Callable[[], None]
    ) -> None:
        while waiting := [child for child in group if child.pidfd >= 0]:
            remaining_ms = (deadline_ns - time.monotonic_ns()) // NS_PER_MS
            if remaining_ms <= 0:
                return
            poll = select.poll()
            for child in waiting:
                poll.register(child.pidfd, select.POLLIN)
            for fd, _ in poll.poll(min(remaining_ms, 1000)):
                self.reap(
                    next(c for c in waiting if c.pidfd == fd), time.monotonic_ns(), stopping=True
                )
            while_waiting()
