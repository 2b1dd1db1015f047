"""The database of groups: one SQLite file with groups, members, committed offsets and the state of
share partitions.

Owner: the process `groups`, alone. WAL, synchronous=FULL.
Invariants:
- The first write begins a transaction, `commit` or `rollback` ends it.
- After a failed write the transaction can only be rolled back. `commit` raises the write's error.
- Group ids are never reused.
Crash: SQLite recovers the file. A change whose `commit` did not return was not answered to clients.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from appliance.groups.store.file_watch import StoreWatch
from appliance.groups.store.schema import (
    FROM_1_TO_2,
    FROM_2_TO_6,
    FROM_3_TO_4,
    FROM_4_TO_5,
    FROM_5_TO_6,
    FROM_6_TO_7,
    FROM_7_TO_8,
    FROM_8_TO_9,
    SCHEMA_VERSION,
    TABLES,
    TO_9_WITH_NEW_TABLES,
    GroupRow,
    MemberRow,
    OffsetRow,
    ShareRow,
)
from shm.runtime.elapsed_time import MARK_EVERY_MS, ElapsedTime, Mark
from shm.runtime.reserve_file import make_room
from tailrace.core.errors import DiskFullError, StorageError, TailraceError

logger = logging.getLogger(__name__)
_UNCHECKED = frozenset(("transactional_ids",))
"""Tables that may have a million rows which a start does not read. SQLite finds damage in them when
it reads the row.
"""
LOCKED_TIMEOUT_S = 0.5
"""Time that a write waits for another process (a backup, a shell) that locks the database."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of SQLite into errors for clients."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                "groups.db cannot grow: its disk is full; nothing of the request was kept"
            ) from error
        raise StorageError(
            f"groups.db cannot be read or written: {error}; nothing of the request was kept"
        ) from error


