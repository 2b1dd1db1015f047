"""Settings of a topic: names (Kafka's), types, defaults and bounds, each documented beside its
definition.

Owner: pure. The controller checks clients' settings with it. Assignments carry the complete, typed
result.
Invariants:
- `complete(complete(x)) == complete(x)`.
- An unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tailrace.core.errors import InvalidSettingError, InvalidTopicNameError
from tailrace.core.hash_slots import HASH_SLOTS
from tailrace.core.schedule.delays import DELAY_SUFFIX, parse_levels
from tailrace.core.units import examples, whole_number

PARTITIONS_MAX = 1024
COMPACT = "compact"
POLICIES = ("delete", COMPACT, "compact,delete")
"""The values of cleanup.policy."""
KEY_COLUMN_MAX = 249
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")
_NEVER = 2**62
DELAY_SEGMENT_BYTES = 64 << 20
_DIRECTORY_NAME_MAX = 255
"""Longest file name of a file system, bytes."""
NAME_MAX = min(249, _DIRECTORY_NAME_MAX - len(f"-{PARTITIONS_MAX - 1}"))
"""Longest name of a topic: a partition's directory adds a suffix to it. Kafka's lower limit applies
too.
"""
DELAY_NAME_MAX = min(NAME_MAX, _DIRECTORY_NAME_MAX - len(f"{DELAY_SUFFIX}-{PARTITIONS_MAX - 1}"))
"""Longest name of a topic with delays, whose delay log's directories have a longer suffix."""
SHOWN_MAX = 60
"""Most characters of a client's text in an error message."""


class TopicSetting(NamedTuple):
    """A setting of topics: its type, default, and allowed values."""

    name: str
    kind: type
    default: Any
    doc: str
    allowed: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = _NEVER


_TABLE = (
    TopicSetting(
        "segment.bytes",
        int,
        256 << 20,
        "Largest size of a segment; a batch that would exceed it begins a new one.",
        minimum=64 << 10,
        maximum=1 << 40,
    ),
    TopicSetting(
        "segment.ms",
        int,
        7 * 86_400_000,
        "A segment is sealed this long after its first batch, also when nothing follows.",
        minimum=100,
    ),
    TopicSetting(
        "max.message.bytes",
        int,
        1 << 20,
        "Largest batch accepted; at most a quarter of ring_bytes and less than half of lane_bytes.",
        minimum=1024,
        maximum=64 << 20,
    ),
    TopicSetting(
        "compression.type",
        str,
        "producer",
        "Compression of batches; producer: as each producer chooses, else none.",
        allowed=("producer", "none", "lz4", "zstd"),
    ),
    TopicSetting(
        "message.timestamp.type",
        str,
        "CreateTime",
        "Clock of a record's timestamp: the producer's, or the appliance's at the append.",
        allowed=("CreateTime", "LogAppendTime"),
    ),
    TopicSetting(
        "cleanup.policy",
        str,
        "delete",
        "Treatment of old records: delete removes segments by retention.ms and "
        "retention.bytes; compact keeps the latest record of each key, and a record needs a key; "
        "compact,delete does both.",
        allowed=POLICIES,
    ),
    TopicSetting(
        "min.cleanable.dirty.ratio",
        float,
        0.5,
        "A compacted partition is cleaned when more than this part of its sealed bytes was not "
        "cleaned yet.",
        minimum=0,
        maximum=1,
    ),
    TopicSetting(
        "min.compaction.lag.ms",
        int,
        0,
        "Time that a record of a compacted topic stays at least, also when a later one has its "
        "key, ms.",
    ),
    TopicSetting(
        "max.compaction.lag.ms",
        int,
        _NEVER,
        "Records of a compacted topic that are older than this are cleaned, whatever the dirty "
        "ratio, and their segment is sealed for it, ms.",
        minimum=100,
    ),
    TopicSetting(
        "delete.retention.ms",
        int,
        86_400_000,
        "Time that a tombstone (a record with a key and without a value) of a compacted topic "
        "stays after the first cleaning that met it, ms.",
    ),
    TopicSetting(
        "small.batch.bytes",
        int,
        0,
        "A sealed segment of at least 512 KiB whose batches have fewer bytes than this on average is "
        "written again, once, with batches of about 256 KiB; every record stays. 0: never.",
        maximum=32 << 10,
    ),
    TopicSetting(
        "key.column",
        str,
        "",
        "The column of a typed topic that has the keys, for compaction; it can be set once.",
    ),
    TopicSetting(
        "kafka.value.format",
        str,
        "json",
        "Rows of a typed topic as Kafka's clients read and write them: json, an object for each "
        "row; arrow, an Arrow stream of one row. Other topics have the bytes of their values.",
        allowed=("json", "arrow"),
    ),
    TopicSetting(
        "schema.compatibility",
        str,
        "backward",
        "Changes of a typed topic's schema that are allowed: backward: all by which stored rows "
        "stay readable. forward, full: neither renaming nor widening a column. none: any type may "
        "become another one, too (see docs/schemas.md).",
        allowed=("backward", "forward", "full", "none"),
    ),
    TopicSetting(
        "retention.ms",
        int,
        7 * 86_400_000,
        "A segment is removed when its newest record is older than this (records that are old "
        "when they come stay five minutes; with delay.enabled it counts from delivery), ms; -1: "
        "never.",
        minimum=-1,
    ),
    TopicSetting(
        "retention.bytes",
        int,
        -1,
        "Closed segments are removed, oldest first, while the partition without them still "
        "holds this many bytes; -1: never.",
        minimum=-1,
    ),
    TopicSetting(
        "durability",
        str,
        "disk",
        "disk: a batch is visible to consumers, and acknowledged with acks=all, after "
        "fdatasync. memory: after the write to the page cache.",
        allowed=("disk", "memory"),
    ),
    TopicSetting(
        "delay.enabled",
        bool,
        False,
        "Producers may have records of this topic delivered later (deliver_at, "
        "deliver_after); turned off, what is pending is still delivered.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "delay.levels",
        str,
        "",
        "Allowed delays, such as `5s 10s 1m 1h`: others are rounded up to the next one. Empty: "
        "any delay, to a millisecond.",
    ),
    TopicSetting(
        "partitioner",
        str,
        "producer",
        "Rule by which producers choose a record's partition: producer: as each is set; hash_slots: by "
        "the key's hash slot, so that a key keeps its order when partitions are added; only "
        "when it is created.",
        allowed=("producer", HASH_SLOTS),
    ),
    TopicSetting(
        "delivery.paused",
        bool,
        False,
        "Consumer groups and share groups are given no records of the topic: their "
        "members keep their partitions and go on where they were once it is false; producers, "
        "and readers without a group, are not held up.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "worker.dedicated",
        bool,
        False,
        "A worker process with a ring of its own for each partition of the topic; can be set "
        "only when the topic is created.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "group.share.record.lock.duration.ms",
        int,
        30_000,
        "Time that a record is locked for a member of a share group, ms; then another member may "
        "get it.",
        minimum=100,
        maximum=3_600_000,
    ),
    TopicSetting(
        "group.share.delivery.count.limit",
        int,
        5,
        "Number of times that a share group delivers a record that is not accepted; then it goes to the "
        "dead-letter topic.",
        minimum=1,
        maximum=10_000,
    ),
    TopicSetting(
        "group.share.partition.max.record.locks",
        int,
        2_000,
        "Most records of a partition that a share group may have in flight.",
        minimum=10,
        maximum=10_000,
    ),
    TopicSetting(
        "dead.letter.topic",
        str,
        "",
        "Topic for records that a share group or retry_later gives up, created when first "
        "needed; empty: the topic's name with `.dlq`.",
    ),
    TopicSetting(
        "derived.from",
        str,
        "",
        "The id of the topic whose retries or dead letters this one holds; `topic delete "
        "--with-derived` deletes it with that one. Clients set it when they create such a topic.",
    ),
)
TOPIC_SETTINGS: dict[str, TopicSetting] = {setting.name: setting for setting in _TABLE}

