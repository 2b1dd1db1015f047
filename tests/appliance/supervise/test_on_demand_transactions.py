"""Processes and lanes that the first use of transactions starts: the process of groups, and lanes
between it and each worker.
"""

from __future__ import annotations

import pytest

from appliance.config.settings import Settings
from appliance.supervise import on_demand_processes
from appliance.supervise.memory.memory_plan import (
    CONTROL_LANE_BYTES,
    plan_groups,
    plan_regions,
    plan_transactions,
    plan_worker,
)
from appliance.supervise.on_demand_processes import OnDemandProcesses
from appliance.supervise.processes.child_processes import Child
from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role
from shm.memory.region import RegionError
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control
from tests.kit import memory

WORKERS, SPARES = 2, 2


class FakeRegions:
    """Counts what is made."""

    def __init__(self) -> None:
        self.workers = list(range(WORKERS))
        self.made: list[str] = []
        self.lacks_memory = False

    def create_groups(self) -> None:
        self.made.append("groups")

    def create_worker(self, index: int, _data_dir: int) -> None:
        self.workers.append(index)

    def create_transactions(self) -> list[int]:
        if self.lacks_memory:
            raise RegionError("no room")
        new = [w for w in self.workers if f"worker-{w}" not in self.made]
        self.made += [f"worker-{w}" for w in new]
        return new


class FakeBell:
    def __init__(self) -> None:
        self.count = 0

    def ring(self) -> None:
        self.count += 1


class Supervised:
    """The supervisor's part, with its surroundings played."""

    def __init__(self) -> None:
        self.control = Control(memory.simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.regions = FakeRegions()
        self.children = [Child(Role.WORKER, w, None) for w in range(WORKERS)]
        names = [process_name(Role.WORKER, w) for w in range(WORKERS + SPARES)]
        self.bells = {name: FakeBell() for name in [*names, "groups-0", "controller"]}
        self.spawned: list[str] = []
        self.it = OnDemandProcesses(
            self.control, self.regions, self.children, self.bells, None,  # type: ignore[arg-type]
            range(WORKERS, WORKERS + SPARES), 1, lambda child: self.spawned.append(child.name),
        )  # fmt: skip

    def lanes(self) -> list[int]:
        """TRANSACTION_LANES of each worker."""
        return [
            self.control.process(Role.WORKER, w).load(ProcessWord.TRANSACTION_LANES)
            for w in range(WORKERS + SPARES)
        ]


def test_nothing_is_made_before_transactions_are_used() -> None:
    supervised = Supervised()
    supervised.it.step(may_halt=False)
    assert (supervised.regions.made, supervised.spawned, supervised.lanes()) == ([], [], [0] * 4)


@pytest.mark.parametrize("by", [(Role.GROUPS, 0), (Role.WORKER, 1)])
def test_a_request_starts_the_process_of_groups_and_makes_lanes_for_every_worker_then_and_later(
    by: tuple[Role, int],
) -> None:
    supervised = Supervised()
    control = supervised.control
    control.process(*by).store(ProcessWord.TRANSACTIONS_REQUESTED, 3)
    supervised.it.step(may_halt=False)
    assert supervised.regions.made == ["groups", "worker-0", "worker-1"]
    assert (supervised.spawned, supervised.lanes()) == (["groups-0"], [1, 1, 0, 0])
    assert [supervised.bells[name].count for name in ("worker-0", "worker-1", "groups-0")] == [
        1
    ] * 3
    control.process(*by).store(ProcessWord.TRANSACTIONS_REQUESTED, 0)
    control.process(Role.WORKER, 2).store(ProcessWord.DEDICATED_TO, 1)
    control.process(Role.WORKER, 2).store(ProcessWord.DEDICATED_DIR, 1)
    supervised.it.step(may_halt=False)
    assert (supervised.spawned, supervised.lanes()) == (["groups-0", "worker-2"], [1, 1, 1, 0])
    supervised.it.step(may_halt=False)
    assert supervised.bells["groups-0"].count == 2


def test_a_lack_of_memory_is_tried_again_later_and_nothing_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervised = Supervised()
    now_ns = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    supervised.regions.lacks_memory = True
    supervised.control.process(Role.GROUPS, 0).store(ProcessWord.TRANSACTIONS_REQUESTED, 1)
    supervised.it.step(may_halt=True)
    supervised.regions.lacks_memory = False
    supervised.it.step(may_halt=True)
    assert supervised.lanes() == [0] * 4, "not before its time"
    now_ns += on_demand_processes.START_RETRY_MS * 1_000_000
    supervised.it.step(may_halt=True)
    assert supervised.lanes() == [1, 1, 0, 0]


def test_lanes_of_transactions_are_no_part_of_what_every_appliance_has() -> None:
    settings = Settings()
    lanes = {plan.logical_name for plan in plan_transactions(1)}
    assert lanes == {"groups-0>worker-1", "worker-1>groups-0"}
    others = plan_regions(settings, 2, 1, 1) + plan_groups(1) + plan_worker(settings, 1, 1)
    assert not lanes & {plan.logical_name for plan in others}
    assert all(plan.first == CONTROL_LANE_BYTES for plan in plan_transactions(1))
