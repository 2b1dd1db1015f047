"""The transactions of `tailrace produce`: one for the whole input, or one for each N records.

Owner: the command line.
Invariants: an error or Ctrl-C aborts the open transaction. Those before it stay committed.
"""

from __future__ import annotations

from types import TracebackType

from tailrace.core.errors import TailraceError
from tailrace.producer.producer import Producer


class InputTransactions:
    """A `with` block around the sending. Without `is_used` it does nothing."""

    def __init__(self, producer: Producer, records_each: int | None, *, is_used: bool) -> None:
        """`records_each`: records of a transaction, None for all."""
        self._producer = producer
        self._records_each = records_each
        self._is_used = is_used
        self._count = 0
        """Records of the open transaction."""
        self.committed = 0
        """Records of the transactions that are committed."""

    def room(self, most: int) -> int:
        """The room that the open transaction has left, `most` records at most."""
        return most if self._records_each is None else min(most, self._records_each - self._count)

    def add(self, count: int = 1) -> None:
        """Note records that were sent. A full transaction is committed, and the next one begun."""
        self._count += count
        if self._is_used and self._count == self._records_each:
            self._commit()
            self._producer.begin_transaction()

    def _commit(self) -> None:
        self._producer.commit_transaction()
        self.committed += self._count
        self._count = 0

    def __enter__(self) -> InputTransactions:
        if self._is_used:
            self._producer.begin_transaction()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Commit. After an error the producer's close aborts, and the error counts the commits."""
        if not self._is_used:
            return
        if kind is None:
            self._commit()
        elif isinstance(error, TailraceError):
            raise type(error)(
                f"{error.detail}; {self.committed} records are committed, those after them are "
                "aborted",
                error.code,
            ) from None
