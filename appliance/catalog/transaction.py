"""One transaction for all that a step of the coordinator takes in.

Within a step each change of the catalog is a savepoint of one transaction, which the first of them begins. What follows from a change (news, answers) waits
until the step is committed; a commit that fails undoes all of it, and says so to everyone who waits. Outside a step each change is a transaction of its own.

Owner: the coordinator. Invariants: nothing is said of a change before it is on the disk; a change that fails leaves the others of its step as they are, unless
SQLite has undone the whole transaction (a full disk can make it): then the step fails.
Crash: SQLite's own recovery: a step that was not committed did not happen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from tailrace.errors import TailraceError

Done = Callable[[], None]
Failed = Callable[[TailraceError], None]


class Database(sqlite3.Connection):
    """The catalog's connection."""

    is_in_step = False
    spoiled_by: BaseException | None = None
    """What made SQLite undo the transaction of this step."""
    refused_by: BaseException | None = None
    """Why this step cannot begin one: another program holds the database. Changes that follow do not wait for that anew."""

    def commit_step(self) -> bool:
        """Keep what the step has changed; returns whether there was something. Raises sqlite3.Error: then nothing is kept, and no transaction is open."""
        self.is_in_step = False
        spoiled_by, self.spoiled_by, self.refused_by = self.spoiled_by, None, None
        try:
            if spoiled_by is not None:
                raise spoiled_by
            if not self.in_transaction:
                return False
            self.execute("COMMIT")
            return True
        finally:
            if self.in_transaction:
                self.execute("ROLLBACK")


class Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the block raises or COMMIT does: the next change must find none open. Within another it is part of that;
    within a step it is a savepoint, undone by itself when the block raises.
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
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _end_savepoint(self, error: BaseException | None) -> None:
        if not self._db.in_transaction:  # with it went what the step had changed before
            self._db.spoiled_by = self._db.spoiled_by or error
            return
        if error is not None:
            self._db.execute("ROLLBACK TO change")
        self._db.execute("RELEASE change")


class Effects:
    """What follows from the changes of a step."""

    def __init__(self) -> None:
        self._effects: list[tuple[Done, Failed]] = []

    def add(self, done: Done, failed: Failed) -> None:
        """`done` when the step is committed, else `failed`."""
        self._effects.append((done, failed))

    def run(self, error: TailraceError | None, caught: Callable[[str, Exception], str]) -> None:
        """Each, whatever happens in others: in order, or backwards where the step has failed with `error`. `caught`: see `shm.runtime.boundary`."""
        effects, self._effects = self._effects, []
        for done, failed in effects if error is None else reversed(effects):
            try:
                if error is None:
                    done()
                else:
                    failed(error)
            except Exception as unexpected:
                caught("after_commit", unexpected)
