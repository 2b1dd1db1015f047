"""Values of settings: Kafka's and ours.

Topic settings have Kafka's names; docs/kafka.md has those whose values differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from netfront.kafka.wire.errors import KafkaError
from shm.messages.kafka_topic_settings import FIXED, KAFKA_NEVER_MS, NEVER_MS, our_value
from shm.messages.lane_messages import Assignment

DEFAULT_SOURCE, TOPIC_SOURCE, DYNAMIC_BROKER_SOURCE, STATIC_BROKER_SOURCE, GROUP_SOURCE = (
    5,
    1,
    2,
    4,
    8,
)
BOOLEAN, STRING, LONG, DOUBLE = 1, 2, 5, 6
POLICY = "cleanup.policy"
POLICIES = {"compact": "compact", "delete": "delete", "compact,delete": "compact,delete"}

_FIXED_VALUES: dict[str, Any] = {
    name: value == "true" if value in ("true", "false") else int(value) if value else ""
    for name, value in FIXED.items()
}
"""FIXED with values of their types."""


class ConfigError(Exception):
    """A setting that is refused."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = KafkaError.INVALID_CONFIG


def ours_of(configs: dict[str, str | None]) -> dict[str, str | None]:
    """Our settings for Kafka's. None: the default. Raises ConfigError."""
    found: dict[str, str | None] = {}
    for name, value in configs.items():
        if name in FIXED:
            if value not in (None, FIXED[name]):
                raise ConfigError(
                    f"{name} is {value!r}; it cannot be chosen here: leave it out, or use "
                    f"{FIXED[name]!r}"
                )
            continue
        if name == POLICY and value is not None:
            policy_of(value.split(","))
        found[name] = None if value is None else our_value(name, value)
    return found


def policy_of(parts: Iterable[str]) -> str:
    """cleanup.policy as we write it. Raises ConfigError."""
    joined = ",".join(sorted({part.strip() for part in parts if part.strip()}))
    if joined not in POLICIES:
        raise ConfigError(f"{POLICY} is {joined!r}; use delete, compact or compact,delete")
    return POLICIES[joined]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(KAFKA_NEVER_MS if value == NEVER_MS else value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int):
        return LONG
    return DOUBLE if isinstance(value, float) else STRING


def described_topic(route: Assignment, keys: set[str] | None) -> list[dict[str, Any]]:
    """The settings of a topic; `keys`: these only."""
    return [
        described(
            name, value, TOPIC_SOURCE if name in route.given else DEFAULT_SOURCE, read_only=False
        )
        for name, value in sorted({**route.settings, **_FIXED_VALUES}.items())
        if keys is None or name in keys
    ]


def described(name: str, value: Any, source: int, *, read_only: bool) -> dict[str, Any]:
    return {
        "name": name, "value": _shown(value), "read_only": read_only, "config_source": source,
        "is_default": source == DEFAULT_SOURCE, "is_sensitive": False, "synonyms": [],
        "config_type": _kind(value), "documentation": None,
    }  # fmt: skip