LATER = {
    "min.insync.replicas": "there are no replicas yet",
}
"""Kafka's settings that this version does not support, with the reason; they are refused."""


def check_topic_name(name: Any) -> str:
    """Check that `name` can be a topic's and part of a directory's name; return it.

    Raises: InvalidTopicNameError.
    """
    if not isinstance(name, str):
        raise InvalidTopicNameError(f"a topic's name must be a text, not {type(name).__name__}")
    if len(name) > NAME_MAX or not _NAME.fullmatch(name) or name in (".", ".."):
        length = f"; it has {len(name)} characters" if len(name) > NAME_MAX else ""
        raise InvalidTopicNameError(f"topic name {shown(name)} is not allowed{length}")
    return name


def shown(value: Any) -> str:
    """A client's value as text for an error message."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = value if isinstance(value, str) else repr(value)
    cut = text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."
    return repr(cut) if isinstance(value, str) else cut


def delay_log_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a topic's delay log: durable as the topic, and kept until the scheduler has read
    everything.
    """
    inherited: dict[str, Any] = {
        name: given[name]
        for name in (
            "durability",
            "max.message.bytes",
            "compression.type",
            "delay.enabled",
            "delay.levels",
        )
        if name in given
    }
    return {
        **inherited,
        "retention.ms": -1,
        "segment.bytes": min(
            int(given.get("segment.bytes", DELAY_SEGMENT_BYTES)), DELAY_SEGMENT_BYTES
        ),
    }


def partitioner_of(given: dict[str, Any]) -> str:
    """The partitioner that these settings choose."""
    return str(given.get("partitioner", TOPIC_SETTINGS["partitioner"].default))


