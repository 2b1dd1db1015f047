"""The core plan: how many workers there are, and which process may run on which cores. Pure.

    cores available   setting      workers                 front, flusher, coordinator
    1 or 2            "auto"       1, unpinned             unpinned
    n >= 3            "auto"       n - 2, one core each    share the first two cores
    any               [c0, c1..]   one per core listed     the other available cores (unpinned where none is left)

Invariants: at least one worker; a listed core that is not available is refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.errors import InvalidSettingError


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Which process runs on which cores."""

    workers: tuple[int | None, ...]
    """The core of each worker; None: unpinned."""
    others: tuple[int, ...] | None
    """Cores for every other process; None: unpinned."""


def plan_cores(setting: str | list[int], available: set[int], workers_max: int) -> CorePlan:
    """The plan for `setting` ("auto" or a list of cores) on a host that lets us use `available`. Raises InvalidSettingError."""
    cores = sorted(available)
    if setting == "auto":
        if len(cores) <= 2:
            return CorePlan((None,), None)
        return CorePlan(tuple(cores[2 : 2 + workers_max]), tuple(cores[:2]))
    if not isinstance(setting, list) or not setting or not all(isinstance(core, int) and not isinstance(core, bool) for core in setting):
        raise InvalidSettingError(f'cores is {setting!r}; it takes "auto" or a list of core numbers such as [2, 3]')
    missing = sorted(set(setting) - available)
    if missing or len(set(setting)) != len(setting) or len(setting) > workers_max:
        raise InvalidSettingError(f"cores is {setting}; each may be listed once and must be one of {cores} (at most {workers_max})")
    rest = tuple(core for core in cores if core not in setting)
    return CorePlan(tuple(setting), rest or None)
