"""The supervisor's decision when a child ends: one pure table of exit codes.

    status                   stopping  running
    0                        fine      restart at once (no stop was requested)
    72 ADDRESS_IN_USE        halt      halt before it ever served, else restart with backoff
    73 DATA_UNUSABLE,        halt      halt: the next try would fail alike
    74 CONFIG,
    75 SHARED_MEMORY
    71 PARENT_GONE           fine      restart (cannot be seen by a living supervisor)
    other code, any signal   fine      restart with backoff: 0, 50, 100, 200 ... 5,000 ms while
                                       it keeps ending within 10 s of its start; halt when it
                                       ends with a code for the STARTS_MAX-th time and never
                                       served: it logged the reason

Invariants:
- A child that has served is always restarted.
- The delay never exceeds BACKOFF_MAX_MS.
- Every halt has a reason in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, unique
from typing import NamedTuple

from shm.runtime.agent_runner import (
    EXIT_ADDRESS_IN_USE,
    EXIT_DATA_UNUSABLE,
    EXIT_PARENT_GONE,
    EXIT_SHARED_MEMORY,
)


@unique
class ExitCode(IntEnum):
    """Exit codes of the appliance and its processes; `tailrace serve --help` lists them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARENT_GONE = EXIT_PARENT_GONE
    ADDRESS_IN_USE = EXIT_ADDRESS_IN_USE
    DATA_UNUSABLE = EXIT_DATA_UNUSABLE
    CONFIG = 74
    SHARED_MEMORY = EXIT_SHARED_MEMORY


@dataclass(slots=True)
class Halt(Exception):
    """The appliance must end with this code; the reason is printed."""

    code: int
    reason: str = ""


HALTING = frozenset({ExitCode.DATA_UNUSABLE, ExitCode.CONFIG, ExitCode.SHARED_MEMORY})
BACKOFF_FIRST_MS = 50
BACKOFF_MAX_MS = 5_000
SETTLED_AFTER_MS = 10_000
STARTS_MAX = 10
"""Most starts of a child that ends with a code and never served: time does not mend its reason."""


class Action(Enum):
    """The supervisor's action when a process has ended."""

    RESTART = 1
    HALT = 2
    NOTHING = 3


class Decision(NamedTuple):
    """An action, and how long to wait before it."""

    action: Action
    delay_ms: int = 0


def decide(exit_status: int, *, stopping: bool, had_served: bool, quick_failures: int) -> Decision:
    """Decide the action for a child that ended.

    `exit_status` is negative for the signal that killed it. `quick_failures` counts earlier ends
    within SETTLED_AFTER_MS of a start.
    """
    if stopping:
        return Decision(Action.NOTHING)
    if exit_status in HALTING or (exit_status == ExitCode.ADDRESS_IN_USE and not had_served):
        return Decision(Action.HALT)
    if exit_status > 0 and not had_served and quick_failures >= STARTS_MAX - 1:
        return Decision(Action.HALT)
    if exit_status == ExitCode.OK or quick_failures == 0:
        return Decision(Action.RESTART)
    return Decision(
        Action.RESTART, min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << min(quick_failures - 1, 10))
    )
