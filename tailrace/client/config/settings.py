"""Settings of the clients, under Kafka's names, checked at construction.

Each setting is documented beside its definition, with unit and default.

Invariants:
- An invalid setting raises InvalidSettingError that names it, before anything is opened.
- For an unknown setting the error names the nearest known one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, TypedDict

from tailrace.client.config.setting_fields import (
    check_callables,
    check_kinds,
    check_name,
    number_field,
)
from tailrace.client.records.partitioners import NAMES as PARTITIONERS
from tailrace.client.records.partitioners import plain_name
from tailrace.client.tracing.setting import TRACING_DOC, check_tracing
from tailrace.core.errors import InvalidSettingError
from tailrace.core.transaction_branches import TransactionBranch
from tailrace.protocol.fetch_messages import ISOLATION_LEVELS, READ_COMMITTED

READER_SCHEMAS = LATEST_SCHEMA, BATCH_SCHEMA = ("latest", "batch")
DEFAULT_BOOTSTRAP = "tcp://127.0.0.1:7420"
CONTEXT_DOC = (
    "Context in place of the address: a name of `tailrace context`, or a file of `tailrace user "
    "add --out`. It has the address, and the keys of a user. None: that of the environment "
    "variable TAILRACE_CONTEXT, if there is neither."
)
COMPRESSIONS = ("none", "lz4", "zstd")
TRANSACTIONAL_ID_MAX = 255
"""Characters of a transactional id."""
KAFKAS_ASSIGNORS = {"cooperative-sticky": "sticky", "uniform": "sticky"}
"""Kafka's name of an assignor -> its name here, where they differ."""


