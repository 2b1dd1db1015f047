"""Settings of the clients: Kafka's names, each documented beside its definition with unit and default, checked at construction.

Invariants: a wrong setting raises InvalidSettingError that names it, before anything is opened; an unknown one names the nearest known.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, TypedDict, TypeVar

from tailrace.errors import InvalidSettingError
from tailrace.other_names import setting_hint
from tailrace.partitioners import NAMES as PARTITIONERS
from tailrace.partitioners import plain_name
from tailrace.protocol.errors import ErrorCode
from tailrace.units import examples, whole_number

DEFAULT_BOOTSTRAP = "tcp://127.0.0.1:7420"
COMPRESSIONS = ("none", "lz4", "zstd")
Kind = TypeVar("Kind")
Client = TypeVar("Client")


def _number(default: int | None, doc: str, minimum: int = 0, maximum: int = 2**31 - 1) -> Any:
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """What `Producer` takes."""

    bootstrap: str = field(default=DEFAULT_BOOTSTRAP, metadata={"doc": "Address of the appliance."})
    acks: int | str = field(
        default="all", metadata={"doc": '0: not answered; 1: appended (survives SIGKILL of everything); "all", -1: on the disk.'}
    )
    linger_ms: int = _number(5, "How long a batch waits for more records, ms; 0: it fills only while a request is under way.")
    batch_size: int = _number(256 << 10, "A batch of send() is sent when it has this many bytes.", 1024, 64 << 20)
    compression_type: str | None = field(default=None, metadata={"doc": "none, lz4 or zstd; None: as the topic says."})
    buffer_memory: int = _number(64 << 20, "Bytes of records that may wait to be acknowledged; then send() blocks.", 65536, 2**40)
    max_block_ms: int = _number(60_000, "How long send() blocks for memory or metadata before it raises, ms.")
    max_request_size: int = _number(1 << 20, "Largest record, batch, or request of many batches, bytes.", 1024, 64 << 20)
    max_in_flight_requests_per_connection: int = _number(
        5, "Requests under way without an answer; one that takes more than a second delays only its own partitions.", 1, 5
    )
    enable_idempotence: bool = field(default=True, metadata={"doc": "No duplicates and no reordering by retries (needs acks 1 or all)."})
    retries: int = _number(2**31 - 1, "How often a batch is sent again.")
    retry_backoff_ms: int = _number(100, "First pause before sending again, doubled each time up to 1,000 ms, with jitter.")
    delivery_timeout_ms: int = _number(120_000, "When a record is given up, ms after send().", 1)
    request_timeout_ms: int = _number(30_000, "How long the appliance may take to answer a batch before it is sent again, ms.", 1)
    client_id: str = field(default="tailrace-producer", metadata={"doc": "Name in the appliance's log."})
    partitioner: Any = field(
        default=None,
        metadata={
            "doc": "murmur2 (Kafka's, by key), sticky, round_robin, modulo (of a key that is a whole number), hash_slots, consistent_random, random, or a "
            "callable (topic, key, partition_count) -> partition; None: as the topic says, else murmur2."
        },
    )
    key_serializer: Any = field(
        default=None, metadata={"doc": "Callable that makes bytes of each key of send(); None: bytes and text as they are."}
    )
    value_serializer: Any = field(default=None, metadata={"doc": "The same for values."})

    def __post_init__(self) -> None:
        for spelling, meant in (("0", 0), ("1", 1), ("-1", "all"), (-1, "all")):
            if self.acks == spelling:
                object.__setattr__(self, "acks", meant)
        _check_callables(self, "key_serializer", "value_serializer")
        _check_kinds(self)
        if self.acks not in (0, 1, "all") or isinstance(self.acks, bool):
            raise InvalidSettingError(f'acks is {self.acks!r}; allowed are 0, 1 and "all"')
        if self.compression_type not in (None, *COMPRESSIONS):
            raise InvalidSettingError(f"compression_type is {self.compression_type!r}; allowed are {', '.join(COMPRESSIONS)}")
        if isinstance(self.partitioner, str):
            object.__setattr__(self, "partitioner", plain_name(self.partitioner))
        elif self.partitioner is not None and not callable(self.partitioner):
            raise InvalidSettingError(
                f"partitioner is of type {type(self.partitioner).__name__}; it takes one of {', '.join(PARTITIONERS)}, or a callable"
                " (topic, key, partition_count) -> partition"
            )
        if self.delivery_timeout_ms < self.linger_ms + 1:
            raise InvalidSettingError(f"delivery_timeout_ms ({self.delivery_timeout_ms}) must be more than linger_ms ({self.linger_ms})")


class ProducerOptions(TypedDict, total=False):
    """`ProducerSettings` as keyword arguments, for type checkers and editors. Numbers may be text with a unit ("5ms", "64MiB")."""

    bootstrap_servers: str | list[str]
    acks: int | str
    linger_ms: int | str
    batch_size: int | str
    compression_type: str | None
    buffer_memory: int | str
    max_block_ms: int | str
    max_request_size: int | str
    max_in_flight_requests_per_connection: int | str
    enable_idempotence: bool
    retries: int | str
    retry_backoff_ms: int | str
    delivery_timeout_ms: int | str
    request_timeout_ms: int | str
    client_id: str
    partitioner: Any
    key_serializer: Any
    value_serializer: Any


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """What `Consumer` takes."""

    bootstrap: str = field(default=DEFAULT_BOOTSTRAP, metadata={"doc": "Address of the appliance."})
    group_id: str | None = field(
        default=None,
        metadata={"doc": "Consumer group: its consumers share the partitions, and it remembers how far they have read. None: none."},
    )
    group_instance_id: str | None = field(
        default=None,
        metadata={
            "doc": "A name that is this consumer's own in its group and outlives it: a restart within session_timeout_ms moves no partition."
        },
    )
    session_timeout_ms: int = _number(45_000, "The group gives a consumer up that it has not heard of for so long, ms.", 1)
    heartbeat_interval_ms: int = _number(
        3_000, "How often the consumer shows its group that it is alive, ms; less than session_timeout_ms.", 1
    )
    max_poll_interval_ms: int = _number(
        300_000, "A consumer that does not call poll() for so long leaves its group and joins again at its next poll(), ms.", 1
    )
    partition_assignment_strategy: Any = field(
        default="sticky",
        metadata={
            "doc": "How a group shares its partitions out: sticky, range, roundrobin, or one of the appliance's plugins. Of a list the first counts."
        },
    )
    auto_offset_reset: str = field(
        default="latest",
        metadata={"doc": "Where to begin without a position, or after falling out of the log: earliest, latest or none (raise)."},
    )
    retry_attempts_max: int = _number(5, "How often retry_later() has a record come again before it goes to the dead-letter topic.")
    max_poll_records: int = _number(500, "Most records that one poll() returns.", 1)
    fetch_min_bytes: int = _number(1, "A fetch waits for this many bytes.", 1)
    fetch_max_bytes: int = _number(
        8 << 20, "Most bytes that one fetch brings (one batch always fits); none is begun while as many are kept.", 1024, 64 << 20
    )
    max_partition_fetch_bytes: int = _number(
        4 << 20, "Most bytes that one fetch brings of one partition (one batch always fits).", 1024, 64 << 20
    )
    fetch_max_wait_ms: int = _number(500, "How long a fetch waits for fetch_min_bytes, ms.", 0, 60_000)
    request_timeout_ms: int = _number(30_000, "How long a request may take, ms.", 1)
    retry_backoff_ms: int = _number(
        100, "First pause before a partition that cannot be read now is asked for again, doubled each time up to 1,000 ms."
    )
    max_unpacked_batch_bytes: int = _number(
        64 << 20,
        "Most bytes that one batch may unpack to, and a row for 8 of them; with more it is not unpacked, and poll() raises.",
        1 << 20,
        2**40,
    )
    check_batches: bool = field(
        default=True, metadata={"doc": "Validate what is inside each batch before touching it; False trusts all producers of the topic."}
    )
    client_id: str = field(default="tailrace-consumer", metadata={"doc": "Name in the appliance's log."})
    enable_auto_commit: bool = field(
        default=True, metadata={"doc": "With a group: poll() and close() commit what earlier calls of poll() have handed out."}
    )
    auto_commit_interval_ms: int = _number(5_000, "How often poll() commits, ms.")
    key_deserializer: Any = field(
        default=None, metadata={"doc": "Callable that is given each key (bytes) that poll() hands out; None: bytes as they are."}
    )
    value_deserializer: Any = field(default=None, metadata={"doc": "The same for values."})

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_callables(self, "key_deserializer", "value_deserializer")
        if self.group_id is not None:
            self._check_group()
        if self.auto_offset_reset not in ("earliest", "latest", "none"):
            raise InvalidSettingError(f"auto_offset_reset is {self.auto_offset_reset!r}; allowed are earliest, latest and none")

    def _check_group(self) -> None:
        _check_name("group_id", self.group_id)
        if self.group_instance_id is not None:
            _check_name("group_instance_id", self.group_instance_id)
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise InvalidSettingError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than session_timeout_ms ({self.session_timeout_ms})"
            )
        strategy = self.partition_assignment_strategy
        if isinstance(strategy, (list, tuple)) and strategy:
            strategy = strategy[0]
        if isinstance(strategy, str):
            strategy = strategy.split(",")[0].strip()
        if not isinstance(strategy, str) or not strategy:
            raise InvalidSettingError(
                f"partition_assignment_strategy is {self.partition_assignment_strategy!r:.100}; it takes a name such as sticky, range or roundrobin"
            )
        object.__setattr__(self, "partition_assignment_strategy", KAFKAS_ASSIGNORS.get(strategy, strategy))


class ConsumerOptions(TypedDict, total=False):
    """`ConsumerSettings` as keyword arguments, for type checkers and editors."""

    bootstrap_servers: str | list[str]
    group_id: str | None
    group_instance_id: str | None
    session_timeout_ms: int | str
    heartbeat_interval_ms: int | str
    max_poll_interval_ms: int | str
    partition_assignment_strategy: str | list[str]
    auto_offset_reset: str
    retry_attempts_max: int | str
    max_poll_records: int | str
    fetch_min_bytes: int | str
    fetch_max_bytes: int | str
    max_partition_fetch_bytes: int | str
    fetch_max_wait_ms: int | str
    request_timeout_ms: int | str
    retry_backoff_ms: int | str
    max_unpacked_batch_bytes: int | str
    check_batches: bool
    client_id: str
    enable_auto_commit: bool
    auto_commit_interval_ms: int | str
    key_deserializer: Any
    value_deserializer: Any


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """What `Admin` takes."""

    bootstrap: str = field(default=DEFAULT_BOOTSTRAP, metadata={"doc": "Address of the appliance."})
    request_timeout_ms: int = _number(30_000, "How long a request may take, ms.", 1)
    connect_timeout_ms: int | None = _number(
        None, "How long to try an appliance that does not answer at all, ms; None: request_timeout_ms."
    )
    client_id: str = field(default="tailrace-admin", metadata={"doc": "Name in the appliance's log."})

    def __post_init__(self) -> None:
        _check_kinds(self)


def documented(kind: type[Any]) -> Callable[[type[Client]], type[Client]]:
    """A client's docstring ends with the settings that it takes, those of the class `kind`, each with its default."""

    def add(client: type[Client]) -> type[Client]:
        rows = [f"        {item.name} = {item.default!r}: {item.metadata['doc']}" for item in fields(kind)]
        client.__doc__ = f"{(client.__doc__ or '').rstrip()}\n\n    Settings:\n\n" + "\n".join(rows) + "\n    "
        return client

    return add


