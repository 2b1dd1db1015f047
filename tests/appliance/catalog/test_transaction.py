"""One transaction for a step of the controller: what it takes in is kept and told together, or
undone and refused together.
"""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Iterator

import pytest

from appliance.catalog.catalog import Catalog, CatalogFullError, Topic
from tailrace.core.errors import DiskFullError, StorageError, TailraceError

SCHEMA = b"schema"


class Steps:
    """A catalog, and what was heard of its steps."""

    def __init__(self, path: pathlib.Path, slots: int = 64) -> None:
        self.path = f"{path}/coordinator.db"
        self.catalog = Catalog(self.path, slots)
        self.catalog.slots.register([("a", "/a")])
        self.heard: list[str] = []
        self.failures: list[str] = []

    def caught(self, what: str, error: Exception) -> str:
        self.failures.append(f"{what} {error}")
        return "id=7"

    def create(self, name: str, partitions: int = 1) -> Topic:
        made = self.catalog.create_topic(name, partitions, {}, SCHEMA, False, 5)
        self.catalog.afterwards(
            lambda: self.heard.append(name),
            lambda error: self.heard.append(f"not {name}: {error.code.name}"),
        )
        return made

    def commit(self) -> bool:
        return self.catalog.commit_step(self.caught)

    def on_disk(self) -> list[str]:
        with sqlite3.connect(self.path) as other:
            found = [name for (name,) in other.execute("SELECT name FROM topics ORDER BY name")]
        other.close()
        return found


@pytest.fixture
def steps(tmp_path: pathlib.Path) -> Iterator[Steps]:
    made = Steps(tmp_path)
    yield made
    made.catalog.close()


def test_nothing_is_told_before_the_step_is_committed_and_then_everything_in_order(
    steps: Steps,
) -> None:
    steps.catalog.begin_step()
    for name in "cab":
        steps.create(name)
    assert (steps.heard, steps.on_disk()) == ([], [])
    assert {topic.name for topic in steps.catalog.topics()} == set("abc"), (
        "entries that follow see it"
    )
    assert steps.commit()
    assert (steps.heard, steps.on_disk()) == (["c", "a", "b"], ["a", "b", "c"])
    steps.catalog.begin_step()
    assert not steps.commit(), "a step that changed nothing commits nothing"


def test_a_change_that_fails_leaves_the_others_of_its_step_and_its_slots(
    tmp_path: pathlib.Path,
) -> None:
    steps = Steps(tmp_path, slots=4)
    steps.catalog.begin_step()
    steps.create("one", 2)
    with pytest.raises(CatalogFullError):
        steps.create("too many", 3)
    with pytest.raises(CatalogFullError):
        _create_three(steps)
    steps.create("two", 2)
    assert steps.commit()
    assert (steps.heard, steps.on_disk()) == (["one", "two"], ["one", "two"])
    with pytest.raises(CatalogFullError):
        steps.create("no slot is left")


def _create_three(steps: Steps) -> None:
    """Two slots are left."""
    with steps.catalog.together():
        for number in range(3):
            steps.catalog.create_topic(f"half-{number}", 1, {}, SCHEMA, False, 5)


def test_a_commit_that_is_refused_undoes_the_step_and_tells_all_of_it_backwards(
    steps: Steps,
) -> None:
    kept = steps.create("kept")
    steps.catalog.begin_step()
    steps.create("a")
    steps.create("b")
    steps.catalog.mark_deleting(kept)
    with pytest.raises(DiskFullError):
        _undo_all(steps)
    with pytest.raises(DiskFullError):
        steps.create("c")
    assert not steps.commit()
    assert steps.heard == ["kept", "not b: DISK_FULL", "not a: DISK_FULL"]
    assert [(topic.name, topic.state) for topic in steps.catalog.topics()] == [("kept", "changing")]
    assert steps.on_disk() == ["kept"]
    for number in range(20):  # no slot was lost
        steps.create(f"t{number}", 3)


def _undo_all(steps: Steps) -> None:
    """As SQLite does it of itself where the disk is full in the midst of a statement."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    with steps.catalog.together():
        steps.catalog.database.execute("ROLLBACK")
        raise error


def test_a_database_that_is_held_is_waited_for_once_in_a_step(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = sqlite3.connect(steps.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    begun: list[str] = []
    steps.catalog.database.set_trace_callback(
        lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None
    )
    steps.catalog.begin_step()
    for name in "abcdef":
        with pytest.raises(StorageError):
            steps.create(name)
    assert not steps.commit()
    assert len(begun) <= 1
    assert not steps.heard
    holder.execute("ROLLBACK")
    holder.close()
    steps.catalog.begin_step()
    steps.create("a")
    assert steps.commit()
    assert steps.heard == ["a"]


def test_what_is_told_may_fail_without_costing_others_theirs(steps: Steps) -> None:
    def broken() -> None:
        raise RuntimeError("nobody expected this")

    def refused(error: TailraceError) -> None:
        raise AssertionError(error)

    steps.catalog.begin_step()
    steps.create("a")
    steps.catalog.afterwards(broken, refused)
    steps.create("b")
    assert steps.commit()
    assert steps.heard == ["a", "b"]
    assert len(steps.failures) == 1


def test_producer_ids_of_one_step_differ_and_are_kept_together(steps: Steps) -> None:
    steps.catalog.begin_step()
    first, second = steps.catalog.producers.new(), steps.catalog.producers.new()
    assert steps.catalog.producers.next_epoch(first[0], 0) == (first[0], 1)
    assert first[0] != second[0]
    assert steps.commit()
    again = Catalog(steps.path, 64)
    assert again.producers.next_epoch(first[0], 0) == (first[0], 2)


def test_a_full_disk_in_the_midst_of_a_step_is_a_refusal_and_not_the_end(steps: Steps) -> None:
    (pages,) = steps.catalog.database.execute("PRAGMA page_count").fetchone()
    steps.catalog.database.execute(f"PRAGMA max_page_count = {pages}")
    steps.catalog.begin_step()
    refused: list[TailraceError] = []
    for number in range(400):
        try:
            steps.catalog.create_topic(f"{number}" * 60, 1, {}, SCHEMA, False, 5)
        except (DiskFullError, StorageError, CatalogFullError) as error:
            refused.append(error) if isinstance(error, TailraceError) else None
            break
    steps.commit()
    assert [error.code.name for error in refused] == ["DISK_FULL"]
    steps.catalog.database.execute("PRAGMA max_page_count = 100000")
    steps.catalog.begin_step()
    steps.create("after")
    assert steps.commit()
    assert "after" in steps.on_disk()
