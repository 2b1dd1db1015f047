"""The settings of a Table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from tailrace.client.config.setting_fields import check_callables, check_kinds, number_field
from tailrace.client.config.settings import CONTEXT_DOC, DEFAULT_BOOTSTRAP, ConsumerSettings
from tailrace.client.connections.runtime import check_bootstrap
from tailrace.core.errors import InvalidSettingError

_CONSUMERS = ConsumerSettings.__dataclass_fields__
FOR_CONSUMER = (
    "client_id", "fetch_max_bytes", "max_partition_fetch_bytes", "max_decompressed_batch_bytes",
    "request_timeout_ms", "validate_batches",
)  # fmt: skip
"""The settings that go to the table's consumer."""


def _as_consumers(name: str) -> Any:
    item = _CONSUMERS[name]
    return field(default=item.default, metadata=item.metadata)


@dataclass(frozen=True, slots=True)
class TableSettings:
    """The settings of `Table`. Those that a consumer also has, mean the same."""

    bootstrap_servers: str = field(
        default=DEFAULT_BOOTSTRAP,
        metadata={"doc": "Address of the appliance. The short name is bootstrap."},
    )
    context: str | None = field(default=None, metadata={"doc": CONTEXT_DOC})
    key_column: str | None = field(
        default=None, metadata={"doc": "For a typed topic: the column that is the key."}
    )
    key_serializer: Any = field(
        default=None,
        metadata={
            "doc": "Function key -> bytes for each key that is asked for. None: keys are bytes, or "
            "text that becomes UTF-8."
        },
    )
    key_deserializer: Any = field(
        default=None,
        metadata={"doc": "Function bytes -> key for each key that the table returns."},
    )
    value_deserializer: Any = field(
        default=None,
        metadata={"doc": "Function bytes -> value for each value that the table returns."},
    )
    on_change: Any = field(
        default=None,
        metadata={
            "doc": "Function that is called with a TableChange for each change after the table "
            "is ready, by the table's thread."
        },
    )
    max_records: int = number_field(
        2**31 - 2, "Most keys. With more the table stops, and every use of it raises.", 1
    )
    max_bytes: int = number_field(
        1 << 30,
        "Most memory for keys and values, bytes. With more the table stops, and every use of it "
        "raises.",
        1 << 16,
        2**50,
    )
    validate_batches: bool = _as_consumers("validate_batches")
    fetch_max_bytes: int = _as_consumers("fetch_max_bytes")
    max_partition_fetch_bytes: int = _as_consumers("max_partition_fetch_bytes")
    max_decompressed_batch_bytes: int = _as_consumers("max_decompressed_batch_bytes")
    request_timeout_ms: int = _as_consumers("request_timeout_ms")
    client_id: str = field(
        default="tailrace-table", metadata={"doc": "Name in the appliance's log."}
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        object.__setattr__(self, "bootstrap_servers", check_bootstrap(self.bootstrap_servers))
        check_callables(
            self, "key_serializer", "key_deserializer", "value_deserializer", "on_change"
        )
        if self.key_column is not None and not isinstance(self.key_column, str):
            raise InvalidSettingError(
                f"key_column is {self.key_column!r:.100}; give a column's name"
            )


class TableOptions(TypedDict, total=False):
    """`TableSettings` as keyword arguments, for type checkers and editors."""

    bootstrap_servers: str | list[str]
    context: str | None
    key_column: str | None
    key_serializer: Callable[[Any], bytes] | None
    key_deserializer: Callable[[bytes], Any] | None
    value_deserializer: Callable[[bytes], Any] | None
    on_change: Callable[[Any], object] | None
    max_records: int | str
    max_bytes: int | str
    validate_batches: bool
    fetch_max_bytes: int | str
    max_partition_fetch_bytes: int | str
    max_decompressed_batch_bytes: int | str
    request_timeout_ms: int | str
    client_id: str
