"""The core plan: the number of workers, and the cores that each process may run on. Pure.

    cores                setting     workers               fronts and flushers   other processes
    fewer than           "auto"      one a data directory  any core              any core
    fronts + 2 * dirs,
    or a smaller quota
    enough               "auto"      the physical cores    one core each         cores that are
                                     that fronts and                             left, or those of
                                     flushers leave                              fronts, flushers
    any                  [c0, c1..]  one per core listed   the other cores       the other cores

A front or a flusher has threads beside its loop, so it may run on every core of its node whose
physical core has no worker, and one of these is meant for it. A worker has its core for itself.

Invariants:
- There is at least one worker for each data directory; worker w belongs to directory w % count.
- Every process has a core. Two share one only when every core has a process. On isolated cores
  the other processes share one: the kernel would leave them there.
- A sibling is used only when every physical core is.
- A flusher and its workers are on one NUMA node while that has a free physical core.
- A listed core that is not available is refused.
- With `busy_poll_us` "auto" no process polls on a core that another process may need.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from appliance.config.topology import Cpu, Topology
from tailrace.core.errors import InvalidSettingError

BUSY_POLL_MAX_US = 10_000
BUSY_POLL_AUTO_US = 100
"""Microseconds that "auto" polls: longer than most waits of a front for an awake worker within one
ack, shorter than a pause between two.
"""
OTHER_PROCESSES = 4
"""Controller, scheduler, group coordinator, console."""
Cores = tuple[int, ...] | None
"""Cores of a process; None: any."""


class CorePlan(NamedTuple):
    """Cores of each process."""

    workers: tuple[int | None, ...]
    """The core of each worker; None: those of `others`."""
    fronts: tuple[Cores, ...]
    flushers: tuple[Cores, ...]
    others: Cores
    """Cores for every other process."""


def plan_cores(
    setting: str | list[int], topology: Topology, fronts: int, directories: int, workers_max: int
) -> CorePlan:
    """The plan for `setting` ("auto" or a list of cores), for so many fronts and data directories.

    Raises: InvalidSettingError.
    """
    if setting == "auto":
        plan = _automatic_plan(topology, fronts, directories, workers_max)
    else:
        plan = _listed_plan(setting, topology, fronts, directories, workers_max)
    return _on_isolated_cores(plan, topology)


# ---- "auto" --------------------------------------------------------------------------------------


def _automatic_plan(
    topology: Topology, fronts: int, directories: int, workers_max: int
) -> CorePlan:
    cpus = _automatic_cpus(topology)
    quota = topology.quota_cores
    if (quota is not None and quota < len(cpus)) or len(cpus) < fronts + 2 * directories:
        # The kernel balances better than a plan that puts two processes on one core. A quota is
        # shared by all cores, and containers beside this one would choose the same ones.
        count = int(min(quota or len(cpus), len(cpus))) - fronts - directories
        return _unpinned_plan(min(count, workers_max), fronts, directories)
    places = _Places(cpus)
    flushers, workers = [], []
    for _ in range(directories):
        flusher = places.take(places.roomiest_node())
        flushers.append(flusher)
        workers.append(places.take(flusher.node))
    front_cpus = [places.take(flushers[f % directories].node) for f in range(fronts)]
    round_needs = Counter(flusher.node for flusher in flushers)
    while len(workers) + directories <= workers_max and all(
        places.untouched_count(node) >= count for node, count in round_needs.items()
    ):
        workers += [places.take(flusher.node) for flusher in flushers]
    front_cpus, flushers, workers = _in_order(front_cpus, flushers, workers)
    worker_cores = {cpu.core for cpu in workers}
    quiet = {cpu.number: cpu for cpu in cpus if cpu.core not in worker_cores}
    homes = {cpu.node for cpu in (*front_cpus, *flushers)}

    def room(cpu: Cpu) -> tuple[int, ...]:
        mine = {cpu.number, *(number for number, other in quiet.items() if other.node == cpu.node)}
        return tuple(sorted(mine))

    free = places.free
    near = [cpu for cpu in free if cpu.number in quiet and cpu.node in homes]
    far = [cpu for cpu in free if cpu.number in quiet and cpu.node not in homes]
    siblings = [cpu for cpu in free if cpu.number not in quiet]
    spare = [*near, *far, *siblings][: max(len(near), OTHER_PROCESSES)]
    others = {cpu.number for cpu in spare}
    if len(spare) < OTHER_PROCESSES:
        others |= {cpu.number for cpu in (*front_cpus, *flushers)}
    return CorePlan(
        tuple(cpu.number for cpu in workers),
        tuple(map(room, front_cpus)),
        tuple(map(room, flushers)),
        tuple(sorted(others)),
    )


def _automatic_cpus(topology: Topology) -> list[Cpu]:
    """Cores that no setting needs to list. Isolated ones are mixed with no others."""
    given = [cpu for cpu in topology.cpus if not cpu.is_reserved]
    return [cpu for cpu in given if not cpu.is_isolated] or given


def _unpinned_plan(worker_count: int, fronts: int, directories: int) -> CorePlan:
    count = max(1, worker_count // directories) * directories
    return CorePlan((None,) * count, (None,) * fronts, (None,) * directories, None)


class _Places:
    """Cores that are given away one by one."""

    def __init__(self, cpus: list[Cpu]) -> None:
        self.free = list(cpus)
        self._touched: set[int] = set()
        """Physical cores with a process."""
        self._untouched_counts = Counter({cpu.core: cpu.node for cpu in cpus}.values())
        """Node -> its physical cores without a process."""

    def untouched_count(self, node: int) -> int:
        """Number of physical cores of a node without a process."""
        return self._untouched_counts[node]

    def roomiest_node(self) -> int:
        """The node with the most physical cores without a process, the first of equal ones."""
        nodes = sorted({cpu.node for cpu in self.free})
        return max(nodes, key=self.untouched_count)

    def take(self, node: int) -> Cpu:
        """Take a core: of a physical core without a process, on this node, on another; then a
        sibling, on this node, on another.
        """
        free, touched = self.free, self._touched
        chosen = next(
            itertools.chain(
                (cpu for cpu in free if cpu.node == node and cpu.core not in touched),
                (cpu for cpu in free if cpu.core not in touched),
                (cpu for cpu in free if cpu.node == node),
                free,
            )
        )
        self.free.remove(chosen)
        if chosen.core not in touched:
            touched.add(chosen.core)
            self._untouched_counts[chosen.node] -= 1
        return chosen


def _in_order(
    fronts: list[Cpu], flushers: list[Cpu], workers: list[Cpu]
) -> tuple[list[Cpu], list[Cpu], list[Cpu]]:
    """The same cores with the lowest numbers of each node to its fronts, then to its flushers;
    siblings count as the highest.
    """
    taken = [*fronts, *flushers, *workers]
    first_of = {cpu.core: cpu for cpu in sorted(taken, reverse=True)}
    by_node: dict[int, list[Cpu]] = {}
    for cpu in sorted(taken, key=lambda cpu: (first_of[cpu.core] != cpu, cpu.number)):
        by_node.setdefault(cpu.node, []).append(cpu)
    numbered = {node: iter(cpus) for node, cpus in by_node.items()}
    ordered = [next(numbered[cpu.node]) for cpu in taken]
    end = len(fronts) + len(flushers)
    return ordered[: len(fronts)], ordered[len(fronts) : end], ordered[end:]


# ---- a list of cores -----------------------------------------------------------------------------


def _listed_plan(
    setting: str | list[int], topology: Topology, fronts: int, directories: int, workers_max: int
) -> CorePlan:
    if (
        not isinstance(setting, list)
        or not setting
        or not all(isinstance(core, int) and not isinstance(core, bool) for core in setting)
    ):
        raise InvalidSettingError(
            f'cores is {setting!r}; it takes "auto" or a list of core numbers such as [2, 3]'
        )
    by_number = {cpu.number: cpu for cpu in topology.cpus}
    missing = sorted(set(setting) - by_number.keys())
    if missing or len(set(setting)) != len(setting) or len(setting) > workers_max:
        raise InvalidSettingError(
            f"cores is {setting}; list each core once, out of {list(by_number)} (at most "
            f"{workers_max})"
        )
    rest = [cpu for cpu in _automatic_cpus(topology) if cpu.number not in setting]
    workers = [*setting, *(None for _ in range(directories - len(setting)))]

    def near(directory: int) -> Cores:
        nodes = {by_number[core].node for core in setting[directory::directories]}
        return _numbers([cpu for cpu in rest if cpu.node in nodes] or rest)

    return CorePlan(
        tuple(workers),
        tuple(near(front % directories) for front in range(fronts)),
        tuple(near(directory) for directory in range(directories)),
        _numbers(rest),
    )


def _numbers(cpus: list[Cpu]) -> Cores:
    return tuple(cpu.number for cpu in cpus) or None


# ---- isolated cores ------------------------------------------------------------------------------


def _on_isolated_cores(plan: CorePlan, topology: Topology) -> CorePlan:
    """The plan with one core for each process whose cores are isolated: the kernel would leave all
    such processes on the first.
    """
    isolated = [cpu.number for cpu in _automatic_cpus(topology) if cpu.is_isolated]
    if not isolated:
        return plan
    given_count = 0

    def one_of(cores: Cores) -> tuple[int, ...]:
        nonlocal given_count
        choice = cores or tuple(isolated)
        given_count += 1
        return (choice[(given_count - 1) % len(choice)],)

    fronts = tuple(map(one_of, plan.fronts))
    flushers = tuple(map(one_of, plan.flushers))
    workers = tuple(one_of(None)[0] if core is None else core for core in plan.workers)
    return CorePlan(workers, fronts, flushers, one_of(plan.others))


# ---- polling -------------------------------------------------------------------------------------


class BusyPoll(NamedTuple):
    """Time that fronts and workers poll before they sleep, and the reason as a half-sentence."""

    us: int
    reason: str


def plan_busy_poll(setting: int | str, plan: CorePlan) -> BusyPoll:
    """Resolve `busy_poll_us` ("auto" or microseconds) for this plan.

    Raises: InvalidSettingError.
    """
    if isinstance(setting, bool) or not (
        setting == "auto" or (isinstance(setting, int) and 0 <= setting <= BUSY_POLL_MAX_US)
    ):
        raise InvalidSettingError(
            f'busy_poll_us is {setting!r}; it takes "auto" or a whole number of microseconds from '
            f"0 (sleep at once) to {BUSY_POLL_MAX_US}"
        )
    if isinstance(setting, int):
        return BusyPoll(setting, "as busy_poll_us says")
    worker_count, unpinned = len(plan.workers), plan.workers.count(None)
    if unpinned:
        return BusyPoll(0, f"{unpinned} of {worker_count} workers share cores with others")
    needed = len(plan.fronts) + len(plan.flushers)
    cores = {core for found in (*plan.fronts, *plan.flushers) for core in found or ()}
    if len(cores) < needed:
        return BusyPoll(0, f"{len(cores)} cores for {needed} fronts and flushers")
    return BusyPoll(BUSY_POLL_AUTO_US, "each front, worker and flusher has a core")
