"""Numbers that are given once: producer ids of transactions, and ordinals of decisions.

Owner: the agent of groups; a service that is opened again continues with the same object.
Invariants:
- No producer id and no ordinal is given twice, also after a rollback, a restart, or the loss of
  groups.db. Each process generation takes a block of the catalog's, and begins both behind it.
- Ordinals only grow.
Crash: the rest of a block is never used.
"""

from __future__ import annotations

from shm.messages.transaction_messages import PRODUCER_IDS_IN_BLOCK
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

EPOCH_MAX = (1 << 15) - 1


class Numbers:
    """Producer ids and ordinals."""

    def __init__(self) -> None:
        self._next_producer_id = 0
        self._end = 0
        self._last_ordinal = 0

    @property
    def has_block(self) -> bool:
        """True once producer ids can be given."""
        return self._next_producer_id < self._end

    @property
    def last_ordinal(self) -> int:
        return self._last_ordinal

    def add_block(self, first: int) -> None:
        """Take a block of the catalog's."""
        if first >= self._end:
            self._next_producer_id, self._end = first, first + PRODUCER_IDS_IN_BLOCK
            self.continue_behind(first - TRANSACTIONAL_PRODUCER_IDS)

    def continue_behind(self, ordinal: int) -> None:
        """Give no ordinal up to this one any more."""
        self._last_ordinal = max(self._last_ordinal, ordinal)

    def new_ordinal(self) -> int:
        self._last_ordinal += 1
        return self._last_ordinal

    def following(self, producer_id: int, epoch: int) -> tuple[int, int]:
        """The (producer id, epoch) of the next transaction. Epochs that are used up never begin
        again: a new producer id follows. Raises TailraceError (NOT_READY) without a block.
        """
        return (producer_id, epoch + 1) if epoch < EPOCH_MAX else (self.new_producer_id(), 0)

    def new_producer_id(self) -> int:
        """Raises TailraceError (NOT_READY) without a block."""
        if not self.has_block:
            raise TailraceError("the controller has not sent producer ids yet", ErrorCode.NOT_READY)
        self._next_producer_id += 1
        return self._next_producer_id - 1
