"""Deleted topics that the bin keeps, and the conversion to and from the rows of its table.

Owner: the controller; `appliance.catalog.catalog` decides when rows are written.
Invariants:
- A row has all that its topic needs to come back, but for slots.
- A row in state `purging` never comes back: some of its files may be removed.
"""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple

import orjson

from appliance.catalog.rows import (
    SELECT_VERSIONS,
    PartitionRow,
    SchemaVersion,
    Topic,
    versions_by_topic,
)

NO_SLOT = -1
_SELECT = (
    "SELECT topic_id, name, state, version, typed, schema_id, message, settings, created_us, "
    "delay_of, slot_counts, partitions, deleted_us, expires_ms, bytes"
    " FROM bin JOIN schemas USING (schema_id) ORDER BY expires_ms, deleted_us, topic_id"
)


class DeletedTopic(NamedTuple):
    """A topic in the bin. Its state is `kept` or `purging`, its partitions have NO_SLOT."""

    topic: Topic
    deleted_us: int
    """Time of the deletion by the wall clock, for people."""
    expires_ms: int
    """End of its retention, elapsed time (`shm.runtime.elapsed_time`)."""
    size_bytes: int
    """Space of its files."""

    @property
    def is_purging(self) -> bool:
        return self.topic.state == "purging"


def deleted_topic(
    topic: Topic, deleted_us: int, expires_ms: int, size_bytes: int, *, state: str = "kept"
) -> DeletedTopic:
    """A topic whose files are in the bin."""
    rows = tuple(row._replace(slot=NO_SLOT) for row in topic.partitions)
    return DeletedTopic(
        topic._replace(state=state, bin=0, partitions=rows), deleted_us, expires_ms, size_bytes
    )


def insert_deleted(database: sqlite3.Connection, deleted: DeletedTopic) -> None:
    """Add a row; the schema must be there."""
    topic = deleted.topic
    partitions = [
        [row.partition, row.data_dir, row.delete_before, row.slots, row.hand_over]
        for row in topic.partitions
    ]
    database.execute(
        "INSERT INTO bin VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (topic.topic_id, topic.name, topic.state, topic.version, int(topic.typed),
         topic.schema_id, orjson.dumps(topic.given).decode(), topic.created_us, topic.delay_of,
         orjson.dumps(topic.slot_counts).decode(), orjson.dumps(partitions).decode(),
         deleted.deleted_us, deleted.expires_ms, deleted.size_bytes),
    )  # fmt: skip


def read_bin(database: sqlite3.Connection) -> list[DeletedTopic]:
    """All rows, the one that expires first in front. Raises sqlite3.Error."""
    rows = database.execute(_SELECT).fetchall()
    versions = versions_by_topic(
        database.execute(f"{SELECT_VERSIONS} WHERE topic_id IN (SELECT topic_id FROM bin)")
    )
    return [_deleted_topic(row, versions.get(row[0], ())) for row in rows]


def remove_unused_schemas(database: sqlite3.Connection) -> None:
    """Remove the schemas, and the versions, that neither a topic nor the bin has."""
    database.execute(
        "DELETE FROM schema_versions WHERE topic_id NOT IN (SELECT topic_id FROM topics UNION ALL "
        "SELECT topic_id FROM bin)"
    )
    database.execute(
        "DELETE FROM schemas WHERE schema_id NOT IN (SELECT schema_id FROM topics UNION ALL SELECT "
        "schema_id FROM bin UNION ALL SELECT schema_id FROM schema_versions)"
    )


def _deleted_topic(row: Any, versions: tuple[SchemaVersion, ...]) -> DeletedTopic:
    topic_id, name, state, version, typed, schema_id, message, settings, created_us = row[:9]
    delay_of, slot_counts, partitions, deleted_us, expires_ms, size_bytes = row[9:]
    topic = Topic(
        topic_id, name, state, version, bool(typed), schema_id, message, orjson.loads(settings),
        tuple(
            PartitionRow(partition, data_dir, NO_SLOT, delete_before, slots,
                         tuple((source, offset) for source, offset in hand_over))
            for partition, data_dir, delete_before, slots, hand_over in orjson.loads(partitions)
        ),
        created_us, delay_of, tuple(orjson.loads(slot_counts)), versions=versions,
    )  # fmt: skip
    return DeletedTopic(topic, deleted_us, expires_ms, size_bytes)
