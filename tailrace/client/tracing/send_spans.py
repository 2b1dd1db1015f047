"""The span of each send: from the call of `send` until the record is acknowledged or has failed.

Its context goes with the record, in its headers.

Owner: one producer; a span is ended by the thread that finds the outcome.

Invariants:
- A span ends with the record's outcome, or with the exception of `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from opentelemetry.trace import Span, SpanKind

from tailrace.client.connections.steps import Steps
from tailrace.client.tracing.header_context import with_context, without_context
from tailrace.client.tracing.spans import Spans, fail, with_span
from tailrace.core.validation import is_coroutine_function

T = TypeVar("T")
SEND = "send"


class _SpanEnd:
    """The `on_delivery` of a record with a span. It ends the span, then calls the user's."""

    __slots__ = ("_on_delivery", "_span", "context", "has_headers")

    def __init__(self, span: Span, on_delivery: Any, *, has_headers: bool) -> None:
        """`has_headers`: the record has other headers than a trace context."""
        self.context = span.get_span_context()
        self.has_headers = has_headers
        self._span: Span | None = span
        self._on_delivery = on_delivery

    def __call__(self, metadata: Any, error: Any) -> Any:
        self.end(metadata, error)
        return None if self._on_delivery is None else self._on_delivery(metadata, error)

    def end(self, metadata: Any, error: BaseException | None) -> None:
        """End the span with the outcome. A second call does nothing."""
        span, self._span = self._span, None
        if span is None:
            return
        if error is not None:
            fail(span, error)
        else:
            span.set_attribute("messaging.destination.partition.id", str(metadata.partition))
            if metadata.offset is not None:
                span.set_attribute("messaging.tailrace.offset", metadata.offset)
            if metadata.delay_id is not None:
                span.set_attribute("messaging.tailrace.delay_id", metadata.delay_id)
        span.end()


class SendSpans:
    """The sends of one producer, with spans around them."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def begin_send(self, begin: Callable[..., T]) -> Callable[..., T]:
        """`begin` with a span. It has the arguments of `RecordAppender.begin`."""

        def traced(
            topic: Any,
            value: Any,
            key: Any,
            headers: Any,
            partition: Any,
            timestamp: Any,
            on_delivery: Any,
            deliver_at: Any,
            deliver_after: Any,
            repeat: Any,
        ) -> T:
            if headers is not None and not isinstance(headers, (list, tuple)):
                try:
                    headers = list(headers)  # it may be possible to read it once only
                except TypeError:
                    pass  # the producer refuses it
            pairs = headers if isinstance(headers, (list, tuple)) else ()
            attributes = {} if value is None else _size(value)
            span = self._spans.start_with(SEND, topic, SpanKind.PRODUCER, pairs, attributes)
            try:
                if headers is None or pairs is headers:
                    headers = with_context(list(pairs), with_span(span))
                if on_delivery is None or _is_plain(on_delivery):
                    has_headers = bool(pairs) and bool(without_context(pairs))
                    on_delivery = _SpanEnd(span, on_delivery, has_headers=has_headers)
                begun = begin(
                    topic, value, key, headers, partition, timestamp, on_delivery, deliver_at,
                    deliver_after, repeat,
                )  # fmt: skip
                _note_trace(begun, on_delivery)
                return begun
            except BaseException as error:
                fail(span, error)
                span.end()
                raise

        return traced

    @staticmethod
    def finish_send(finish: Callable[..., Steps[T]]) -> Callable[..., Steps[T]]:
        """`RecordAppender.finish`, which ends the span when the send fails while it waits."""

        def traced(outgoing: Any, start_ns: int | None = None) -> Steps[T]:
            try:
                future = yield from finish(outgoing, start_ns)
                _note_trace(future, outgoing.record[6])
                return future
            except BaseException as error:
                end = outgoing.record[6]
                if isinstance(end, _SpanEnd):
                    end.end(None, error)
                raise

        return traced

    def send_arrow(self, topic: str, rows: Any, append: Steps[T]) -> Steps[T]:
        """The steps of `FrameAppender.append`, with one span for the frame."""
        attributes = {"messaging.batch.message_count": len(rows)} if _has_length(rows) else {}
        span = self._spans.start(SEND, topic, SpanKind.PRODUCER, attributes)
        try:
            future: Any = yield from append
        except BaseException as error:
            fail(span, error)
            span.end()
            raise
        future.add_done_callback(lambda done: _end_frame(span, done))
        return future  # type: ignore[no-any-return]


def _is_plain(on_delivery: Any) -> bool:
    """False for what the producer refuses."""
    return callable(on_delivery) and not is_coroutine_function(on_delivery)


def _note_trace(begun: Any, on_delivery: Any) -> None:
    """Have the request name the record's trace, if that is sampled. A batch that was sent at once
    goes without.
    """
    if not hasattr(begun, "resolve") or not isinstance(on_delivery, _SpanEnd):
        return  # it waits, or its topic takes no callback
    context = on_delivery.context
    if context.trace_flags.sampled:
        begun.resolve()[0].trace_id = context.trace_id.to_bytes(16, "big")


def _end_frame(span: Span, future: Any) -> None:
    error = future.exception(0)
    if error is not None:
        fail(span, error)
    span.end()


def _size(value: Any) -> dict[str, Any]:
    return (
        {"messaging.message.body.size": len(value)}
        if isinstance(value, (bytes, bytearray, memoryview))
        else {}
    )


def _has_length(rows: Any) -> bool:
    return hasattr(type(rows), "__len__")