class GroupStore:
    """An open database of groups, with one transaction at a time."""

    def __init__(self, path: str) -> None:
        """Open or create the file (mode 0600). Raises StorageError when it cannot be used."""
        self.path = path
        self.before_commit: list[Callable[[], None]] = []
        """Callbacks of `commit` that write changed rows before the commit. The commit fails when
        one raises TailraceError.
        """
        self.after_commit: list[Callable[[], None]] = []
        """Callbacks of `commit` after the commit."""
        self._failure: TailraceError | None = None
        _make_private(path)
        try:
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=LOCKED_TIMEOUT_S, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        try:
            self._set_up()
            self._open_tables(path)
            self._files = StoreWatch(path)
            (highest,) = self._db.execute(
                "SELECT coalesce(max(group_id), 0) FROM groups"
            ).fetchone()
            self._next_group_id: int = 1 + max(int(highest), self._meta("last_group_id"))
            self._elapsed: ElapsedTime | None = None
            self._now_ns = 0
            self._unkept_mark: Mark | None = None
            """The mark of elapsed time that the open transaction has written."""
        except sqlite3.Error as error:
            self._db.close()
            raise _unusable(path, error) from error
        except BaseException:
            self._db.close()
            raise

    def _set_up(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")

    def watch_files(self) -> None:
        """Write the database again if another program has removed it or its log. Does nothing in a
        transaction. Raises StorageError when it cannot be written, or another file replaced it.
        """
        if self._db.in_transaction or self._files.are_there():
            return
        logger.error("groups_db_removed path=%s", self.path)
        with _refusals():
            try:
                self._files.restore_copy(self._db)
                old, self._db = (
                    self._db,
                    sqlite3.connect(
                        self.path,
                        isolation_level=None,
                        timeout=LOCKED_TIMEOUT_S,
                        check_same_thread=False,
                    ),
                )
                old.close()
                self._set_up()
                self._meta("schema_version")
                self._files = StoreWatch(self.path)
            except OSError as error:
                raise StorageError(
                    f"{self.path} was removed and cannot be written again "
                    f"({os.strerror(error.errno or 0)}); make its directory writable for this user"
                ) from error

    def _open_tables(self, path: str) -> None:
        """Create or migrate the tables. The version is checked before the first write, so that a
        database of another build stays unchanged.
        """
        tables = {
            name
            for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        found = self._meta("schema_version") if "meta" in tables else 0
        if tables and found not in range(1, SCHEMA_VERSION + 1):
            raise StorageError(
                f"{path} has schema version {found}, this build reads {SCHEMA_VERSION}: start the "
                "build that wrote it, or move the file away "
                "(groups then begin without members and committed offsets)"
            )
        if tables:
            for table in sorted(tables - _UNCHECKED):
                row = self._db.execute(f"PRAGMA quick_check('{table}')").fetchone()
                if row is not None and row[0] != "ok":
                    raise sqlite3.DatabaseError(str(row[0]))
        if found == 1:
            self._db.executescript(FROM_1_TO_2)
        if found in (1, 2):
            self._db.executescript(FROM_2_TO_6)
        if found == 3:
            self._db.executescript(FROM_3_TO_4)
        if found in (3, 4):
            self._db.executescript(FROM_4_TO_5)
        if found in (3, 4, 5):
            self._db.executescript(FROM_5_TO_6)
        if found in range(1, 7):
            self._db.executescript(FROM_6_TO_7)
        if found in (1, 2):
            self._db.executescript(TO_9_WITH_NEW_TABLES)
        elif found in range(3, 8):
            self._db.executescript(FROM_7_TO_8)
        if found in range(3, 9):
            self._db.executescript(FROM_8_TO_9)
        self._db.executescript(
            f"BEGIN; {TABLES} INSERT OR IGNORE INTO meta VALUES ('schema_version', "
            f"{SCHEMA_VERSION}); COMMIT;"
        )

    # ---- elapsed time ----------------------------------------------------------------------------

    def begin_time(self, now_ns: int) -> None:
        """Continue elapsed time from the database. A second call has no effect. Raises
        StorageError.
        """
        if self._elapsed is None:
            mark = Mark.of_rows(self.read("SELECT name, value FROM meta"))
            self._elapsed, self._now_ns = ElapsedTime(mark, now_ns), now_ns

    def elapsed_ms(self, now_ns: int) -> int:
        """Elapsed time, by which everything in the database expires."""
        assert self._elapsed is not None, "begin_time comes first"
        self._now_ns = now_ns
        return self._elapsed.ms(now_ns)

    def keep_time(self, after_ms: int = MARK_EVERY_MS) -> None:
        """Write the last value of `elapsed_ms` if the stored one is older than `after_ms`. `commit`
        calls it for each transaction. Raises StorageError, DiskFullError.
        """
        mark = (
            None
            if self._elapsed is None or self._unkept_mark is not None
            else self._elapsed.mark_due(self._now_ns, after_ms)
        )
        if mark is not None:
            self.write_many("INSERT OR REPLACE INTO meta VALUES (?, ?)", mark.rows())
            self._unkept_mark = mark

    def _meta(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Close the database; an uncommitted transaction is lost."""
        self._db.close()

    # ---- transactions ----------------------------------------------------------------------------

    @property
    def is_in_transaction(self) -> bool:
        """True when a write is not committed yet."""
        return self._failure is not None or self._db.in_transaction

    def begin(self) -> None:
        """Begin a transaction unless one is open; writes call it. Raises StorageError when another
        process locks the database.
        """
        if self._failure is not None:
            raise self._failure
        if not self._db.in_transaction:
            with self._failing():
                self.watch_files()
                self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit the open transaction, if there is one. Raises StorageError, DiskFullError: then
        roll back.
        """
        for write in self.before_commit:
            write()
        if self._failure is not None:
            raise self._failure
        if self._db.in_transaction:
            self.keep_time()
            make_room(os.path.dirname(self.path))
            with self._failing():
                self._db.execute("COMMIT")
            if self._unkept_mark is not None and self._elapsed is not None:
                self._elapsed.kept(self._unkept_mark)
                self._unkept_mark = None
        for done in self.after_commit:
            done()

    def rollback(self) -> None:
        """Undo all writes since the last commit."""
        self._failure = self._unkept_mark = None
        if self._db.in_transaction:
            with _refusals():
                self._db.execute("ROLLBACK")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Mark the transaction as failed when the block raises: SQLite may have undone all of
        it.
        """
        try:
            with _refusals():
                yield
        except TailraceError as error:
            self._failure = error
            raise

    def write_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Execute a statement for each row in the open transaction. Returns the number of changed
        rows. Raises StorageError, DiskFullError.
        """
        self.begin()
        with self._failing():
            return int(self._db.executemany(sql, rows).rowcount)

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows of a SELECT. Raises StorageError."""
        with _refusals():
            return self._db.execute(sql, values).fetchall()

    def read_each(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a SELECT one by one, before another use of the store: there may be too many
        for a list. Raises StorageError.
        """
        with _refusals():
            yield from self._db.execute(sql, values)

    # ---- groups and members ----------------------------------------------------------------------

    def new_group_id(self) -> int:
        """A group id that was never used."""
        number = self._next_group_id
        self._next_group_id += 1
        return number

    def groups(self, kind: str) -> list[GroupRow]:
        """All groups of a kind ("consumer", "share"), by id."""
        return [
            GroupRow(*row)
            for row in self.read("SELECT * FROM groups WHERE kind = ? ORDER BY group_id", (kind,))
        ]

    def group(self, group_id: int) -> GroupRow | None:
        rows = self.read("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        return GroupRow(*rows[0]) if rows else None

    def group_names(self, after: str, limit: int) -> list[str]:
        """Names of groups of all kinds after `after`, sorted."""
        return [
            name
            for (name,) in self.read(
                "SELECT name FROM groups WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
            )
        ]

    def groups_empty_since(
        self, cutoff_ms: int, behind_group_id: int, limit: int
    ) -> list[tuple[int, int, bool]]:
        """(id, empty since, has offsets) by id, of consumer groups that lost their last member
        before `cutoff_ms`. Both times are elapsed time.
        """
        sql = (
            "SELECT group_id, empty_elapsed_ms, EXISTS (SELECT 1 FROM offsets WHERE "
            "offsets.group_id = groups.group_id) FROM groups"
            " WHERE empty_since_ms > 0 AND empty_elapsed_ms <= ? AND group_id > ? AND kind = "
            "'consumer' ORDER BY group_id LIMIT ?"
        )
        found = self.read(sql, (cutoff_ms, behind_group_id, limit))
        return [
            (group_id, empty_elapsed_ms, bool(has_offsets))
            for group_id, empty_elapsed_ms, has_offsets in found
        ]

    def put_groups(self, rows: Iterable[GroupRow]) -> None:
        self.write_many(
            "INSERT INTO groups (group_id, name, kind, epoch, assignor, rebalances, created_ms, "
            "empty_since_ms, detail, empty_elapsed_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id) DO UPDATE SET epoch = "
            "excluded.epoch,"
            " assignor = excluded.assignor, rebalances = excluded.rebalances, empty_since_ms = "
            "excluded.empty_since_ms, detail = excluded.detail,"
            " empty_elapsed_ms = excluded.empty_elapsed_ms",
            rows,
        )

    def delete_group(self, group_id: int) -> None:
        """Delete the group with its members, offsets and share partitions."""
        self.write_many(
            "INSERT OR REPLACE INTO meta VALUES ('last_group_id', ?)", [(self._next_group_id - 1,)]
        )
        for table in ("groups", "members", "offsets", "share_partitions"):
            self.write_many(f"DELETE FROM {table} WHERE group_id = ?", [(group_id,)])

    def members(self, group_id: int) -> list[MemberRow]:
        """A group's members, by id."""
        return [
            MemberRow(*row)
            for row in self.read(
                "SELECT * FROM members WHERE group_id = ? ORDER BY member_id", (group_id,)
            )
        ]

    def all_members(self) -> Iterator[MemberRow]:
        """The members of all groups, by group id."""
        with _refusals():
            for row in self._db.execute("SELECT * FROM members ORDER BY group_id, member_id"):
                yield MemberRow(*row)

    def put_members(self, rows: Iterable[MemberRow]) -> None:
        """Insert or update members. Empty settings keep the stored ones."""
        self.write_many(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (group_id, member_id) DO "
            "UPDATE SET epoch = excluded.epoch,"
            " settings = iif(excluded.settings = '', settings, excluded.settings), assignment = "
            "excluded.assignment, target = excluded.target",
            rows,
        )

    def delete_members(self, keys: Iterable[tuple[int, str]]) -> None:
        """`keys`: (group id, member id)."""
        self.write_many("DELETE FROM members WHERE group_id = ? AND member_id = ?", keys)

    # ---- committed offsets -----------------------------------------------------------------------

    def put_offsets(self, rows: Iterable[OffsetRow]) -> None:
        self.write_many(
            "INSERT INTO offsets (group_id, topic_id, partition, committed, leader_epoch, "
            "metadata, committed_ms, committed_elapsed_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id, topic_id, partition) DO "
            "UPDATE SET committed = excluded.committed,"
            " leader_epoch = excluded.leader_epoch, metadata = excluded.metadata, committed_ms = "
            "excluded.committed_ms,"
            " committed_elapsed_ms = excluded.committed_elapsed_ms",
            rows,
        )

    def delete_offsets(self, keys: Iterable[tuple[int, str, int]]) -> None:
        """`keys`: (group id, topic id, partition)."""
        self.write_many(
            "DELETE FROM offsets WHERE group_id = ? AND topic_id = ? AND partition = ?", keys
        )

    def offset(self, group_id: int, topic_id: str, partition: int) -> OffsetRow | None:
        sql = "SELECT * FROM offsets WHERE group_id = ? AND topic_id = ? AND partition = ?"
        rows = self.read(sql, (group_id, topic_id, partition))
        return OffsetRow(*rows[0]) if rows else None

    def offsets_of_topic(self, group_id: int, topic_id: str, behind: int) -> list[OffsetRow]:
        """The topic's rows of partitions above `behind`, in order."""
        sql = (
            "SELECT * FROM offsets WHERE group_id = ? AND topic_id = ? AND partition > ? ORDER "
            "BY partition"
        )
        return list(map(OffsetRow._make, self.read(sql, (group_id, topic_id, behind))))

    def has_offsets(self, group_id: int, topic_id: str) -> bool:
        return bool(
            self.read(
                "SELECT 1 FROM offsets WHERE group_id = ? AND topic_id = ? LIMIT 1",
                (group_id, topic_id),
            )
        )

    def offset_topics(self, group_id: int) -> list[str]:
        """Ids of the topics in which the group has offsets."""
        return [
            topic_id
            for (topic_id,) in self.read(
                "SELECT DISTINCT topic_id FROM offsets WHERE group_id = ?", (group_id,)
            )
        ]

    def expire_offsets(self, group_id: int, cutoff_ms: int) -> bool:
        """Delete the group's offsets that were committed before `cutoff_ms` of elapsed time.
        Returns whether others are left.
        """
        self.write_many(
            "DELETE FROM offsets WHERE group_id = ? AND committed_elapsed_ms <= ?",
            [(group_id, cutoff_ms)],
        )
        return bool(self.read("SELECT 1 FROM offsets WHERE group_id = ? LIMIT 1", (group_id,)))

    def all_offset_topics(self) -> list[str]:
        """Ids of all topics in which any group has offsets (one index step for each)."""
        sql = (
            "WITH RECURSIVE ids(id) AS (SELECT min(topic_id) FROM offsets UNION ALL"
            " SELECT (SELECT min(topic_id) FROM offsets WHERE topic_id > ids.id) FROM ids WHERE "
            "ids.id IS NOT NULL) SELECT id FROM ids WHERE id IS NOT NULL"
        )
        return [topic_id for (topic_id,) in self.read(sql)]

    def delete_topic_offsets(self, topic_id: str, committed_before_ms: int, limit: int) -> int:
        """Delete at most `limit` offsets of a topic, in all groups, that were committed before a
        moment of elapsed time. Returns the number of deleted rows.
        """
        sql = (
            "DELETE FROM offsets WHERE (group_id, topic_id, partition) IN"
            " (SELECT group_id, topic_id, partition FROM offsets WHERE topic_id = ? AND "
            "committed_elapsed_ms <= ? LIMIT ?)"
        )
        return self.write_many(sql, [(topic_id, committed_before_ms, limit)])

    # ---- share partitions ------------------------------------------------------------------------

    def share_states(self, group_id: int) -> list[ShareRow]:
        """The group's share partitions, by topic id and partition."""
        sql = "SELECT * FROM share_partitions WHERE group_id = ? ORDER BY topic_id, partition"
        return [ShareRow(*row) for row in self.read(sql, (group_id,))]

    def put_share_states(self, rows: Iterable[ShareRow]) -> None:
        self.write_many("INSERT OR REPLACE INTO share_partitions VALUES (?, ?, ?, ?)", rows)

    def delete_share_states(self, keys: Iterable[tuple[int, str, int]]) -> None:
        """`keys`: (group id, topic id, partition)."""
        self.write_many(
            "DELETE FROM share_partitions WHERE group_id = ? AND topic_id = ? AND partition = ?",
            keys,
        )


def _make_private(path: str) -> None:
    """Create the file if it does not exist, and make it private to its owner. SQLite gives its
    other files the same mode.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise StorageError(f"{path} is not a regular file: move it away")
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(
            f"cannot open {path}: {os.strerror(error.errno or 0)}; make it writable for this "
            "user, or move it away"
        ) from error


def _unusable(path: str, error: sqlite3.Error) -> StorageError:
    return StorageError(
        f"{path} cannot be used: {error}. If another process locks it, stop that process; if it is "
        "damaged, restore it from a backup or move it away "
        "(groups then begin without members and committed offsets)"
    )
