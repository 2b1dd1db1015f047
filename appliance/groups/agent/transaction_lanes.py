"""The transaction coordinator's part of the agent: what the controller and the workers send it, and
what it sends to the workers.

Owner: the agent of groups.
Invariants:
- Reports of workers are handled before the requests of a step, when memory and database agree.
- Decisions are published to the workers before the answers of the step.
- Without a transactional id there are no lanes, and no requests for them.
Crash: see `appliance.groups.agent.worker_link`.
"""

from __future__ import annotations

from appliance.groups.agent.worker_link import Report, WorkerLink, WorkerLinks
from appliance.groups.transactions.coordinator import TransactionCoordinator
from appliance.groups.transactions.ids.numbers import Numbers
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import decode_epochs
from shm.runtime.error_handler import CountedErrorHandler


class TransactionLanes:
    """See the module's docstring."""

    def __init__(self, links: WorkerLinks, generation: int, errors: CountedErrorHandler) -> None:
        self.links = links
        self.numbers = Numbers()
        self._generation = generation
        self._errors = errors
        self._coordinator: TransactionCoordinator | None = None

    def serve(self, coordinator: TransactionCoordinator) -> None:
        """Pass reports to this coordinator from now on, which knows nothing of the workers yet."""
        self._coordinator = coordinator
        self.links.require_feed()
        coordinator.workers_changed()

    def take_producer_ids(self, first: int, generation: int) -> None:
        """Handle PRODUCER_IDS."""
        if generation == self._generation:
            self.numbers.add_block(first)

    def read(self, now_ns: int) -> int:
        """Read what the workers have sent."""
        coordinator = self._coordinator
        if coordinator is None:
            return 0
        if self.links.attach(now_ns):
            coordinator.workers_changed()
        count = 0
        for link in self.links:
            for report in link.reports():
                count += 1
                try:
                    self._handle(coordinator, link, report, now_ns)
                except Exception as error:
                    self._errors.on_error(f"report={report.kind} worker={link.index}", error)
        return count

    def _handle(
        self, coordinator: TransactionCoordinator, link: WorkerLink, report: Report, now_ns: int
    ) -> None:
        if report.kind == LaneKind.OPENED:
            coordinator.opened(decode_epochs(report.payload), now_ns)
        elif report.kind == LaneKind.SETTLED:
            link.settle(report.payload)
            coordinator.workers_changed()
        elif report.kind == LaneKind.ASK_OUTCOME:
            coordinator.asked(link.index, decode_epochs(report.payload), now_ns)

    def flush(self) -> int:
        """Publish decisions, and ring the workers."""
        return self.links.flush()

    def has_more(self) -> bool:
        return self.links.has_more()

    @property
    def has_unsent(self) -> bool:
        return self.links.has_unsent
