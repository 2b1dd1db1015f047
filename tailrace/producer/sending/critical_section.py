"""The producer's lock, with repair of sections that were interrupted.

Everything that changes the producer's state runs as a section (`run`), under the lock. A signal
handler (KeyboardInterrupt) may interrupt a section between any two instructions. The next section,
in whatever thread, notices and repairs the state first. Other code thus needs no care for handlers,
except in the order in which a batch changes its own fields (see
`tailrace.producer.batches.accumulator`).

Owner: a Producer. All fields but `lock` are used with the lock held.
Invariants: `is_torn` is true while a section runs, and stays true if it was interrupted.
Crash: an interrupted repair is done again by the next section.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tailrace import kernel
from tailrace.core.errors import TailraceError

T = TypeVar("T")


class CriticalSection:
    """Runs functions that change the producer's state."""

    def __init__(self, repair: Callable[[bool], None]) -> None:
        """`repair` repairs the state. Its argument is true if a use of the connection was
        interrupted.
        """
        self._repair = repair
        self.lock = kernel.new_lock()
        self.is_inside = False
        """True while the thread that has the lock runs a section."""
        self.is_torn = False
        """True while a section runs, or after one was interrupted."""
        self.connection_is_torn = False
        """True while the connection is used, or after a use of it was interrupted."""
        self.nested_is_torn = False
        """True while a section within a section runs, or after one was interrupted."""

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a section. Called with the lock or without it. Raises what `function` does.

        A TailraceError leaves the state right: it is raised on purpose.
        """
        with self.lock:
            if self.is_inside:
                return self._run_nested(function, *args)
            if self.is_torn:
                self._mend()
            self.is_inside = self.is_torn = True
            try:
                result = function(*args)
                self.is_torn = self.connection_is_torn or self.nested_is_torn
                return result
            except TailraceError:
                self.is_torn = self.connection_is_torn or self.nested_is_torn
                raise
            finally:
                self.is_inside = False

    def _run_nested(self, function: Callable[..., T], *args: Any) -> T:
        """Run a section within a section, in a destructor or a signal handler that sends. It may be
        interrupted although the outer one completes.
        """
        was_torn, self.nested_is_torn = self.nested_is_torn, True
        try:
            result = function(*args)
            self.nested_is_torn = was_torn
            return result
        except TailraceError:
            self.nested_is_torn = was_torn
            raise

    def use_connection(self, function: Callable[[], T]) -> T:
        """Run a section that uses the connection outside of the sender's runs."""
        result: T = self.run(self._use_connection, function)
        return result

    def _use_connection(self, function: Callable[[], T]) -> T:
        was_torn, self.connection_is_torn = self.connection_is_torn, True
        try:
            result = function()
            self.connection_is_torn = was_torn
            return result
        except TailraceError:
            self.connection_is_torn = was_torn
            raise

    def _mend(self) -> None:
        """Repair the state after an interrupted section."""
        self.is_inside = True
        try:
            self._repair(self.connection_is_torn or self.nested_is_torn)
            self.is_torn = self.connection_is_torn = self.nested_is_torn = False
        finally:
            self.is_inside = False
