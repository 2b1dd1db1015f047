"""Step lock: one caller of a consumer at a time makes the steps of a rebalance.

A consumer in an event loop is used by several tasks. A listener runs inside its caller's steps, and
may call the consumer again: that is the same caller.

Owner: one ConsumerCoordinator.
Invariants: a caller that was interrupted in its steps still has the lock, and goes on there.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.steps import Steps, Wait

RECHECK_NS = 1_000_000_000
"""The longest wait between two looks at the lock."""


class StepLock:
    """See the module's docstring."""

    def __init__(self, is_nested: Callable[[], bool], now_ns: Callable[[], int]) -> None:
        """`is_nested` is True if the running operation was called by code of another one (a
        listener or a callback).
        """
        self.is_nested = is_nested
        self._now_ns = now_ns
        self._holder: object = None
        self.caller: Callable[[], object] = _the_thread
        """Identifies the caller."""
        self.on_release: Callable[[], None] = _nothing
        """Called when waiting callers are to check their conditions."""

    @property
    def is_locked(self) -> bool:
        """True while a caller makes steps, or was interrupted in one."""
        return self._holder is not None

    def acquire(self) -> Steps[bool]:
        """Wait until no other caller makes steps. Returns True if this caller makes steps already,
        and a listener of it calls.
        """
        me = self.caller()
        if self._holder is me and self.is_nested():
            return True
        while self._holder is not None and self._holder is not me:
            yield Wait(self._now_ns() + RECHECK_NS)
        self._holder = me
        return False

    def release(self, *, is_nested: bool) -> None:
        """End the steps, unless a listener's call ends within them."""
        if not is_nested:
            self._holder = None
            self.on_release()


def _the_thread() -> object:
    """Identify the caller where there is only one."""
    return StepLock


def _nothing() -> None:
    pass
