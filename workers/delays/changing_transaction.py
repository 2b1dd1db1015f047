"""Changing transaction: the transaction that a cancel or reschedule request belongs to.

Owner: pure.
"""

from __future__ import annotations

from typing import NamedTuple

Key = tuple[int, int]
"""(producer id, epoch) of a transaction."""


class ChangingTransaction(NamedTuple):
    """The transaction of a change."""

    key: Key
    number: int
    """Number of the change within it. A repeated request has the same, a later one a higher."""
