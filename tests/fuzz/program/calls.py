"""Calls of the program fuzzer: directly or in an event loop, cut off by a signal's handler, by a
cancellation, or by an exception of the program's own functions.

Owner: one ProgramRun, in the main thread: a signal's handler runs there alone.
Invariants: a handler raises only while code of the client is on top of the stack, or what that has
    called: a call that has returned is not cut off, nor what the fuzzer itself calls of the
    standard library.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import tailrace
from tests.fuzz.program.model import Finding
from tests.fuzz.program.operations import Operation
from tests.kit.runs.cancellation import CancelledAt

HANG_S = 90.0
"""A call that takes so long hangs: what it waits for ends after 30 s at most."""
PATIENCE_S = 0.4
"""Time that a loop waits for records that may not come."""
CLIENT = os.path.dirname(tailrace.__file__) + os.sep
RETRY_S = 0.0003
"""Time until a signal comes again that found the fuzzer's own code running."""


class Interrupt(KeyboardInterrupt):
    """Raised by the signal's handler."""


class Planted(Exception):
    """Raised by a function of the program."""


class PlantedEnd(BaseException):
    """As Planted, and no Exception."""


CUT_OFF = (Interrupt, asyncio.CancelledError, PlantedEnd)
"""Exceptions that end a call at any point."""


class Fuse:
    """A function of the program that fails once: at its call number `count` from now on."""

    def __init__(self) -> None:
        self._left = 0
        self._is_end = False
        self.has_failed = False
        """It has failed since the last call began."""

    def arm(self, count: int, *, is_end: bool) -> None:
        """Fail at this call. `is_end`: with PlantedEnd."""
        self._left, self._is_end = count, is_end

    def burn(self) -> None:
        """The function is called."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.has_failed = True
                raise PlantedEnd if self._is_end else Planted


def _is_of_client(frame: FrameType | None) -> bool:
    """True if the client has called this frame, or is it, more recently than the fuzzer."""
    while frame is not None:
        if "/tests/" in frame.f_code.co_filename:
            return False
        if frame.f_code.co_filename.startswith(CLIENT):
            return True
        frame = frame.f_back
    return False


def _stacks() -> str:
    """Stack of each thread of this process."""
    return "\n".join(
        f"{number}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


class Calls:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._is_armed = False
        self._is_hang = False
        self._before = signal.signal(signal.SIGALRM, self._on_signal)

    def close(self) -> None:
        """Restore the signal's handler, end the event loop."""
        signal.signal(signal.SIGALRM, self._before)
        self._runner.close()

    def make(
        self, operation: Operation, call: Callable[[], Any], *, patience_s: float | None = None
    ) -> Any:
        """The result of a call, which may be a coroutine. `patience_s`: cut it off after so long.
        Raises what it raises, and Finding when it hangs.
        """
        if operation.after_us is not None:
            patience_s = operation.after_us / 1e6
        if operation.slot[0] == "w" or not self.is_async:
            return self._directly(call, patience_s)
        return self._runner.run(self._awaited(call, operation.at_wait, patience_s))

    is_async = False
    """The client that is called is one of an event loop."""

    def _directly(self, call: Callable[[], Any], patience_s: float | None) -> Any:
        self._is_hang = patience_s is None
        self._is_armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, patience_s or HANG_S, 0.5)
            return call()
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._is_armed or frame is None:
            return
        if self._is_hang:
            raise Finding(f"a call hangs; all threads:\n{_stacks()}")
        if not _is_of_client(frame):
            signal.setitimer(signal.ITIMER_REAL, RETRY_S, 0.5)
            return
        raise Interrupt

    async def _awaited(
        self,
        call: Callable[[], Coroutine[Any, Any, Any]],
        at_wait: int | None,
        patience_s: float | None,
    ) -> Any:
        try:
            async with asyncio.timeout(HANG_S if patience_s is None else patience_s) as timeout:
                if at_wait is None:
                    return await call()
                return await CancelledAt(call(), at_wait)
        except TimeoutError:
            if not timeout.expired():
                raise
            if patience_s is None:
                raise Finding(f"a coroutine hangs: {call}") from None
            raise asyncio.CancelledError from None
