"""The classic groups of one gateway, and their timer.

Owner: one gateway.

Invariants:
- A group without members and given-out ids is forgotten.
- A group's timer is due at its next deadline or earlier.
- `on_expired` is called with a group whose last member has expired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netfront.kafka.groups.classic_group import ClassicGroup
from shm.runtime.timing_wheel import NEVER_NS, Timer, TimingWheel


def lease_end(group: ClassicGroup) -> dict[str, Any]:
    """GROUP_HEARTBEAT that ends the lease of a group."""
    return {"group": group.name, "kind": "classic", "member_id": "kafka", "member_epoch": -1}


class ClassicGroups:
    """The groups by their names."""

    def __init__(
        self,
        timers: TimingWheel[Callable[[], None]],
        now_ns: Callable[[], int],
        settings: dict[str, Any],
        on_expired: Callable[[ClassicGroup], None],
    ) -> None:
        self._timers = timers
        self._now_ns = now_ns
        self._settings = settings
        self._on_expired = on_expired
        self._groups: dict[str, ClassicGroup] = {}
        self._due: dict[str, Timer[Callable[[], None]]] = {}

    def __iter__(self) -> Any:
        return iter(list(self._groups.values()))

    def get(self, name: str) -> ClassicGroup | None:
        """The group, if it has members."""
        return self._groups.get(name)

    def group(self, name: str) -> ClassicGroup | None:
        """The group, made if there is none. None: there are too many."""
        group = self._groups.get(name)
        if group is None and len(self._groups) < self._settings["groups.max"]:
            group = self._groups[name] = ClassicGroup(name, self._settings["group.members.max"])
        return group

    def schedule(self, group: ClassicGroup) -> None:
        """Follow a change of the group."""
        name = group.name
        if self._groups.get(name) is not group:
            return
        timer = self._due.pop(name, None)
        if group.is_unused:
            del self._groups[name]
        else:
            deadline_ns = group.next_deadline_ns()
            if timer is not None and timer.deadline_ns <= deadline_ns:
                self._due[name] = timer
                return
            if deadline_ns < NEVER_NS:
                self._due[name] = self._timers.add(deadline_ns, lambda: self._advance(name))
        if timer is not None:
            self._timers.cancel(timer)

    def _advance(self, name: str) -> None:
        self._due.pop(name, None)
        group = self._groups.get(name)
        if group is not None:
            group.advance(self._now_ns())
            self.schedule(group)
            if group.is_unused:
                self._on_expired(group)