def default_bootstrap() -> str:
    """The address where none is given: of the context that TAILRACE_CONTEXT names, else
    DEFAULT_BOOTSTRAP.
    """
    context = os.environ.get("TAILRACE_CONTEXT")
    return f"context:{context}" if context else DEFAULT_BOOTSTRAP


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The settings of `Producer`."""

    bootstrap_servers: str = field(
        default=DEFAULT_BOOTSTRAP,
        metadata={"doc": "Address of the appliance. The short name is bootstrap."},
    )
    context: str | None = field(default=None, metadata={"doc": CONTEXT_DOC})
    acks: int | str = field(
        default="all",
        metadata={
            "doc": "0: no response; 1: appended (survives SIGKILL of every process); "
            '"all" or -1: durable on disk.'
        },
    )
    linger_ms: int = number_field(
        5,
        "Time that an open batch waits for more records, ms; 0: a batch waits only while a "
        "request is in flight.",
    )
    batch_size: int = number_field(
        256 << 10, "Size at which a batch of send() is complete, bytes.", 1024, 64 << 20
    )
    compression_type: str | None = field(
        default=None, metadata={"doc": "none, lz4 or zstd; None: the topic's setting."}
    )
    buffer_memory: int = number_field(
        64 << 20,
        "Memory for records that are not yet acknowledged, bytes; when full, send() blocks.",
        65536,
        2**40,
    )
    max_block_ms: int = number_field(
        60_000,
        "Longest time that send() blocks for memory or metadata before it raises, ms. 0: the first "
        "send() to a topic raises while the metadata is fetched.",
    )
    max_request_size: int = number_field(
        1 << 20, "Largest record, batch, or request of several batches, bytes.", 4096, 64 << 20
    )
    max_in_flight_requests_per_connection: int = number_field(
        5,
        "Requests without a response at a time. One that takes more than a second delays only its "
        "own partitions.",
        1,
        5,
    )
    enable_idempotence: bool = field(
        default=True,
        metadata={"doc": "No duplicates and no reordering by retries (needs acks 1 or all)."},
    )
    transactional_id: str | None = field(
        default=None,
        metadata={
            "doc": "Name of the producer that makes transactions, and of no other one at a time. "
            "Needs acks=all and enable_idempotence. None: no transactions."
        },
    )
    transaction_branch: Any = field(
        default=None,
        metadata={
            "doc": "A branch of another producer's transaction, from its "
            "create_transaction_branches(): this producer writes in that transaction. Needs "
            "acks=all and enable_idempotence."
        },
    )
    transaction_timeout_ms: int = number_field(
        60_000,
        "The appliance aborts a transaction that stays open for this long after its first batch, "
        "ms; at most its transaction.max.timeout.ms.",
        1,
    )
    retries: int = number_field(2**31 - 1, "Number of times that a batch is sent again.")
    metadata_max_age_ms: int = number_field(
        60_000,
        "Time between two looks at the topics that the producer sends to, ms: added partitions and "
        "changed settings are then used.",
        1,
    )
    retry_backoff_ms: int = number_field(
        100, "First pause in ms before a batch is sent again, doubled up to 1,000, with jitter."
    )
    delivery_timeout_ms: int = number_field(
        120_000, "Time after send() when a record fails, ms.", 1
    )
    request_timeout_ms: int = number_field(
        30_000, "Longest wait for a response before a batch is sent again, ms.", 1
    )
    client_id: str = field(
        default="tailrace-producer", metadata={"doc": "Name in the appliance's log."}
    )
    partitioner: Any = field(
        default=None,
        metadata={
            "doc": "murmur2 (Kafka's, by key), sticky, round_robin, modulo (of a key that is a "
            "whole number), hash_slots, consistent_random, random, or a function (topic, key, "
            "partition_count) -> partition; None: the topic's setting, else murmur2."
        },
    )
    key_serializer: Any = field(
        default=None,
        metadata={
            "doc": "Function key -> bytes for send(). None: bytes and str are sent as they are."
        },
    )
    value_serializer: Any = field(
        default=None,
        metadata={
            "doc": "Function value -> bytes for send(). None: bytes and str are sent as they are."
        },
    )
    tracing: Any = field(default=None, metadata={"doc": TRACING_DOC})

    def __post_init__(self) -> None:
        for spelling, meant in (("0", 0), ("1", 1), ("-1", "all"), (-1, "all")):
            if self.acks == spelling:
                object.__setattr__(self, "acks", meant)
        check_callables(self, "key_serializer", "value_serializer")
        check_kinds(self)
        check_tracing(self.tracing)
        if self.acks not in (0, 1, "all") or isinstance(self.acks, bool):
            raise InvalidSettingError(f'acks is {self.acks!r}; allowed are 0, 1 and "all"')
        if self.compression_type not in (None, *COMPRESSIONS):
            raise InvalidSettingError(
                f"compression_type is {self.compression_type!r}; allowed are "
                f"{', '.join(COMPRESSIONS)}"
            )
        if isinstance(self.partitioner, str):
            object.__setattr__(self, "partitioner", plain_name(self.partitioner))
        elif self.partitioner is not None and not callable(self.partitioner):
            raise InvalidSettingError(
                f"partitioner is of type {type(self.partitioner).__name__}; give one of "
                f"{', '.join(PARTITIONERS)}, or a function"
                " (topic, key, partition_count) -> partition"
            )
        else:
            check_callables(self, "partitioner")
        if self.transactional_id is not None:
            check_name("transactional_id", self.transactional_id, TRANSACTIONAL_ID_MAX, code=None)
            self._check_transactional("transactional_id")
        if self.transaction_branch is not None:
            self._check_branch()
            self._check_transactional("transaction_branch")
        if self.delivery_timeout_ms < self.linger_ms + 1:
            raise InvalidSettingError(
                f"delivery_timeout_ms ({self.delivery_timeout_ms}) must be more than linger_ms "
                f"({self.linger_ms})"
            )

    def _check_branch(self) -> None:
        if not isinstance(self.transaction_branch, TransactionBranch):
            raise InvalidSettingError(
                f"transaction_branch is {self.transaction_branch!r:.100}; give a TransactionBranch "
                "of create_transaction_branches(), or TransactionBranch.from_json(text)"
            )
        if self.transactional_id is not None:
            raise InvalidSettingError(
                "transactional_id and transaction_branch exclude each other: the owner of the "
                "transaction has the id, and a writer has a branch"
            )

    def _check_transactional(self, setting: str) -> None:
        if self.acks != "all":
            raise InvalidSettingError(
                f"acks is {self.acks!r} beside a {setting}: a commit needs records that are "
                'durable, so leave acks out or give "all"'
            )
        if not self.enable_idempotence:
            raise InvalidSettingError(
                f"enable_idempotence is False beside a {setting}: a transaction has each record "
                "once, so leave it out"
            )


class ProducerOptions(TypedDict, total=False):
    """`ProducerSettings` as keyword arguments, for type checkers and editors.

    Numbers may be text with a unit ("5ms", "64MiB").
    """

    bootstrap_servers: str | list[str]
    context: str | None
    acks: int | str
    linger_ms: int | str
    batch_size: int | str
    compression_type: str | None
    buffer_memory: int | str
    max_block_ms: int | str
    max_request_size: int | str
    max_in_flight_requests_per_connection: int | str
    enable_idempotence: bool
    transactional_id: str | None
    transaction_branch: TransactionBranch | None
    transaction_timeout_ms: int | str
    retries: int | str
    metadata_max_age_ms: int | str
    retry_backoff_ms: int | str
    delivery_timeout_ms: int | str
    request_timeout_ms: int | str
    client_id: str
    partitioner: Any
    key_serializer: Any
    value_serializer: Any
    tracing: Any


def check_reader_schema(value: Any) -> None:
    """Raise InvalidSettingError unless the value is one of READER_SCHEMAS."""
    if value not in READER_SCHEMAS:
        raise InvalidSettingError(
            f"reader_schema is {value!r:.100}; allowed are {' and '.join(READER_SCHEMAS)}"
        )


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of `Consumer`."""

    bootstrap_servers: str = field(
        default=DEFAULT_BOOTSTRAP,
        metadata={"doc": "Address of the appliance. The short name is bootstrap."},
    )
    context: str | None = field(default=None, metadata={"doc": CONTEXT_DOC})
    group_id: str | None = field(
        default=None,
        metadata={
            "doc": "Consumer group: its members share the partitions, and it stores committed "
            "offsets. None: no group."
        },
    )
    group_instance_id: str | None = field(
        default=None,
        metadata={
            "doc": "Name of this consumer in its group that outlives it: a restart within "
            "session_timeout_ms moves no partition."
        },
    )
    session_timeout_ms: int = number_field(
        45_000, "The group removes a consumer after this time without a heartbeat, ms.", 1
    )
    heartbeat_interval_ms: int = number_field(
        3_000,
        "Time between heartbeats to the group, ms; less than session_timeout_ms.",
        1,
    )
    max_poll_interval_ms: int = number_field(
        300_000,
        "A consumer that does not ask for records, by poll() or a loop, for this time leaves its "
        "group, and joins again at its next poll(), ms.",
        1,
    )
    partition_assignment_strategy: Any = field(
        default="sticky",
        metadata={
            "doc": "Assignor of the group: sticky, range, roundrobin, or one of the appliance's "
            "plugins. Of a list the first counts."
        },
    )
    auto_offset_reset: str = field(
        default="latest",
        metadata={
            "doc": "Start without a committed offset, or when the position is outside the log: "
            "earliest, latest or none (raise)."
        },
    )
    isolation_level: str = field(
        default=READ_COMMITTED,
        metadata={
            "doc": "read_committed: no record of an open or aborted transaction. read_uncommitted: "
            "all records as soon as they are durable."
        },
    )
    reader_schema: str = field(
        default=LATEST_SCHEMA,
        metadata={
            "doc": "Rows of typed topics: latest: in the newest version of the topic's schema, as "
            "far as this reader has met it. batch: in the version that they were written with."
        },
    )
    max_retry_attempts: int = number_field(
        5,
        "Attempts by retry_later() before a record goes to the dead-letter topic.",
    )
    max_poll_records: int = number_field(500, "Most records that one poll() returns.", 1)
    fetch_min_bytes: int = number_field(1, "A fetch waits for this many bytes.", 1)
    fetch_max_bytes: int = number_field(
        8 << 20,
        "Most bytes of one fetch (one batch always fits). No fetch starts while this many bytes "
        "are buffered.",
        1024,
        64 << 20,
    )
    max_partition_fetch_bytes: int = number_field(
        4 << 20,
        "Most bytes of one partition in one fetch (one batch always fits).",
        1024,
        64 << 20,
    )
    fetch_max_wait_ms: int = number_field(
        500, "Longest time that a fetch waits for fetch_min_bytes, ms.", 0, 60_000
    )
    request_timeout_ms: int = number_field(30_000, "Longest wait for a response, ms.", 1)
    retry_backoff_ms: int = number_field(
        100,
        "First pause in ms before a partition that could not be read is fetched again, doubled up "
        "to 1,000.",
    )
    max_decompressed_batch_bytes: int = number_field(
        64 << 20,
        "Largest batch after decompression, bytes; it may have one row for 8 of them. poll() "
        "raises for a larger one.",
        1 << 20,
        2**40,
    )
    validate_batches: bool = field(
        default=True,
        metadata={
            "doc": "Validate the contents of each batch before decoding; False trusts all "
            "producers of the topic."
        },
    )
    client_id: str = field(
        default="tailrace-consumer", metadata={"doc": "Name in the appliance's log."}
    )
    enable_auto_commit: bool = field(
        default=True,
        metadata={
            "doc": "With a group: a call that asks for records commits those that were delivered "
            "before it. close(), unsubscribe() and a revocation commit all delivered records."
        },
    )
    auto_commit_interval_ms: int = number_field(
        5_000, "Time between commits by poll() or a loop, ms."
    )
    key_deserializer: Any = field(
        default=None,
        metadata={
            "doc": "Function bytes -> key for each key that poll() returns. None: keys stay bytes."
        },
    )
    value_deserializer: Any = field(
        default=None,
        metadata={
            "doc": "Function bytes -> value for each value that poll() returns. None: values stay "
            "bytes."
        },
    )
    tracing: Any = field(default=None, metadata={"doc": TRACING_DOC})

    def __post_init__(self) -> None:
        check_kinds(self)
        check_callables(self, "key_deserializer", "value_deserializer")
        check_tracing(self.tracing)
        if self.group_id is not None:
            self._check_group()
        if self.auto_offset_reset not in ("earliest", "latest", "none"):
            raise InvalidSettingError(
                f"auto_offset_reset is {self.auto_offset_reset!r}; allowed are earliest, latest "
                "and none"
            )
        if self.isolation_level not in ISOLATION_LEVELS:
            raise InvalidSettingError(
                f"isolation_level is {self.isolation_level!r}; allowed are "
                f"{' and '.join(ISOLATION_LEVELS)}"
            )

        check_reader_schema(self.reader_schema)

    def _check_group(self) -> None:
        check_name("group_id", self.group_id)
        if self.group_instance_id is not None:
            check_name("group_instance_id", self.group_instance_id)
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise InvalidSettingError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than "
                f"session_timeout_ms ({self.session_timeout_ms})"
            )
        strategy = self.partition_assignment_strategy
        if isinstance(strategy, (list, tuple)) and strategy:
            strategy = strategy[0]
        if isinstance(strategy, str):
            strategy = strategy.split(",")[0].strip()
        if not isinstance(strategy, str) or not strategy:
            raise InvalidSettingError(
                f"partition_assignment_strategy is {self.partition_assignment_strategy!r:.100}; "
                "give a name such as sticky, range or roundrobin"
            )
        object.__setattr__(
            self, "partition_assignment_strategy", KAFKAS_ASSIGNORS.get(strategy, strategy)
        )


