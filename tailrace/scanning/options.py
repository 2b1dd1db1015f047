"""Options of a scan: its settings, and its start and end in each partition.

Invariants:
- All functions are pure.
- An invalid option raises InvalidSettingError that names it, before anything is opened.
"""

from __future__ import annotations

import datetime as dt
import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypedDict

from tailrace.client.config.setting_fields import (
    ALIASES,
    build,
    check_callables,
    check_kinds,
    merged,
    number_field,
)
from tailrace.client.config.settings import ConsumerSettings
from tailrace.core.errors import InvalidSettingError, OffsetOutOfRangeError
from tailrace.core.records import to_timestamp_us
from tailrace.core.topic_partition import TopicPartition

_CONSUMERS = {item.name: item for item in ConsumerSettings.__dataclass_fields__.values()}

ARGUMENTS = ("bootstrap", "columns", "start", "end")
"""The arguments of `scan` beside `ScanSettings`."""


def _as_consumers(name: str) -> Any:
    item = _CONSUMERS[name]
    return field(default=item.default, metadata=item.metadata)


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """The settings of `scan`. Those that a consumer also has, mean the same."""

    partitions: Any = field(
        default=None, metadata={"doc": "A partition number, or several; None: all partitions."}
    )
    skip_damaged: bool = field(
        default=False,
        metadata={
            "doc": "Skip offsets that are damaged on disk, and log which; False: raise "
            "CorruptBatchError."
        },
    )
    on_damage: Any = field(
        default=None,
        metadata={
            "doc": "With skip_damaged: a function that is called with the CorruptBatchError of "
            "each skipped range."
        },
    )
    latest: bool = field(
        default=False,
        metadata={
            "doc": "Only the latest record of each key; no key whose latest record has no value."
        },
    )
    key_column: str | None = field(
        default=None,
        metadata={"doc": "With latest, for a typed topic: the column that is the key."},
    )
    latest_memory_bytes: int = number_field(
        256 << 20,
        "With latest: memory for keys, bytes. If they need more, they are read several times.",
        1 << 16,
        2**40,
    )
    from_files: Any = field(
        default=None,
        metadata={
            "doc": "True: only from files on this host; False: only over ZeroMQ; None: from files "
            "if they can be opened here."
        },
    )
    validate_batches: bool = _as_consumers("validate_batches")
    max_decompressed_batch_bytes: int = _as_consumers("max_decompressed_batch_bytes")
    request_timeout_ms: int = _as_consumers("request_timeout_ms")
    client_id: str = field(
        default="tailrace-scan", metadata={"doc": "Name in the appliance's log."}
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        check_callables(self, "on_damage")
        if self.key_column is not None and not isinstance(self.key_column, str):
            raise InvalidSettingError(
                f"key_column is {self.key_column!r:.100}; give a column's name"
            )
        if self.key_column is not None and not self.latest:
            raise InvalidSettingError(
                f"key_column is {self.key_column!r:.100}, which only latest=True uses; give both, "
                "or none"
            )
        if self.from_files not in (None, True, False):
            raise InvalidSettingError(
                f"from_files is {self.from_files!r:.100}; give True, False or None"
            )
        if self.partitions is not None:
            object.__setattr__(self, "partitions", _partition_numbers(self.partitions))


class ScanOptions(TypedDict, total=False):
    """`ScanSettings` as keyword arguments, for type checkers and editors."""

    partitions: int | Iterable[int] | None
    skip_damaged: bool
    on_damage: Any
    latest: bool
    key_column: str | None
    latest_memory_bytes: int | str
    from_files: bool | None
    validate_batches: bool
    max_decompressed_batch_bytes: int | str
    request_timeout_ms: int | str
    client_id: str


def build_settings(given: Mapping[str, Any]) -> ScanSettings:
    """Build the settings. Raises InvalidSettingError, with the
    nearest known name for an unknown one.
    """
    arguments = {item.name for item in fields(ScanSettings)} | set(ARGUMENTS)
    for name in given:
        near = difflib.get_close_matches(name, arguments, 1, 0.5)
        if ALIASES.get(name, name) not in arguments and near:
            raise InvalidSettingError(f"scan has no setting {name!r}; did you mean {near[0]}?")
    return build(ScanSettings, merged(None, given))


def _partition_numbers(given: Any) -> tuple[int, ...]:
    items = given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    try:
        numbers = [operator.index(item) for item in items]
    except TypeError:
        numbers = [-1]
    if not numbers or min(numbers) < 0:
        raise InvalidSettingError(
            f"partitions is {given!r:.100}; give a partition number, or several"
        )
    return tuple(sorted(set(numbers)))


class AtTime(NamedTuple):
    """The first record at or after this time."""

    timestamp_us: int


Bound = str | int | AtTime
"""Start or end of a scan in a partition: "earliest", "latest", an offset, or a time."""


class Bounds:
    """The `start` or `end` argument of a scan."""

    def __init__(self, name: str, given: Any) -> None:
        """Parse the argument. Raises InvalidSettingError."""
        self.name = name
        self.default: Bound = {"start": "earliest", "end": "latest"}[name]
        self._by_partition: dict[int | TopicPartition, Bound] = {}
        if isinstance(given, Mapping):
            for key, value in given.items():
                if isinstance(key, tuple) and len(key) == 2:
                    self._by_partition[TopicPartition(str(key[0]), self._partition(key[1]))] = (
                        self._bound(value)
                    )
                else:
                    self._by_partition[self._partition(key)] = self._bound(value)
        elif given is not None:
            self.default = self._bound(given)

    def _partition(self, key: Any) -> int:
        try:
            return operator.index(key)
        except TypeError:
            raise InvalidSettingError(
                f"{self.name} names partition {key!r:.100}; write {{0: 100}} or "
                "{TopicPartition(topic, 0): 100}"
            ) from None

    def _bound(self, value: Any) -> Bound:
        if isinstance(value, AtTime) or (
            isinstance(value, str) and value in ("earliest", "latest")
        ):
            return value
        # pandas' NaT is a datetime by its class but is not equal to itself.
        if isinstance(value, dt.datetime) and value == value:
            return AtTime(to_timestamp_us(value))
        try:
            offset = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            offset = -1
        if offset < 0:
            raise InvalidSettingError(
                f'{self.name} is {value!r:.100}; give "earliest", "latest", an offset, a '
                "datetime, or a dict of these by partition"
            )
        return offset

    def check_partitions(self, topic: str, partitions: Iterable[int]) -> None:
        """Check that the scan reads the named partitions. Raises InvalidSettingError."""
        read = set(partitions)
        for key in self._by_partition:
            of_topic, number = key if isinstance(key, TopicPartition) else (topic, key)
            if of_topic != topic or number not in read:
                raise InvalidSettingError(
                    f"{self.name} names {of_topic}-{number}, which this scan of {topic!r} does "
                    "not read; leave it out"
                )

    def of(self, key: TopicPartition) -> Bound:
        """The bound of one partition."""
        return self._by_partition.get(key, self._by_partition.get(key.partition, self.default))


def resolve(
    name: str, bound: Bound, key: TopicPartition, beginning: int, end: int, at_time: int | None
) -> int:
    """The offset of a bound in a partition with offsets `beginning` to `end - 1`.

    `at_time` is the first record at or after the bound's time, None if there is none. Raises
    OffsetOutOfRangeError.
    """
    if isinstance(bound, AtTime):
        return end if at_time is None else min(max(at_time, beginning), end)
    if isinstance(bound, str):
        return beginning if bound == "earliest" else end
    if not beginning <= bound <= end:
        raise OffsetOutOfRangeError(
            f"{name} is offset {bound} of {key.topic}-{key.partition}, which has {beginning} to "
            f"{end}"
        )
    return bound
