"""A kill during a migration of groups.db or coordinator.db, after any of its statements: the next
start finishes it, and the database is the one of a migration that nothing interrupted.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.catalog.catalog import Catalog
from appliance.catalog.transaction import Database
from appliance.groups.store import schema
from appliance.groups.store.database import StoreDatabase

GOLDEN = Path(__file__).parents[1] / "golden"
GROUPS_FILES = sorted(path.name for path in GOLDEN.glob("groups_v[0-9].sql"))
CATALOG_FILES = sorted(path.name for path in GOLDEN.glob("catalog_v[0-9].sql"))


class _Killed(BaseException):
    """The end of the process: what is not committed is gone."""


class _Statements:
    """Counts the statements of a start, and ends it after one of them."""

    last = 0
    """The statement after which the process is killed; 0: none."""
    count = 0

    def done(self) -> None:
        self.count += 1
        if self.count == self.last:
            raise _Killed


STATEMENTS = _Statements()


class _Connection(Database):
    """A connection that counts each statement, also those of a script."""

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if sql == "PRAGMA synchronous=FULL":  # a process ends here, and no host: without fsync
            sql = "PRAGMA synchronous=OFF"
        found = super().execute(sql, *values)  # type: ignore[arg-type]
        if not sql.lstrip().startswith(("SELECT", "PRAGMA")):  # the others change nothing
            STATEMENTS.done()
        return found

    def executescript(self, sql: str) -> sqlite3.Cursor:
        statement, found = "", self.cursor()
        for piece in sql.split(";"):
            statement += f"{piece};"
            if sqlite3.complete_statement(statement) and piece.strip():
                found = self.execute(statement)
                statement = ""
        return found


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def counted(path: str, **options: object) -> sqlite3.Connection:
        if options.get("isolation_level", "") is not None:
            return connect(path)  # this module's own
        return connect(path, **{**options, "factory": _Connection})  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", counted)


def open_groups(path: Path) -> None:
    StoreDatabase(str(path)).close()


def open_catalog(path: Path) -> None:
    opened = Catalog(str(path), 2000)
    try:
        assert opened.check() == ""
    finally:
        opened.close()


def opened(opening: Callable[[Path], None], path: Path, last: int = 0) -> int:
    """Open a database and close it; kill the process after its statement `last`. The number of
    statements.
    """
    STATEMENTS.count, STATEMENTS.last = 0, last
    opening(path)
    return STATEMENTS.count


def content(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
        return list(database.iterdump())


def written(path: Path, script: str) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(f"PRAGMA synchronous=OFF; {script}")
    return path


def test_the_scripts_lead_from_every_older_version() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(1, schema.SCHEMA_VERSION))


@pytest.mark.parametrize(
    ("opening", "script"),
    [
        *((open_groups, name) for name in ["", "2", "3", *GROUPS_FILES]),
        *((open_catalog, name) for name in ["", "2", *CATALOG_FILES]),
    ],
)
def test_a_start_after_a_kill_at_any_statement_finishes_the_migration(
    tmp_path: Path, opening: Callable[[Path], None], script: str
) -> None:
    """`script`: a golden file, a version that has none and is made of the next one, or "" for a
    new database.
    """
    old = written(tmp_path / "old.db", script_of(opening, script))
    whole = Path(shutil.copy(old, tmp_path / "whole.db"))
    count = opened(opening, whole)
    expected = content(whole)
    for last in range(1, count + 1):
        path = Path(shutil.copy(old, tmp_path / f"{last}.db"))
        with pytest.raises(_Killed):
            opened(opening, path, last)
        opened(opening, path)
        assert content(path) == expected, f"killed after statement {last} of {count}"
        path.unlink()


def script_of(opening: Callable[[Path], None], name: str) -> str:
    """The SQL that makes a database of an older version."""
    if name.endswith(".sql"):
        return (GOLDEN / name).read_text()
    if not name:
        return ""
    if opening is open_catalog:
        return (GOLDEN / "catalog_v3.sql").read_text() + (
            "ALTER TABLE topics DROP COLUMN delay_of;"
            "UPDATE meta SET value = 2 WHERE name = 'schema_version';"
        )
    if name == "2":
        return (GOLDEN / "groups_v1.sql").read_text() + schema.FROM_1_TO_2
    return (GOLDEN / "groups_v4.sql").read_text() + (
        "ALTER TABLE transactional_ids DROP COLUMN prepared;"
        "UPDATE meta SET value = 3 WHERE name = 'schema_version';"
    )
