"""The catalog: topics, partitions, schemas and producer ids in one SQLite database.

Owner: the controller, alone. The database (WAL, synchronous=FULL) is the only place of what is
decided.
Invariants:
- A change is on the disk when its method returns; within a step, when the step is committed.
- Slots are unique among existing topics. Versions grow. A producer id and a schema id are given
  once.
- The schema ids of a topic's versions ascend.
- A change that the database refuses raises StorageError or DiskFullError and decides nothing.
Bounds: SCHEMA_BYTES_MAX of schemas in all, TOPIC_SCHEMA_BYTES_MAX and SCHEMA_VERSIONS_MAX of one
topic, PRODUCERS_MAX remembered producer ids.
Crash:
- SQLite recovers the file.
- The controller sends a topic in state `changing` to the workers again at start.
- `appliance.catalog.recovery` handles a missing or damaged database.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import orjson

from appliance.catalog.bin_rows import (
    DeletedTopic,
    insert_deleted,
    read_bin,
    remove_unused_schemas,
)
from appliance.catalog.database import open_database, read_meta, refusals
from appliance.catalog.moved_rows import (
    MovedPartition,
    create_moves,
    delete_moved,
    insert_moved,
    read_moved,
    slots_in_use,
)
from appliance.catalog.rows import (
    COMES_BACK,
    ROW,
    SELECT_TOPICS,
    SELECT_VERSIONS,
    PartitionRow,
    Topic,
    partition_of,
    topic_of,
    versions_by_topic,
)
from appliance.catalog.transaction import Database, Done, Effects, Failed, Transaction
from shm.messages.transaction_messages import PRODUCER_IDS_IN_BLOCK
from tailrace.core.delays import delay_log_name
from tailrace.core.errors import DiskFullError, InvalidSchemaError, StorageError, TailraceError
from tailrace.core.hash_slots import HASH_SLOTS, HandOver, owners_after, ranges_of
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

__all__ = [
    "Catalog", "CatalogFullError", "DeletedTopic", "MissingDirectoryError", "PartitionRow", "Topic",
    "delay_log_of",
]  # fmt: skip

logger = logging.getLogger(__name__)

PRODUCER_EPOCH_MAX = 32767
_TOPIC_DEFAULTS = "topic_defaults"
"""Row of `meta`: number of the defaults that the topics were last decided with."""
_BLOCK = "transactional_block"
"""Row of `meta`: number of the last block of transactional producer ids. There are blocks until the
year 2106.
"""
PRODUCERS_MAX = 100_000
"""Most producer ids whose epochs are known. An older id gets a new one when it asks for its next
epoch, as an unknown id does.
"""
SCHEMA_BYTES_MAX = 16 << 20
TOPIC_SCHEMA_BYTES_MAX = 256 << 10
"""Most bytes of all versions of a topic's schema: each process and partition has a copy."""
SCHEMA_VERSIONS_MAX = 1_000


class MissingDirectoryError(RuntimeError):
    """A data directory that holds partitions is not configured."""


def delay_log_of(topic: Topic, topics: Mapping[str, Topic]) -> Topic | None:
    """The topic's delay log; None if it has none. A topic of that name may also be the delay log of
    a deleted topic of the same name, which is still being removed.
    """
    found = topics.get(delay_log_name(topic.name))
    return found if found is not None and found.delay_of == topic.topic_id else None


class CatalogFullError(RuntimeError):
    """No slot is left for another partition."""


