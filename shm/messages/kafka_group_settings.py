"""Settings of groups that Kafka clients set: their names and values, and their texts in the
appliance's setting `kafka.group.settings`.

Text of a group: `group=NAME setting=value ...`. The name is percent-encoded as in URLs.

Owner: pure. The appliance checks the texts, the Kafka gateway uses and changes them.

Invariants:
- A group has one text, and at least one setting.
- The texts of a set of groups, parsed, are that set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import digits_in

GROUPS_MAX = 1_000
NAME_MAX = 249
_LONGEST_MS = 86_400_000


class GroupSetting(NamedTuple):
    """Description of a setting. A choice of texts, or a time in ms."""

    default: str | int
    choices: tuple[str, ...] = ()


CONSUMER_SESSION, CONSUMER_INTERVAL = (
    "consumer.session.timeout.ms",
    "consumer.heartbeat.interval.ms",
)
SHARE_SESSION, SHARE_INTERVAL = "share.session.timeout.ms", "share.heartbeat.interval.ms"
SHARE_RESET = "share.auto.offset.reset"
GROUP_SETTINGS: dict[str, GroupSetting] = {
    CONSUMER_INTERVAL: GroupSetting(3_000),
    CONSUMER_SESSION: GroupSetting(45_000),
    SHARE_RESET: GroupSetting("latest", ("earliest", "latest")),
    SHARE_INTERVAL: GroupSetting(3_000),
    SHARE_SESSION: GroupSetting(45_000),
}
FIXED = {"share.isolation.level": "read_committed", "share.renew.acknowledge.enable": "true"}
"""Settings of Kafka that have one value here."""
OF_TOPICS = {
    f"share.{name}": f"group.share.{name}"
    for name in ("record.lock.duration.ms", "delivery.count.limit", "partition.max.record.locks")
}
"""Settings that a topic has here, not a group."""
GroupValues = dict[str, str | int]


def checked_group(name: object) -> str:
    """The name of a group. Raises InvalidSettingError."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        raise InvalidSettingError(
            f"the group of settings is {name!r:.100}; it takes a name of at most {NAME_MAX} "
            "characters"
        )
    return name


def checked_setting(name: str, value: str) -> str | int:
    """The value of a group's setting. Raises InvalidSettingError."""
    if name in OF_TOPICS:
        raise InvalidSettingError(
            f"{name} is a setting of topics here: set {OF_TOPICS[name]} of each topic"
        )
    if name.startswith("streams."):
        raise InvalidSettingError(
            f"{name:.100} is of groups of the protocol STREAMS (KIP-1071), which is not known here"
        )
    row = GROUP_SETTINGS.get(name)
    if row is None:
        raise InvalidSettingError(
            f"{name!r:.100} is no setting of groups; there are {', '.join(sorted(GROUP_SETTINGS))}"
        )
    if row.choices:
        if value not in row.choices:
            raise InvalidSettingError(
                f"{name} is {value!r:.100}; it takes {' or '.join(row.choices)}"
            )
        return value
    number = digits_in(value)
    if number is None or not 1 <= number <= _LONGEST_MS:
        raise InvalidSettingError(
            f"{name} is {value!r:.100}; it takes a whole number of ms from 1 to {_LONGEST_MS}"
        )
    return number


def complete(values: Mapping[str, str | int]) -> GroupValues:
    """All settings of a group, with defaults. Raises InvalidSettingError if they do not go
    together.
    """
    found = {name: values.get(name, row.default) for name, row in GROUP_SETTINGS.items()}
    for session, interval in (
        (CONSUMER_SESSION, CONSUMER_INTERVAL),
        (SHARE_SESSION, SHARE_INTERVAL),
    ):
        if int(found[interval]) >= int(found[session]):
            raise InvalidSettingError(
                f"{interval} is {found[interval]}; it must be below {session} ({found[session]})"
            )
    return found


def parse_groups(texts: Iterable[str]) -> dict[str, GroupValues]:
    """group -> its settings. Raises InvalidSettingError."""
    from urllib.parse import unquote  # only where a group has settings

    groups: dict[str, GroupValues] = {}
    for text in texts:
        first, *parts = text.split() or [""]
        key, _, name = first.partition("=")
        values: GroupValues = {}
        for part in parts:
            setting, sign, value = part.partition("=")
            if not sign or setting in values:
                raise _misspelt(text)
            values[setting] = checked_setting(setting, value)
        group = checked_group(unquote(name))
        if key != "group" or not values or group in groups:
            raise _misspelt(text)
        complete(values)
        groups[group] = values
    if len(groups) > GROUPS_MAX:
        raise InvalidSettingError(
            f"kafka.group.settings has {len(groups)} groups; at most {GROUPS_MAX} have settings of "
            "their own: remove those of groups that are gone"
        )
    return groups


def _misspelt(text: str) -> InvalidSettingError:
    return InvalidSettingError(
        f"kafka.group.settings has {text!r:.200}: write `group=NAME setting=value ...`, one text "
        "for each group"
    )


def group_texts(groups: Mapping[str, GroupValues]) -> list[str]:
    """The texts of groups, sorted."""
    from urllib.parse import quote  # a change is rare

    return sorted(
        " ".join(
            [
                f"group={quote(name, safe='.:@-_')}",
                *(f"{each}={values[each]}" for each in sorted(values)),
            ]
        )
        for name, values in groups.items()
        if values
    )
