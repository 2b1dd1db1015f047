"""Waiters: values that come later, and tasks that wait for them.

A task is a generator that yields a waiter and is resumed with its value. It is never run again from
its beginning.

Owner: one gateway, one thread.

Invariants:
- A waiter is completed once. Later completions have no effect.
- A task is resumed once for each waiter.
- A closed task is never resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any


class Waiter:
    """A value that comes later."""

    __slots__ = ("is_done", "on_done", "value")

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self.on_done: Callable[[Any], None] | None = None

    def complete(self, value: Any = None) -> None:
        """Set the value and resume the task that waits."""
        if self.is_done:
            return
        self.is_done, self.value = True, value
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(value)


Steps = Generator[Waiter, Any, Any]


class Task:
    """Runs a generator until it returns."""

    __slots__ = ("_on_end", "_on_error", "_steps")

    def __init__(
        self, steps: Steps, on_end: Callable[[Any], None], on_error: Callable[[Exception], None]
    ) -> None:
        """`on_end` gets what it returns, `on_error` what it raises."""
        self._steps: Steps | None = steps
        self._on_end = on_end
        self._on_error = on_error

    def resume(self, value: Any = None) -> None:
        """Run until it waits or ends. The first value is None."""
        while (steps := self._steps) is not None:
            try:
                waiter = steps.send(value)
            except StopIteration as end:
                self._steps = None
                self._on_end(end.value)
                return
            except Exception as error:
                self._steps = None
                self._on_error(error)
                return
            if not waiter.is_done:
                waiter.on_done = self.resume
                return
            value = waiter.value

    def close(self) -> None:
        """End it where it waits."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
