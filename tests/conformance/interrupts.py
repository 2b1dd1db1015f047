"""A signal's handler that raises at each of the points, one after the other, at which Python runs
handlers during a call.

CPython runs handlers where a function of Python's begins, where one written in C has returned, and
where a loop goes round. `sys.setprofile` tells of the first two, `sys.settrace` of the third (a
line that is not behind the one before it). So the points are met one by one, in a run that is the
same each time, and no point is left to chance.

Owner: one test, one thread.
"""

from __future__ import annotations

import dis
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

POINTS_MAX = 50_000


class Interrupt(KeyboardInterrupt):
    """The exception that the handler raises."""


class Interruption:
    """Raises at the point with this number, within a block of `at`; or calls `handler` there."""

    def __init__(self, point: int, handler: Callable[[], object] | None) -> None:
        self._left = point
        self._handler = handler
        self.was_made = False
        self.where = "nowhere"

    def _count(self, frame: types.FrameType) -> None:
        if self.was_made or _outside:
            return
        self._left -= 1
        if self._left < 0:
            self.was_made = True
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            if self._handler is None:
                raise Interrupt
            sys.settrace(
                None
            )  # `sys.setprofile` is off meanwhile: the program that is looked at has been looked at
            self._handler()

    def profile(self, frame: types.FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_return") and not _is_own(frame):
            self._count(frame)

    def trace(self, frame: types.FrameType, event: str, _argument: Any) -> Any:
        if event != "call" or _is_own(frame):
            return None
        last_line = frame.f_lineno

        def lines(frame: types.FrameType, event: str, _argument: Any) -> Any:
            nonlocal last_line
            if event == "line":
                went_round = frame.f_lineno <= last_line and frame.f_lineno in _loop_lines(
                    frame.f_code
                )
                last_line = frame.f_lineno
                if went_round:
                    self._count(frame)
            return lines

        return lines


@cache
def _loop_lines(code: types.CodeType) -> frozenset[int]:
    """The lines that loops go back to. The line of a `with` also comes again, when its block is
    left: no handler runs there.
    """
    targets = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if "JUMP_BACKWARD" in instruction.opname
    }
    return frozenset(
        line
        for begin, end, line in code.co_lines()
        if line and any(begin <= target < end for target in targets)
    )


_outside: list[None] = []


@contextmanager
def outside() -> Iterator[None]:
    """Exempt the block from signals: it is not the program's."""
    _outside.append(None)
    try:
        yield
    finally:
        _outside.pop()


def _is_own(frame: types.FrameType) -> bool:
    """True if a frame belongs to the harness, which gets no signal."""
    name = frame.f_code.co_filename
    return "/tests/" in name or "contextlib" in name or "_weakrefset" in name


@contextmanager
def at(point: int, handler: Callable[[], object] | None = None) -> Iterator[Interruption]:
    """Within the block a signal's handler runs at this point. None: one that raises; the block ends
    then, without an error.
    """
    interruption = Interruption(point, handler)
    gc.disable()  # else it would run at points of its own
    sys.settrace(interruption.trace)
    sys.setprofile(interruption.profile)
    try:
        yield interruption
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()


def points(*, step: int = 1) -> Iterator[int]:
    """0, 1, 2, ...: the test ends the loop at the first point that was not met. `step`: more than 1
    for each step-th, where a run is long.
    """
    yield from range(0, POINTS_MAX, step)
    raise AssertionError("the call has no end")
