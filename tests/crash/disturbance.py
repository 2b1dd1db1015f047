"""An appliance whose processes are killed and stopped at random.

SIGKILL or SIGSTOP/SIGCONT of any process, or of the supervisor (then everything dies and is started
anew), at random moments. The seed decides victims, signals and pauses; what the machine makes of it
differs from run to run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children


@dataclass(slots=True)
class Harm:
    """Counts of the faults that were made."""

    kills: int = 0
    stops: int = 0
    restarts: int = 0

    @property
    def total(self) -> int:
        return self.kills + self.stops + self.restarts


class DisturbedAppliance:
    """See the module's docstring."""

    def __init__(
        self,
        rng: random.Random,
        data_dir: str,
        favourite: str = "",
        harm: Harm | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`favourite`: a process that is hit as often as all others together. `harm`: counts the
        faults. `settings`: of the appliance.
        """
        self._settings = {"ring_bytes": 4 << 20, **(settings or {})}
        self.address = f"ipc://{data_dir}/socket"
        self.harm = harm if harm is not None else Harm()
        self._rng = rng
        self._data_dir = data_dir
        self._favourite = favourite
        self._appliance = self._start()

    def _start(self) -> EmbeddedAppliance:
        return start_embedded(
            data_dir=self._data_dir,
            listen=self.address,
            settings=self._settings,
            auto_create_topics=False,
        )

    def stop(self) -> int:
        """As users stop it; the exit status."""
        return self._appliance.stop()

    def disturb_until(
        self, is_over: Callable[[], bool], is_behind: Callable[[], bool] = lambda: False
    ) -> None:
        """Make one fault after the other, with a random pause before each, until `is_over`. While
        the appliance `is_behind` there are none.
        """
        while not is_over():
            time.sleep(
                self._rng.uniform(0.1, 1.5)
            )  # a load, not a synchronisation: the pause between two faults
            if not is_behind():
                self.disturb()

    def disturb(self) -> None:
        """Make one fault."""
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
                time.sleep(
                    self._rng.uniform(0.05, 0.5)
                )  # a load, not a synchronisation: so long the process stands still
                os.kill(victim, signal.SIGCONT)
                self.harm.stops += 1
        except ProcessLookupError:
            pass
