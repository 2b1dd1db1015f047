"""Reports of a worker to the transaction coordinator, through the lane between them.

Owner: one worker, the writer of the lane.

Invariants:
- TRANSACTIONS_CONNECTED is the first message of a process generation.
- What waits for room in the lane is at most one progress, and each transaction once.
- A transaction is reported as open when it has been so for OPENED_AFTER_NS: most have ended by
  then, and wake the coordinator once less.

Crash: the successor connects anew, and reports everything that is open after its feed.
"""

from __future__ import annotations

from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import ProducerEpoch, Settled, encode_epochs, encode_settled
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneWriter
from workers.append.open_transaction_index import Key

OPENED_AFTER_NS = 50_000_000
"""Age of a transaction that is reported as open. Its timeout begins with the report."""
EPOCHS_MAX = 4096
"""Transactions in one message."""
ANOTHER_FEED = 0
"""Generation of a TRANSACTIONS_CONNECTED of a process that was fed, and needs another feed."""


class CoordinatorReports:
    """Messages to the coordinator, written by `flush`."""

    def __init__(self, lane: LaneWriter, bell: Doorbell, generation: int) -> None:
        self._lane = lane
        self._bell = bell
        self._generation = generation
        self._connect_as = generation
        self._must_connect = True
        self._began: dict[Key, int] = {}
        """Transactions that are not reported yet, and the time of their first batch, oldest first.
        """
        self._opened: dict[Key, None] = {}
        self._asked: dict[Key, None] = {}
        self._settled: Settled | None = None

    @property
    def is_waiting(self) -> bool:
        """True if something waits for room in the lane."""
        return bool(self._must_connect or self._opened or self._asked or self._settled)

    def request_feed(self) -> None:
        """Ask for another feed, as a process of no generation. Other reports are dropped: they
        follow the feed.
        """
        self._connect_as = ANOTHER_FEED
        self._must_connect = True
        self.forget()

    def forget(self) -> None:
        """Drop what waits: a feed begins."""
        self._began.clear()
        self._opened.clear()
        self._asked.clear()
        self._settled = None

    @property
    def due_ns(self) -> int | None:
        """Time when the oldest transaction that is not reported yet will be."""
        for began_ns in self._began.values():
            return began_ns + OPENED_AFTER_NS
        return None

    def began(self, key: Key, now_ns: int) -> None:
        """Report a transaction with its first batch here, if it stays open."""
        self._began[key] = now_ns

    def opened(self, key: Key) -> None:
        """Report a transaction with a batch here."""
        self._opened[key] = None

    def ended(self, key: Key) -> None:
        """Do not report the transaction any more."""
        self._began.pop(key, None)

    def ask(self, key: Key) -> None:
        """Ask for the outcome of a transaction."""
        self._asked[key] = None

    def settled(self, settled: Settled) -> None:
        """Report progress, in place of what waits."""
        self._settled = settled

    def flush(self, now_ns: int) -> None:
        """Write as much as fits into the lane, and ring."""
        while (due_ns := self.due_ns) is not None and due_ns <= now_ns:
            key = next(iter(self._began))
            del self._began[key]
            self._opened[key] = None
        if self.is_waiting and self._write():
            self._must_connect = False
        if self._lane.commit():
            self._bell.ring()

    def _write(self) -> bool:
        """Return True if at least the first message of this generation is written."""
        if self._must_connect and not self._lane.try_write(
            LaneKind.TRANSACTIONS_CONNECTED, 0, 0, 0, self._connect_as, 0, (b"",)
        ):
            return False
        self._write_epochs(LaneKind.OPENED, self._opened)
        self._write_epochs(LaneKind.ASK_OUTCOME, self._asked)
        if self._settled is not None and self._try_write(
            LaneKind.SETTLED, encode_settled(self._settled)
        ):
            self._settled = None
        return True

    def _write_epochs(self, kind: LaneKind, waiting: dict[Key, None]) -> None:
        while waiting:
            some = [ProducerEpoch(*key) for key in list(waiting)[:EPOCHS_MAX]]
            if not self._try_write(kind, encode_epochs(some)):
                return
            for key in some:
                del waiting[key]

    def _try_write(self, kind: LaneKind, payload: bytes) -> bool:
        return self._lane.try_write(kind, 0, 0, 0, self._generation, 0, (payload,))
