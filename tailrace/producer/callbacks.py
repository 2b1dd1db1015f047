"""Calls that a producer owes its user: `on_delivery`, and whatever waits for handles.

Owner: one Producer. `due` is appended to under the producer's lock; calls are made without it: a
    callback may send, flush and close.
Invariants: each call is made once, in the order in which batches ended, whatever another raised;
    what one raises is logged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from tailrace.core.log import logger
from tailrace.producer.producer_batch import DueCallback


class Callbacks:
    """See the module's docstring. `due`: what is to be called."""

    def __init__(self, lock: threading.RLock, wake: Callable[[], None]) -> None:
        """`wake`: has a thread call `make` soon."""
        self._lock = lock
        self._wake = wake
        self.due: list[DueCallback] = []

    def __bool__(self) -> bool:
        """Whether any call is due."""
        return bool(self.due)

    def make(self) -> None:
        """Make all calls that are due. Without the lock."""
        while self.due:
            calls: Iterator[DueCallback] = iter(())
            try:
                with self._lock:
                    calls, self.due = iter(self.due), []
                for (
                    callback,
                    metadata,
                    error,
                ) in calls:  # nothing is cut off between the taking of a call and its making
                    try:
                        callback(metadata, error)
                    except Exception:
                        logger.exception(
                            "on_delivery raised; its record %s",
                            "failed" if error else "was delivered",
                        )
            finally:
                left = list(calls)
                if (
                    left
                ):  # KeyboardInterrupt, SystemExit: the thread that looks next makes the others
                    with self._lock:
                        self.due[:0] = left
                        self._wake()