class ConsumerOptions(TypedDict, total=False):
    """`ConsumerSettings` as keyword arguments, for type checkers and editors."""

    bootstrap_servers: str | list[str]
    context: str | None
    group_id: str | None
    group_instance_id: str | None
    session_timeout_ms: int | str
    heartbeat_interval_ms: int | str
    max_poll_interval_ms: int | str
    partition_assignment_strategy: str | list[str]
    auto_offset_reset: str
    isolation_level: str
    reader_schema: str
    max_retry_attempts: int | str
    max_poll_records: int | str
    fetch_min_bytes: int | str
    fetch_max_bytes: int | str
    max_partition_fetch_bytes: int | str
    fetch_max_wait_ms: int | str
    request_timeout_ms: int | str
    retry_backoff_ms: int | str
    max_decompressed_batch_bytes: int | str
    validate_batches: bool
    client_id: str
    enable_auto_commit: bool
    auto_commit_interval_ms: int | str
    key_deserializer: Any
    value_deserializer: Any
    tracing: Any


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The settings of `Admin`."""

    bootstrap_servers: str = field(
        default=DEFAULT_BOOTSTRAP,
        metadata={"doc": "Address of the appliance. The short name is bootstrap."},
    )
    context: str | None = field(default=None, metadata={"doc": CONTEXT_DOC})
    request_timeout_ms: int = number_field(30_000, "Longest wait for a response, ms.", 1)
    connect_timeout_ms: int | None = number_field(
        None,
        "Longest wait for an appliance that does not respond at all, ms; None: request_timeout_ms.",
    )
    client_id: str = field(
        default="tailrace-admin", metadata={"doc": "Name in the appliance's log."}
    )

    def __post_init__(self) -> None:
        check_kinds(self)
