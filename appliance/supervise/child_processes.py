"""The processes that should be running, and whether each of them gets on.

Owner: the supervisor; in shared memory each process counts its own beats.
Invariants: a process that shows no beat for hang_timeout_ms, while its supervisor ran, is killed, once in each such time; one that ends is reaped by its
    supervisor alone.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.cores import CorePlan
from shm.control import Control
from shm.layout import ProcessWord, Role
from shm.runtime.process import process_name

logger = logging.getLogger("appliance.supervisor")

NS_PER_MS = 1_000_000
STOOD_STILL_NS = 1_000_000_000
"""A look that comes later than this was held up by the host."""
QUICK_FAILURES_MAX = 5
"""A process that ended so often before it ever served is in trouble."""
NOT_NEEDED = (Role.CONSOLE, Role.GROUPS)
"""Records are produced and consumed without these."""


MODULES = {
    Role.COORDINATOR: "appliance.coordinator",
    Role.FLUSHER: "workers.flusher",
    Role.SCHEDULER: "workers.delays.scheduler",
    Role.GROUPS: "appliance.groups.agent",
    Role.WORKER: "workers.worker",
    Role.FRONT: "netfront.front",
    Role.CONSOLE: "appliance.console",
}
"""What each process runs."""


@dataclass(slots=True)
class Child:
    """One process that should be running."""

    role: Role
    index: int
    cores: list[int] | None = None
    pid: int = 0
    pidfd: int = -1
    generation: int = 0
    started_ns: int = 0
    restart_at_ns: int = 0
    quick_failures: int = 0
    has_served: bool = False
    last_beat: int = -1
    beat_changed_ns: int = 0
    is_dismissed: bool = False
    """A dedicated worker whose topic is gone: it is told to stop, and has no successor."""

    @property
    def name(self) -> str:
        """As bells, logs and `ps` have it."""
        return process_name(self.role, self.index)


def other_cores(plan: CorePlan) -> list[int] | None:
    """Where everything runs that has no core of its own; None: anywhere."""
    return list(plan.others) if plan.others else None


def first_children(plan: CorePlan, data_dir_count: int, worker_count: int, front_count: int) -> list[Child]:
    """What is started first, in the order in which it is started."""
    others = other_cores(plan)
    children = [Child(Role.COORDINATOR, 0, others)]
    children += [Child(Role.FLUSHER, d, others) for d in range(data_dir_count)]
    for w in range(worker_count):
        core = plan.workers[w] if w < len(plan.workers) else None
        children.append(Child(Role.WORKER, w, others if core is None else [core]))
    children.append(Child(Role.SCHEDULER, 0, others))
    return [*children, *(Child(Role.FRONT, f, others) for f in range(front_count))]


def look_at_beats(children: Iterable[Child], control: Control, hang_timeout_ms: int, now_ns: int, late_ns: int) -> bool:
    """Kill each process that hangs; returns whether all get on. `late_ns`: how much later this look comes than it should. When that is much, the host stood
    still (a paused virtual machine, memory that is short): its processes are not to blame, and killing all of them would make it worse.
    """
    healthy = True
    if late_ns < STOOD_STILL_NS:
        late_ns = 0
    else:
        logger.warning(
            "host_stood_still ms=%d: no process had a core; look for a paused machine or for memory that is short", late_ns // NS_PER_MS
        )
    for child in children:
        child.beat_changed_ns = min(now_ns, child.beat_changed_ns + late_ns)
        if child.pidfd < 0:
            healthy = healthy and (child.quick_failures < QUICK_FAILURES_MAX or child.role in NOT_NEEDED)
            continue
        beat = control.process(child.role, child.index).load(ProcessWord.BEAT)
        if beat != child.last_beat:
            child.last_beat, child.beat_changed_ns = beat, now_ns
        silent_ms = (now_ns - child.beat_changed_ns) // NS_PER_MS
        healthy = healthy and silent_ms < hang_timeout_ms * 3 // 4
        if silent_ms >= hang_timeout_ms:
            logger.error("hangs process=%s pid=%d silent_ms=%d killing", child.name, child.pid, silent_ms)
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            child.beat_changed_ns = now_ns
    return healthy
