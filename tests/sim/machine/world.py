"""The machine: clock, disk, shared memory, doorbells, and the appliance's processes, stepped one at
a time.

Processes are the real agents, built by the same `build` functions as the real ones. What is
simulated is what lies under them: a process sleeps until its bell is rung, a message comes or its
deadline passes (so a wake-up that is missed shows); it dies between any two published stores to
shared memory (cells, table, outcomes: see `shm.memory.atomic_word`), any two file operations, or at
a crash point; in every second schedule others have turns between two of its stores. Memory outlives
it, the page cache outlives it, power loss takes both. Each store is held against
`shm.tables.invariants`.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from appliance.catalog.catalog import Catalog
from appliance.config.topic_settings import TOPIC_SETTINGS
from appliance.control import controller as controller
from appliance.groups import process as groups_process
from appliance.groups.agent import agent as groups_agent
from appliance.supervise.memory.memory_plan import (
    RegionPlan,
    plan_groups,
    plan_regions,
    plan_transactions,
    plan_worker,
)
from netfront import front
from netfront.agent import front_agent
from shm.memory.layout import Phase, ProcessWord, Role, SlotState
from shm.memory.region import Region
from shm.queues.ring import Ring
from shm.runtime.agent_runner import Agent, Clock, ProcessSpec, process_name
from shm.tables.control import Control, ProcessSlot
from shm.tables.invariants import CheckedBuffer
from shm.tables.partition_table import PartitionTable
from tailrace.client.connections.runtime import Runtime
from tests.kit import memory
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.stepped.agent_invariants import check_agent
from tests.sim.machine.fate import Fate
from tests.sim.machine.machine_parts import (
    CHILD_SETTINGS,
    INSTANCE,
    MS,
    SECOND,
    SETTINGS,
    Child,
    ColdFiles,
    Killed,
    SimBell,
    SimContext,
    SimGroups,
    SimMachine,
    SimPool,
    is_undrained,
)
from tests.sim.machine.network import Network, SimSocket
from workers.append import worker
from workers.clean import cleaner
from workers.delays import scheduler
from workers.flush import flusher, flusher_agent

PREEMPTION_RATE = 0.03
_WORLD_NUMBERS = itertools.count()
"""A world's database in memory has a name that no other has: a connection that a process of an
earlier world left open (it died while it was built, say) would keep the one of that name alive.
"""
CHECKED_EVERY = 64
"""Steps, before those invariants of the process that has made one are checked whose checks take
long.
"""


class World:
    """See the module's docstring."""

    def __init__(self, rng: random.Random, *, workers: int = 1, data_dirs: int = 1) -> None:
        self.rng = rng
        self.child_settings: dict[str, Any] = dict(CHILD_SETTINGS)
        self.now_ns = SECOND
        self.wall_offset_us = 1_700_000_000_000_000
        self.clock = Clock(lambda: self.now_ns, lambda: self.now_ns // 1000 + self.wall_offset_us)
        self.data_dirs = [f"/disk{d}" for d in range(data_dirs)]
        self.disk = SimDisk(self.data_dirs)
        self.network = Network(rng)
        self.regions: dict[str, Region] = {}
        self.bells: dict[str, SimBell] = {}
        self.children: list[Child] = []
        self.run = 0
        self.changes_layout = False
        """True if the configuration is another at each start."""
        self.kills = 0
        self.steps = 0
        self.digest = 0
        """Digest of the steps and their results: two runs of one seed are alike."""
        self._worker_dirs: list[int] = []
        self.control: Control
        self._front_slot: ProcessSlot
        self._spare_slots: dict[int, ProcessSlot] = {}
        self._transaction_slots: list[ProcessSlot] = []
        """Slots of the processes that request transactions: groups, then the workers."""
        self._directory_of: dict[int, int] = {}
        """Worker, dedicated ones included -> index of its data directory."""
        self._set_layout(workers)
        self._manifest: list[dict[str, Any]] = []
        self._recover: list[dict[str, Any]] = []
        self._spec_regions: dict[str, str] = {}
        self._lost_memory = False
        self._owes_epochs = False
        """The manifest's word about it: it stays so until some run has recovered."""
        self._catalog: Catalog | None = None
        self._database = f"file:sim-{next(_WORLD_NUMBERS)}?mode=memory&cache=shared"
        self._session_lifecycle = sqlite3.connect(self._database, uri=True)
        """The database's file: it is there while this is open, whatever happens to the
        controller.
        """
        self.fate = Fate(rng)
        self._groups = SimGroups(self)
        self._running: Child | None = None
        """The process that is being stepped."""
        self.preempts: random.Random | None = None
        """Generator of interruptions of a process by others, between two stores; None: there are
        none.
        """
        self._is_preempted = False
        self.runtime = Runtime(
            self.clock.monotonic_ns, lambda _: SimSocket(self.network), self.wait, rng.random, False
        )

    def close(self) -> None:
        self.fate.disarm()
        self._close_catalog()
        self._groups.remove()
        self._session_lifecycle.close()

    def _close_catalog(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def open_catalog(self) -> Catalog:
        return Catalog(self._database, SETTINGS.slots, self.rng.randbytes)

    # ---- interruption ----------------------------------------------------------------------------

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have file operations count, as published stores do; and let segments be smaller than
        users may have them.
        """
        known = TOPIC_SETTINGS["segment.bytes"]
        TOPIC_SETTINGS["segment.bytes"] = known._replace(minimum=1024)
        self.disk.hook = lambda _operation, _path: self.fate.count_down()
        try:
            yield
        finally:
            TOPIC_SETTINGS["segment.bytes"] = known
            self.disk.hook = None

    def _maybe_preempt(self) -> None:
        """Behind a published store: now and then other processes have their turns before the one
        that stored goes on.
        """
        rng = self.preempts
        if (
            rng is None
            or not self.fate.is_inside
            or self._is_preempted
            or rng.random() > PREEMPTION_RATE
        ):
            return
        inside, self._is_preempted = self._running, True
        try:
            for _ in range(rng.randint(1, 6)):
                others = [
                    child
                    for child in self.children
                    if child is not inside and self.is_runnable(child)
                ]
                if others:
                    self.step(rng.choice(others))
        finally:
            self.fate.is_inside, self._is_preempted, self._running = True, False, inside

    def high_watermark(self, topic_id: bytes, partition: int) -> int | None:
        """High watermark that the flusher has published for a partition. None: the partition is not
        open.
        """
        for data_dir in range(len(self.data_dirs)):
            region = self.regions.get(self._spec_regions.get(f"table-{data_dir}", ""))
            for state in PartitionTable(region).all() if region is not None else ():
                if (state.topic_id, state.partition) == (topic_id, partition):
                    return state.high_watermark if state.state is SlotState.ONLINE else None
        return None

    def heal(self) -> None:
        """No more faults."""
        self.fate.pardon()
        self.fate.disarm()
        self.disk.hook = None
        self.disk.free = 1 << 40
        for child in self.children:
            child.stopped_until_ns = 0

    # ---- starting --------------------------------------------------------------------------------

    def _set_layout(self, workers: int) -> None:
        self._worker_dirs = [
            w % len(self.data_dirs) for w in range(max(workers, len(self.data_dirs)))
        ]

    def change_layout(self) -> None:
        """From the next start on: another number of workers, data directories in another order,
        perhaps one more.
        """
        if len(self.data_dirs) < 3 and self.rng.random() < 0.3:
            self.data_dirs.append(f"/disk{len(self.data_dirs)}")
            self.disk.add_directory(self.data_dirs[-1])
        self.rng.shuffle(self.data_dirs)

    def boot(self) -> None:
        """Start as the supervisor does: look what an earlier run left, make regions and bells,
        start everybody.
        """
        # of a controller that power or a kill of all took while it was being built: it was not
        # buried
        self._close_catalog()
        self._groups.close()
        self.run += 1
        if self.changes_layout and self.run > 1:
            self.change_layout()
            self._set_layout(self.rng.randint(1, 3))
        found = [old for old in self._manifest if old["ring"] in self.regions]
        self._lost_memory = self._owes_epochs = (
            len(found) < len(self._manifest) or self._owes_epochs
        )
        self._recover = [old for old in found if is_undrained(Ring(self.regions[old["ring"]]))]
        keep = {old[part] for old in self._recover for part in ("ring", "table")}
        self.regions = {name: region for name, region in self.regions.items() if name in keep}
        self._spec_regions = {}
        self._directory_of = dict(enumerate(self._worker_dirs))
        self._make(plan_regions(SETTINGS, len(self._worker_dirs), 1, len(self.data_dirs)))
        self.control = Control(self.regions[self._spec_regions["control"]])
        self._front_slot = self.control.process(Role.FRONT, 0)
        self._spare_slots = {
            index: self.control.process(Role.WORKER, index) for index in self._spares()
        }
        self._transaction_slots = [
            self.control.process(Role.GROUPS, 0),
            *(self.control.process(Role.WORKER, w) for w in range(self._spares().stop)),
        ]
        self.control.set_phase(Phase.RECOVERING)
        names = [(Role.CONTROLLER, 0), *((Role.FLUSHER, d) for d in range(len(self.data_dirs)))]
        names += [
            *((Role.WORKER, w) for w in range(len(self._worker_dirs))),
            (Role.FRONT, 0),
        ]
        self.bells = {process_name(Role.SUPERVISOR, 0): SimBell()}
        self.children = []
        for role, index in [
            *names,
            *((Role.WORKER, w) for w in self._spares()),
            (Role.GROUPS, 0),
            (Role.SCHEDULER, 0),
            *((Role.CLEANER, d) for d in range(len(self.data_dirs))),
        ]:
            self.bells[process_name(role, index)] = SimBell()
        if self._groups.exist:
            self._make(plan_groups(1))
            names.insert(-1, (Role.GROUPS, 0))
        for role, index in names:
            self._employ(role, index)

    def _employ(self, role: Role, index: int) -> None:
        """Start a process, unless there is one: `boot` may be interrupted by `_hire`."""
        name = process_name(role, index)
        if any(child.name == name for child in self.children):
            return
        child = Child(role, index, name, self.bells[name])
        self.children.append(child)
        self.start(child)

    def _spares(self) -> range:
        return range(len(self._worker_dirs), len(self._worker_dirs) + SETTINGS.dedicated_workers)

    def _make(self, plans: list[RegionPlan]) -> None:
        for plan in plans:
            name = self._spec_regions[plan.logical_name] = f"/sim-{self.run}-{plan.logical_name}"
            region = self.regions[name] = memory.simulated(
                plan.kind, plan.size, plan.first, plan.second
            )
            assert isinstance(region.words, CheckedBuffer)
            region.words.before, region.words.after = self.fate.count_down, self._maybe_preempt
        self._write_manifest()

    def _names_with_spares(self) -> dict[str, str]:
        plans = plan_groups(1) + [
            plan for w in self._spares() for plan in plan_worker(SETTINGS, w, 1)
        ]
        plans += [plan for w in range(self._spares().stop) for plan in plan_transactions(w)]
        return {
            plan.logical_name: f"/sim-{self.run}-{plan.logical_name}" for plan in plans
        } | self._spec_regions

    def _hire(self) -> None:
        """The supervisor: start the dedicated workers that the controller wants, the scheduler when
        controller or front wants it, the process of groups when a front wants it, and the lanes of
        transactions when anybody does.
        """
        slots = (self._front_slot, self.control.process(Role.CONTROLLER, 0))
        if any(slot.load(ProcessWord.SCHEDULER_REQUESTED) for slot in slots) and not any(
            child.role is Role.SCHEDULER for child in self.children
        ):
            self._employ(Role.SCHEDULER, 0)
        for index, slot in self._spare_slots.items():
            if slot.load(ProcessWord.DEDICATED_TO) and index not in self._directory_of:
                self._directory_of[index] = slot.load(ProcessWord.DEDICATED_DIR) - 1
                self._make(plan_worker(SETTINGS, index, 1))
                self._employ(Role.WORKER, index)
        has_transactions = any(
            slot.load(ProcessWord.TRANSACTIONS_REQUESTED) for slot in self._transaction_slots
        )
        if (has_transactions or self._front_slot.load(ProcessWord.GROUPS_REQUESTED)) and not any(
            child.role is Role.GROUPS for child in self.children
        ):
            self._make(plan_groups(1))
            self._employ(Role.GROUPS, 0)
        if has_transactions:
            self._connect_transactions()
        if not self._is_preempted:
            self._hire_cleaners()

    def _hire_cleaners(self) -> None:
        """The supervisor: a flusher with a job for its cleaner has one."""
        for index in range(len(self.data_dirs)):
            has_job = self.control.process(Role.FLUSHER, index).load(ProcessWord.CLEANING)
            name = process_name(Role.CLEANER, index)
            child = next((child for child in self.children if child.name == name), None)
            if has_job and child is None:
                self._employ(Role.CLEANER, index)
            elif not has_job and child is not None:
                if child.agent is not None:
                    child.agent.begin_stop()
                    self.control.process(Role.CLEANER, index).store(ProcessWord.LIVE, 0)
                self.children.remove(child)

    def _connect_transactions(self) -> None:
        """The supervisor: make the lanes between the transaction coordinator and each worker."""
        for index in self._directory_of:
            plans = plan_transactions(index)
            if plans[0].logical_name not in self._spec_regions:
                self._make(plans)
                self._transaction_slots[1 + index].store(ProcessWord.TRANSACTION_LANES, 1)
                self.bells[process_name(Role.WORKER, index)].ring()
                self.bells[process_name(Role.GROUPS, 0)].ring()

    def _write_manifest(self) -> None:
        self._manifest = list(self._recover)
        for w, d in self._directory_of.items():
            self._manifest.append(
                {
                    "ring": self._spec_regions[f"ring-{w}"],
                    "table": self._spec_regions[f"table-{d}"],
                    "dir": self.data_dirs[d],
                }
            )

    def start(self, child: Child) -> None:
        """The next generation of a process. It may die before it is built."""
        child.generation += 1
        slot = self.control.process(child.role, child.index)
        slot.store(ProcessWord.GENERATION, child.generation)
        slot.store(ProcessWord.LIVE, 1)
        spec = ProcessSpec(
            role=child.role, index=child.index, generation=child.generation,
            instance=INSTANCE.hex(), parent_pid=1, data_dirs=self.data_dirs,
            regions=self._names_with_spares(), doorbells={},
            settings={
                **self.child_settings, "workers": len(self._worker_dirs),
                "worker_dirs": self._worker_dirs, "run": f"run-{self.run}",
                "spare_workers": list(self._spares()),
                "lost_memory": self._lost_memory,
            },
            recover=[old for old in self._recover if child.role is Role.FLUSHER and old["dir"] == self.data_dirs[child.index]],  # noqa: E501
        )  # fmt: skip
        child.is_asleep = False
        child.deadline_ns = None
        context = SimContext(spec, self.clock, self)
        try:
            self.fate.is_inside, self._running = True, child
            child.agent = self._build(child, context)
        except Killed:
            self.bury(child)
        finally:
            self.fate.is_inside = False

    def _build(self, child: Child, context: SimContext) -> Agent:
        if child.role is Role.WORKER:
            return worker.build(context, SimFiles(self.disk))
        if child.role is Role.FLUSHER:
            return flusher.build(context, SimFiles(self.disk))
        if child.role is Role.CLEANER:
            return cleaner.build(context, SimFiles(self.disk))
        if child.role is Role.SCHEDULER:
            return scheduler.build(context, SimFiles(self.disk))
        if child.role is Role.GROUPS:
            return groups_process.build(context, self._groups.open)
        if child.role is Role.FRONT:
            generation = self.rng.getrandbits(31) | 1
            return front.build(
                context,
                self.network,
                ColdFiles(self.disk, self.rng),
                SimPool(child.bell.ring),
                generation,
            )
        self._catalog = self.open_catalog()
        numbers = self._catalog.slots.register([(path, path) for path in self.data_dirs])
        return controller.build(context, self._catalog, numbers, SimMachine(SimFiles(self.disk)))

    def bury(self, child: Child) -> None:
        """The process is dead; the supervisor sees it and starts another a little later."""
        self.kills += 1
        self.fate.pardon()
        child.agent = None
        child.stopped_until_ns = 0
        child.starts_at_ns = self.now_ns + self.rng.randrange(1, 60) * MS
        self.control.process(child.role, child.index).store(ProcessWord.LIVE, 0)
        if child.role is Role.FRONT:
            self.network.cut_all()
        if child.role is Role.CONTROLLER:
            self._close_catalog()
        if child.role is Role.GROUPS:
            self._groups.close()

    def kill_all(self) -> None:
        """SIGKILL of everything, the supervisor included, and a new start. Memory and page cache
        outlive it.
        """
        for child in self.children:
            if child.agent is not None:
                self.bury(child)
        self.boot()

    def lose_power(self) -> None:
        for child in self.children:
            if child.agent is not None:
                self.bury(child)
        hook = self.disk.hook
        self.disk = self.disk.lose_power(self.rng)
        self.disk.hook = hook
        self.regions = {}
        self.boot()

    def stop_cleanly(self) -> None:
        """As `systemctl restart` does it."""
        self.fate.pardon()
        self.fate.disarm()
        self.settle_servers()
        deadline_ns = self.now_ns + SECOND
        for role in (
            Role.FRONT,
            Role.GROUPS,
            Role.SCHEDULER,
            Role.WORKER,
            Role.CLEANER,
            Role.FLUSHER,
            Role.CONTROLLER,
        ):
            for child in [child for child in self.children if child.role is role]:
                agent = child.agent
                assert agent is not None
                agent.begin_stop()
                while agent.step(self.now_ns) or not agent.is_finished():
                    self.now_ns += MS
                    if self.now_ns > deadline_ns:  # a full disk, say: what is left is killed
                        self.kill_all()
                        return
                    for other in self.children:  # whoever it waits for goes on
                        if other.agent is not None and other is not child:
                            other.agent.step(self.now_ns)
                if isinstance(agent, (flusher_agent.Flusher, groups_agent.GroupsAgent)):
                    agent.close()
                child.agent = None
                if role is Role.FRONT:
                    self.network.cut_all()
        self._close_catalog()
        self.regions = {}
        self._manifest = []
        self.boot()

    # ---- stepping --------------------------------------------------------------------------------

    def is_runnable(self, child: Child) -> bool:
        if child.agent is None:
            return self.now_ns >= child.starts_at_ns
        if self.now_ns < child.stopped_until_ns:
            return False
        if not child.is_asleep or child.bell.is_set:
            return True
        if child.deadline_ns is not None and self.now_ns >= child.deadline_ns:
            return True
        return (
            isinstance(child.agent, front_agent.Front)
            and child.agent.accepts_input
            and self.network.has_input()
        )

    def next_wake_ns(self, child: Child) -> int | None:
        """Time at which a process that sleeps is runnable."""
        if child.agent is None:
            return child.starts_at_ns
        return max(child.stopped_until_ns, child.deadline_ns or 0) or None

    def step(self, child: Child) -> int:
        """One turn of a process; it may be its last."""
        self.steps += 1
        agent = child.agent
        if agent is None:
            self.start(child)
            return 1
        if child.is_asleep:
            child.bell.clear()
            child.is_asleep = False
        try:
            self.fate.is_inside, self._running = True, child
            work = agent.step(self.now_ns)
            check_agent(agent, thoroughly=self.steps % CHECKED_EVERY == 0)
        except Killed:
            self.bury(child)
            return 1
        finally:
            self.fate.is_inside = False
        self.digest = zlib.crc32(
            b"%b %d %d" % (child.name.encode(), work, self.now_ns), self.digest
        )
        if not work or not agent.has_more():
            child.is_asleep = True
            child.deadline_ns = agent.next_deadline_ns()
        self._advance_phase()
        self._hire()
        return work

    def _advance_phase(self) -> None:
        """The supervisor: everything is recovered, so everybody may begin."""
        control = self.control
        if control.phase is not Phase.RECOVERING:
            return
        for child in self.children:
            if child.role is Role.FLUSHER:
                ready = control.process(child.role, child.index).load(ProcessWord.READY_GENERATION)
                if child.agent is None or ready != child.generation:
                    return
        control.set_phase(Phase.RUNNING)
        for old in self._recover:
            self.regions.pop(old["ring"], None)
            self.regions.pop(old["table"], None)
        self._recover = []
        self._owes_epochs = False
        self._write_manifest()
        for bell in self.bells.values():
            bell.ring()

    def pass_time(self, limit_ns: int | None = None) -> None:
        """Nobody is runnable: on to when somebody is, or to `limit_ns`."""
        times = [
            when
            for when in map(self.next_wake_ns, self.children)
            if when is not None and when > self.now_ns
        ]
        if limit_ns is not None:
            times.append(limit_ns)
        assert times, "everybody sleeps for ever"
        self.now_ns = max(self.now_ns + 1000, min(times))

    def step_servers(self, limit_ns: int | None = None) -> None:
        """One turn of some process, or time passes."""
        runnable = [child for child in self.children if self.is_runnable(child)]
        self.now_ns += self.rng.randrange(1_000, 100_000)
        if runnable:
            self.step(self.rng.choice(runnable))
        else:
            self.pass_time(limit_ns)

    def wait(self, _fds: Sequence[int], timeout_ns: int) -> None:
        """`Runtime.sleep_on` for a client whose call blocks: meanwhile the appliance's processes go
        on.
        """
        limit_ns = self.now_ns + max(timeout_ns, 1000)
        for _ in range(8):
            self.step_servers(limit_ns)
            if self.now_ns >= limit_ns:
                return

    def settle_servers(self) -> None:
        """Until every process is alive, running, and asleep."""
        for _ in range(20_000):
            runnable = [child for child in self.children if self.is_runnable(child)]
            if runnable:
                self.now_ns += 10_000
                self.step(self.rng.choice(runnable))
            elif any(
                child.agent is None or child.stopped_until_ns > self.now_ns
                for child in self.children
            ):
                self.pass_time()
            else:
                return
        raise AssertionError("the appliance does not come to rest")
