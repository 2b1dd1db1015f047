"""The scheduler is started for whoever requests it, once."""

from __future__ import annotations

import pytest

from appliance.supervise.on_demand_processes import OnDemandProcesses
from appliance.supervise.processes.child_processes import Child
from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role
from shm.tables.control import Control
from tests.kit.memory import simulated


class World:
    """The supervisor's part of an appliance with two fronts, by hand."""

    def __init__(self) -> None:
        self.control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.children: list[Child] = []
        self.spawned: list[Child] = []
        self.on_demand = OnDemandProcesses(
            self.control,
            None,  # type: ignore[arg-type] # the scheduler's regions exist from the start
            self.children,
            {},
            None,
            range(0),
            2,
            self.spawned.append,
        )

    def request(self, role: Role, index: int) -> None:
        self.control.process(role, index).store(ProcessWord.SCHEDULER_REQUESTED, 1)


@pytest.mark.parametrize(
    ("role", "index"), [(Role.CONTROLLER, 0), (Role.FRONT, 0), (Role.FRONT, 1)]
)
def test_whoever_requests_it_gets_one_scheduler(role: Role, index: int) -> None:
    world = World()
    world.on_demand.step(may_halt=True)
    assert world.spawned == []
    world.request(role, index)
    world.request(Role.FRONT, 1)
    for _ in range(3):
        world.on_demand.step(may_halt=True)
    assert [child.name for child in world.spawned] == ["scheduler-0"]
    assert world.children == world.spawned


def test_a_scheduler_that_never_serves_ends_an_appliance_that_starts_and_not_one_that_serves() -> (
    None
):
    for may_halt in (True, False):
        world = World()
        world.request(Role.CONTROLLER, 0)
        world.on_demand.step(may_halt=may_halt)
        assert world.spawned[0].has_served is not may_halt
