"""Names and settings of topics as clients give them: checked, converted, and completed by the table
(`appliance.config.topic_settings`).

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
from typing import Any

from appliance.config.topic_settings import APART, COMPACT, LATER, MIN_REPLICAS, TOPIC_SETTINGS
from tailrace.core.errors import InvalidSettingError, InvalidTopicNameError
from tailrace.core.schedule.delays import DELAY_SUFFIX, parse_levels
from tailrace.core.units import examples, whole_number

PARTITIONS_MAX = 1024
KEY_COLUMN_MAX = 249
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")
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


def parse_all(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of a request. A min.insync.replicas of 1 holds anyway, and is left out.

    Raises: InvalidSettingError.
    """
    return {
        name: parse(name, value)
        for name, value in given.items()
        if name != MIN_REPLICAS or whole_number(name, value) != 1
    }


def _unknown(name: str) -> InvalidSettingError:
    """The error of a setting that this version does not have."""
    if name in LATER:
        return InvalidSettingError(
            f"topic setting {name} is not supported by this version: {LATER[name]}"
        )
    if name in APART:
        return InvalidSettingError(APART[name])
    from appliance.config.files.near_names import nearest  # only needed for a wrong name

    near = nearest(name, TOPIC_SETTINGS, 0.5)
    hint = f"; did you mean {near}?" if near else f"; known are {', '.join(TOPIC_SETTINGS)}"
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


def check_lags(settings: Mapping[str, Any]) -> None:
    """Check that a record may be cleaned before it must be (KIP-354).

    Raises: InvalidSettingError.
    """
    least_ms, most_ms = settings["min.compaction.lag.ms"], settings["max.compaction.lag.ms"]
    if least_ms > most_ms:
        raise InvalidSettingError(
            f"min.compaction.lag.ms is {least_ms} and max.compaction.lag.ms is {most_ms}: records "
            "would have to be cleaned before they may be; lower the first, or raise the second"
        )


def check_compaction(settings: Mapping[str, Any], *, typed: bool) -> None:
    """Check that the settings of compaction fit the topic and each other.

    Raises: InvalidSettingError.
    """
    check_lags(settings)
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
