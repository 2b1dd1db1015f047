"""The database of the catalog, coordinator.db: its tables, their versions, and its errors.

Owner: the controller, alone. WAL, synchronous=FULL. Fronts read users and rules in it.
Invariants: a database of an unknown version is refused.
Crash: SQLite recovers the file. An upgrade is one transaction a version.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.catalog.transaction import Database, Transaction
from tailrace.core.errors import DiskFullError, InvalidRequestError, StorageError

SCHEMA_VERSION = 9
OLDEST_VERSION = 2
"""The oldest version that is upgraded."""
LOCKED_TIMEOUT_S = 0.5
"""Longest wait of a change for another process (a backup, a shell) that holds the database."""
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS schemas (
    schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS schema_versions (
    topic_id BLOB NOT NULL, schema_id INTEGER NOT NULL REFERENCES schemas,
    created_us INTEGER NOT NULL, author TEXT NOT NULL, PRIMARY KEY (topic_id, schema_id)
) STRICT;
CREATE TABLE IF NOT EXISTS topics (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('changing', 'active', 'deleting')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    delay_of BLOB NOT NULL DEFAULT x'', slot_counts TEXT NOT NULL DEFAULT '[]',
    bin INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL,
    data_dir INTEGER NOT NULL, slot INTEGER NOT NULL, delete_before INTEGER NOT NULL,
    slots TEXT NOT NULL DEFAULT '', hand_over TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (topic_id, partition), UNIQUE (slot)
) STRICT;
CREATE TABLE IF NOT EXISTS bin (
    topic_id BLOB PRIMARY KEY, name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('kept', 'purging')),
    version INTEGER NOT NULL, typed INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schemas, settings TEXT NOT NULL,
    created_us INTEGER NOT NULL, delay_of BLOB NOT NULL, slot_counts TEXT NOT NULL,
    partitions TEXT NOT NULL, deleted_us INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS data_dirs (
    number INTEGER PRIMARY KEY, directory_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS producers (
    producer_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS overrides (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS users (
    name TEXT PRIMARY KEY, is_admin INTEGER NOT NULL, is_disabled INTEGER NOT NULL,
    user_groups TEXT NOT NULL, password_hash TEXT NOT NULL,
    created_us INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS user_keys (
    user TEXT NOT NULL REFERENCES users ON DELETE CASCADE, name TEXT NOT NULL,
    public TEXT NOT NULL UNIQUE, created_us INTEGER NOT NULL, expires_us INTEGER NOT NULL,
    PRIMARY KEY (user, name)
) STRICT;
CREATE TABLE IF NOT EXISTS user_scram (
    user TEXT NOT NULL REFERENCES users ON DELETE CASCADE, mechanism TEXT NOT NULL,
    salt BLOB NOT NULL, stored_key BLOB NOT NULL, server_key BLOB NOT NULL,
    iterations INTEGER NOT NULL, PRIMARY KEY (user, mechanism)
) STRICT;
CREATE TABLE IF NOT EXISTS user_accounts (
    account INTEGER PRIMARY KEY, user TEXT NOT NULL REFERENCES users ON DELETE CASCADE
) STRICT;
CREATE TABLE IF NOT EXISTS acls (
    number INTEGER PRIMARY KEY AUTOINCREMENT, principal TEXT NOT NULL, resource_type TEXT NOT NULL,
    pattern TEXT NOT NULL, name TEXT NOT NULL, operation TEXT NOT NULL, is_allowed INTEGER NOT NULL,
    host TEXT NOT NULL,
    UNIQUE (principal, resource_type, pattern, name, operation, is_allowed, host)
) STRICT;
CREATE INDEX IF NOT EXISTS keys_of_users ON user_keys (user);
CREATE INDEX IF NOT EXISTS accounts_of_users ON user_accounts (user);
"""


class CatalogVersionError(RuntimeError):
    """Another build wrote the database."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn SQLite's errors into errors with a code for clients."""
    try:
        yield
    except OverflowError as error:
        raise InvalidRequestError(
            "a number of the request does not fit 64 bits; give one that the appliance has told"
        ) from error
    except sqlite3.Error as error:
        if error_kind(error) == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                "the disk of the catalog (coordinator.db) is full: free some space on it"
            ) from error
        raise StorageError(
            f"the catalog (coordinator.db) cannot be read or written: {error}; nothing was decided"
        ) from error


