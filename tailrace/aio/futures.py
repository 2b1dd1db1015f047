"""Awaitable outcomes of `AsyncProducer.send` and `send_arrow`.

Owner: one event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from tailrace.aio.producer_loop import ProducerLoopConnection
from tailrace.core.errors import TailraceError
from tailrace.core.records import BatchMetadata, RecordMetadata
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.producer.futures import FrameFuture, RecordFuture


class AsyncRecordFuture(tuple[ProducerBatch, int, ProducerLoopConnection]):
    """The outcome of a sent record. `await` returns its RecordMetadata, or raises its error. A
    cancelled await does not cancel the record.

    It has methods of `asyncio.Future`. `result()` and `exception()` raise asyncio.InvalidStateError
    before it is done. It is a tuple (batch, row at the time of `send`, connection), since one is
    made for every record.
    """

    __slots__ = ()

    def __new__(
        cls, handle: RecordFuture, loop_connection: ProducerLoopConnection
    ) -> AsyncRecordFuture:
        return tuple.__new__(cls, (*handle, loop_connection))

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    @property
    def _handle(self) -> RecordFuture:
        return RecordFuture(self[:2])

    @property
    def _loop_connection(self) -> ProducerLoopConnection:
        return self[2]

    def __repr__(self) -> str:
        return f"<Async{repr(self._handle)[1:]}"

    def done(self) -> bool:
        return self._handle.done()

    def exception(self) -> TailraceError | None:
        """The error of the record, or None."""
        if not self._handle.done():
            raise asyncio.InvalidStateError("the record has not ended; await its future")
        return self._handle.exception(0)

    def result(self) -> RecordMetadata:
        """The record's place in the log. Raises its error."""
        error = self.exception()
        if error is not None:
            raise error
        return self._handle.result(0)

    def add_done_callback(self, callback: Callable[[AsyncRecordFuture], None]) -> None:
        """Have the loop call `callback(future)` once the record has an outcome."""
        self._loop_connection.ended(self._handle).add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self._handle.done():
            yield from self._loop_connection.ended(self._handle)
        return self.result()


class AsyncFrameFuture:
    """The outcome of a sent frame. `await` returns the BatchMetadata of its batches, or raises the
    first error.
    """

    __slots__ = ("_handle", "_loop_connection")

    def __init__(self, handle: FrameFuture, loop_connection: ProducerLoopConnection) -> None:
        self._handle = handle
        self._loop_connection = loop_connection

    def done(self) -> bool:
        return self._handle.done()

    def exception(self) -> TailraceError | None:
        """The first error among the batches, or None. Raises asyncio.InvalidStateError before all
        have an outcome.
        """
        if not self._handle.done():
            raise asyncio.InvalidStateError("not everything has ended; await the handle")
        return self._handle.exception(0)

    def result(self) -> list[BatchMetadata]:
        """The place of each batch, in the order of the rows within each partition. Raises the first
        error.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self._handle.result(0)

    def __await__(self) -> Generator[Any, None, list[BatchMetadata]]:
        for handle in self._handle.incomplete():
            yield from self._loop_connection.ended(handle)
        return self.result()
