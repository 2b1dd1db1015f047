"""The trace context in a record's headers, written and read by the program's propagator.

By default that is W3C Trace Context and Baggage: the headers `traceparent`, `tracestate` and
`baggage`. OTEL_PROPAGATORS or `opentelemetry.propagate.set_global_textmap` choose others.

Invariants:
- A record has one trace context: that of its last send. The headers of an earlier one are replaced.
- The context comes before the record's other headers. Those that `retry_later` and dead letters add
  stay the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context


class _Added:
    """A Setter of opentelemetry, for a list of headers."""

    def set(self, carrier: list[tuple[str, bytes]], key: str, value: str) -> None:
        carrier.append((key, value.encode()))


class _Found:
    """A Getter of opentelemetry, for a list of headers."""

    def get(self, carrier: list[Any], key: str) -> list[str] | None:
        values = [
            bytes(pair[1]).decode(errors="replace")
            for pair in carrier
            if _name(pair) == key and isinstance(pair[1], (bytes, bytearray, memoryview))
        ]
        return values or None

    def keys(self, carrier: list[Any]) -> list[str]:
        return [name for pair in carrier if (name := _name(pair)) is not None]


_ADDED, _FOUND = _Added(), _Found()


def extracted(headers: Iterable[Any]) -> Context:
    """The context of a record's headers, above an empty one."""
    return propagate.extract(headers, context=Context(), getter=_FOUND)


def with_context(headers: list[Any], context: Context) -> list[Any]:
    """The headers, with this context instead of another one."""
    propagator = propagate.get_global_textmap()
    added: list[tuple[str, bytes]] = []
    propagator.inject(added, context=context, setter=_ADDED)
    replaced = {*propagator.fields, *(name for name, _ in added)}
    return [*added, *(pair for pair in headers if _name(pair) not in replaced)]


def without_context(headers: Iterable[Any]) -> list[Any]:
    """The headers that are no trace context."""
    fields = propagate.get_global_textmap().fields
    return [pair for pair in headers if _name(pair) not in fields]


def _name(pair: Any) -> Any:
    """The name of a header; None for what is none, which the producer refuses."""
    return pair[0] if isinstance(pair, (tuple, list)) and len(pair) == 2 else None
