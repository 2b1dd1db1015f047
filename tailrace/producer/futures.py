"""Futures of `send` and `send_arrow`: the outcome of a record, or of a frame's batches.

Both are futures of `concurrent.futures`. `wait`, `as_completed` and `asyncio.wrap_future` take
them, and they can be awaited. The lock and condition of a Future cost more than a record. They are
made when something first needs them, which `result` and `done` do not.

Invariants:
- A future is done exactly when its batches are completed. Its outcome then never changes.
- It cannot be cancelled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tailrace.core.errors import RequestTimeoutError, TailraceError
from tailrace.core.records import BatchMetadata, RecordMetadata
from tailrace.core.validation import callable_of, timeout_s_of
from tailrace.producer.batches.producer_batch import COMPLETED, ProducerBatch

Value = TypeVar("Value")
_STATE = frozenset({"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"})
"""Attributes that `Future.__init__` makes, which is put off here."""
_making = threading.Lock()


class LazyFuture(Future[Value]):
    """A Future whose state is made when something first asks for it."""

    def _follow(self) -> None:
        """Have `set_result` or `set_exception` called with the outcome."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Make the state of a Future. Python calls this only for missing attributes."""
        if name not in _STATE:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        with _making:
            is_first = "_done_callbacks" not in self.__dict__
            if is_first:
                Future.__init__(self)
                self.set_running_or_notify_cancel()
        if is_first:
            self._follow()
        return self.__dict__[name]

    def future(self) -> Future[Value]:
        """Return itself, which is a Future."""
        return self

    def cancel(self) -> bool:
        """Return False: a sent record cannot be cancelled."""
        return False

    def cancelled(self) -> bool:
        """Return False."""
        return False

    def running(self) -> bool:
        """True while there is no outcome."""
        return not self.done()

    def __await__(self) -> Generator[Any, None, Value]:
        """Wait as `result()` does, without blocking the event loop. A cancelled wait cancels
        nothing else.
        """
        import asyncio

        return asyncio.wrap_future(self).__await__()


class RecordFuture(tuple[ProducerBatch, int], LazyFuture[RecordMetadata]):
    """The outcome of one record, as `send` returns it.

    It is a tuple (batch, row at the time of `send`), since one is made for every record.
    """

    if TYPE_CHECKING:

        def __new__(cls, record: tuple[ProducerBatch, int]) -> Self: ...
        def __init__(self, record: tuple[ProducerBatch, int]) -> None: ...
    else:
        __init__ = object.__init__  # a Future's, which makes a lock, comes when it is asked for

    def __repr__(self) -> str:
        batch, row = self.resolve()
        return (
            f"<Handle of record {row} of a batch for {batch.info.name}-{batch.partition}, "
            f"{batch.state.name}>"
        )

    def resolve(self) -> tuple[ProducerBatch, int]:
        """The batch that has the record now, and its row there. A split moves it."""
        batch, row = self
        while batch.children is not None:
            batch, row = batch.children.place(row)
        return batch, row

    def done(self) -> bool:
        """True if the record was acknowledged, or failed."""
        return self.resolve()[0].state is COMPLETED

    def exception(self, timeout: float | None = None) -> TailraceError | None:
        """The error of the record, or None. Waits for at most `timeout` seconds (None: no limit).

        Raises RequestTimeoutError when there is no outcome by then.
        """
        return self._ended(timeout)[0].error

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """The record's place in the log. Waits for at most `timeout` seconds (None: no limit).

        Raises the record's error, or RequestTimeoutError when there is no outcome by then. The
        record may still be delivered after that.
        """
        batch, row = self._ended(timeout)
        if batch.error is not None:
            raise batch.error
        return batch.metadata(row)

    def _ended(self, timeout: float | None) -> tuple[ProducerBatch, int]:
        """The completed batch that has the record, and its row there. Raises
        RequestTimeoutError.
        """
        timeout_s = None if timeout is None else timeout_s_of(timeout)
        while True:
            batch, row = self.resolve()
            if batch.state is COMPLETED:
                return batch, row
            if not batch.completion.wait_for(batch, timeout_s):
                raise RequestTimeoutError(f"the record was not acknowledged within {timeout} s")

    def add_done_callback(self, fn: Callable[[RecordFuture], object]) -> None:
        """Call `fn(future)` once the record has an outcome, or now if it has.

        Later calls come from the thread that finds the outcome. An exception of `fn` is logged.
        """
        callable_of("fn", fn)

        def ended(_metadata: RecordMetadata | None, _error: TailraceError | None) -> None:
            fn(self)

        self[0].completion.add_done_callback(self, ended)

    def _follow(self) -> None:
        self[0].completion.add_done_callback(self, self._settle)

    def _settle(self, metadata: RecordMetadata | None, error: TailraceError | None) -> None:
        if metadata is None:
            self.set_exception(error)
        else:
            self.set_result(metadata)


class FrameFuture(LazyFuture[list[BatchMetadata]]):
    """The outcome of a frame's batches, as `send_arrow` returns it."""

    def __init__(self, handles: list[RecordFuture]) -> None:
        """`handles`: of the first record of each batch, in the order of the rows within each
        partition.
        """
        self._handles = handles  # a Future's __init__ comes when its state is asked for

    def __repr__(self) -> str:
        return (
            f"<FrameFuture of {len(self._handles)} batches, "
            f"{'ended' if self.done() else 'under way'}>"
        )

    def done(self) -> bool:
        """True if all batches were acknowledged, or failed."""
        return all(batch.state is COMPLETED for batch in _leaves(self._handles))

    def exception(self, timeout: float | None = None) -> TailraceError | None:
        """The first error among the batches, or None. Waits for at most `timeout` seconds.

        Raises RequestTimeoutError when a batch has no outcome by then.
        """
        timeout_s = timeout_s_of(timeout)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for batch, _ in self.incomplete():
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not batch.completion.wait_for(batch, remaining):
                raise RequestTimeoutError(
                    f"not every batch of the frame was acknowledged within {timeout} s"
                )
        return next((leaf.error for leaf in _leaves(self._handles) if leaf.error is not None), None)

    def result(self, timeout: float | None = None) -> list[BatchMetadata]:
        """The place of each batch in its log, in the order of the rows within each partition.

        Raises the first error, or RequestTimeoutError.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return [batch.batch_metadata() for batch in _leaves(self._handles)]

    def incomplete(self) -> Iterator[RecordFuture]:
        """The incomplete batches one by one, each by its first row. Parts of split batches are
        included.
        """
        for handle in self._handles:
            while (
                leaf := next(
                    (leaf for leaf in _leaves([handle]) if leaf.state is not COMPLETED), None
                )
            ) is not None:
                yield RecordFuture((leaf, 0))

    def _follow(self) -> None:
        self._follow_on(self.incomplete())

    def _follow_on(self, incomplete: Iterator[RecordFuture]) -> None:
        """Wait for one batch after the other, then set the outcome."""
        waiting = next(incomplete, None)
        if waiting is not None:
            waiting.add_done_callback(lambda _: self._follow_on(incomplete))
        elif (error := self.exception(0)) is not None:
            self.set_exception(error)
        else:
            self.set_result(self.result(0))


def _leaves(handles: list[RecordFuture]) -> list[ProducerBatch]:
    """The batches that have the handles' rows now, with splits followed."""
    leaves: list[ProducerBatch] = []
    stack = [handle[0] for handle in reversed(handles)]
    while stack:
        batch = stack.pop()
        if batch.children is not None:
            stack += reversed(batch.children.batches)
        else:
            leaves.append(batch)
    return leaves
