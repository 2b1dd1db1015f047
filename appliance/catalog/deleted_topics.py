"""Deleted topics that the bin keeps, and the conversion to and from the rows of its table.

Owner: the controller.
Invariants:
- A row has all that its topic needs to come back, but for slots.
- A row in state `purging` never comes back: some of its files may be removed.
"""

from __future__ import annotations

import sqlite3
from itertools import islice
from typing import Any, NamedTuple

import orjson

from appliance.catalog.catalog import Catalog
from appliance.catalog.database import refusals
from appliance.catalog.rows import (
    COMES_BACK,
    SELECT_VERSIONS,
    PartitionRow,
    SchemaVersion,
    Topic,
    versions_by_topic,
)
from appliance.catalog.tables.schemas import add_schemas_of, remove_unused_schemas
from appliance.catalog.transaction import Transaction

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


class DeletedTopics:
    """Decisions about topics in the bin, and the table `bin`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.database

    def all(self) -> list[DeletedTopic]:
        """The topics in the bin, with their delay logs, oldest deletion first."""
        with refusals():
            return read_bin(self._db)

    def put(self, deleted: DeletedTopic) -> None:
        """Note that the files of a topic are in the bin: its slots are free.

        Raises: StorageError, DiskFullError.
        """
        with refusals(), Transaction(self._db):
            insert_deleted(self._db, deleted)
            self._catalog.forget(deleted.topic.topic_id)

    def undelete(self, deleted: DeletedTopic, name: str) -> Topic:
        """Decide that a topic comes back from the bin under this name, which must be free: its next
        version, in state `changing`, in slots of its own. Raises CatalogFullError.
        """
        topic = deleted.topic
        with refusals(), Transaction(self._db):
            slots = list(islice(self._catalog.slots.free(), len(topic.partitions)))
            if len(slots) < len(topic.partitions):
                raise self._catalog.slots.full()
            back = topic._replace(
                name=name,
                state="changing",
                version=topic.version + 1,
                bin=COMES_BACK,
                partitions=tuple(
                    row._replace(slot=slot)
                    for row, slot in zip(topic.partitions, slots, strict=True)
                ),
            )
            self._db.execute("DELETE FROM bin WHERE topic_id = ?", (topic.topic_id,))
            self._catalog.restore_topic(back)
        return self._catalog.known(name)

    def mark_purging(self, topic_id: bytes) -> None:
        """Decide to remove a topic from the bin for good."""
        with refusals(), Transaction(self._db):
            self._db.execute("UPDATE bin SET state = 'purging' WHERE topic_id = ?", (topic_id,))

    def forget(self, topic_id: bytes) -> None:
        """Note that the files of a topic are removed from the bin."""
        with refusals(), Transaction(self._db):
            self._db.execute("DELETE FROM bin WHERE topic_id = ?", (topic_id,))
            remove_unused_schemas(self._db)

    def restore(self, deleted: DeletedTopic) -> None:
        """Add a topic to the bin whose files are there (see `appliance.catalog.recovery`).

        Raises: sqlite3.Error.
        """
        with Transaction(self._db):
            add_schemas_of(self._db, deleted.topic)
            insert_deleted(self._db, deleted)
