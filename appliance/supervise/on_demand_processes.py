"""Processes that are started when they are first needed: dedicated workers, and the process of groups.

Each asks for shared memory of its own, which is made before it is started. An appliance that needs none of them has neither the processes nor the memory.

Owner: the supervisor. Reads what the coordinator (DEDICATED_TO) and the fronts (WANTS_GROUPS) ask for in the control region.
Invariants: a process is started after its regions exist; what lacks memory is tried again every HIRE_AGAIN_MS, and WITHOUT_MEMORY says so meanwhile.
Crash: what was asked for ends with the supervisor. The process of groups is started with the appliance where its database exists.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

from appliance.children import NS_PER_MS, Child
from appliance.directory_errors import DataDirectoryError
from appliance.regions import Regions
from appliance.restart_policy import ExitCode, Halt
from shm.control import Control
from shm.doorbell import Doorbell
from shm.layout import ProcessWord, Role
from shm.region import RegionError
from shm.runtime.process import process_name
from tailrace.formats.data_directory import GROUPS_FILE

logger = logging.getLogger("appliance.supervisor")

HIRE_AGAIN_MS = 5_000


class Hiring:
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
    ) -> None:
        """`children`: of the supervisor, whom this one adds to; `cores`: where a hired process runs; `spawn`: starts a child."""
        self._control = control
        self._regions = regions
        self._children = children
        self._bells = bells
        self._cores = cores
        self._spare_workers = spare_workers
        self._fronts = [control.process(Role.FRONT, f) for f in range(fronts)]
        self._groups = control.process(Role.GROUPS, 0)
        self._spawn = spawn
        self._had_groups = False
        self._hire_at_ns = 0
        """Not before: there was no room for a dedicated worker."""
        self._hire_groups_at_ns = 0
        """The same, for the process of groups."""

    def add_groups_of(self, data_dir: str) -> None:
        """At start, before any process runs: where the database of groups exists, their process is among the first. Without memory for it the rest starts."""
        self._had_groups = os.path.lexists(f"{data_dir}/{GROUPS_FILE}")
        if self._had_groups and self._make_groups():
            first_front = next(at for at, child in enumerate(self._children) if child.role is Role.FRONT)
            self._children.insert(first_front, Child(Role.GROUPS, 0, self._cores))  # a front that starts later sees that there is one

    def step(self, *, may_halt: bool) -> None:
        """Start what is wanted and not there; stop dedicated workers that are not wanted any more. `may_halt`: nothing serves yet, so a worker that cannot
        be started ends the appliance. Raises Halt.
        """
        self._hire_and_dismiss_workers(may_halt)
        is_wanted = self._had_groups or any(front.load(ProcessWord.WANTS_GROUPS) for front in self._fronts)
        if is_wanted and self._child(Role.GROUPS, 0) is None and self._make_groups():
            self._children.append(Child(Role.GROUPS, 0, self._cores))
            self._spawn(self._children[-1])

    def _child(self, role: Role, index: int) -> Child | None:
        return next((child for child in self._children if child.role is role and child.index == index), None)

    # ---- groups ----------------------------------------------------------------------------------------------------------------------

    def _make_groups(self) -> bool:
        """Whether the lanes of the process of groups exist now."""
        now_ns = time.monotonic_ns()
        if now_ns < self._hire_groups_at_ns:
            return False
        try:
            self._regions.create_groups()
        except (RegionError, DataDirectoryError) as error:
            logger.error("no_process_of_groups error=%r again_ms=%d", str(error), HIRE_AGAIN_MS)
            self._hire_groups_at_ns = now_ns + HIRE_AGAIN_MS * NS_PER_MS
            self._groups.store(ProcessWord.WITHOUT_MEMORY, 1)
            return False
        self._groups.store(ProcessWord.WITHOUT_MEMORY, 0)
        return True

    # ---- dedicated workers -----------------------------------------------------------------------------------------------------------

    def _hire_and_dismiss_workers(self, may_halt: bool) -> None:
        for index in self._spare_workers:
            slot = self._control.process(Role.WORKER, index)
            wanted = slot.load(ProcessWord.DEDICATED_TO)
            child = self._child(Role.WORKER, index)
            if wanted and child is None:
                self._hire_worker(index, slot.load(ProcessWord.DEDICATED_DIR) - 1, may_halt)
            elif not wanted and child is not None and not child.is_dismissed:
                child.is_dismissed = True
                slot.store(ProcessWord.STOP, child.generation)
                self._bells[child.name].ring()

    def _hire_worker(self, index: int, data_dir: int, may_halt: bool) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._hire_at_ns:
            return
        try:
            self._regions.create_worker(index, data_dir)
        except (RegionError, DataDirectoryError) as error:
            if may_halt:
                raise Halt(ExitCode.SHARED_MEMORY if isinstance(error, RegionError) else ExitCode.DATA_UNUSABLE, str(error)) from None
            logger.error("no_dedicated_worker index=%d error=%r again_ms=%d", index, str(error), HIRE_AGAIN_MS)
            self._hire_at_ns = now_ns + HIRE_AGAIN_MS * NS_PER_MS
            self._control.process(Role.WORKER, index).store(ProcessWord.WITHOUT_MEMORY, 1)
            self._bells[process_name(Role.COORDINATOR, 0)].ring()
            return
        self._control.process(Role.WORKER, index).store(ProcessWord.WITHOUT_MEMORY, 0)
        child = Child(Role.WORKER, index, self._cores)
        self._children.append(child)
        self._spawn(child)
