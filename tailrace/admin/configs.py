"""Administration of settings: describe, alter, reload. `tailrace.Admin` has these methods.

The appliance's settings are those of the resource `ConfigResource("broker")`, as in Kafka. Topics
are named by texts, or `ConfigResource("topic", name)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRequestError
from tailrace.core.validation import mapping_of, name_of
from tailrace.protocol.frame import Api

T = TypeVar("T")
BROKER = "broker"
TOPIC = "topic"
_EXAMPLE = '{ConfigResource("broker"): {"log_level": "debug"}}'


class ConfigResource(NamedTuple):
    """An owner of settings: the appliance (`kind` "broker"), or a topic."""

    kind: str
    name: str = ""
    """The topic's name; "" for the appliance."""


class ConfigEntry(NamedTuple):
    """A setting of the appliance."""

    name: str
    value: Any
    """In force. A secret is not shown."""
    source: str
    """Origin: "default", a file, an environment variable, "command line" or "config set"."""
    default: Any
    reload: bool
    """True if it may be changed while the appliance runs."""
    line: int = 0
    """Line in the file `source`; 0: it has none."""
    after_restart: Any = None
    """Value that the next start takes, if it is another one."""


class ConfigAdmin:
    """The methods of `Admin` for settings."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    def _topic_info(self, names: str | Iterable[str]) -> Steps[dict[str, TopicInfo]]:
        raise NotImplementedError

    def _alter_topics(self, configs: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        raise NotImplementedError

    @operation
    def describe_configs(
        self, resources: str | ConfigResource | Iterable[str | ConfigResource]
    ) -> Steps[dict[Any, dict[str, Any]]]:
        """All settings of topics (by name: setting -> value) and of the appliance
        (`ConfigResource("broker")`: setting -> ConfigEntry). Raises UnknownTopicError.
        """
        self._connection.check_usable()
        given = [resources] if isinstance(resources, (str, ConfigResource)) else list(resources)
        topics = [_topic_of(resource) for resource in given if not _is_broker(resource)]
        infos = (yield from self._topic_info(topics)) if topics else {}
        found: dict[Any, dict[str, Any]] = {}
        for resource in given:
            if _is_broker(resource):
                answer = yield from self._call(Api.DESCRIBE_CONFIGS, {})
                found[resource] = {row["name"]: _entry(row) for row in answer["configs"]}
            else:
                found[resource] = dict(infos[_topic_of(resource)].settings)
        return found

    @operation
    def alter_configs(
        self, changes: Mapping[Any, Mapping[str, Any]], *, validate_only: bool = False
    ) -> Steps[None]:
        """Change settings: resource -> {setting: value}; others stay. Those of the appliance are
        stored by it, survive restarts, and win over its files, environment and flags; the value
        None removes one again. It returns when the processes use them. With `validate_only`
        settings of the appliance are only checked. Raises InvalidSettingError, UnknownTopicError.
        """
        self._connection.check_usable()
        topics: dict[str, Mapping[str, Any]] = {}
        for resource, values in mapping_of("changes", changes, _EXAMPLE).items():
            named = mapping_of(f"settings of {resource!r:.100}", values, '{"log_level": "debug"}')
            if not _is_broker(resource):
                topics[_topic_of(resource)] = named
                continue
            yield from self._call(
                Api.ALTER_CONFIGS,
                {
                    "set": {name: value for name, value in named.items() if value is not None},
                    "unset": [name for name, value in named.items() if value is None],
                    "validate_only": validate_only,
                },
            )
        if topics and validate_only:
            raise InvalidRequestError("validate_only checks settings of the appliance alone")
        if topics:
            yield from self._alter_topics(topics)

    @operation
    def config_state(self) -> Steps[dict[str, Any]]:
        """The appliance's settings with the outcome of its last reload: a dict with `version`,
        `configs` (rows as in docs/protocol.md), `reload`, `left_out` (settings of `alter_configs`
        that are stored and not in force, each with `name` and `reason`) and `not_applied` (names of
        processes that do not use this version yet).
        """
        return (yield from self._call(Api.DESCRIBE_CONFIGS, {}))

    @operation
    def reload_config(self) -> Steps[dict[str, Any]]:
        """Have the appliance read its files, environment and flags again, as SIGHUP does. Returns
        a dict with `errors` (sentences with file and line; then nothing has changed), `changed`
        (names of settings that it uses from now on), `restart` (names of settings that differ
        until it is restarted), `overridden` (names of settings that the files change without
        effect, for `alter_configs` has set them), and `not_applied` (names of processes that do not
        use them yet).
        """
        answer = yield from self._call(Api.RELOAD_CONFIG, {})
        report = answer["reload"]
        return {
            **{name: list(report[name]) for name in ("errors", "changed", "restart")},
            "overridden": list(report.get("overridden", ())),
            "not_applied": list(answer["not_applied"]),
        }


def _is_broker(resource: Any) -> bool:
    return isinstance(resource, ConfigResource) and resource.kind == BROKER


def _topic_of(resource: Any) -> str:
    """The name of a topic's resource. Raises InvalidRequestError."""
    if isinstance(resource, ConfigResource):
        if resource.kind != TOPIC:
            raise InvalidRequestError(
                f"{resource!r:.100} is no resource; write ConfigResource({BROKER!r}) or "
                f"ConfigResource({TOPIC!r}, name)"
            )
        return name_of("the name of a topic", resource.name)
    return name_of("the name of a topic", resource)


def _entry(row: Mapping[str, Any]) -> ConfigEntry:
    known = {name: row[name] for name in ConfigEntry._fields if name in row}
    return ConfigEntry(**known)