class Catalog:
    """The decided state of all topics, in the open database."""

    def __init__(
        self, path: str, slot_count: int, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`path`: a file, or a `file:` URI of SQLite. Raises CatalogVersionError when another
        version made it, sqlite3.Error when it is damaged.
        """
        self._slot_count = slot_count
        self._random_bytes = random_bytes
        self._usable_dirs: list[int] = [0]
        self.takes_writes: Callable[[int], bool] = lambda _number: True
        """False for the number of a data directory whose disk is gone or full: it gets no new
        partitions while another one takes writes.
        """
        self._db = open_database(path)
        self._effects = Effects()
        try:
            create_moves(self._db)
            self._slots: set[int] = slots_in_use(self._db)
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
    def slots_needed(self) -> int:
        """One more than the highest slot that a partition has."""
        return max(self._slots, default=-1) + 1

    @property
    def database(self) -> Database:
        """The database itself, for tables beside those of topics
        (`appliance.control.offset_leases`).
        """
        return self._db

    def close(self) -> None:
        self._db.close()

    # ---- data directories ------------------------------------------------------------------------

    def register_dirs(self, directories: list[tuple[str, str]]) -> list[int]:
        """Give every configured directory, (identity, path), its number; returns them in that
        order. Raises MissingDirectoryError, sqlite3.Error.
        """
        with Transaction(self._db):
            for directory_id, path in directories:
                self._db.execute(
                    "INSERT INTO data_dirs VALUES ((SELECT coalesce(max(number) + 1, 0) FROM "
                    "data_dirs), ?, ?)"
                    " ON CONFLICT (directory_id) DO UPDATE SET path = excluded.path",
                    (directory_id, path),
                )
        numbers = {
            directory_id: number
            for number, directory_id in self._db.execute(
                "SELECT number, directory_id FROM data_dirs"
            )
        }
        self._usable_dirs = [numbers[directory_id] for directory_id, _ in directories]
        marks = ",".join("?" * len(self._usable_dirs))
        missing = self._db.execute(
            "SELECT path, count(*) FROM partitions JOIN data_dirs ON number = data_dir WHERE "
            f"number NOT IN ({marks}) GROUP BY path",
            self._usable_dirs,
        ).fetchall()
        if missing:
            stored = ", ".join(f"{path} with {count} partitions" for path, count in missing)
            raise MissingDirectoryError(
                f"data_dirs lacks {stored}; list every directory that holds partitions, or delete "
                "the topics first"
            )
        return self._usable_dirs

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
            self._read_slots()
        self._effects.run(error, caught)
        return has_changed

    def _read_slots(self) -> None:
        try:
            self._slots = slots_in_use(self._db)
        except sqlite3.Error:
            logger.exception("slots_not_read")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Decide everything in the block, or nothing."""
        try:
            with refusals(), Transaction(self._db):
                yield
        except BaseException:
            self._slots = slots_in_use(self._db)
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
            schema_id = self._schema_id(schema)
            if typed:
                self._add_version(topic_id, schema_id, now_us, author)
            self._db.execute(
                "INSERT INTO topics VALUES (?, ?, 'changing', 1, ?, ?, ?, ?, ?, '[]', 0)",
                (
                    topic_id,
                    name,
                    int(typed),
                    schema_id,
                    orjson.dumps(given).decode(),
                    now_us,
                    delay_of,
                ),
            )
            added = self._add_partitions(topic_id, 0, partitions, delay_of)
            if given.get("partitioner") == HASH_SLOTS:
                self._set_slots(topic_id, (partitions,))
        self._slots |= added
        return self._known(name)

    def _known(self, name: str) -> Topic:
        topic = self.topic(name)
        assert topic is not None, "decided a moment ago"
        return topic

    def _schema_id(self, schema: bytes) -> int:
        """The id of a schema; a new schema gets an id that was never given."""
        row = self._db.execute(
            "SELECT schema_id FROM schemas WHERE message = ?", (schema,)
        ).fetchone()
        return int(row[0]) if row is not None else self._new_schema(schema)

    def _new_schema(self, schema: bytes) -> int:
        """Store a schema under an id that was never given."""
        (stored,) = self._db.execute(
            "SELECT coalesce(sum(length(message)), 0) FROM schemas"
        ).fetchone()
        if stored + len(schema) > SCHEMA_BYTES_MAX:
            raise InvalidSchemaError(
                f"the schemas of all topics have {stored} bytes; with this one they would have "
                f"more than {SCHEMA_BYTES_MAX}"
            )
        (highest,) = self._db.execute("SELECT coalesce(max(schema_id), 0) FROM schemas").fetchone()
        number = max(highest + 1, read_meta(self._db, "next_schema_id", 1))
        self._db.execute("INSERT INTO schemas VALUES (?, ?)", (number, schema))
        self._db.execute("UPDATE meta SET value = ? WHERE name = 'next_schema_id'", (number + 1,))
        return int(number)

    def _add_version(self, topic_id: bytes, schema_id: int, now_us: int, author: str) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO schema_versions VALUES (?, ?, ?, ?)",
            (topic_id, schema_id, now_us, author),
        )

    def _add_partitions(self, topic_id: bytes, start: int, end: int, delay_of: bytes) -> set[int]:
        """The slots of added partitions. Partitions of a delay log are in the data directories of
        their topic's.
        """
        beside = dict(
            self._db.execute(
                "SELECT partition, data_dir FROM partitions WHERE topic_id = ?", (delay_of,)
            )
        )
        usable = self._usable_dirs
        if len(usable) > 1:
            usable = [number for number in usable if self.takes_writes(number)] or usable
        counts: Counter[int] = Counter(dict.fromkeys(usable, 0))
        if len(usable) > 1:
            counts.update(
                dict(
                    self._db.execute("SELECT data_dir, count(*) FROM partitions GROUP BY data_dir")
                )
            )
        free = (slot for slot in range(self._slot_count) if slot not in self._slots)
        added = set()
        for partition in range(start, end):
            slot = next(free, None)
            if slot is None:
                raise self._full()
            added.add(slot)
            data_dir = (
                beside[partition]
                if delay_of
                else min(usable, key=lambda number: (counts[number], number))
            )
            counts[data_dir] += 1
            self._db.execute(
                "INSERT INTO partitions VALUES (?, ?, ?, ?, 0, '', '[]')",
                (topic_id, partition, data_dir, slot),
            )
        return added

    def _full(self) -> CatalogFullError:
        return CatalogFullError(
            f"all {self._slot_count} partition slots are in use; raise `slots` in the configuration"
        )

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
            self._add_schema(topic)
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
        self._slots |= {row.slot for row in topic.partitions}

    def _add_schema(self, topic: Topic) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO schemas VALUES (?, ?)", (topic.schema_id, topic.schema)
        )
        read_meta(self._db, "next_schema_id", 1)
        self._db.execute(
            "UPDATE meta SET value = max(value, ?) WHERE name = 'next_schema_id'",
            (topic.schema_id + 1,),
        )
        for version in topic.versions:
            self._db.execute(
                "INSERT OR IGNORE INTO schemas VALUES (?, ?)", (version.schema_id, version.message)
            )
            self._add_version(topic.topic_id, version.schema_id, version.created_us, version.author)

    def alter_topic(self, topic: Topic, given: dict[str, Any], partitions: int) -> Topic:
        """Decide new settings and more partitions, in state `changing`. Raises CatalogFullError."""
        with refusals(), Transaction(self._db):
            self._db.execute(
                "UPDATE topics SET settings = ?, version = version + 1, state = 'changing' WHERE "
                "topic_id = ?",
                (orjson.dumps(given).decode(), topic.topic_id),
            )
            added = self._add_partitions(
                topic.topic_id, len(topic.partitions), partitions, topic.delay_of
            )
            if topic.slot_counts and added:
                self._set_slots(topic.topic_id, (*topic.slot_counts, partitions))
        self._slots |= added
        return self._known(topic.name)

    def alter_schema(self, topic: Topic, schema: bytes, now_us: int, author: str) -> Topic:
        """Decide the next version of a typed topic's schema, in state `changing`. It gets an id of
        its own, even where an earlier version had the same columns. Raises InvalidSchemaError when
        there are too many versions, or bytes of them.
        """
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
        with refusals(), Transaction(self._db):
            schema_id = self._new_schema(schema)
            self._add_version(topic.topic_id, schema_id, now_us, author)
            self._db.execute(
                "UPDATE topics SET schema_id = ?, version = version + 1, state = 'changing' WHERE "
                "topic_id = ?",
                (schema_id, topic.topic_id),
            )
        return self._known(topic.name)

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
        return self._known(topic.name)

    # ---- partitions that move --------------------------------------------------------------------

    def close_partition(self, topic: Topic, partition: int) -> Topic:
        """Decide that a partition is about to move: the topic's next version, in state `changing`,
        which closes it for appends.
        """
        row = topic.partitions[partition]
        with refusals(), Transaction(self._db):
            insert_moved(
                self._db,
                MovedPartition(
                    topic.topic_id, partition, topic.name, row.data_dir, row.slot, False
                ),
            )
            return self.alter_topic(topic, topic.given, len(topic.partitions))

    def cancel_move(self, topic: Topic, partition: int) -> Topic:
        """Decide that a closed partition stays: the topic's next version, which opens it."""
        with refusals(), Transaction(self._db):
            delete_moved(self._db, topic.topic_id, partition)
            return self.alter_topic(topic, topic.given, len(topic.partitions))

    def move_partition(self, topic: Topic, partition: int, data_dir: int) -> Topic:
        """Decide that a partition is in the data directory of this number from now on, in a slot of
        its own: the topic's next version, in state `changing`, which opens the copy there. Raises
        CatalogFullError.
        """
        former = topic.partitions[partition]
        with refusals(), Transaction(self._db):
            slot = next((slot for slot in range(self._slot_count) if slot not in self._slots), None)
            if slot is None:
                raise self._full()
            insert_moved(
                self._db,
                MovedPartition(
                    topic.topic_id, partition, topic.name, former.data_dir, former.slot, True
                ),
            )
            self._db.execute(
                "UPDATE partitions SET data_dir = ?, slot = ? WHERE topic_id = ? AND partition = ?",
                (data_dir, slot, topic.topic_id, partition),
            )
            self._db.execute(
                "UPDATE topics SET version = version + 1, state = 'changing', bin = ? WHERE "
                "topic_id = ?",
                (COMES_BACK, topic.topic_id),
            )
        self._slots.add(slot)
        return self._known(topic.name)

    def moved_partitions(self) -> list[MovedPartition]:
        """Partitions that are closed for a move, and those whose files in their former
        directories are not removed yet.
        """
        with refusals():
            return read_moved(self._db)

    def forget_moved(self, moved: MovedPartition) -> None:
        """Note that nothing is left of a move: the former files are removed and their slot is
        free, or the topic of a closed partition is gone.
        """
        with refusals(), Transaction(self._db):
            delete_moved(self._db, moved.topic_id, moved.partition)
            self._slots = slots_in_use(self._db)

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
        return self._known(topic.name)

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
        self._slots -= gone

    # ---- the bin ---------------------------------------------------------------------------------

    def deleted_topics(self) -> list[DeletedTopic]:
        """The topics in the bin, with their delay logs, oldest deletion first."""
        with refusals():
            return read_bin(self._db)

    def put_in_bin(self, deleted: DeletedTopic) -> None:
        """Note that the files of a topic are in the bin: its slots are free.

        Raises: StorageError, DiskFullError.
        """
        with refusals(), Transaction(self._db):
            insert_deleted(self._db, deleted)
            self.forget(deleted.topic.topic_id)

    def undelete(self, deleted: DeletedTopic, name: str) -> Topic:
        """Decide that a topic comes back from the bin under this name, which must be free: its next
        version, in state `changing`, in slots of its own. Raises CatalogFullError.
        """
        topic = deleted.topic
        with refusals(), Transaction(self._db):
            free = (slot for slot in range(self._slot_count) if slot not in self._slots)
            slots = list(islice(free, len(topic.partitions)))
            if len(slots) < len(topic.partitions):
                raise self._full()
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
            self.restore_topic(back)
        return self._known(name)

    def mark_purging(self, topic_id: bytes) -> None:
        """Decide to remove a topic from the bin for good."""
        with refusals(), Transaction(self._db):
            self._db.execute("UPDATE bin SET state = 'purging' WHERE topic_id = ?", (topic_id,))

    def forget_deleted(self, topic_id: bytes) -> None:
        """Note that the files of a topic are removed from the bin."""
        with refusals(), Transaction(self._db):
            self._db.execute("DELETE FROM bin WHERE topic_id = ?", (topic_id,))
            remove_unused_schemas(self._db)

    def restore_deleted(self, deleted: DeletedTopic) -> None:
        """Add a topic to the bin whose files are there (see `appliance.catalog.recovery`).

        Raises: sqlite3.Error.
        """
        with Transaction(self._db):
            self._add_schema(deleted.topic)
            insert_deleted(self._db, deleted)

    # ---- producers -------------------------------------------------------------------------------

    def new_producer(self) -> tuple[int, int]:
        """A producer id never given before, and its first epoch, 0."""
        with refusals(), Transaction(self._db):
            cursor = self._db.execute("INSERT INTO producers (epoch) VALUES (0)")
            assert cursor.lastrowid is not None
            self._db.execute(
                "DELETE FROM producers WHERE producer_id <= ?", (cursor.lastrowid - PRODUCERS_MAX,)
            )
        return cursor.lastrowid, 0

    def new_transactional_block(self, now_us: int) -> int:
        """The first of PRODUCER_IDS_IN_BLOCK transactional producer ids that were never given
        before. Blocks are numbered by the seconds of the clock, and follow each other where it was
        set back: so a catalog that was rebuilt or restored gives no id again.
        """
        with refusals(), Transaction(self._db):
            block = max(read_meta(self._db, _BLOCK, 0) + 1, now_us // 1_000_000)
            self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (block, _BLOCK))
        return TRANSACTIONAL_PRODUCER_IDS + block * PRODUCER_IDS_IN_BLOCK

    def next_epoch(self, producer_id: int, epoch: int) -> tuple[int, int]:
        """A higher epoch of a known producer; a new id if it is unknown or its epochs are used
        up.
        """
        with refusals(), Transaction(self._db):
            row = self._db.execute(
                "SELECT epoch FROM producers WHERE producer_id = ?", (producer_id,)
            ).fetchone()
            if row is None or max(row[0], epoch) >= PRODUCER_EPOCH_MAX:
                return self.new_producer()
            following = max(row[0], epoch) + 1
            self._db.execute(
                "UPDATE producers SET epoch = ? WHERE producer_id = ?", (following, producer_id)
            )
        return producer_id, following

    def begin_producers_at(self, producer_id: int) -> None:
        """Give no id below this one any more.

        Raises: sqlite3.Error.
        """
        self._db.execute("INSERT OR IGNORE INTO producers VALUES (?, 0)", (producer_id - 1,))

    # ---- users -----------------------------------------------------------------------------------

    def has_users(self) -> bool:
        """True if there are users or ACLs, which `appliance.catalog.users` reads and changes.
        Raises StorageError.
        """
        with refusals():
            row = self._db.execute(
                "SELECT EXISTS (SELECT 1 FROM users) OR EXISTS (SELECT 1 FROM acls)"
            ).fetchone()
        return bool(row[0])

    # ---- settings of the appliance ---------------------------------------------------------------

    def overrides(self) -> dict[str, Any]:
        """The settings of `tailrace config set`. Raises StorageError."""
        with refusals():
            rows = self._db.execute("SELECT name, value FROM overrides ORDER BY name").fetchall()
        return {name: orjson.loads(value) for name, value in rows}

    def set_overrides(self, values: Mapping[str, Any]) -> None:
        """Replace these settings."""
        with refusals(), Transaction(self._db):
            self._db.execute("DELETE FROM overrides")
            self._db.executemany(
                "INSERT INTO overrides VALUES (?, ?)",
                [(name, orjson.dumps(value).decode()) for name, value in values.items()],
            )

    def topic_defaults_number(self) -> int:
        """Number of the defaults that all topics have, as `note_topic_defaults` noted it."""
        with refusals():
            return read_meta(self._db, _TOPIC_DEFAULTS, 0)

    def note_topic_defaults(self, number: int) -> None:
        """Note that all topics are decided with the defaults of this number."""
        with refusals(), Transaction(self._db):
            read_meta(self._db, _TOPIC_DEFAULTS, 0)
            self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (number, _TOPIC_DEFAULTS))
