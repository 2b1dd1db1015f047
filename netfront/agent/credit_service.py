"""Credit of producers: CREDIT requests, the budget, and grants that nobody uses.

Owner: one front. In shared memory: the occupancy of its credit.

Invariants: credit that was granted and not used is taken back only while producers wait for credit,
and no sooner than the batches that may use it were read.
"""

from __future__ import annotations

from netfront.session.responses import Responses
from netfront.session.sessions import Session
from netfront.socket.flow_control import CreditLedger
from shm.runtime.timing_wheel import NEVER_NS
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import credit_messages
from tailrace.protocol.frame import RequestHeader, WireError

SWEEP_NS = 100_000_000
"""Interval of credit sweeps while producers wait for credit.

Credit unused for so long is taken back.
"""


class CreditService:
    """Grants the ledger's credit, and sends the clients their limits."""

    def __init__(self, ledger: CreditLedger, responses: Responses, slot: ProcessSlot) -> None:
        self._ledger = ledger
        self._responses = responses
        self._occupancy = slot.credit
        self._sweep_at_ns = 0
        self.show()

    def on_credit(self, session: Session, _header: RequestHeader, body: list[bytes]) -> None:
        """Handle CREDIT."""
        if len(body) != 1:
            raise WireError(ErrorCode.MALFORMED_REQUEST, "CREDIT takes one body frame")
        self._responses.send_credit(
            self._ledger.ask(session.credit, credit_messages.decode_credit(body[0]))
        )

    def resize(self, budget_bytes: int) -> None:
        """Grant out of another budget from now on."""
        self._responses.send_credit(self._ledger.resize(budget_bytes))

    def sweep(self, now_ns: int, *, may_be_unread: bool) -> None:
        """Take unused credit back if that is due. Called while producers wait for credit.

        `may_be_unread`: batches that use the credit may have arrived without having been read.
        """
        if now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            if not may_be_unread:
                self._responses.send_credit(self._ledger.sweep())

    def next_deadline_ns(self) -> int:
        """Time of the next sweep; NEVER_NS while no producer waits."""
        return self._sweep_at_ns if self._ledger.is_contended else NEVER_NS

    def show(self) -> None:
        """Write the occupancy to shared memory."""
        ledger = self._ledger
        self._occupancy.store(ledger.outstanding_bytes, ledger.budget_bytes, ledger.waiting_count)
