"""Death of the process that is being stepped: after so many more published stores and file
operations, or at a crash point.

Owner: `tests.sim.machine.world.World`, which says who is inside a step; nobody else can be
    interrupted.
"""

from __future__ import annotations

import random
from contextlib import ExitStack

from shm.crash_points import CRASH_POINTS, armed
from tests.sim.machine.machine_parts import Killed

NOT_SIMULATED = (
    "supervisor.", "backup.", "restore.", "move.before_opening", "move.before_going_back",
)  # fmt: skip
"""Crash points of what the simulation does not run."""


class Fate:
    """One machine's."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: int | None = None
        """Number of stores and file operations that the process which is being stepped still gets
        done.
        """
        self._error: type[BaseException] = Killed
        self._points = ExitStack()
        self.is_inside = False
        """True if a process is being stepped."""

    def doom(self, after: int, error: type[BaseException] = Killed) -> None:
        """End whoever is stepped then, `after` stores and file operations from now."""
        self._left, self._error = after, error

    def pardon(self) -> None:
        """The one that was to die is dead, or is spared."""
        self._left = None

    def count_down(self) -> None:
        """A store or a file operation. Raises what `doom` was given."""
        if self._left is not None and self.is_inside:
            self._left -= 1
            if self._left < 0:
                self._left = None
                raise self._error

    def crash_at_a_point(self) -> None:
        """A process dies at one of the named crash points, when it comes there."""
        name = self._rng.choice(
            [name for name in CRASH_POINTS if not name.startswith(NOT_SIMULATED)]
        )
        self._points.enter_context(armed(name, self._die, self._rng.randint(1, 3)))

    def disarm(self) -> None:
        """No crash point is fatal any more."""
        self._points.close()

    @staticmethod
    def _die() -> None:
        raise Killed
