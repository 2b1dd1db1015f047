"""Processes that are started when first needed: dedicated workers, the group coordinator, the
scheduler and the cleaners. Lanes that are made when first needed: those between workers and the
transaction coordinator, which is in the process of groups.

The cleaner of a data directory has no shared memory of its own, and ends when its flusher has no
job for it.

Dedicated workers and the group coordinator have shared memory of their own, which is made before
they are started. An appliance that needs none of them has neither the processes nor the memory. The
scheduler's lanes are there from the start, so that the other processes need not look for them.

Owner: the supervisor. It reads the requests of the controller (DEDICATED_TO, SCHEDULER_REQUESTED),
the fronts (GROUPS_REQUESTED, SCHEDULER_REQUESTED), the flushers (CLEANING), the group coordinator
and the workers (TRANSACTIONS_REQUESTED) in the control region, and stores each worker's
TRANSACTION_LANES.
Invariants:
- A process is started after its regions exist.
- Where topics with delays exist, the appliance serves when the scheduler does: the controller
  requests it before it is ready itself.
- Once transactions are requested, each worker that is started gets its lanes.
- A process that lacks memory is retried every START_RETRY_MS, and WITHOUT_MEMORY is set meanwhile.
Crash: requests end with the supervisor. The group coordinator is started with the appliance where
its database exists. A controller requests the scheduler when the catalog has a topic with delays.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

from appliance.data.directory_errors import DataDirectoryError
from appliance.supervise.memory.shm_regions import Regions
from appliance.supervise.processes.child_processes import NS_PER_MS, Child
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from shm.memory.layout import ProcessWord, Role
from shm.memory.region import RegionError
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control
from tailrace.format.directory.data_dir import GROUPS_FILE

logger = logging.getLogger("appliance.supervise.supervisor")

START_RETRY_MS = 5_000


class OnDemandProcesses:
    """See the module's docstring."""

    def __init__(
        self,
        control: Control,
        regions: Regions,
        children: list[Child],
        bells: Mapping[str, Doorbell],
        cores: list[int] | None,
        spare_workers: range,
        fronts: int,
        spawn: Callable[[Child], object],
        data_dirs: int = 0,
    ) -> None:
        """`children`: the supervisor's, which this class appends to; `cores`: those of a new
        process; `spawn`: starts a child; `data_dirs`: their number, each with a flusher that may
        want a cleaner.
        """
        self._control = control
        self._regions = regions
        self._children = children
        self._bells = bells
        self._cores = cores
        self._spare_workers = spare_workers
        self._fronts = [control.process(Role.FRONT, f) for f in range(fronts)]
        self._controller = control.process(Role.CONTROLLER, 0)
        self._groups = control.process(Role.GROUPS, 0)
        self._workers = [control.process(Role.WORKER, index) for index in range(spare_workers.stop)]
        self._has_transactions = False
        """True once transactions are requested, for the rest of this run."""
        self._spawn = spawn
        self._flushers = [control.process(Role.FLUSHER, d) for d in range(data_dirs)]
        self._had_groups = False
        self._start_at_ns = 0
        """Time of the next try after a lack of memory for a dedicated worker."""
        self._start_groups_at_ns = 0
        """Time of the next try after a lack of memory for the group coordinator."""
        self._make_lanes_at_ns = 0
        """Time of the next try after a lack of memory for the lanes of transactions."""

    def add_groups_of(self, data_dir: str) -> None:
        """Start the group coordinator with the first processes, where its database exists. Without
        memory for it the other processes start.
        """
        self._had_groups = os.path.lexists(f"{data_dir}/{GROUPS_FILE}")
        if self._had_groups and self._make_groups():
            first_front = next(
                at for at, child in enumerate(self._children) if child.role is Role.FRONT
            )
            self._children.insert(
                first_front, Child(Role.GROUPS, 0, self._cores)
            )  # a front that starts later sees that there is one

    def step(self, *, may_halt: bool) -> None:
        """Start processes that are wanted; stop dedicated workers that are not wanted any more.

        `may_halt`: nothing serves yet, so a worker that cannot be started ends the appliance.
        Raises: Halt.
        """
        self._start_and_stop_workers(may_halt)
        self._start_scheduler(may_halt)
        self._start_and_stop_cleaners()
        self._has_transactions = self._has_transactions or any(
            process.load(ProcessWord.TRANSACTIONS_REQUESTED)
            for process in (self._groups, *self._workers)
        )
        is_requested = (
            self._had_groups
            or self._has_transactions
            or any(front.load(ProcessWord.GROUPS_REQUESTED) for front in self._fronts)
        )
        if is_requested and self._child(Role.GROUPS, 0) is None and self._make_groups():
            self._children.append(Child(Role.GROUPS, 0, self._cores))
            self._spawn(self._children[-1])
        if self._has_transactions:
            self._make_transaction_lanes()

    def _child(self, role: Role, index: int) -> Child | None:
        return next(
            (child for child in self._children if child.role is role and child.index == index), None
        )

    # ---- scheduler -------------------------------------------------------------------------------

    def _start_scheduler(self, may_halt: bool) -> None:
        is_requested = any(
            process.load(ProcessWord.SCHEDULER_REQUESTED)
            for process in (self._controller, *self._fronts)
        )
        if is_requested and self._child(Role.SCHEDULER, 0) is None:
            # Its failures end an appliance that has never served, and no other.
            child = Child(Role.SCHEDULER, 0, self._cores, has_served=not may_halt)
            self._children.append(child)
            self._spawn(child)

    # ---- cleaners --------------------------------------------------------------------------------

    def _start_and_stop_cleaners(self) -> None:
        """A flusher with a job for its cleaner has one."""
        for index, flusher in enumerate(self._flushers):
            is_needed = bool(flusher.load(ProcessWord.CLEANING))
            child = self._child(Role.CLEANER, index)
            if is_needed and child is None:
                child = Child(Role.CLEANER, index, self._cores)
                self._children.append(child)
                self._spawn(child)
            elif not is_needed and child is not None and not child.is_dismissed:
                self._dismiss(child)

    def _dismiss(self, child: Child) -> None:
        """Stop a process that is not needed any more."""
        if child.pidfd < 0:  # it waits to be started again
            self._children.remove(child)
            return
        child.is_dismissed = True
        self._control.process(child.role, child.index).store(ProcessWord.STOP, child.generation)
        self._bells[child.name].ring()

    # ---- groups ----------------------------------------------------------------------------------

    def _make_groups(self) -> bool:
        """Make the lanes of the group coordinator; True if they exist."""
        now_ns = time.monotonic_ns()
        if now_ns < self._start_groups_at_ns:
            return False
        try:
            self._regions.create_groups()
        except (RegionError, DataDirectoryError) as error:
            logger.error("no_process_of_groups error=%r retry_ms=%d", str(error), START_RETRY_MS)
            self._start_groups_at_ns = now_ns + START_RETRY_MS * NS_PER_MS
            self._groups.store(ProcessWord.WITHOUT_MEMORY, 1)
            return False
        self._groups.store(ProcessWord.WITHOUT_MEMORY, 0)
        return True

    # ---- transactions ----------------------------------------------------------------------------

    def _make_transaction_lanes(self) -> None:
        """Make the lanes of each worker that has none, and announce them."""
        now_ns = time.monotonic_ns()
        if now_ns < self._make_lanes_at_ns:
            return
        try:
            made = self._regions.create_transactions()
        except (RegionError, DataDirectoryError) as error:
            logger.error("no_transaction_lanes error=%r retry_ms=%d", str(error), START_RETRY_MS)
            self._make_lanes_at_ns = now_ns + START_RETRY_MS * NS_PER_MS
            return
        for worker in made:
            self._workers[worker].store(ProcessWord.TRANSACTION_LANES, 1)
            self._bells[process_name(Role.WORKER, worker)].ring()
        if made:
            self._bells[process_name(Role.GROUPS, 0)].ring()

    # ---- dedicated workers -----------------------------------------------------------------------

    def _start_and_stop_workers(self, may_halt: bool) -> None:
        for index in self._spare_workers:
            slot = self._control.process(Role.WORKER, index)
            requested = slot.load(ProcessWord.DEDICATED_TO)
            child = self._child(Role.WORKER, index)
            if requested and child is None:
                self._start_worker(index, slot.load(ProcessWord.DEDICATED_DIR) - 1, may_halt)
            elif not requested and child is not None and not child.is_dismissed:
                child.is_dismissed = True
                slot.store(ProcessWord.STOP, child.generation)
                self._bells[child.name].ring()

    def _start_worker(self, index: int, data_dir: int, may_halt: bool) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._start_at_ns:
            return
        try:
            self._regions.create_worker(index, data_dir)
        except (RegionError, DataDirectoryError) as error:
            if may_halt:
                raise Halt(
                    ExitCode.SHARED_MEMORY
                    if isinstance(error, RegionError)
                    else ExitCode.DATA_UNUSABLE,
                    str(error),
                ) from None
            logger.error(
                "no_dedicated_worker index=%d error=%r retry_ms=%d",
                index,
                str(error),
                START_RETRY_MS,
            )
            self._start_at_ns = now_ns + START_RETRY_MS * NS_PER_MS
            self._control.process(Role.WORKER, index).store(ProcessWord.WITHOUT_MEMORY, 1)
            self._bells[process_name(Role.CONTROLLER, 0)].ring()
            return
        self._control.process(Role.WORKER, index).store(ProcessWord.WITHOUT_MEMORY, 0)
        child = Child(Role.WORKER, index, self._cores)
        self._children.append(child)
        self._spawn(child)
