"""The setting `tracing` of clients. Without it no other module of this package is imported.

Owner: pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.core.errors import InvalidSettingError

if TYPE_CHECKING:
    from tailrace.client.tracing.read_spans import ReadSpans
    from tailrace.client.tracing.spans import Spans

TRACING_DOC = (
    "OpenTelemetry spans, and the trace context in records' headers: True (the global tracer "
    "provider), a TracerProvider or a Tracer. Needs tailrace[otel]. None: neither."
)


def check_tracing(value: Any) -> None:
    """Check the setting. Raises InvalidSettingError."""
    if value is None or isinstance(value, bool):
        return
    if not (hasattr(value, "get_tracer") or hasattr(value, "start_span")):
        raise InvalidSettingError(
            f"tracing is {value!r:.100}; give True, a TracerProvider, or a Tracer of opentelemetry"
        )


def spans_of(settings: Any) -> Spans | None:
    """The spans of a client with these settings. None: it makes none. Raises
    InvalidSettingError.
    """
    if settings.tracing is None or settings.tracing is False:
        return None
    try:
        from tailrace.client.tracing.spans import Spans
    except ImportError as error:
        raise InvalidSettingError(
            f"tracing needs opentelemetry-api, and {error}: pip install 'tailrace[otel]'"
        ) from None
    return Spans(
        settings.tracing,
        client_id=settings.client_id,
        bootstrap=settings.bootstrap_servers,
        group=getattr(settings, "group_id", None),
    )


def read_spans_of(settings: Any) -> ReadSpans | None:
    """The spans of a consumer with these settings, as `spans_of`."""
    spans = spans_of(settings)
    if spans is None:
        return None
    from tailrace.client.tracing.read_spans import ReadSpans

    return ReadSpans(spans)
