"""The spans of reading: `receive` for a call that returns records, `process` for the body of a loop
with its record, `settle` for a commit.

Owner: one consumer, in its thread or event loop.

Invariants:
- A span is started before its record is delivered, so that nothing runs between the delivery and
  the program.
- In the body of a loop its span is the current one. It ends when the loop asks for the next record,
  or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import time_ns
from types import FrameType
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry.trace import SpanKind, Status, StatusCode

from tailrace.client.connections.steps import Steps
from tailrace.client.tracing.spans import Spans, fail, links_to, of_record, with_span
from tailrace.core.loop_end import is_broken_off
from tailrace.core.records import Record

T = TypeVar("T")
RECEIVE, PROCESS, SETTLE = "receive", "process", "settle"


class LoopSpan:
    """The span of the record that a loop's body has now."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._current: tuple[Any, Any, Any] | None = None
        """(span, its context, the token of attaching it)."""

    def begin(self, record: Record) -> None:
        """Start the span of the record that is delivered next, and make it current."""
        self.end()
        span = self._spans.start_with(
            PROCESS, record.topic, SpanKind.CONSUMER, record.headers, of_record(record)
        )
        context = with_span(span)
        self._current = span, context, contexts.attach(context)

    def before_each(self, next_record: Callable[[], Record | None]) -> Iterator[None]:
        """An item for each record of a loop, which is asked for before the record is delivered and
        starts its span. `next_record`: the record, which stays buffered.
        """
        while (record := next_record()) is not None:
            self.begin(record)
            yield

    def end(self, *, has_failed: bool = False) -> None:
        """End the span, if there is one. `has_failed`: the loop was left by an exception."""
        current, self._current = self._current, None
        if current is None:
            return
        span, context, token = current
        # A loop may be dropped in another task or thread, whose context is its own.
        if contexts.get_current() is context:
            contexts.detach(token)
        if has_failed:
            span.set_attribute("error.type", "_OTHER")
            span.set_status(Status(StatusCode.ERROR, "the loop was left by an exception"))
        span.end()

    def end_dropped(self, frame: FrameType | None) -> None:
        """End the span of a loop that this frame of the program drops."""
        if self._current is not None:
            self.end(has_failed=not is_broken_off(frame))


class ReadSpans:
    """The spans of one consumer."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def loop(self) -> LoopSpan:
        """The spans of one loop."""
        return LoopSpan(self._spans)

    @contextmanager
    def receiving(self, received: Callable[[], Sequence[Record]]) -> Iterator[None]:
        """The span of a call that asks for records. `received`: those that it will return. A call
        without records has no span, but one that fails has.
        """
        start_ns = time_ns()
        try:
            yield
        except Exception as error:
            self._failed(start_ns, error)
            raise
        records = received()
        if records:
            places = {(record.topic, record.partition) for record in records}
            self._span_of_call(places, len(records), links_to(records), start_ns)

    def _failed(self, start_ns: int, error: Exception) -> None:
        span = self._spans.start(RECEIVE, None, SpanKind.CLIENT, start_ns=start_ns)
        fail(span, error)
        span.end()

    def receiving_batches(
        self, steps: Steps[None], received: Callable[[], Sequence[Any]]
    ) -> Steps[None]:
        """The steps of a call that returns Arrow batches, with their span. It has no links."""
        start_ns = time_ns()
        try:
            yield from steps
        except Exception as error:
            self._failed(start_ns, error)
            raise
        batches = received()
        if batches:
            places = {(batch.topic, batch.partition) for batch in batches}
            count = sum(batch.batch.num_rows for batch in batches)
            self._span_of_call(places, count, (), start_ns)

    def _span_of_call(
        self, places: set[tuple[str, int]], count: int, links: Sequence[Any], start_ns: int
    ) -> None:
        topics = {topic for topic, _ in places}
        attributes: dict[str, Any] = {"messaging.batch.message_count": count}
        if len(places) == 1:
            ((_, partition),) = places
            attributes["messaging.destination.partition.id"] = str(partition)
        self._spans.start(
            RECEIVE,
            topics.pop() if len(topics) == 1 else None,
            SpanKind.CLIENT,
            attributes,
            links=links,
            start_ns=start_ns,
        ).end()

    def settling(self, steps: Steps[T]) -> Steps[T]:
        """The steps of a commit, with their span."""
        span = self._spans.start(SETTLE, None, SpanKind.CLIENT)
        try:
            return (yield from steps)
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()
