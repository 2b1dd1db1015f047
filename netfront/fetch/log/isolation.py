"""Isolation levels: which part of a log a reader is shown.

Owner: none; plain values.

Invariants:
- Below the end of a level everything is final: a read of it never shows something else later.
"""

from __future__ import annotations

from enum import Enum

from shm.tables.partition_table import PartitionState
from tailrace.protocol.fetch_messages import FETCH_UNCOMMITTED, FLAGGED_FETCH_VERSION


class Isolation(Enum):
    """The isolation level of a reader: what of transactions it is shown."""

    COMMITTED = 1
    """Committed records, up to the last stable offset."""
    UNCOMMITTED = 2
    """All records up to the high watermark, also of open and aborted transactions."""
    WITHOUT_TRANSACTIONS = 3
    """As COMMITTED, for a client that cannot read a batch of a transaction."""


def isolation_of(version: int, flags: int) -> Isolation:
    """The level that an entry of a FETCH request asks for."""
    if version < FLAGGED_FETCH_VERSION:
        return Isolation.WITHOUT_TRANSACTIONS
    return Isolation.UNCOMMITTED if flags & FETCH_UNCOMMITTED else Isolation.COMMITTED


def end_of(state: PartitionState, isolation: Isolation) -> int:
    """The offset where a read of this level ends."""
    if isolation is Isolation.UNCOMMITTED:
        return state.high_watermark
    return state.last_stable_offset


def is_at_end(state: PartitionState, isolation: Isolation, offset: int) -> bool:
    """True if a reader at `offset` has to wait: it has no record yet, and no error either."""
    return end_of(state, isolation) <= offset <= state.high_watermark
