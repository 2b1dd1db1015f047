"""The shared set-up of the tortures: an appliance under load and under faults, until enough was
seen.

Owner: the test's thread makes the faults; each load thread has its own clients.
Invariants:
- An error in a load thread ends the run, which raises it.
- The end is counted (faults, records); seconds end a run only where the command line says so.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tailrace import Admin
from tailrace.core.errors import TailraceError
from tests.crash.disturbance import DisturbedAppliance, Harm

CountsT = TypeVar("CountsT")
ALTERATION_INTERVAL_S = 0.2
Enough = Callable[[CountsT], bool]
"""Told what was counted so far; true when the faults may end."""


class TortureBase(Generic[CountsT]):
    """One run. A subclass starts its load in `run`, then calls `disturb`, then checks."""

    def __init__(
        self,
        counts: CountsT,
        harm: Harm,
        seed: int,
        data_dir: str,
        favourite: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`harm`: the part of `counts` that the appliance's faults go into."""
        self.appliance = DisturbedAppliance(
            random.Random(seed), data_dir, favourite, harm, settings
        )
        self.address = self.appliance.address
        self.counts = counts
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def thread(self, load: Callable[..., None], *arguments: Any) -> threading.Thread:
        """A thread of load, started, whose error ends the run."""

        def guarded() -> None:
            try:
                load(*arguments)
            except BaseException as error:
                self._errors.append(error)

        started = threading.Thread(target=guarded, name=load.__name__)
        started.start()
        return started

    def alter_settings(self, topics: Sequence[str]) -> None:
        """A load: settings of topics that are in use change all the time."""
        with Admin(self.address, request_timeout_ms=20_000) as admin:
            for days in itertools.cycle(range(7, 14)):
                if self._stop.wait(ALTERATION_INTERVAL_S):
                    return
                try:
                    admin.alter_topics({topic: {"retention.ms": f"{days}d"} for topic in topics})
                except TailraceError as error:
                    if not error.retriable:
                        raise

    def disturb(self, enough: Enough[CountsT], threads: list[threading.Thread]) -> None:
        """Make faults until `enough`, then let the load end. Raises what a thread of it has
        raised.
        """
        try:
            self.appliance.disturb_until(
                lambda: bool(self._errors) or enough(self.counts), self.is_behind
            )
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def is_behind(self) -> bool:
        """True while the appliance must get through its work before the next fault."""
        return False

    def run(self, enough: Enough[CountsT]) -> CountsT:
        """Disturb until `enough`, then check. Raises AssertionError."""
        raise NotImplementedError


def run_torture(make: Callable[[str], TortureBase[CountsT]], enough: Enough[CountsT]) -> CountsT:
    """A run in a directory of its own, which goes with it."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-torture-", ignore_cleanup_errors=True
    ) as data_dir:
        one = make(data_dir)
        try:
            return one.run(enough)
        finally:
            one.appliance.stop()


def for_seconds(seconds: float) -> Enough[Any]:
    """An end by the clock, for `make torture`."""
    deadline = time.monotonic() + seconds
    return lambda _counts: time.monotonic() >= deadline


def run_from_command_line(torture: Callable[[int, Enough[Any]], object]) -> int:
    """`SECONDS [SEED]`: prints the seed first, what was counted last. `torture` raises when a
    promise is broken.
    """
    seconds, seed = (
        float(sys.argv[1]),
        int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] else random.randrange(1 << 32),
    )
    print(f"seed {seed}, {seconds:g} s", flush=True)
    print(f"no violation: {torture(seed, for_seconds(seconds))}")
    return 0