ALIASES = {"bootstrap_servers": "bootstrap"}
"""Kafka's names that are others here."""


KAFKAS_ASSIGNORS = {"cooperative-sticky": "sticky", "uniform": "sticky"}
"""Kafka's names of assignors that are others here."""
GROUP_NAME_MAX = 249


def _check_name(setting: str, name: object) -> None:
    """What a group, or a member of one, may be called. Raises InvalidSettingError."""
    if not isinstance(name, str) or not 0 < len(name) <= GROUP_NAME_MAX or any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        shown = f"a text of {len(name)} characters" if isinstance(name, str) and len(name) > GROUP_NAME_MAX else f"{name!r:.100}"
        raise InvalidSettingError(
            f"{setting} is {shown}; it takes text of 1 to {GROUP_NAME_MAX} characters without control characters", ErrorCode.INVALID_GROUP
        )


def _check_callables(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) is not None and not callable(getattr(settings, name)):
            raise InvalidSettingError(f"{name} is of type {type(getattr(settings, name)).__name__}; it takes a callable")


def _check_kinds(settings: Any) -> None:
    """Numbers between their bounds, and what is text, or true or false, by its default. Raises InvalidSettingError."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if "minimum" in item.metadata:
            low, high = item.metadata["minimum"], item.metadata["maximum"]
            is_number = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            if not is_number and (value is not None or item.default is not None):
                raise InvalidSettingError(f"{item.name} is {value!r}; it takes a whole number from {low} to {high}{examples(item.name)}")
        elif isinstance(item.default, bool) and not isinstance(value, bool):
            raise InvalidSettingError(f"{item.name} is {value!r}; it takes True or False")
        elif item.name == "client_id" and not isinstance(value, str):
            raise InvalidSettingError(f"{item.name} is {value!r}; it takes text")


def merged(settings: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of settings, as Kafka's clients take it, and keyword arguments: names with underscores, ours for Kafka's. Raises InvalidSettingError for one
    that is given twice.
    """
    result: dict[str, Any] = {}
    for source in (settings or {}, given):
        for name, value in source.items():
            if not isinstance(name, str):
                raise InvalidSettingError(f"the name of a setting is {name!r}; it must be text")
            plain = name.replace(".", "_")
            plain = ALIASES.get(plain, plain)
            if plain in result:
                raise InvalidSettingError(f"{name} is given twice")
            result[plain] = value
    return result


def build(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of the class `kind` from what `merged` made. A number may be text, with a unit where the setting has one ("1h30m", "64MiB"), and so may
    true and false. Raises InvalidSettingError for unknown names and wrong values, NotSupportedError for what a later version has.
    """
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _plain(known[name], value) if name in known else _refuse(name, known) for name, value in given.items()})


def _plain(item: Field[Any], value: Any) -> Any:
    """A number or a truth that is given as text, as files of settings have them; anything else as it is."""
    if "minimum" in item.metadata:
        number = whole_number(item.name, value)
        return value if number is None else number
    if isinstance(item.default, bool) and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    return value


def _refuse(name: str, known: Iterable[str]) -> NoReturn:
    hint = setting_hint(name)
    if not hint:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise InvalidSettingError(f"unknown setting {name!r}; {hint}")
