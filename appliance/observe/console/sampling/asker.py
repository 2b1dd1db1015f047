"""The client that takes the page's samples.

Owner: the sampler's thread.
Invariants:
- One client is kept while a page is open, and closed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from appliance.observe.console.sampling.samples import GroupTotals, Sample, take
from appliance.observe.process_states import ProcessStates
from shm.memory.layout import ProcessWord, Role
from tailrace.admin.admin import Admin

ASK_TIMEOUT_MS = 3_000


class Asker:
    """Takes the page's samples, with one client that is kept while somebody watches."""

    def __init__(self, states: ProcessStates, address: Callable[[], str]) -> None:
        self._states = states
        self._address = address
        self._admin: Admin | None = None

    def take(self, groups: Mapping[str, GroupTotals] | None) -> Sample:
        """One sample (see `samples.take`)."""
        if self._admin is None:
            self._admin = Admin(
                self._address(),
                client_id="tailrace-console",
                request_timeout_ms=ASK_TIMEOUT_MS,
                connect_timeout_ms=ASK_TIMEOUT_MS,
            )
        sample = take(self._admin, self._states.processes(), self.groups_run, groups)
        if sample.error:
            self.close()  # the next one may find the front at another port
        return sample

    def close(self) -> None:
        """Close the client."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def groups_run(self) -> bool:
        slot = self._states.control.process(Role.GROUPS, 0)
        return bool(slot.load(ProcessWord.GENERATION))
