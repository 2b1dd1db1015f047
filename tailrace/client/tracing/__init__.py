"""OpenTelemetry: the trace context in records' headers, and the spans of clients.

Only `setting` is imported without the setting `tracing`; the others import opentelemetry.
"""
