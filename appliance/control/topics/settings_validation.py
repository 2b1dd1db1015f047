"""Settings of topics in requests: parsed, and checked together with the defaults in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.catalog.catalog import Topic
from appliance.config import topic_config
from appliance.config.topic_settings import TOPIC_SETTINGS
from appliance.control.topics.schema_validation import check_key_column
from tailrace.core.errors import InvalidSettingError

_UNALTERABLE = frozenset({"worker.dedicated", "partitioner", "key.column"})
"""Settings that an alteration cannot unset."""


class SettingsValidation:
    """The rules of an appliance: its defaults, and the sizes that bound a topic's settings."""

    def __init__(self, ring_bytes: int, lane_bytes: int, topic_defaults: Mapping[str, Any]) -> None:
        """`topic_defaults`: the appliance's defaults of topic settings, in force."""
        self._ring_bytes = ring_bytes
        self._lane_bytes = lane_bytes
        self._topic_defaults = topic_defaults

    def parsed(self, given: Any) -> dict[str, Any]:
        """Parse and check the settings of an entry; {} if it has none.

        Raises: InvalidSettingError.
        """
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise InvalidSettingError("configs must be an object of names and values")
        typed = topic_config.parse_all(given)
        self.check_together(typed)
        return typed

    def changed(self, topic: Topic, given: Any) -> tuple[dict[str, Any], set[str]]:
        """The changed settings of an entry, and those that get their defaults (null).

        Raises: InvalidSettingError.
        """
        if not isinstance(given, dict):
            return self.parsed(given), set()
        unset = {name for name, value in given.items() if value is None}
        for name in unset:
            if name not in TOPIC_SETTINGS:
                topic_config.parse(name, None)  # raises, and names the nearest one
            if name in _UNALTERABLE and name in topic.given:
                raise InvalidSettingError(f"{name} can be set once, and not unset")
        return self.parsed({n: v for n, v in given.items() if n not in unset}), unset

    def in_force(self, given: dict[str, Any]) -> dict[str, Any]:
        """All settings of a topic that gives these."""
        defaults = {name: each.default for name, each in TOPIC_SETTINGS.items()}
        return {**defaults, **self._topic_defaults, **given}

    def check_compaction(
        self, given: dict[str, Any], schema: bytes, *, typed: bool
    ) -> dict[str, Any]:
        """Check what compaction needs. Returns the settings with the defaults in force. Raises
        InvalidSettingError.
        """
        settings = self.in_force(given)
        topic_config.check_compaction(settings, typed=typed)
        if settings["key.column"]:
            check_key_column(settings["key.column"], schema)
        return settings

    def check_together(self, given: dict[str, Any]) -> None:
        """Check settings together. Raises InvalidSettingError."""
        topic_config.complete(
            given,
            ring_bytes=self._ring_bytes,
            lane_bytes=self._lane_bytes,
            defaults=self._topic_defaults,
        )

    def altered(self, topic: Topic, requested: Any) -> dict[str, Any]:
        """The settings that a topic gives after an alteration. Raises InvalidSettingError."""
        changed, unset = self.changed(topic, requested)
        dedicated = bool(topic.given.get("worker.dedicated"))
        if bool(changed.get("worker.dedicated", dedicated)) is not dedicated:
            raise InvalidSettingError(
                "worker.dedicated can be set only when a topic is created: batches would lose "
                "their order between two workers"
            )
        partitioner = topic_config.partitioner_of(topic.given)
        if changed.get("partitioner", partitioner) != partitioner:
            raise InvalidSettingError(
                "partitioner can be set only when a topic is created: keys would lose their "
                "order between two partitions"
            )
        given = {n: v for n, v in topic.given.items() if n not in unset} | changed
        if topic.given.get("key.column", "") not in ("", given.get("key.column", "")):
            raise InvalidSettingError(
                "key.column can be set once: segments are cleaned by the keys of one column"
            )
        return given
