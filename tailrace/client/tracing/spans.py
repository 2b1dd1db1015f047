"""Spans of one client, with the attributes of OpenTelemetry's conventions for messaging.

Owner: one client. Spans may be ended by any thread.

Invariants:
- Every span that was started is ended once.
- A span is started from the current context. Without a current span it continues the trace of the
  record's headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode

from tailrace.client.tracing.header_context import extracted
from tailrace.core.records import Record

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
"""The version of the conventions that the attributes follow."""
SYSTEM = "tailrace"


class Spans:
    """Starts and ends the spans of one client."""

    def __init__(self, tracing: Any, *, client_id: str, bootstrap: Any, group: str | None) -> None:
        """`tracing`: the setting, which is not None and not False."""
        if tracing is True:
            tracing = trace.get_tracer_provider()
        if hasattr(tracing, "get_tracer"):
            from tailrace import __version__

            tracing = tracing.get_tracer("tailrace", __version__, schema_url=SCHEMA_URL)
        self.tracer: Any = tracing
        self._common: dict[str, Any] = {
            "messaging.system": SYSTEM,
            "messaging.client.id": client_id,
            **_server(bootstrap),
        }
        if group is not None:
            self._common["messaging.consumer.group.name"] = group

    def start(
        self,
        operation: str,
        topic: str | None,
        kind: SpanKind,
        attributes: dict[str, Any] | None = None,
        parent: Context | None = None,
        links: Sequence[Link] = (),
        start_ns: int | None = None,
    ) -> Span:
        """Start a span. `operation`: send, receive, process or settle. `parent`: None for the
        current context. `start_ns`: nanoseconds since 1970, None for now.
        """
        given = {
            **self._common,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            **(attributes or {}),
        }
        if topic is not None:
            given["messaging.destination.name"] = str(topic)
        name = operation if topic is None else f"{operation} {topic}"
        return self.tracer.start_span(
            name, parent, kind=kind, attributes=given, links=links, start_time=start_ns
        )

    def start_with(
        self, operation: str, topic: str, kind: SpanKind, headers: Any, attributes: dict[str, Any]
    ) -> Span:
        """Start the span of one record. It is the child of the current span, and is linked to the
        span in the record's headers; without a current span it is the child of that.
        """
        current = trace.get_current_span().get_span_context()
        found = extracted(headers) if headers else None
        origin = None if found is None else span_context(found)
        parent = None
        links: list[Link] = []
        if origin is not None:
            if not current.is_valid:
                parent = found
            if origin != current:
                links.append(Link(origin))
        return self.start(operation, topic, kind, attributes, parent, links)


def span_context(context: Context) -> SpanContext | None:
    """The span of a context; None if it has none."""
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def links_to(records: Iterable[Record]) -> list[Link]:
    """Links to the spans that sent these records, each once."""
    found: dict[tuple[int, int], Link] = {}
    for record in records:
        origin = span_context(extracted(record.headers)) if record.headers else None
        if origin is not None:
            found.setdefault((origin.trace_id, origin.span_id), Link(origin))
    return list(found.values())


def of_record(record: Record) -> dict[str, Any]:
    """The attributes of a record that was read."""
    attributes = {
        "messaging.destination.partition.id": str(record.partition),
        "messaging.tailrace.offset": record.offset,
    }
    count = getattr(record, "delivery_count", None)
    if count is not None:
        attributes["messaging.tailrace.delivery_count"] = count
    return attributes


def fail(span: Span, error: BaseException) -> None:
    """Set the status and the attributes of a failure. The span is not ended."""
    span.set_attribute("error.type", type(error).__qualname__)
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))


def with_span(span: Span) -> Context:
    """The current context with this span."""
    return trace.set_span_in_context(span, contexts.get_current())


def _server(bootstrap: Any) -> dict[str, Any]:
    """`server.address` and `server.port`; of several addresses the first."""
    first = str(bootstrap[0] if isinstance(bootstrap, (list, tuple)) and bootstrap else bootstrap)
    first = first.split(",")[0].strip()
    try:
        parts = urlsplit(first if "://" in first else f"tcp://{first}")
        if parts.scheme == "ipc":
            return {"server.address": parts.netloc + parts.path}
        found: dict[str, Any] = {} if parts.hostname is None else {"server.address": parts.hostname}
        if parts.port is not None:
            found["server.port"] = parts.port
    except ValueError:  # the connection refuses such an address
        return {}
    return found
