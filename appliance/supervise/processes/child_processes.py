"""The child processes that should be running, and the check that each makes progress.

Owner: the supervisor. In shared memory each process counts its own beats.
Invariants:
- A process without a beat for hang_timeout_ms, while its supervisor ran, is killed, once in each
  such time.
- Only the supervisor reaps a process.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.config.core_plan import CorePlan, Cores
from shm.memory.layout import ProcessWord, Role
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control

logger = logging.getLogger("appliance.supervise.supervisor")

NS_PER_MS = 1_000_000
SUSPENDED_NS = 1_000_000_000
"""Lateness of a check that shows that the host stood still."""
QUICK_FAILURES_MAX = 5
"""Number of ends without ever serving at which a process is in trouble."""
NOT_NEEDED = (Role.CONSOLE, Role.GROUPS, Role.CLEANER)
"""Processes that are not needed to produce and consume records."""


MODULES = {
    Role.CONTROLLER: "appliance.control.controller",
    Role.FLUSHER: "workers.flush.flusher",
    Role.SCHEDULER: "workers.delays.scheduler",
    Role.GROUPS: "appliance.groups.process",
    Role.WORKER: "workers.append.worker",
    Role.FRONT: "netfront.front",
    Role.CLEANER: "workers.clean.cleaner",
    Role.CONSOLE: "appliance.observe.http_server",
}
"""The module that each process runs."""
KAFKA_GATEWAY = "netfront.kafka.gateway"
"""The module of a front that speaks Kafka's protocol."""


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
    gateway: int = -1
    """Number of a Kafka gateway, which is a front with a program of its own; -1: it is none."""
    last_beat: int = -1
    beat_changed_ns: int = 0
    is_restarting: bool = False
    """True from an operator's request on until it is replaced, at once when it has ended."""
    is_dismissed: bool = False
    """True for a dedicated worker whose topic was deleted, and for a cleaner without a job: it is
    stopped and not replaced.
    """

    @property
    def module(self) -> str:
        """The module that it runs."""
        return MODULES[self.role] if self.gateway < 0 else KAFKA_GATEWAY

    @property
    def name(self) -> str:
        """Name for doorbells, logs and `ps`."""
        return process_name(self.role, self.index)


def other_cores(plan: CorePlan) -> list[int] | None:
    """Cores of processes without a core of their own; None: all."""
    return _listed(plan.others)


def _listed(cores: Cores) -> list[int] | None:
    return list(cores) if cores else None


def first_children(plan: CorePlan, gateways: int = 0) -> list[Child]:
    """Processes of a start, in their order."""
    others = other_cores(plan)
    children = [Child(Role.CONTROLLER, 0, others)]
    children += [Child(Role.FLUSHER, d, _listed(cores)) for d, cores in enumerate(plan.flushers)]
    for w, core in enumerate(plan.workers):
        children.append(Child(Role.WORKER, w, others if core is None else [core]))
    children += [Child(Role.FRONT, f, _listed(c)) for f, c in enumerate(plan.fronts)]
    for gateway in range(gateways):
        children.append(Child(Role.FRONT, len(plan.fronts) + gateway, others, gateway=gateway))
    return children


def check_heartbeats(
    children: Iterable[Child], control: Control, hang_timeout_ms: int, now_ns: int, late_ns: int
) -> bool:
    """Kill each process that hangs; return True if none does.

    `late_ns`: lateness of this check. A large one shows that the host stood still (a paused virtual
    machine, a lack of memory): then its processes are not killed, which would make it worse.
    """
    healthy = True
    if late_ns < SUSPENDED_NS:
        late_ns = 0
    else:
        logger.warning("host_stood_still ms=%d", late_ns // NS_PER_MS)
    for child in children:
        child.beat_changed_ns = min(now_ns, child.beat_changed_ns + late_ns)
        if child.pidfd < 0:
            healthy = healthy and (
                child.quick_failures < QUICK_FAILURES_MAX or child.role in NOT_NEEDED
            )
            continue
        beat = control.process(child.role, child.index).load(ProcessWord.BEAT)
        if beat != child.last_beat:
            child.last_beat, child.beat_changed_ns = beat, now_ns
        silent_ms = (now_ns - child.beat_changed_ns) // NS_PER_MS
        healthy = healthy and silent_ms < hang_timeout_ms * 3 // 4
        if silent_ms >= hang_timeout_ms:
            logger.error(
                "hangs process=%s pid=%d silent_ms=%d action=KILL",
                child.name, child.pid, silent_ms,
            )  # fmt: skip
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            child.beat_changed_ns = now_ns
    return healthy
