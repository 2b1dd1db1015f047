"""A topic to create: the user's description, and its entry of a CREATE_TOPICS request."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any

from tailrace.core.errors import (
    InvalidSchemaError,
    InvalidSettingError,
    NotSupportedError,
    SchemaMismatchError,
)

TOPIC_ID_BYTES = 16


class NewTopic:
    """A topic to create by `Admin.create_topics`.

    `configs`: topic settings, with Kafka's names. Numbers may have a unit (`{"retention.ms": "7d",
    "segment.bytes": "64MiB"}`). `schema`: a pyarrow Schema, or any frame with the columns. None is
    the default schema of key, value, timestamp and headers.
    """

    def __init__(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, Any] | None = None,
        schema: Any = None,
        *,
        num_partitions: int | None = None,
        replication_factor: int = 1,
        config: Mapping[str, Any] | None = None,
        topic_configs: Mapping[str, Any] | None = None,
    ) -> None:
        """`num_partitions`, `config` and `topic_configs` are other clients' names for `partitions`
        and `configs`. Raises InvalidSettingError, and NotSupportedError for more than one replica.
        """
        given = [each for each in (configs, config, topic_configs) if each is not None]
        if len(given) > 1:
            raise InvalidSettingError(
                "configs is given twice; give one of configs, config and topic_configs"
            )
        chosen: Any = given[0] if given else {}
        if num_partitions is not None:
            partitions = num_partitions
        if not isinstance(name, str):
            raise InvalidSettingError(f"the name of a topic is {name!r:.100}; it must be text")
        if not isinstance(partitions, int) or isinstance(partitions, bool):
            raise InvalidSettingError(f"partitions is {partitions!r:.100}; it takes a whole number")
        if not isinstance(chosen, Mapping):
            hint = (
                "; replication_factor, which is always 1, is a keyword argument"
                if isinstance(chosen, int)
                else ""
            )
            raise InvalidSettingError(
                f"configs is {chosen!r:.100}; it takes a dict of setting -> value{hint}"
            )
        check_configs(chosen)
        if replication_factor not in (1, -1):
            raise NotSupportedError(
                "replication is not part of this version: leave replication_factor out"
            )
        self.name = name
        self.partitions = partitions
        self.configs = dict(chosen)
        self.schema = schema

    def __repr__(self) -> str:
        return (
            f"NewTopic(name={self.name!r}, partitions={self.partitions}, "
            f"configs={self.configs}, schema={'given' if self.schema is not None else None})"
        )

    def request(self) -> dict[str, Any]:
        """Its entry of a CREATE_TOPICS request. Raises InvalidSchemaError."""
        message = None
        if self.schema is not None:
            from tailrace.format.schema import schema_of, to_message

            try:
                message = to_message(schema_of(self.schema))
            except SchemaMismatchError as error:
                raise InvalidSchemaError(
                    f"the schema of topic {self.name!r}: {error.detail}"
                ) from None
        return create_request(self.name, self.partitions, self.configs, message)


def check_configs(configs: Mapping[Any, Any]) -> None:
    """Raise InvalidSettingError unless these are names with text, numbers or booleans. The
    appliance checks the names themselves.
    """
    for name, value in configs.items():
        if not isinstance(name, str):
            raise InvalidSettingError(
                f"the name of a topic setting is {name!r:.100}; it must be text, such as "
                '"retention.ms"'
            )
        if not isinstance(value, (str, int, float, bool, type(None))) or (
            isinstance(value, int) and abs(value) >= 2**63
        ):
            raise InvalidSettingError(
                f"{name} is {value!r:.100}; it takes text, a number, or true or false"
            )


def create_request(
    name: str,
    partitions: int = 1,
    configs: Mapping[str, Any] | None = None,
    schema_message: bytes | None = None,
) -> dict[str, Any]:
    """One entry of a CREATE_TOPICS request. Its id marks a request that is repeated because the
    answer was lost.
    """
    request: dict[str, Any] = {
        "name": name,
        "partitions": partitions,
        "configs": dict(configs or {}),
        "schema": None,
        "topic_id": os.urandom(TOPIC_ID_BYTES).hex(),
    }
    if schema_message is not None:
        from tailrace.client.topics.schema_author import author

        request["schema"] = base64.b64encode(schema_message).decode("ascii")
        request["author"] = author()
        if "delay.enabled" in request["configs"]:
            request["delay_schema"] = delay_schema_of(schema_message)
    return request


def delay_schema_of(schema_message: bytes) -> str:
    """The schema of the delay log of a topic with this schema, as base64."""
    from tailrace.format.schema import delay_schema, from_message, to_message

    return base64.b64encode(to_message(delay_schema(from_message(schema_message)))).decode("ascii")
