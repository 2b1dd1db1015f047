"""Settings of a share consumer: Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from tailrace.client.config.setting_fields import (
    check_callables,
    check_kinds,
    check_name,
    number_field,
)
from tailrace.client.config.settings import (
    CONTEXT_DOC,
    DEFAULT_BOOTSTRAP,
    ConsumerSettings,
    check_reader_schema,
)
from tailrace.client.tracing.setting import check_tracing
from tailrace.core.errors import InvalidSettingError

_READING = {item.name: item for item in fields(ConsumerSettings)}


def _as_consumers(name: str) -> Any:
    """The Consumer's setting of this name."""
    return field(default=_READING[name].default, metadata=_READING[name].metadata)


@dataclass(frozen=True, slots=True)
class ShareConsumerSettings:
    """The settings of `ShareConsumer`."""

    bootstrap_servers: str = field(
        default=DEFAULT_BOOTSTRAP,
        metadata={"doc": "Address of the appliance. The short name is bootstrap."},
    )
    context: str | None = field(default=None, metadata={"doc": CONTEXT_DOC})
    group_id: str | None = field(
        default=None,
        metadata={
            "doc": "The share group. Its consumers share the records of its topics. Required."
        },
    )
    auto_offset_reset: str = field(
        default="latest",
        metadata={
            "doc": "Start of a group in a topic that it has never read: latest or earliest. The "
            "group remembers it."
        },
    )
    share_acknowledgement_mode: str = field(
        default="implicit",
        metadata={
            "doc": "implicit: the next poll() accepts what the last one returned, unless "
            "acknowledge() was called for one of them; explicit: "
            "a record that is not acknowledged is delivered again when its lock expires."
        },
    )
    max_poll_records: int = _as_consumers("max_poll_records")
    session_timeout_ms: int = _as_consumers("session_timeout_ms")
    heartbeat_interval_ms: int = _as_consumers("heartbeat_interval_ms")
    fetch_max_bytes: int = _as_consumers("fetch_max_bytes")
    max_partition_fetch_bytes: int = _as_consumers("max_partition_fetch_bytes")
    fetch_max_wait_ms: int = _as_consumers("fetch_max_wait_ms")
    request_timeout_ms: int = _as_consumers("request_timeout_ms")
    retry_backoff_ms: int = _as_consumers("retry_backoff_ms")
    max_decompressed_batch_bytes: int = _as_consumers("max_decompressed_batch_bytes")
    validate_batches: bool = _as_consumers("validate_batches")
    reader_schema: str = _as_consumers("reader_schema")
    dead_letter_timeout_ms: int = number_field(
        10_000, "How long poll() and commit() try to write to the dead-letter topic, ms.", 1
    )
    client_id: str = field(
        default="tailrace-share-consumer", metadata={"doc": "Name in the appliance's log."}
    )
    key_deserializer: Any = _as_consumers("key_deserializer")
    value_deserializer: Any = _as_consumers("value_deserializer")
    tracing: Any = _as_consumers("tracing")

    def __post_init__(self) -> None:
        check_kinds(self)
        check_callables(self, "key_deserializer", "value_deserializer")
        check_tracing(self.tracing)
        if self.group_id is None:
            raise InvalidSettingError(
                "a ShareConsumer needs group_id: consumers with the same one share the records"
            )
        check_name("group_id", self.group_id)
        check_reader_schema(self.reader_schema)
        if self.auto_offset_reset not in ("earliest", "latest"):
            raise InvalidSettingError(
                f"auto_offset_reset is {self.auto_offset_reset!r}; allowed are earliest and latest"
            )
        if self.share_acknowledgement_mode not in ("implicit", "explicit"):
            raise InvalidSettingError(
                f"share_acknowledgement_mode is {self.share_acknowledgement_mode!r}; allowed are "
                "implicit and explicit"
            )
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise InvalidSettingError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than "
                f"session_timeout_ms ({self.session_timeout_ms})"
            )

    def for_reading(self) -> ConsumerSettings:
        """The settings of the fetch loop."""
        shared = {item.name for item in fields(self)} & _READING.keys() - {"group_id"}
        return ConsumerSettings(**{name: getattr(self, name) for name in shared})


class ShareConsumerOptions(TypedDict, total=False):
    """`ShareConsumerSettings` as keyword arguments, for type checkers and editors."""

    bootstrap_servers: str | list[str]
    context: str | None
    group_id: str
    auto_offset_reset: str
    share_acknowledgement_mode: str
    max_poll_records: int | str
    session_timeout_ms: int | str
    heartbeat_interval_ms: int | str
    fetch_max_bytes: int | str
    max_partition_fetch_bytes: int | str
    fetch_max_wait_ms: int | str
    request_timeout_ms: int | str
    retry_backoff_ms: int | str
    max_decompressed_batch_bytes: int | str
    validate_batches: bool
    dead_letter_timeout_ms: int | str
    client_id: str
    key_deserializer: Any
    value_deserializer: Any
    tracing: Any
