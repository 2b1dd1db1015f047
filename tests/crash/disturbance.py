"""An appliance whose processes are killed and stopped at random, and the command line of what is run on it.

SIGKILL or SIGSTOP/SIGCONT of any process, or of the supervisor (then everything dies and is started anew), at random moments. The seed decides victims,
signals and pauses; what the machine makes of it differs from run to run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children


@dataclass(slots=True)
class Harm:
    """What was done."""

    kills: int = 0
    stops: int = 0
    restarts: int = 0

    @property
    def total(self) -> int:
        return self.kills + self.stops + self.restarts


class DisturbedAppliance:
    """See the module's docstring."""

    def __init__(self, rng: random.Random, data_dir: str, favourite: str = "") -> None:
        """`favourite`: a process that is hit as often as all others together."""
        self.address = f"ipc://{data_dir}/socket"
        self.harm = Harm()
        self._rng = rng
        self._data_dir = data_dir
        self._favourite = favourite
        self._appliance = self._start()

    def _start(self) -> EmbeddedAppliance:
        return start_embedded(data_dir=self._data_dir, listen=self.address, settings={"ring_bytes": 4 << 20}, auto_create_topics=False)

    def stop(self) -> int:
        """As users stop it; the exit status."""
        return self._appliance.stop()

    def disturb_for(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """`is_over`: whether there is no use in going on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_over():
            time.sleep(self._rng.uniform(0.1, 1.5))  # a load, not a synchronisation: the pause between two faults
            self._disturb()

    def _disturb(self) -> None:
        choice = self._rng.random()
        victims = children(self._appliance)
        if choice < 0.1 or not victims:
            os.kill(self._appliance.pid, signal.SIGKILL)
            self._appliance.stop()
            self._appliance = self._start()
            self.harm.restarts += 1
            return
        is_favourite = self._favourite in victims and self._rng.random() < 0.5
        victim = victims[self._favourite if is_favourite else self._rng.choice(sorted(victims))]
        try:
            if choice < 0.65:
                os.kill(victim, signal.SIGKILL)
                self.harm.kills += 1
            else:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(self._rng.uniform(0.05, 0.5))  # a load, not a synchronisation: so long the process stands still
                os.kill(victim, signal.SIGCONT)
                self.harm.stops += 1
        except ProcessLookupError:
            pass


def run_from_command_line(torture: Callable[[int, float], object]) -> int:
    """`SECONDS [SEED]`; the seed is printed first, what was counted last. `torture` raises AssertionError when a promise is broken."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] else random.randrange(1 << 32)
    print(f"seed {seed}, {seconds:g} s", flush=True)
    print(f"no violation: {torture(seed, seconds)}")
    return 0
