"""The words of a process that others read."""

from __future__ import annotations

from shm.memory.layout import ControlLayout, RegionKind, Role
from shm.tables.control import Control
from tests.kit.memory import simulated


def test_until_the_coordinator_has_read_its_decisions_one_is_not_carried_out() -> None:
    """A reader that reads once waits for it: right after a start nobody knows what is missing."""
    slot = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0)).process(Role.GROUPS, 0)
    decided, carried_out = slot.decisions()
    assert carried_out < decided
    slot.show_decisions(0, 0)
    assert len(set(slot.decisions())) == 1, "nothing was ever decided"
    slot.show_decisions(7, 5)
    decided, carried_out = slot.decisions()
    assert decided - carried_out == 2
    slot.show_decisions(0, 7)
    assert len(set(slot.decisions())) == 1, "of a successor without decisions of its own"
