"""Methods of `Admin` for the schemas of typed topics."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import InvalidSchemaError, SchemaMismatchError
from tailrace.core.validation import name_of
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
SCHEMA_MAX_BYTES, COLUMNS_MAX = 64 << 10, 2048
"""Limits of the appliance. A larger schema would not fit a request, either."""


class SchemaVersion:
    """A version of a typed topic's schema."""

    __slots__ = ("author", "created_us", "schema_id", "schema_message")

    def __init__(self, schema_id: int, schema_message: bytes, created_us: int, author: str) -> None:
        self.schema_id = schema_id
        """Its id. The versions of a topic have ascending ids, not consecutive ones."""
        self.schema_message = schema_message
        self.created_us = created_us
        """Microseconds since 1970; 0: unknown, because the catalog was rebuilt."""
        self.author = author
        """`user@host` as the client that made it says; empty: unknown."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        from tailrace.format.schema import from_message

        return from_message(self.schema_message)

    def __repr__(self) -> str:
        return f"SchemaVersion(schema_id={self.schema_id}, author={self.author!r})"


def encoded_schema(topic: str, source: Any) -> bytes:
    """The canonical schema message of a pyarrow Schema or a frame. Raises InvalidSchemaError."""
    from tailrace.format.schema import schema_of, to_message

    try:
        schema = schema_of(source)
    except SchemaMismatchError as error:
        raise InvalidSchemaError(f"the schema of topic {topic!r}: {error.detail}") from None
    if len(schema) > COLUMNS_MAX:
        raise InvalidSchemaError(
            f"the schema of topic {topic!r} has {len(schema)} columns; the limit is {COLUMNS_MAX}"
        )
    message = to_message(schema)
    if len(message) > SCHEMA_MAX_BYTES:
        raise InvalidSchemaError(
            f"the schema of topic {topic!r} has {len(message)} bytes; the limit is "
            f"{SCHEMA_MAX_BYTES}"
        )
    return message


class SchemaAdmin:
    """The methods of `Admin` for schemas."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    @operation
    def describe_schemas(self, topic: str) -> Steps[list[SchemaVersion]]:
        """The versions of a typed topic's schema, oldest first; none of a topic without a schema of
        its own. Raises UnknownTopicError.
        """
        self._connection.check_usable()
        answer = yield from self._call(Api.DESCRIBE_SCHEMAS, {"topic": name_of("topic", topic)})
        return [
            SchemaVersion(
                row["schema_id"], base64.b64decode(row["schema"]), row["created_us"], row["author"]
            )
            for row in answer["versions"]
        ]
