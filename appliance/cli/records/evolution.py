"""`tailrace produce --from FILE --evolve`: the topic gets the columns that the file has."""

from __future__ import annotations

from typing import Any

import click
import pyarrow as pa

from tailrace.admin.admin import Admin
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidSchemaError
from tailrace.format.schema import canonical

ATTEMPTS = 5
"""Attempts while other programs alter the schema at the same time."""


def with_columns_of(admin: Admin, topic: str, table: pa.Table, due_column: str | None) -> pa.Table:
    """The rows with the columns of the topic, which gets those that only the file has.
    `due_column` is not sent. Raises UsageError, InvalidSchemaError.
    """
    info = admin.topic_info([topic])[topic]
    for attempt in range(ATTEMPTS):
        if not info.typed:
            raise click.UsageError(
                f"topic {topic} has no schema of its own: --evolve is for typed topics"
            )
        added = [
            _without_alias(field)
            for field in canonical(table.schema)
            if field.name not in info.columns and field.name != due_column
        ]
        if not added:
            break
        try:
            admin.alter_topics(
                schema={topic: pa.schema([*info.schema, *added])}, schema_id=info.schema_id
            )
        except InvalidSchemaError:
            before, info = info, admin.topic_info([topic])[topic]
            if info.schema_id == before.schema_id or attempt == ATTEMPTS - 1:
                raise
            continue
        info = admin.topic_info([topic])[topic]
    return _filled(table, info)


def _without_alias(field: pa.Field) -> pa.Field:
    """A column as a new one: a file of another topic may say that it was renamed there."""
    from tailrace.format.evolution.schema_rules import ALIAS_KEY

    kept = {
        key: value for key, value in (field.metadata or {}).items() if key.decode() != ALIAS_KEY
    }
    return field.with_metadata(kept or None)


def _filled(table: pa.Table, info: TopicInfo) -> pa.Table:
    for field in info.schema:
        if field.name not in table.column_names:
            value: Any = info.column_defaults.get(field.name)
            column = (
                pa.nulls(table.num_rows, field.type)
                if value is None
                else pa.repeat(pa.scalar(value, field.type), table.num_rows)
            )
            table = table.append_column(field.name, column)
    return table
