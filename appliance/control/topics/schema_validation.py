"""Schemas of topics in requests: decoded, within the limits, and compatible with earlier versions.
Pure.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from typing import Any

from appliance.catalog.catalog import Topic
from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from appliance.control.request_fields import SHOWN_MAX, is_whole, shown_name
from tailrace.core.errors import InvalidRequestError, InvalidSchemaError, InvalidSettingError
from tailrace.core.schedule.delays import DELAY_COLUMNS
from tailrace.format.record_batch.arrow_metadata import ArrowMetadataError, read_schema

SCHEMA_MAX_BYTES = 64 << 10
COLUMNS_MAX = 2048
KEY_KINDS = frozenset({2, 4, 5, 6, 7, 8, 9, 10, 15, 18})
"""Numbers of Arrow's types whose values can be keys: Int, Binary, Utf8, Bool, Decimal, Date, Time,
Timestamp, FixedSizeBinary, Duration.
"""
RESERVED = "@"
"""First character of the names of a delay log's own columns."""
AUTHOR_MAX = 128
_DELAY_NODES = read_schema(DEFAULT_DELAY_SCHEMA_MESSAGE).nodes[-len(DELAY_COLUMNS) :]


def own_schema(encoded: Any) -> bytes:
    """The schema of a typed topic. Raises InvalidSchemaError."""
    schema = checked_schema(encoded)
    for node in read_schema(schema).nodes:
        if node.top_level and node.name.startswith(RESERVED):
            raise InvalidSchemaError(
                f"column {shown_name(node.name)!r}: names that begin with {RESERVED} are "
                "reserved; rename it"
            )
    return schema


def checked_schema(encoded: Any) -> bytes:
    """A schema's message, decoded and within the limits. Raises InvalidSchemaError."""
    try:
        message = base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidSchemaError("the schema is not valid base64") from None
    if len(message) > SCHEMA_MAX_BYTES:
        raise InvalidSchemaError(
            f"the schema has {len(message)} bytes; the limit is {SCHEMA_MAX_BYTES}"
        )
    try:
        layout = read_schema(message)
    except ArrowMetadataError as error:
        raise InvalidSchemaError(str(error)) from None
    if len(layout.nodes) > COLUMNS_MAX:
        raise InvalidSchemaError(
            f"the schema has {len(layout.nodes)} columns, nested ones included; the limit "
            f"is {COLUMNS_MAX}"
        )
    names = Counter(node.name for node in layout.nodes if node.top_level)
    for name, count in names.items():
        if not name or count > 1:
            raise InvalidSchemaError(f"column name {name[:SHOWN_MAX]!r} is empty or used twice")
    if any(not node.buffers for node in layout.nodes):
        raise InvalidSchemaError("a column that is all null has no type; cast it to a type")
    return message


def delay_schema_of(item: dict[str, Any], schema: bytes) -> bytes:
    """The schema of a topic's delay log: the topic's with the columns of delays appended. Clients
    that create typed topics send it along, for this process does not build Arrow schemas. Raises
    InvalidSchemaError.
    """
    if schema == DEFAULT_SCHEMA_MESSAGE:
        return DEFAULT_DELAY_SCHEMA_MESSAGE
    if item.get("delay_schema") is None:
        raise InvalidSchemaError(
            "a typed topic with delays needs `delay_schema`: its own schema with the columns "
            "of delays (see docs/protocol.md)"
        )
    message = checked_schema(item["delay_schema"])
    own, delayed = read_schema(schema), read_schema(message)
    mine, theirs = own.nodes + _DELAY_NODES, delayed.nodes
    if theirs != mine:
        raise InvalidSchemaError(
            "delay_schema must be the topic's schema followed by the columns @due_us, "
            "@origin and @repeat"
        )
    from tailrace.format.evolution.schema_rules import fields_of

    if fields_of(message)[: -len(DELAY_COLUMNS)] != fields_of(schema):
        raise InvalidSchemaError(
            "delay_schema must have the aliases and defaults of the topic's columns, in their "
            "metadata tailrace.alias and tailrace.default"
        )
    return message


