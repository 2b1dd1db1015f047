"""Placement of partitions: a partition with an open log never moves between live workers."""

from __future__ import annotations

from appliance.catalog.rows import PartitionRow, Topic
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.placement.partition_placement import PartitionPlacement
from shm.memory.layout import ControlLayout, RegionKind, Role
from shm.tables.control import Control
from tests.kit.memory import simulated
from tests.kit.stepped.fronts import SilentBell


def topic(name: str, *slots: int, dedicated: bool) -> Topic:
    rows = tuple(PartitionRow(number, slot % 2, slot, 0) for number, slot in enumerate(slots))
    given = {"worker.dedicated": True} if dedicated else {}
    return Topic(name.encode().ljust(16), name, "active", 1, False, 0, b"", given, rows, 0)


class Appliance:
    """The shared memory of one run of the appliance, and the controller's topics."""

    def __init__(self) -> None:
        self.control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.topics: dict[str, Topic] = {}

    def controller(self) -> PartitionPlacement:
        """The placement of a controller that starts now."""
        spares = {w: self.control.process(Role.WORKER, w) for w in range(4, 12)}
        placement = PartitionPlacement(
            self.topics, [0, 1], [0, 0, 1, 1], DedicatedWorkers(spares, 2), SilentBell()
        )
        for each in self.topics.values():
            placement.assign(each)
        return placement

    def workers(self, placement: PartitionPlacement) -> dict[tuple[str, int], int]:
        return {
            (each.name, row.partition): placement.worker_of(each, row)
            for each in self.topics.values()
            if each.state != "deleting"
            for row in each.partitions
        }


def test_a_partition_keeps_its_worker_through_every_change_of_topics_and_controllers() -> None:
    appliance = Appliance()
    appliance.topics["plain"] = topic("plain", 0, 1, 2, dedicated=False)
    appliance.topics["first"] = topic("first", 3, 4, dedicated=True)
    appliance.topics["kept"] = topic("kept", 5, 6, dedicated=True)
    placement = appliance.controller()
    before = appliance.workers(placement)
    assert len({w for (name, _), w in before.items() if name != "plain"}) == 4

    def check() -> None:
        now = appliance.workers(placement)
        assert now.items() >= {key: w for key, w in before.items() if key in now}.items()
        assert {key for key in before if key[0] != "first"} <= now.keys()

    placement = appliance.controller()  # the words of the first one are still there
    check()
    first = appliance.topics["first"] = appliance.topics["first"]._replace(state="deleting")
    placement = appliance.controller()
    check()
    del appliance.topics["first"]
    placement.release(first)
    check()
    grown = topic("kept", 5, 6, 7, dedicated=True)
    placement.assign(grown)
    appliance.topics["kept"] = grown
    appliance.topics["plain"] = topic("plain", 0, 1, 2, 8, dedicated=False)
    appliance.topics["later"] = topic("later", 9, 10, dedicated=True)
    placement.assign(appliance.topics["later"])
    check()
    placement = appliance.controller()
    check()
    after = appliance.workers(placement)
    dedicated = [w for (name, _), w in after.items() if name != "plain"]
    assert len(set(dedicated)) == len(dedicated), "each has a partition of its own"
