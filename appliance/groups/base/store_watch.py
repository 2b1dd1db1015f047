"""The files of an open database: whether they are still where they were opened.

A program may remove or replace the files of a database that is in use. SQLite goes on in files
without a name then, and all that it says is kept goes with the process. So the store looks before
each transaction, and writes everything again where something is missing.

Owner: the store. Invariants: a file that another has put in the place is never written to.
Crash: a copy that was not finished stays beside the database, and is replaced by the next one.
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
        """The database at `path` has just been opened, and read from."""
        self._path = path
        self._database, self._wal = _number(path), _number(f"{path}-wal")

    def are_there(self) -> bool:
        """Whether both have their names. Raises StorageError when another file has the name
        of one.
        """
        for path, opened in ((self._path, self._database), (f"{self._path}-wal", self._wal)):
            found = _number(path)
            if found != opened:
                if found is None:
                    return False
                raise StorageError(
                    f"{path} was replaced while it was in use; nothing of the request was kept. "
                    "To go on with what is known, move the new file away; "
                    "to use it, stop the appliance first"
                )
        return True

    def restore_copy(self, database: sqlite3.Connection) -> None:
        """Bring what the connection has, which is in no transaction, to where its files were. It is
        to be closed then, and another one opened. Raises sqlite3.Error, OSError.
        """
        if _number(self._path) is not None:  # the log alone is gone
            busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise sqlite3.OperationalError(
                    "its log was removed while another program reads it; end that one"
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
