"""The core plan: the number of workers, and the cores that each process may run on. Pure.

    cores available  setting     workers            front, flusher, controller
    1 or 2           "auto"      1, unpinned        unpinned
    n >= 3           "auto"      n - 2, one core    share the first two cores
                                 each
    any              [c0, c1..]  one per core       the other available cores
                                 listed             (unpinned where none is left)

Invariants:
- There is at least one worker.
- A listed core that is not available is refused.
- With `busy_poll_us` "auto" no process polls on a core that another process may need.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.core.errors import InvalidSettingError

BUSY_POLL_MAX_US = 10_000
BUSY_POLL_AUTO_US = 100
"""Microseconds that "auto" polls: longer than most waits of a front for an awake worker within one
ack, shorter than a pause between two.
"""


class CorePlan(NamedTuple):
    """Cores of each process."""

    workers: tuple[int | None, ...]
    """The core of each worker; None: unpinned."""
    others: tuple[int, ...] | None
    """Cores for every other process; None: unpinned."""


def plan_cores(setting: str | list[int], available: set[int], workers_max: int) -> CorePlan:
    """The plan for `setting` ("auto" or a list of cores) on a host that lets us use `available`.
    Raises InvalidSettingError.
    """
    cores = sorted(available)
    if setting == "auto":
        if len(cores) <= 2:
            return CorePlan((None,), None)
        return CorePlan(tuple(cores[2 : 2 + workers_max]), tuple(cores[:2]))
    if (
        not isinstance(setting, list)
        or not setting
        or not all(isinstance(core, int) and not isinstance(core, bool) for core in setting)
    ):
        raise InvalidSettingError(
            f'cores is {setting!r}; it takes "auto" or a list of core numbers such as [2, 3]'
        )
    missing = sorted(set(setting) - available)
    if missing or len(set(setting)) != len(setting) or len(setting) > workers_max:
        raise InvalidSettingError(
            f"cores is {setting}; list each core once, out of {cores} (at most {workers_max})"
        )
    rest = tuple(core for core in cores if core not in setting)
    return CorePlan(tuple(setting), rest or None)


class BusyPoll(NamedTuple):
    """Time that fronts and workers poll before they sleep, and the reason as a half-sentence."""

    us: int
    reason: str


def plan_busy_poll(
    setting: int | str, plan: CorePlan, worker_count: int, front_count: int, flusher_count: int
) -> BusyPoll:
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
    pinned, needed = sum(core is not None for core in plan.workers), front_count + flusher_count
    if pinned < worker_count:
        return BusyPoll(
            0, f"{worker_count - pinned} of {worker_count} workers share cores with others"
        )
    if len(plan.others or ()) < needed:
        return BusyPoll(0, f"{len(plan.others or ())} cores for {needed} fronts and flushers")
    return BusyPoll(BUSY_POLL_AUTO_US, "each front, worker and flusher has a core")