def altered_delay_schema(
    topic: Topic, delay_log: Topic | None, item: dict[str, Any], schema: bytes
) -> bytes | None:
    """The next version of the schema of the topic's delay log, where the topic has the schema
    `schema` from now on; None if it stays. Raises InvalidSchemaError.
    """
    if delay_log is None or item.get("schema") is None:
        return None
    from tailrace.format.evolution.schema_rules import Step, fields_of, steps_between

    own, delayed = fields_of(schema), fields_of(delay_log.schema)[: -len(DELAY_COLUMNS)]
    if delayed == own:
        return None
    for step, name, detail in steps_between(delayed, own):
        if step is Step.RETYPE:
            raise InvalidSchemaError(
                f"column {shown_name(name)!r} changes its type {detail}, and topic "
                f"{topic.name!r} has delayed records whose values would become null: drop the "
                "column, and add one of another name"
            )
    return delay_schema_of(item, schema)


def altered_schema(topic: Topic, item: dict[str, Any], settings: dict[str, Any]) -> bytes | None:
    """The next version of the topic's schema; None if it stays. `settings`: the topic's, with the
    defaults in force. Raises InvalidSchemaError, InvalidRequestError.
    """
    if item.get("schema") is None:
        return None
    base = item.get("schema_id")
    if base is not None and not is_whole(base, 0, 1 << 62):
        raise InvalidRequestError("`schema_id` must be a whole number")
    schema = own_schema(item["schema"])
    if not topic.typed:
        raise InvalidSchemaError(
            f"topic {topic.name!r} was created without a schema and keeps key, value, "
            "timestamp and headers: create another topic with the schema"
        )
    if base is not None and base != topic.schema_id:
        raise InvalidSchemaError(
            f"the schema of topic {topic.name!r} was altered meanwhile: it is version "
            f"{topic.schema_id}, and the change was made for {base}; look at `tailrace topic "
            f"schema {topic.name} --diff` and alter that one"
        )
    if schema == topic.schema:
        return None
    from tailrace.format.evolution import schema_rules

    mode = settings["schema.compatibility"]
    schema_rules.check(topic.schema, schema, mode, settings["key.column"] or None)
    return schema


def check_key_column(column: str, schema: bytes) -> None:
    """Check that a schema has this column, with values that can be keys. Raises
    InvalidSettingError.
    """
    nodes = [node for node in read_schema(schema).nodes if node.top_level]
    found = next((node for node in nodes if node.name == column), None)
    if found is None:
        raise InvalidSettingError(
            f"key.column is {shown_name(column)!r}; the topic has the columns "
            f"{', '.join(node.name for node in nodes)[:SHOWN_MAX]}"
        )
    if not found.kind or found.kind[0] not in KEY_KINDS:
        raise InvalidSettingError(
            f"column {shown_name(column)!r} cannot be key.column; a key is text, bytes, an "
            "integer, a decimal, a date or a time"
        )


def check_key_of_all_versions(topic: Topic, column: str) -> None:
    """Check that all versions of the schema have the key, with one type. Raises
    InvalidSettingError.
    """
    from tailrace.format.evolution.schema_rules import fields_of

    shapes = {
        next((field.shape for field in fields_of(version.message) if field.name == column), ())
        for version in topic.versions
    }
    if len(shapes) > 1:
        raise InvalidSettingError(
            f"column {shown_name(column)!r} cannot be key.column: an earlier version of the "
            f"schema of topic {topic.name!r} has it with another type, or not at all; copy the "
            "records to a new topic"
        )


def checked_author(item: dict[str, Any]) -> str:
    """The user that a client names as the author of a schema. Raises InvalidRequestError."""
    author = item.get("author", "")
    if not isinstance(author, str) or len(author) > AUTHOR_MAX or not author.isprintable():
        raise InvalidRequestError(
            f"`author` must be a text of at most {AUTHOR_MAX} printable characters"
        )
    return author


def described_versions(topic: Topic) -> dict[str, Any]:
    """The versions of a topic's schema, oldest first."""
    return {
        "name": topic.name,
        "versions": [
            {
                "schema_id": version.schema_id,
                "schema": base64.b64encode(version.message).decode("ascii"),
                "created_us": version.created_us,
                "author": version.author,
            }
            for version in topic.versions
        ],
    }
