"""Arrow schemas of topics, under ids that are given once, and the versions that a topic has had.

Owner: the controller.
Invariants: the schema ids of a topic's versions ascend.
Bounds: SCHEMA_BYTES_MAX of schemas in all, TOPIC_SCHEMA_BYTES_MAX and SCHEMA_VERSIONS_MAX of one
topic.
"""

from __future__ import annotations

from appliance.catalog.database import read_meta
from appliance.catalog.rows import Topic
from appliance.catalog.transaction import Database
from tailrace.core.errors import InvalidSchemaError

SCHEMA_BYTES_MAX = 16 << 20
TOPIC_SCHEMA_BYTES_MAX = 256 << 10
"""Most bytes of all versions of a topic's schema: each process and partition has a copy."""
SCHEMA_VERSIONS_MAX = 1_000


def schema_id_of(database: Database, schema: bytes) -> int:
    """The id of a schema; a new schema gets an id that was never given."""
    row = database.execute("SELECT schema_id FROM schemas WHERE message = ?", (schema,)).fetchone()
    return int(row[0]) if row is not None else new_schema(database, schema)


def new_schema(database: Database, schema: bytes) -> int:
    """Store a schema under an id that was never given."""
    (stored,) = database.execute("SELECT coalesce(sum(length(message)), 0) FROM schemas").fetchone()
    if stored + len(schema) > SCHEMA_BYTES_MAX:
        raise InvalidSchemaError(
            f"the schemas of all topics have {stored} bytes; with this one they would have "
            f"more than {SCHEMA_BYTES_MAX}"
        )
    (highest,) = database.execute("SELECT coalesce(max(schema_id), 0) FROM schemas").fetchone()
    number = max(highest + 1, read_meta(database, "next_schema_id", 1))
    database.execute("INSERT INTO schemas VALUES (?, ?)", (number, schema))
    database.execute("UPDATE meta SET value = ? WHERE name = 'next_schema_id'", (number + 1,))
    return int(number)


def add_version(
    database: Database, topic_id: bytes, schema_id: int, now_us: int, author: str
) -> None:
    database.execute(
        "INSERT OR IGNORE INTO schema_versions VALUES (?, ?, ?, ?)",
        (topic_id, schema_id, now_us, author),
    )


def add_schemas_of(database: Database, topic: Topic) -> None:
    database.execute("INSERT OR IGNORE INTO schemas VALUES (?, ?)", (topic.schema_id, topic.schema))
    read_meta(database, "next_schema_id", 1)
    database.execute(
        "UPDATE meta SET value = max(value, ?) WHERE name = 'next_schema_id'",
        (topic.schema_id + 1,),
    )
    for version in topic.versions:
        database.execute(
            "INSERT OR IGNORE INTO schemas VALUES (?, ?)", (version.schema_id, version.message)
        )
        add_version(database, topic.topic_id, version.schema_id, version.created_us, version.author)


def check_room_for_version(topic: Topic, schema: bytes) -> None:
    """Raises InvalidSchemaError when a topic has too many versions, or bytes of them."""
    if len(topic.versions) >= SCHEMA_VERSIONS_MAX:
        raise InvalidSchemaError(
            f"topic {topic.name!r} has {len(topic.versions)} schema versions, which is the "
            "limit: create another topic with the new schema"
        )
    stored = sum(len(version.message) for version in topic.versions) + len(schema)
    if stored > TOPIC_SCHEMA_BYTES_MAX:
        raise InvalidSchemaError(
            f"the schema versions of topic {topic.name!r} would have {stored} bytes; the limit "
            f"is {TOPIC_SCHEMA_BYTES_MAX}: create another topic with the new schema"
        )


def remove_unused_schemas(database: Database) -> None:
    """Remove the schemas, and the versions, that neither a topic nor the bin has."""
    database.execute(
        "DELETE FROM schema_versions WHERE topic_id NOT IN (SELECT topic_id FROM topics UNION ALL "
        "SELECT topic_id FROM bin)"
    )
    database.execute(
        "DELETE FROM schemas WHERE schema_id NOT IN (SELECT schema_id FROM topics UNION ALL SELECT "
        "schema_id FROM bin UNION ALL SELECT schema_id FROM schema_versions)"
    )
