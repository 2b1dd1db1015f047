"""The database of the process of groups: one SQLite file, its transactions, and elapsed time.

Owner: the process `groups`, alone. WAL, synchronous=FULL.
Invariants:
- The first write begins a transaction, `commit` or `rollback` ends it.
- After a failed write the transaction can only be rolled back. `commit` raises the write's error.
- A number beyond 64 bits is the fault of a request: InvalidRequestError, never an internal error.
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
from appliance.groups.store.schema import MIGRATIONS, SCHEMA_VERSION, TABLES
from shm.runtime.elapsed_time import MARK_EVERY_MS, ElapsedTime, Mark
from shm.runtime.reserve_file import make_room
from tailrace.core.errors import DiskFullError, InvalidRequestError, StorageError, TailraceError

logger = logging.getLogger(__name__)
_UNCHECKED = frozenset(("transactional_ids",))
"""Tables that may have a million rows which a start does not read. SQLite finds damage in them when
it reads the row.
"""
CACHE_KIB = 2_000
LOADING_CACHE_KIB = 200
"""The cache of pages before the first write: a start reads pages once, and would keep them."""
LOCKED_TIMEOUT_S = 0.5
"""Time that a write waits for another process (a backup, a shell) that locks the database."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of SQLite into errors for clients."""
    try:
        yield
    except OverflowError as error:
        raise InvalidRequestError(
            "a number of the request does not fit 64 bits; nothing of the request was kept"
        ) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                "groups.db cannot grow: its disk is full; nothing of the request was kept"
            ) from error
        raise StorageError(
            f"groups.db cannot be read or written: {error}; nothing of the request was kept"
        ) from error


class StoreDatabase:
    """An open database, with one transaction at a time."""

    def __init__(self, path: str) -> None:
        """Open or create the file (mode 0600). Raises StorageError when it cannot be used."""
        self.path = path
        self.before_commit: list[Callable[[], None]] = []
        """Callbacks of `commit` that write changed rows before the commit. The commit fails when
        one raises TailraceError.
        """
        self.after_commit: list[Callable[[], None]] = []
        """Callbacks of `commit` after the commit."""
        self.is_ahead = False
        """True if one of them has failed behind a commit: memory may lack what is durable. The
        database has to be opened anew then.
        """
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
            self._load()
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

    def _load(self) -> None:
        """Read what a subclass keeps in memory. Raises sqlite3.Error."""

    def _set_up(self) -> None:
        self._is_loading = True
        self._db.execute(f"PRAGMA cache_size=-{LOADING_CACHE_KIB}")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")

    def watch_files(self) -> None:
        """Write the database again if another program has removed it or its log. Does nothing in a
        transaction. Raises StorageError when it cannot be written, or another file replaced it.
        """
        if self._db.in_transaction or self._files.are_there():
            return
        logger.error("groups_db_removed path=%s", self.path)
        with refusals():
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
        while tables and found < SCHEMA_VERSION:
            self._db.executescript(MIGRATIONS[found])
            found = self._meta("schema_version")
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
                if self._is_loading:
                    self._is_loading = False
                    self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
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
            self.is_ahead = True
            if self._unkept_mark is not None and self._elapsed is not None:
                self._elapsed.kept(self._unkept_mark)
                self._unkept_mark = None
        for done in self.after_commit:
            done()
        self.is_ahead = False

    def rollback(self) -> None:
        """Undo all writes since the last commit."""
        self._failure = self._unkept_mark = None
        if self._db.in_transaction:
            with refusals():
                self._db.execute("ROLLBACK")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Mark the transaction as failed when the block raises: SQLite may have undone all of
        it.
        """
        try:
            with refusals():
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
        with refusals():
            return self._db.execute(sql, values).fetchall()

    def read_each(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a SELECT one by one, before another use of the store: there may be too many
        for a list. Raises StorageError.
        """
        with refusals():
            yield from self._db.execute(sql, values)


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
