"""The catalog: topics, partitions, schemas and producer ids in one SQLite database.

Owner: the coordinator, alone. The database (WAL, synchronous=FULL) is the only home of what is decided; every other process is told.
Invariants: what a method has answered is on the disk; slots are unique among topics that exist; versions grow.
Crash: SQLite's own recovery. A topic in state `changing` was told to the workers but perhaps not heard: the coordinator tells it again
at start.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

SCHEMA_VERSION = 3
PRODUCER_EPOCH_MAX = 32767
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS schemas (schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL UNIQUE) STRICT;
CREATE TABLE IF NOT EXISTS topics (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL CHECK (state IN ('changing', 'active', 'deleting')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL, schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL, created_us INTEGER NOT NULL,
    delay_of BLOB NOT NULL DEFAULT x''
) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL, data_dir INTEGER NOT NULL, slot INTEGER NOT NULL,
    delete_before INTEGER NOT NULL, PRIMARY KEY (topic_id, partition), UNIQUE (slot)
) STRICT;
CREATE TABLE IF NOT EXISTS data_dirs (number INTEGER PRIMARY KEY, directory_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS producers (producer_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class PartitionRow:
    partition: int
    data_dir: int
    """Its number in the catalog, whatever the configuration's order."""
    slot: int
    delete_before: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as decided. `given` holds only the settings that were asked for; defaults are filled in by `topic_settings.complete`."""

    topic_id: bytes
    name: str
    state: str
    version: int
    typed: bool
    schema_id: int
    schema: bytes
    given: dict[str, Any]
    partitions: tuple[PartitionRow, ...]
    created_us: int
    delay_of: bytes = b""
    """Of a delay log: the id of the topic whose delayed records it holds."""


class MissingDirectoryError(RuntimeError):
    """A data directory that holds partitions is not configured."""


class CatalogFullError(RuntimeError):
    """No slot is left for another partition."""


class Catalog:
    """The database."""

    def __init__(self, path: str, slot_count: int, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """`path`: a file, or a `file:` URI of SQLite. Raises RuntimeError when another version made it."""
        self._slot_count = slot_count
        self._random_bytes = random_bytes
        self._usable_dirs: list[int] = [0]
        self._db = sqlite3.connect(path, isolation_level=None, uri=path.startswith("file:"))
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA foreign_keys=ON")
        self._db.executescript(_TABLES)
        found = self._meta("schema_version", SCHEMA_VERSION)
        if found == 2:  # before delays
            with _Transaction(self._db):
                self._db.execute("ALTER TABLE topics ADD COLUMN delay_of BLOB NOT NULL DEFAULT x''")
                self._db.execute("UPDATE meta SET value = 3 WHERE name = 'schema_version'")
            found = 3
        if found != SCHEMA_VERSION:
            raise RuntimeError(f"{path} has catalog version {found}; this build reads {SCHEMA_VERSION}")

    @property
    def database(self) -> sqlite3.Connection:
        """For what lies beside topics in the same database (`appliance.leases`)."""
        return self._db

    def close(self) -> None:
        self._db.close()

    def _meta(self, name: str, default: int) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            self._db.execute("INSERT INTO meta VALUES (?, ?)", (name, default))
            return default
        return int(row[0])

    # ---- data directories ------------------------------------------------------------------------------------------------------------

    def register_dirs(self, directories: list[tuple[str, str]]) -> list[int]:
        """Give every configured directory, (identity, path), its number; answers them in that order. Raises MissingDirectoryError."""
        with _Transaction(self._db):
            for directory_id, path in directories:
                self._db.execute(
                    "INSERT INTO data_dirs VALUES ((SELECT coalesce(max(number) + 1, 0) FROM data_dirs), ?, ?)"
                    " ON CONFLICT (directory_id) DO UPDATE SET path = excluded.path",
                    (directory_id, path),
                )
        numbers = {directory_id: number for number, directory_id in self._db.execute("SELECT number, directory_id FROM data_dirs")}
        self._usable_dirs = [numbers[directory_id] for directory_id, _ in directories]
        marks = ",".join("?" * len(self._usable_dirs))
        missing = self._db.execute(
            f"SELECT path, count(*) FROM partitions JOIN data_dirs ON number = data_dir WHERE number NOT IN ({marks}) GROUP BY path",
            self._usable_dirs,
        ).fetchall()
        if missing:
            held = ", ".join(f"{path} with {count} partitions" for path, count in missing)
            raise MissingDirectoryError(f"data_dirs lacks {held}; list every directory that holds partitions, or delete the topics first")
        return self._usable_dirs

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        by_topic: dict[bytes, list[PartitionRow]] = {}
        for topic_id, *rest in self._db.execute(
            "SELECT topic_id, partition, data_dir, slot, delete_before FROM partitions ORDER BY partition"
        ):
            by_topic.setdefault(topic_id, []).append(PartitionRow(*rest))
        rows = self._db.execute(
            "SELECT topic_id, name, state, version, typed, schema_id, message, settings, created_us, delay_of"
            " FROM topics JOIN schemas USING (schema_id) ORDER BY name"
        )
        return [
            Topic(
                topic_id,
                name,
                state,
                version,
                bool(typed),
                schema_id,
                message,
                orjson.loads(settings),
                tuple(by_topic.get(topic_id, ())),
                created_us,
                delay_of,
            )
            for topic_id, name, state, version, typed, schema_id, message, settings, created_us, delay_of in rows
        ]

    def topic(self, name: str) -> Topic | None:
        return next((topic for topic in self.topics() if topic.name == name), None)

    def create_topic(
        self, name: str, partitions: int, given: dict[str, Any], schema: bytes, typed: bool, now_us: int, delay_of: bytes = b""
    ) -> Topic:
        """Decide a new topic, in state `changing`. Raises CatalogFullError; the name must be free."""
        topic_id = self._random_bytes(16)
        with _Transaction(self._db):
            self._db.execute("INSERT OR IGNORE INTO schemas (message) VALUES (?)", (schema,))
            (schema_id,) = self._db.execute("SELECT schema_id FROM schemas WHERE message = ?", (schema,)).fetchone()
            self._db.execute(
                "INSERT INTO topics VALUES (?, ?, 'changing', 1, ?, ?, ?, ?, ?)",
                (topic_id, name, int(typed), schema_id, orjson.dumps(given).decode(), now_us, delay_of),
            )
            self._add_partitions(topic_id, 0, partitions, delay_of)
        created = self.topic(name)
        assert created is not None
        return created

    def _add_partitions(self, topic_id: bytes, start: int, end: int, delay_of: bytes) -> None:
        """A delay log's partitions lie where the topic's do."""
        beside = dict(self._db.execute("SELECT partition, data_dir FROM partitions WHERE topic_id = ?", (delay_of,)))
        used = {slot for (slot,) in self._db.execute("SELECT slot FROM partitions")}
        counts = dict.fromkeys(self._usable_dirs, 0)
        counts.update(dict(self._db.execute("SELECT data_dir, count(*) FROM partitions GROUP BY data_dir")))
        free = (slot for slot in range(self._slot_count) if slot not in used)
        for partition in range(start, end):
            slot = next(free, None)
            if slot is None:
                raise CatalogFullError(f"all {self._slot_count} partition slots are in use")
            data_dir = beside[partition] if delay_of else min(self._usable_dirs, key=lambda number: (counts[number], number))
            counts[data_dir] += 1
            self._db.execute("INSERT INTO partitions VALUES (?, ?, ?, ?, 0)", (topic_id, partition, data_dir, slot))

    def alter_topic(self, topic: Topic, given: dict[str, Any], partitions: int) -> Topic:
        """Decide new settings and more partitions, in state `changing`. Raises CatalogFullError."""
        with _Transaction(self._db):
            self._db.execute(
                "UPDATE topics SET settings = ?, version = version + 1, state = 'changing' WHERE topic_id = ?",
                (orjson.dumps(given).decode(), topic.topic_id),
            )
            self._add_partitions(topic.topic_id, len(topic.partitions), partitions, topic.delay_of)
        altered = self.topic(topic.name)
        assert altered is not None
        return altered

    def delete_records(self, topic: Topic, before: dict[int, int]) -> Topic:
        """Decide that records below these offsets go: partition -> offset."""
        with _Transaction(self._db):
            for partition, offset in before.items():
                self._db.execute(
                    "UPDATE partitions SET delete_before = max(delete_before, ?) WHERE topic_id = ? AND partition = ?",
                    (offset, topic.topic_id, partition),
                )
            self._db.execute("UPDATE topics SET version = version + 1, state = 'changing' WHERE topic_id = ?", (topic.topic_id,))
        changed = self.topic(topic.name)
        assert changed is not None
        return changed

    def mark_deleting(self, topic: Topic) -> Topic:
        self._db.execute("UPDATE topics SET state = 'deleting', version = version + 1 WHERE topic_id = ?", (topic.topic_id,))
        marked = self.topic(topic.name)
        assert marked is not None
        return marked

    def mark_active(self, topic_id: bytes) -> None:
        self._db.execute("UPDATE topics SET state = 'active' WHERE topic_id = ? AND state = 'changing'", (topic_id,))

    def forget(self, topic_id: bytes) -> None:
        """The topic's files are gone: its slots are free."""
        self._db.execute("DELETE FROM topics WHERE topic_id = ?", (topic_id,))

    # ---- producers -------------------------------------------------------------------------------------------------------------------

    def new_producer(self) -> tuple[int, int]:
        """A producer id never given before, and its first epoch, 0."""
        cursor = self._db.execute("INSERT INTO producers (epoch) VALUES (0)")
        assert cursor.lastrowid is not None
        return cursor.lastrowid, 0

    def next_epoch(self, producer_id: int, epoch: int) -> tuple[int, int]:
        """A higher epoch of a known producer; a new id where it is unknown or its epochs are used up."""
        row = self._db.execute("SELECT epoch FROM producers WHERE producer_id = ?", (producer_id,)).fetchone()
        if row is None or max(row[0], epoch) >= PRODUCER_EPOCH_MAX:
            return self.new_producer()
        following = max(row[0], epoch) + 1
        self._db.execute("UPDATE producers SET epoch = ? WHERE producer_id = ?", (following, producer_id))
        return producer_id, following


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the block raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_rest: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
