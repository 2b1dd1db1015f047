"""Readers of `tailrace consume`: poll records until the end offsets, --max records, or for ever.

A member of a group (--group) commits only what was written to standard output: every
COMMIT_EVERY_S, before a partition goes to another member, and at its end. After a kill its
successor repeats at most the records of COMMIT_EVERY_S. So it does where the reader of standard
output is gone (`| head`): the member leaves the group and commits nothing more, for nobody knows
which of the written records were read.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import pyarrow as pa

from appliance.cli.output import complain
from tailrace.batch.topic_batch import TopicBatch
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import CommitFailedError, CorruptBatchError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.rebalance_listener import RebalanceListener

POLL_MS = 500
COMMIT_EVERY_S = 1.0
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
"""As shells show a process that the signal ends."""


class Ending:
    """Signals that end a member of a group: Ctrl-C and a service manager's SIGTERM.

    The first signal ends it while it waits for records or between two records. Printed records are
    then committed and the partitions given back. A second signal ends it at once, for standard
    output may be blocked.
    """

    def __init__(self) -> None:
        self._asked: BaseException | None = None
        self._may_raise = True
        """True if a signal ends the command at once, as until records are printed."""

    def __enter__(self) -> Self:
        self._before = [
            (number, signal.signal(number, self._on_signal))
            for number in (signal.SIGINT, signal.SIGTERM)
        ]
        self._before.append((signal.SIGPIPE, signal.getsignal(signal.SIGPIPE)))
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        error: BaseException = (
            KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        )
        if self._may_raise or self._asked is not None:
            raise error
        self._asked = error

    def begin_printing(self) -> None:
        """Begin to delay signals to the next `while_waiting` block or `check`. From now on a write
        to a closed pipe raises BrokenPipeError; before, it would end the process within the group.
        """
        self._may_raise = False
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def check(self) -> None:
        """End here if a signal came.

        Raises: KeyboardInterrupt, SystemExit.
        """
        if self._asked is not None:
            raise self._asked

    @contextmanager
    def while_waiting(self, *, waits: bool = True) -> Iterator[None]:
        """End at once on a signal in this block; with `waits=False` delay signals."""
        before, self._may_raise = self._may_raise, waits
        try:
            if waits:
                self.check()
            yield
        finally:
            self._may_raise = before


class Reader:
    """A reader that polls until the end offsets are reached, --max records came, or for ever."""

    def __init__(
        self,
        consumer: Consumer,
        ends: dict[TopicPartition, int] | None,
        maximum: int | None,
        skip_damaged: bool,
    ) -> None:
        self._consumer = consumer
        self._skip_damaged = skip_damaged
        self._ends = ends
        self._left = maximum
        self.skipped_offsets = 0
        self.skipped_ranges = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        """The end of the writer: it is done, a signal came, or a write failed."""

    def _waiting(self) -> AbstractContextManager[None]:
        """Around a poll."""
        return nullcontext()

    def is_finished(self) -> bool:
        """True if the end offsets are reached or --max records were printed."""
        if self._left is not None and self._left <= 0:
            return True
        return self._ends is not None and all(
            self._consumer.position(key) >= end for key, end in self._ends.items()
        )

    def _skip(self, error: CorruptBatchError) -> None:
        """Seek behind the damage if --skip-damaged is given; else raise `error`."""
        if not self._skip_damaged or error.key is None or error.next_offset is None:
            raise error
        complain(f"skipped: {error.detail}")
        self.skipped_offsets += error.next_offset - (
            error.next_offset if error.first_offset is None else error.first_offset
        )
        self.skipped_ranges += 1
        self._consumer.seek(error.key, error.next_offset)

    def records(self) -> Iterable[Record]:
        """Poll for at most POLL_MS and return the records.

        Raises: CorruptBatchError, unless damage is skipped.
        """
        limit = 5000 if self._left is None else min(5000, self._left)
        try:
            with self._waiting():
                records = self._consumer.poll(POLL_MS, limit)
        except CorruptBatchError as error:
            self._skip(error)
            return []
        if self._ends is not None:
            records = [
                r
                for r in records
                if r.offset < self._ends.get(TopicPartition(r.topic, r.partition), 0)
            ]
        if self._left is not None:
            self._left -= len(records)
        return records

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Poll for at most POLL_MS and yield Arrow batches of some rows each.

        Raises: CorruptBatchError, unless damage is skipped.
        """
        try:
            with self._waiting():
                polled = self._consumer.poll_arrow(POLL_MS)
        except CorruptBatchError as error:
            self._skip(error)
            return
        for taken in polled:
            batch = taken.batch
            if self._ends is not None:
                end = self._ends.get(TopicPartition(taken.topic, taken.partition), 0)
                batch = batch.slice(0, taken.rows_below(end))
            if self._left is not None:
                batch = batch.slice(0, max(0, self._left))
                self._left -= batch.num_rows
            if batch.num_rows:
                yield batch
                self._wrote_batch(taken, batch.num_rows)

    def _wrote_batch(self, taken: TopicBatch, rows: int) -> None:
        """Count the first rows of a batch as written."""


