"""Settings of groups that a Kafka client has set: what members get as they join.

They are texts in the appliance's setting `kafka.group.settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netfront.kafka.apis.call import Services

if TYPE_CHECKING:
    from shm.messages.kafka_group_settings import GroupValues

SETTING = "kafka.group.settings"
SESSION_LIMITS = ("group.session.timeout.min.ms", "group.session.timeout.max.ms")
_PARSED = "group_settings"


def groups_with_settings(services: Services) -> dict[str, GroupValues]:
    """group -> the settings that it was given."""
    texts: list[str] = services.settings.get(SETTING) or []
    if not texts:
        return {}
    from shm.messages.kafka_group_settings import parse_groups  # only where a group has settings

    known = services.state.get(_PARSED)
    if known is None or known[0] is not texts:
        known = services.state[_PARSED] = texts, parse_groups(texts)
    found: dict[str, GroupValues] = known[1]
    return found


def setting_of(services: Services, group: str, name: str) -> Any:
    """The value of a group's setting."""
    from shm.messages.kafka_group_settings import GROUP_SETTINGS  # with the first member

    return groups_with_settings(services).get(group, {}).get(name, GROUP_SETTINGS[name].default)


def session_timeout_ms(services: Services, group: str, name: str) -> int:
    """A session timeout within the appliance's limits, which may have changed since it was set."""
    low, high = session_limits_ms(services)
    return int(max(low, min(high, setting_of(services, group, name))))


def session_limits_ms(services: Services) -> tuple[int, int]:
    """The shortest and the longest session timeout of a member."""
    low, high = (int(services.settings[limit]) for limit in SESSION_LIMITS)
    return low, high
