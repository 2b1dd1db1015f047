"""Callbacks of the user that are due: `on_delivery`, and those of futures.

Owner: one Producer. `due` is filled under the producer's lock. Callbacks run without the lock, so
they may send, flush and close.
Invariants:
- Each callback is called once, in the order in which batches were completed.
- An exception of a callback is logged, and the others are still called.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator

from tailrace.core.log import logger
from tailrace.producer.batches.producer_batch import DueCallback


class Callbacks:
    """The callbacks that are due, in `due`."""

    def __init__(self, lock: threading.RLock, wake: Callable[[], None]) -> None:
        """`wake` makes a thread call `make` soon."""
        self._lock = lock
        self._wake = wake
        self.due: list[DueCallback] = []
        self._callers: list[int] = []
        """The threads that are in `make`. An interrupted one may still be noted."""

    def __bool__(self) -> bool:
        """True if a callback is due."""
        return bool(self.due)

    def make(self) -> None:
        """Call everything that is due. Called without the lock."""
        while self.due:
            calls: Iterator[DueCallback] = iter(())
            me = threading.get_ident()
            try:
                with self._lock:
                    self._callers.append(me)
                    calls, self.due = iter(self.due), []
                # A signal handler cannot interrupt between taking a callback and calling it.
                for callback, metadata, error in calls:
                    called: Callable[..., object] = callback
                    try:
                        returned = called(metadata, error)
                        if returned is not None and inspect.iscoroutine(returned):
                            returned.close()
                            logger.error("on_delivery returned a coroutine, which is not awaited")
                    except Exception:
                        logger.exception(
                            "on_delivery raised; its record %s",
                            "failed" if error else "was delivered",
                        )
            finally:
                left = list(calls)
                # After KeyboardInterrupt or SystemExit the next thread calls the rest.
                if left:
                    with self._lock:
                        self.due[:0] = left
                        self._wake()
                with self._lock:
                    if me in self._callers:
                        self._callers.remove(me)

    def is_called_here(self) -> bool:
        """True if this thread is in a callback."""
        return threading.get_ident() in self._callers

    def is_called_by(self, thread: int | None) -> bool:
        """True if that thread is in a callback."""
        return thread in self._callers

    def is_called_elsewhere(self) -> bool:
        """True if another thread is in a callback."""
        me = threading.get_ident()
        return any(caller != me for caller in list(self._callers))
