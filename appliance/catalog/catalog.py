"""The catalog: topics and their partitions in one SQLite database. Its other tables have modules in
`tables`; `deleted_topics` and `moved_partitions` decide over this one.

Owner: the controller, alone. The database (WAL, synchronous=FULL) is the only place of what is
decided.
Invariants:
- A change is on the disk when its method returns; within a step, when the step is committed.
- Versions of a topic grow.
- A change that the database refuses raises StorageError or DiskFullError and decides nothing.
Crash:
- SQLite recovers the file.
- The controller sends a topic in state `changing` to the workers again at start.
- `appliance.catalog.recovery` handles a missing or damaged database.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from appliance.catalog.database import open_database, refusals
from appliance.catalog.rows import (
    ROW,
    SELECT_TOPICS,
    SELECT_VERSIONS,
    PartitionRow,
    Topic,
    partition_of,
    topic_of,
    versions_by_topic,
)
from appliance.catalog.tables.former_topics import FormerTopics
from appliance.catalog.tables.partition_slots import (
    CatalogFullError,
    MissingDirectoryError,
    PartitionSlots,
)
from appliance.catalog.tables.producer_ids import ProducerIdTable
from appliance.catalog.tables.schemas import (
    add_schemas_of,
    add_version,
    check_room_for_version,
    new_schema,
    remove_unused_schemas,
    schema_id_of,
)
from appliance.catalog.tables.stored_settings import StoredSettings
from appliance.catalog.transaction import Database, Done, Effects, Failed, Transaction
from tailrace.core.errors import DiskFullError, StorageError, TailraceError
from tailrace.core.hash_slots import HASH_SLOTS, HandOver, owners_after, ranges_of
from tailrace.core.schedule.delays import delay_log_name

__all__ = [
    "Catalog", "CatalogFullError", "MissingDirectoryError", "PartitionRow", "Topic", "delay_log_of",
]  # fmt: skip

logger = logging.getLogger(__name__)


def delay_log_of(topic: Topic, topics: Mapping[str, Topic]) -> Topic | None:
    """The topic's delay log; None if it has none. A topic of that name may also be the delay log of
    a deleted topic of the same name, which is still being removed.
    """
    found = topics.get(delay_log_name(topic.name))
    return found if found is not None and found.delay_of == topic.topic_id else None


class Catalog:
    """The decided state of all topics, in the open database."""

    def __init__(
        self, path: str, slot_count: int, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`path`: a file, or a `file:` URI of SQLite. Raises CatalogVersionError when another
        version made it, sqlite3.Error when it is damaged.
        """
        self._random_bytes = random_bytes
        self._db = open_database(path)
        self._effects = Effects()
        self.producers = ProducerIdTable(self._db)
        self.settings = StoredSettings(self._db)
        try:
            self.former_topics = FormerTopics(self._db)
            self.slots = PartitionSlots(self._db, slot_count)
        except BaseException:
            self._db.close()
            raise

    def check(self) -> str:
        """Return the structural damage that SQLite finds in the database; "" if there is none.

        Raises: sqlite3.Error.
        """
        row = self._db.execute("PRAGMA quick_check(1)").fetchone()
        return "" if row is None or row[0] == "ok" else str(row[0])

    @property
    def database(self) -> Database:
        """The database itself, for tables beside those of topics
        (`appliance.control.offset_leases`).
        """
        return self._db

    def close(self) -> None:
        self._db.close()

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a transaction that takes all changes until `commit_step`."""
        self._db.is_in_step = True

    def afterwards(self, done: Done, failed: Failed) -> None:
        """Call `done` when the changes so far are on the disk, or `failed` with the reason when
        they cannot be kept. Outside a step, call `done` at once.
        """
        if self._db.is_in_step:
            self._effects.add(done, failed)
        else:
            done()

    def commit_step(self, caught: Callable[[str, Exception], str]) -> bool:
        """Commit the step, or roll it back, and run the effects of its changes. Return True if
        something was kept. Raises nothing.
        """
        error: TailraceError | None = None
        has_changed = False
        try:
            with refusals():
                has_changed = self._db.commit_step()
        except (StorageError, DiskFullError) as refusal:
            error = refusal
            self.slots.try_reload()
        self._effects.run(error, caught)
        return has_changed

    @contextmanager
    def together(self) -> Iterator[None]:
        """Decide everything in the block, or nothing."""
        try:
            with refusals(), Transaction(self._db):
                yield
        except BaseException:
            self.slots.reload()
            raise

    # ---- topics ----------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        by_topic: dict[bytes, list[PartitionRow]] = {}
        with refusals():
            for topic_id, *rest in self._db.execute(
                f"SELECT topic_id, {ROW} FROM partitions ORDER BY partition"
            ):
                by_topic.setdefault(topic_id, []).append(partition_of(rest))
            versions = versions_by_topic(self._db.execute(SELECT_VERSIONS))
            return [
                topic_of(row, by_topic.get(row[0], ()), versions.get(row[0], ()))
                for row in self._db.execute(f"{SELECT_TOPICS} ORDER BY name")
            ]

    def topic(self, name: str) -> Topic | None:
        """A topic by name, None where there is none. Raises StorageError."""
        with refusals():
            row = self._db.execute(f"{SELECT_TOPICS} WHERE name = ?", (name,)).fetchone()
            if row is None:
                return None
            rows = self._db.execute(
                f"SELECT {ROW} FROM partitions WHERE topic_id = ? ORDER BY partition", (row[0],)
            )
            versions = versions_by_topic(
                self._db.execute(f"{SELECT_VERSIONS} WHERE topic_id = ?", (row[0],))
            )
            return topic_of(row, [partition_of(rest) for rest in rows], versions.get(row[0], ()))

    def create_topic(
        self,
        name: str,
        partitions: int,
        given: dict[str, Any],
        schema: bytes,
        typed: bool,
        now_us: int,
        delay_of: bytes = b"",
        topic_id: bytes | None = None,
        author: str = "",
    ) -> Topic:
        """Decide a new topic, in state `changing`, with this id or one of its own. Raises
        CatalogFullError, InvalidSchemaError when there are too many bytes of schemas; the name must
        be free.
        """
        topic_id = topic_id or self._random_bytes(16)
        with refusals(), Transaction(self._db):
            created_us = self.former_topics.creation_us(name, now_us)
            schema_id = schema_id_of(self._db, schema)
            if typed:
                add_version(self._db, topic_id, schema_id, now_us, author)
            self._db.execute(
                "INSERT INTO topics VALUES (?, ?, 'changing', 1, ?, ?, ?, ?, ?, '[]', 0)",
                (
                    topic_id,
                    name,
                    int(typed),
                    schema_id,
                    orjson.dumps(given).decode(),
                    created_us,
                    delay_of,
                ),
            )
            added = self.slots.add(topic_id, 0, partitions, delay_of)
            if given.get("partitioner") == HASH_SLOTS:
                self._set_slots(topic_id, (partitions,))
        self.slots.used |= added
        return self.known(name)

    def known(self, name: str) -> Topic:
        """A topic that exists."""
        topic = self.topic(name)
        assert topic is not None, "decided a moment ago"
        return topic

    def _set_slots(self, topic_id: bytes, counts: tuple[int, ...]) -> None:
        """The slot map that follows from a history of partitions."""
        self._db.execute(
            "UPDATE topics SET slot_counts = ? WHERE topic_id = ?",
            (orjson.dumps(counts).decode(), topic_id),
        )
        for partition, ranges in ranges_of(owners_after(counts)).items():
            self._db.execute(
                "UPDATE partitions SET slots = ? WHERE topic_id = ? AND partition = ?",
                (ranges, topic_id, partition),
            )

    def restore_topic(self, topic: Topic) -> None:
        """Add a topic that was decided before (see `appliance.catalog.recovery`), with its slots.

        Raises: sqlite3.Error.
        """
        with Transaction(self._db):
            add_schemas_of(self._db, topic)
            self._db.execute(
                "INSERT INTO topics VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (topic.topic_id, topic.name, topic.state, topic.version, int(topic.typed),
                topic.schema_id, orjson.dumps(topic.given).decode(),
                 topic.created_us, topic.delay_of, orjson.dumps(topic.slot_counts).decode(),
                 topic.bin),
            )  # fmt: skip
            for row in topic.partitions:
                self._db.execute(
                    "INSERT INTO partitions VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        topic.topic_id,
                        row.partition,
                        row.data_dir,
                        row.slot,
                        row.delete_before,
                        row.slots,
                        orjson.dumps(row.hand_over).decode(),
                    ),
                )
        self.slots.used |= {row.slot for row in topic.partitions}

    def alter_topic(self, topic: Topic, given: dict[str, Any], partitions: int) -> Topic:
        """Decide new settings and more partitions, in state `changing`. Raises CatalogFullError."""
        with refusals(), Transaction(self._db):
            self._db.execute(
                "UPDATE topics SET settings = ?, version = version + 1, state = 'changing' WHERE "
                "topic_id = ?",
                (orjson.dumps(given).decode(), topic.topic_id),
            )
            added = self.slots.add(
                topic.topic_id, len(topic.partitions), partitions, topic.delay_of
            )
            if topic.slot_counts and added:
                self._set_slots(topic.topic_id, (*topic.slot_counts, partitions))
        self.slots.used |= added
        return self.known(topic.name)

    def alter_schema(self, topic: Topic, schema: bytes, now_us: int, author: str) -> Topic:
        """Decide the next version of a typed topic's schema, in state `changing`. It gets an id of
        its own, even where an earlier version had the same columns. Raises InvalidSchemaError when
        there are too many versions, or bytes of them.
        """
        check_room_for_version(topic, schema)
        with refusals(), Transaction(self._db):
            schema_id = new_schema(self._db, schema)
            add_version(self._db, topic.topic_id, schema_id, now_us, author)
            self._db.execute(
                "UPDATE topics SET schema_id = ?, version = version + 1, state = 'changing' WHERE "
                "topic_id = ?",
                (schema_id, topic.topic_id),
            )
        return self.known(topic.name)

    def delete_records(self, topic: Topic, before: dict[int, int]) -> Topic:
        """Decide to delete records below these offsets: partition -> offset."""
        with refusals(), Transaction(self._db):
            for partition, offset in before.items():
                self._db.execute(
                    "UPDATE partitions SET delete_before = max(delete_before, ?) WHERE topic_id = "
                    "? AND partition = ?",
                    (offset, topic.topic_id, partition),
                )
            self._db.execute(
                "UPDATE topics SET version = version + 1, state = 'changing' WHERE topic_id = ?",
                (topic.topic_id,),
            )
        return self.known(topic.name)

    def mark_deleting(self, topic: Topic, kept_ms: int = 0) -> Topic:
        """Decide to delete a topic: its next version, in state `deleting`. `kept_ms`: the time that
        the bin keeps it; 0: its files are removed.

        Raises: StorageError, DiskFullError.
        """
        with refusals(), Transaction(self._db):
            self._db.execute(
                "UPDATE topics SET state = 'deleting', version = version + 1, bin = ? WHERE "
                "topic_id = ?",
                (kept_ms, topic.topic_id),
            )
        return self.known(topic.name)

    def mark_active(self, topic: Topic, hand_overs: Mapping[int, HandOver]) -> None:
        """Note that this version of the topic is carried out; a later one may be decided already.
        `hand_overs`: those of partitions that got slots from others.
        """
        with refusals(), Transaction(self._db):
            for partition, hand_over in hand_overs.items():
                self._db.execute(
                    "UPDATE partitions SET hand_over = ? WHERE topic_id = ? AND partition = ?",
                    (orjson.dumps(hand_over).decode(), topic.topic_id, partition),
                )
            self._db.execute(
                "UPDATE topics SET state = 'active', bin = 0 WHERE topic_id = ? AND state = "
                "'changing' AND version = ?",
                (topic.topic_id, topic.version),
            )

    def forget(self, topic_id: bytes) -> None:
        """Free the slots of a topic whose files are removed, and its schema if no other topic has
        it.
        """
        with refusals(), Transaction(self._db):
            gone = {
                slot
                for (slot,) in self._db.execute(
                    "SELECT slot FROM partitions WHERE topic_id = ?", (topic_id,)
                )
            }
            self._db.execute("DELETE FROM topics WHERE topic_id = ?", (topic_id,))
            remove_unused_schemas(self._db)
        self.slots.used -= gone

    # ---- users -----------------------------------------------------------------------------------

    def has_users(self) -> bool:
        """True if there are users or ACLs, which `appliance.catalog.tables.users` reads and
        changes. Raises StorageError.
        """
        with refusals():
            row = self._db.execute(
                "SELECT EXISTS (SELECT 1 FROM users) OR EXISTS (SELECT 1 FROM acls)"
            ).fetchone()
        return bool(row[0])