class GroupReader(Reader):
    """A reader for a member of a group, which commits what was written."""

    def __init__(
        self,
        consumer: Consumer,
        ends: dict[TopicPartition, int] | None,
        maximum: int | None,
        skip_damaged: bool,
        ending: Ending,
    ) -> None:
        super().__init__(consumer, ends, maximum, skip_damaged)
        self._ending = ending
        self._written: dict[TopicPartition, int] = {}
        """Offsets after the last written records that are not committed yet."""
        self._commit_at_s = time.monotonic() + COMMIT_EVERY_S
        self.listener = _Handover(self)

    def __enter__(self) -> Self:
        self._ending.begin_printing()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        try:
            if not isinstance(error, BrokenPipeError):
                self.commit()
                return
        except BrokenPipeError:
            pass
        self._written.clear()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer
        raise SystemExit(EXIT_CLOSED_PIPE)

    def _waiting(self) -> AbstractContextManager[None]:
        return self._ending.while_waiting()

    def is_finished(self) -> bool:
        """`Reader.is_finished` for the assigned partitions; False while none is assigned."""
        if time.monotonic() >= self._commit_at_s:
            self.commit()
        if self._left is not None and self._left <= 0:
            return True
        mine = self._consumer.assignment() if self._ends is not None else ()
        return bool(mine) and all(
            self._consumer.position(key) >= self._ends.get(key, 0)
            for key in mine
            if self._ends is not None
        )

    def records(self) -> Iterator[Record]:
        """Yield as `Reader.records`. A record counts as written when the next one is asked for."""
        for record in super().records():
            yield record
            self._written[TopicPartition(record.topic, record.partition)] = record.offset + 1
            self._ending.check()
        self._pass_over()

    def _pass_over(self) -> None:
        """Count offsets without a record, such as a transaction's marker, behind the written
        records.
        """
        assigned = self._consumer.assignment() if self._written else ()
        for key in [key for key in self._written if key in assigned]:
            position = self._consumer.position(key)
            if self._ends is None or position <= self._ends.get(key, 0):
                self._written[key] = max(self._written[key], position)

    def _wrote_batch(self, taken: TopicBatch, rows: int) -> None:
        self._written[TopicPartition(taken.topic, taken.partition)] = (
            int(taken.offsets[rows - 1].as_py()) + 1
        )
        self._ending.check()

    def commit(self, keys: Iterable[TopicPartition] | None = None) -> None:
        """Flush standard output and commit what was written, in these partitions or all."""
        self._commit_at_s = time.monotonic() + COMMIT_EVERY_S
        taken = {
            key: self._written.pop(key)
            for key in list(self._written if keys is None else keys)
            if key in self._written
        }
        if not taken:
            return
        with self._ending.while_waiting(waits=False):  # a poll may be the caller
            sys.stdout.flush()
            sys.stdout.buffer.flush()
            try:
                self._consumer.commit(taken)
            except CommitFailedError as error:
                complain(
                    "offsets not committed, so another member prints these records again: "
                    f"{error.detail}"
                )

    def forget(self, keys: Iterable[TopicPartition]) -> None:
        """Forget partitions that another member has now; it begins at the committed offsets."""
        for key in keys:
            self._written.pop(key, None)


class _Handover(RebalanceListener):
    """Commits before a partition goes to another member."""

    def __init__(self, reader: GroupReader) -> None:
        self._reader = reader

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self._reader.commit(revoked)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self._reader.forget(lost)