def error_kind(error: sqlite3.Error) -> int:
    """SQLite's number of an error without its details, 0 when Python's module raised it."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def open_database(path: str) -> Database:
    """Open or create the database. `path`: a file, or a `file:` URI of SQLite. Raises
    CatalogVersionError when another version wrote it, sqlite3.Error when it is damaged.
    """
    database: Database = sqlite3.connect(
        path,
        isolation_level=None,
        uri=path.startswith("file:"),
        timeout=LOCKED_TIMEOUT_S,
        factory=Database,
    )
    database.path = path if path.startswith("file:") else os.path.abspath(path)
    database.directory = "" if path.startswith("file:") else os.path.dirname(path)
    try:
        _refuse_other_versions(database, path)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.executescript(f"BEGIN; {TABLES} COMMIT;")
        _upgrade(database)
        database.execute(
            "PRAGMA foreign_keys=ON"
        )  # an upgrade replaces a table that has references
    except BaseException:
        database.close()
        raise
    return database


def read_meta(database: Database, name: str, default: int) -> int:
    """A number of the table `meta`; a missing one is stored as `default`."""
    row = database.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    if row is None:
        database.execute("INSERT INTO meta VALUES (?, ?)", (name, default))
        return default
    return int(row[0])


def _refuse_other_versions(database: Database, path: str) -> None:
    """Before anything is written: a file of another build stays as it is."""
    if not database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
        return
    row = database.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    if row is not None and not OLDEST_VERSION <= row[0] <= SCHEMA_VERSION:
        raise CatalogVersionError(
            f"{path} has catalog version {row[0]}; this build reads versions {OLDEST_VERSION} to "
            f"{SCHEMA_VERSION}: use the build that wrote it"
        )


def _upgrade(database: Database) -> None:
    found = read_meta(database, "schema_version", SCHEMA_VERSION)
    if found == 2:  # before delays
        with Transaction(database):
            database.execute("ALTER TABLE topics ADD COLUMN delay_of BLOB NOT NULL DEFAULT x''")
            database.execute("UPDATE meta SET value = 3 WHERE name = 'schema_version'")
        found = 3
    if found == 3:  # before hash slots
        with Transaction(database):
            database.execute("ALTER TABLE topics ADD COLUMN slot_counts TEXT NOT NULL DEFAULT '[]'")
            database.execute("ALTER TABLE partitions ADD COLUMN slots TEXT NOT NULL DEFAULT ''")
            database.execute(
                "ALTER TABLE partitions ADD COLUMN hand_over TEXT NOT NULL DEFAULT '[]'"
            )
            database.execute("UPDATE meta SET value = 4 WHERE name = 'schema_version'")
        found = 4
    if found == 4:  # before settings of the appliance; the table is made already
        with Transaction(database):
            database.execute("UPDATE meta SET value = 5 WHERE name = 'schema_version'")
        found = 5
    if found == 5:  # before the bin; its table is made already
        with Transaction(database):
            database.execute("ALTER TABLE topics ADD COLUMN bin INTEGER NOT NULL DEFAULT 0")
            database.execute("UPDATE meta SET value = 6 WHERE name = 'schema_version'")
        found = 6
    if found == 6:  # before schema versions, of which several may have the same columns
        with Transaction(database):
            database.execute(
                "CREATE TABLE schemas_7 (schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL) "
                "STRICT"
            )
            database.execute("INSERT INTO schemas_7 SELECT schema_id, message FROM schemas")
            database.execute("DROP TABLE schemas")
            database.execute("ALTER TABLE schemas_7 RENAME TO schemas")
            for table in ("topics", "bin"):
                database.execute(
                    "INSERT INTO schema_versions SELECT topic_id, schema_id, created_us, '' FROM "
                    f"{table} WHERE typed"
                )
            database.execute("UPDATE meta SET value = 7 WHERE name = 'schema_version'")
        found = 7
    if found == 7:  # before users; their tables are made already
        with Transaction(database):
            database.execute("UPDATE meta SET value = 8 WHERE name = 'schema_version'")
        found = 8
    if found == 8:  # before SCRAM credentials; their table is made already
        with Transaction(database):
            database.execute("UPDATE meta SET value = 9 WHERE name = 'schema_version'")
