"""Transactions of the catalog: one for all changes of a controller's step.

Within a step each change is a savepoint of one transaction, which the first change begins. Effects
of a change (updates, answers) wait for the step's commit. A commit that fails undoes the step and
fails every effect. Outside a step each change is a transaction of its own.

Owner: the controller.
Invariants:
- No change is published or answered before it is on the disk.
- A change that fails leaves the others of its step as they are, unless SQLite has rolled back the
  whole transaction (on a full disk, for example). Then the step fails.
Crash: SQLite recovers the file. A step that was not committed did not happen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from shm.runtime.reserve_file import make_room
from tailrace.core.errors import TailraceError

Done = Callable[[], None]
Failed = Callable[[TailraceError], None]


class Database(sqlite3.Connection):
    """The catalog's connection."""

    path = ""
    """The file, absolute."""
    directory = ""
    """The data directory, whose reserve file gives a commit room; "" for a database without one."""
    is_in_step = False
    spoiled_by: BaseException | None = None
    """The error on which SQLite rolled this step's transaction back."""
    refused_by: BaseException | None = None
    """The error that kept this step from beginning a transaction: another program holds the
    database. Later changes of the step fail at once.
    """

    def commit_step(self) -> bool:
        """Commit the step; return True if it changed something.

        Raises: sqlite3.Error; then nothing is kept, and no transaction is open.
        """
        self.is_in_step = False
        spoiled_by, self.spoiled_by, self.refused_by = self.spoiled_by, None, None
        try:
            if spoiled_by is not None:
                raise spoiled_by
            if not self.in_transaction:
                return False
            self.execute_commit()
            return True
        finally:
            if self.in_transaction:
                self.execute("ROLLBACK")

    def execute_commit(self) -> None:
        """COMMIT. On a full disk a piece of the reserve file is given up for it. Raises
        sqlite3.Error.
        """
        if self.directory:
            make_room(self.directory)
        self.execute("COMMIT")


class Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the block or COMMIT raises: none stays open.

    Within another transaction it is part of that one. Within a step it is a savepoint, which is
    rolled back alone when the block raises.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._is_in_step = db.is_in_step
        self._is_part = db.in_transaction and not db.is_in_step

    def __enter__(self) -> None:
        if self._is_part:
            return
        if self._is_in_step:
            self._begin_savepoint()
        else:
            self._db.execute("BEGIN IMMEDIATE")

    def _begin_savepoint(self) -> None:
        refusal = self._db.spoiled_by or self._db.refused_by
        if refusal is not None:
            raise refusal
        if not self._db.in_transaction:
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                self._db.refused_by = error
                raise
        self._db.execute("SAVEPOINT change")

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if self._is_part:
            return
        if self._is_in_step:
            self._end_savepoint(error)
            return
        try:
            if error is None:
                self._db.execute_commit()
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _end_savepoint(self, error: BaseException | None) -> None:
        if not self._db.in_transaction:  # the step's earlier changes are rolled back too
            self._db.spoiled_by = self._db.spoiled_by or error
            return
        if error is not None:
            self._db.execute("ROLLBACK TO change")
        self._db.execute("RELEASE change")


class Effects:
    """Effects of a step's changes, run after its commit or rollback."""

    def __init__(self) -> None:
        self._effects: list[tuple[Done, Failed]] = []

    def add(self, done: Done, failed: Failed) -> None:
        """Add effects: `done` when the step is committed, else `failed`."""
        self._effects.append((done, failed))

    def run(self, error: TailraceError | None, caught: Callable[[str, Exception], str]) -> None:
        """Run each effect, also when others raise.

        Effects run in order, or in reverse when the step failed with `error`. `caught`: see
        `shm.runtime.error_handler`.
        """
        effects, self._effects = self._effects, []
        for done, failed in effects if error is None else reversed(effects):
            try:
                if error is None:
                    done()
                else:
                    failed(error)
            except Exception as unexpected:
                caught("after_commit", unexpected)