def check_partitions(count: Any) -> int:
    """Check the number of partitions of a request.

    Raises: InvalidSettingError.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= PARTITIONS_MAX:
        raise InvalidSettingError(f"partitions is {shown(count)}; it takes 1 to {PARTITIONS_MAX}")
    return count


def parse(name: str, value: Any) -> Any:
    """Convert `value` (a text, or typed already) to the setting's type.

    Raises: InvalidSettingError.
    """
    setting = TOPIC_SETTINGS.get(name)
    if setting is None:
        raise _unknown(name)
    if setting.kind is int:
        number = whole_number(name, value)
        if number is None or not setting.minimum <= number <= setting.maximum:
            raise InvalidSettingError(
                f"topic setting {name} is {shown(value)}; it takes a whole number from "
                f"{setting.minimum} to {setting.maximum}{examples(name)}"
            )
        return number
    if setting.kind is float:
        return _fraction(name, value)
    if name in _OF_ONE_SETTING:
        return _OF_ONE_SETTING[name](name, value)
    if name == "cleanup.policy" and isinstance(value, (str, list)):
        parts = value.split(",") if isinstance(value, str) else value
        value = ",".join(sorted({str(part).strip() for part in parts}))
    if setting.kind is bool and (isinstance(value, bool) or value in setting.allowed):
        return value in (True, "true")
    if name == "delay.levels" and isinstance(value, str):
        parse_levels(value)
        return " ".join(value.replace(",", " ").split())
    if value not in setting.allowed:
        raise InvalidSettingError(
            f"topic setting {name} is {shown(value)}; allowed are {', '.join(setting.allowed)}"
        )
    return value


def _unknown(name: str) -> InvalidSettingError:
    """The error of a setting that this version does not have."""
    if name in LATER:
        return InvalidSettingError(
            f"topic setting {name} is not supported by this version: {LATER[name]}"
        )
    import difflib  # only needed for a wrong name

    near = difflib.get_close_matches(name[:SHOWN_MAX], TOPIC_SETTINGS, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(TOPIC_SETTINGS)}"
    return InvalidSettingError(f"unknown topic setting {shown(name)}{hint}")


def _column(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > KEY_COLUMN_MAX:
        raise InvalidSettingError(
            f"topic setting {name} is {shown(value)}; it takes the name of a column, or empty"
        )
    return value


def _topic(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidSettingError(
            f"topic setting {name} is {shown(value)}; it takes the name of a topic, or empty"
        )
    try:
        return check_topic_name(value) if value else ""
    except InvalidTopicNameError as error:
        raise InvalidSettingError(f"topic setting {name}: {error.detail}") from None


def _topic_id(name: str, value: Any) -> str:
    if not isinstance(value, str) or (value and not _TOPIC_ID.fullmatch(value)):
        raise InvalidSettingError(
            f"topic setting {name} is {shown(value)}; it takes the id of a topic, 32 "
            "hexadecimal digits, or empty text"
        )
    return value


_OF_ONE_SETTING: dict[str, Callable[[str, Any], str]] = {
    "key.column": _column,
    "dead.letter.topic": _topic,
    "derived.from": _topic_id,
}
"""Settings whose text has a form of its own."""


def _fraction(name: str, value: Any) -> float:
    """A number from 0 to 1. Raises InvalidSettingError."""
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1:
        raise InvalidSettingError(
            f"topic setting {name} is {shown(value)}; it takes a number from 0 to 1, such as 0.5"
        )
    return number


def check_compaction(settings: Mapping[str, Any], *, typed: bool) -> None:
    """Check that the settings of compaction fit the topic and each other.

    Raises: InvalidSettingError.
    """
    if not typed and settings["key.column"]:
        raise InvalidSettingError(
            f"key.column is {shown(settings['key.column'])}; the topic's records have keys of "
            "their own: leave it out"
        )
    if COMPACT not in settings["cleanup.policy"]:
        return
    if settings["delay.enabled"]:
        raise InvalidSettingError(
            "a topic has either cleanup.policy=compact or delay.enabled=true, not both: use two "
            "topics, or cleanup.policy=delete"
        )
    if typed and not settings["key.column"]:
        raise InvalidSettingError(
            "cleanup.policy=compact of a typed topic needs key.column, the name of the column "
            "with the keys"
        )


def complete(
    given: dict[str, Any], *, ring_bytes: int, lane_bytes: int,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Defaults, overlaid with `defaults`, the appliance's, and with `given`; checked against each
    other and the appliance's sizes. Raises InvalidSettingError.
    """
    settings = {name: setting.default for name, setting in TOPIC_SETTINGS.items()}
    largest = min(ring_bytes // 4, lane_bytes // 2 - 128)
    settings["max.message.bytes"] = min(settings["max.message.bytes"], largest)
    settings.update({name: parse(name, value) for name, value in {**defaults, **given}.items()})
    if settings["max.message.bytes"] > largest:
        raise InvalidSettingError(
            f"max.message.bytes is {settings['max.message.bytes']}; the limit is {largest}, for "
            f"ring_bytes = {ring_bytes} and lane_bytes = {lane_bytes}: raise these settings of "
            "the appliance"
        )
    return settings
