"""Detection of a removed or replaced database file while the database is open.

Another program may remove or replace the files of an open database. SQLite then continues in
unlinked files, and all commits are lost with the process. The store therefore checks the files
before each transaction and writes a missing one again.

Owner: the store.
Invariants: a replacement file of another program is never written to.
Crash: an unfinished copy stays beside the database; the next one replaces it.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from tailrace.core.errors import StorageError

COPY_SUFFIX = ".saved"


def _number(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class StoreWatch:
    """See the module's docstring."""

    def __init__(self, path: str) -> None:
        """Remember the files of the database at `path`, which was just opened and read."""
        self._path = path
        self._database, self._wal = _number(path), _number(f"{path}-wal")

    def are_there(self) -> bool:
        """True when database and log still exist at their paths. Raises StorageError when another
        file has replaced one.
        """
        for path, opened in ((self._path, self._database), (f"{self._path}-wal", self._wal)):
            found = _number(path)
            if found != opened:
                if found is None:
                    return False
                raise StorageError(
                    f"{path} was replaced while it was in use; nothing of the request was kept. "
                    "To continue with the state in memory, move the new file away; "
                    "to use the new file, stop the appliance first"
                )
        return True

    def restore_copy(self, database: sqlite3.Connection) -> None:
        """Write the database of a connection without a transaction back to its path. The caller
        then closes the connection and opens another one. Raises sqlite3.Error, OSError.
        """
        if _number(self._path) is not None:  # the log alone is gone
            busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise sqlite3.OperationalError(
                    "its log was removed while another program reads it; stop that program"
                )
            return
        copy = self._path + COPY_SUFFIX
        Path(copy).unlink(missing_ok=True)
        os.close(
            os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        )
        into = sqlite3.connect(copy, isolation_level=None)
        try:
            into.execute("PRAGMA synchronous=FULL")
            database.backup(into)
        finally:
            into.close()
        handle = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(copy, self._path)
        handle = os.open(
            os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
