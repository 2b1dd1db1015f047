"""The database of groups: opened, refused, locked, full."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.groups.base.members import Member
from appliance.groups.store import database as store_module
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import (
    FROM_2_TO_NEWEST,
    MIGRATIONS,
    SCHEMA_VERSION,
    GroupRow,
    MemberRow,
    OffsetRow,
    ShareRow,
)
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.branches.pool import pool_of
from appliance.groups.transactions.ids.prepared_mark import prepared_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import DiskFullError, InvalidRequestError, StorageError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, Refused, settle

GOLDEN_4 = Path(__file__).parents[3] / "golden/groups_v4.sql"
GOLDEN_5 = Path(__file__).parents[3] / "golden/groups_v5.sql"
GOLDEN_7 = Path(__file__).parents[3] / "golden/groups_v7.sql"
GOLDEN_6 = Path(__file__).parents[3] / "golden/groups_v6.sql"
GOLDEN_8 = Path(__file__).parents[3] / "golden/groups_v8.sql"
GOLDEN_9 = Path(__file__).parents[3] / "golden/groups_v9.sql"
GROUP = GroupRow(1, "billing", "consumer", 1, "sticky", 0, 5, 0, "{}")


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    path.touch(0o666)
    os.chmod(path, 0o666)
    store = GroupStore(str(path))
    store.put_groups([GROUP])
    store.commit()
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    assert set(modes) == {"groups.db", "groups.db-wal", "groups.db-shm"}
    assert set(modes.values()) == {0o600}
    assert store.read("PRAGMA synchronous") == [(2,)]
    assert store.read("PRAGMA journal_mode") == [("wal",)]
    store.close()


def test_rows_come_back_and_go_with_their_group(tmp_path: Path) -> None:
    store = GroupStore(str(tmp_path / "groups.db"))
    assert store.new_group_id() == 1
    member, offset = MemberRow(1, "m1", 3, "[]", "[]", "{}"), OffsetRow(1, "t", 0, 5, -1, "", 7)
    share = ShareRow(1, "t", 0, b"\0\1")
    store.put_groups([GROUP])
    store.put_members([member])
    store.put_offsets([offset])
    store.put_share_states([share])
    was_open = store.is_in_transaction
    store.commit()
    assert (was_open, store.is_in_transaction) == (True, False)
    store.put_offsets([offset._replace(committed=6)])
    store.put_groups([GROUP._replace(epoch=9)])
    store.rollback()
    assert (store.groups("consumer"), store.groups("share"), store.members(1)) == (
        [GROUP],
        [],
        [member],
    )
    assert (store.offset(1, "t", 0), store.share_states(1)) == (offset, [share])
    store.delete_share_states([(1, "t", 0)])
    assert store.share_states(1) == []
    store.delete_group(1)
    store.commit()
    store.close()
    store = GroupStore(str(tmp_path / "groups.db"))
    for table in ("groups", "members", "offsets", "share_partitions"):
        assert store.read(f"SELECT count(*) FROM {table}") == [(0,)]
    assert store.new_group_id() == 2, "numbers are never used again"
    store.close()


def test_what_cannot_be_a_database_is_refused_with_a_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"this is no database, whatever it is called" * 100)
    with pytest.raises(StorageError, match="move it away"):
        GroupStore(str(damaged))
    assert damaged.read_bytes().startswith(b"this is no database"), "it is left as it is"
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(StorageError, match="directory"):
        GroupStore(str(directory))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="link"):
        GroupStore(str(link))
    with pytest.raises(StorageError, match="No such file"):
        GroupStore(str(tmp_path / "nowhere" / "groups.db"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="regular file"):
        GroupStore(str(tmp_path / "pipe"))


def as_version_2(path: Path) -> None:
    """Take out of a database what later versions have added."""
    with sqlite3.connect(path) as database:
        database.executescript(
            "DROP TABLE transactional_ids; DROP TABLE decisions;"
            "UPDATE meta SET value = 2 WHERE name = 'schema_version';"
        )
    database.close()


def test_a_database_of_version_2_is_migrated_with_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    store = GroupStore(str(path))
    store.put_groups([GroupRow(1, "g", "consumer", 3, "", 0, 0, 0, "{}")])
    store.commit()
    store.close()
    as_version_2(path)
    for _ in range(2):
        store = GroupStore(str(path))
        assert [row.name for row in store.groups("consumer")] == ["g"]
        assert store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
            (SCHEMA_VERSION,)
        ]
        assert store.read("SELECT count(*) FROM transactional_ids") == [(0,)]
        store.close()


def test_a_database_of_version_3_is_migrated_with_its_transactional_ids(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    GroupStore(str(path)).close()
    with sqlite3.connect(path) as database:
        database.executescript(
            "ALTER TABLE transactional_ids DROP COLUMN prepared;"
            "ALTER TABLE transactional_ids DROP COLUMN branches;"
            "ALTER TABLE transactional_ids DROP COLUMN metadata;"
            "ALTER TABLE transactional_ids DROP COLUMN replaced;"
            "ALTER TABLE transactional_ids DROP COLUMN staged;"
            "ALTER TABLE transactional_ids DROP COLUMN user_name;"
            "INSERT INTO transactional_ids VALUES (1, 'a', 5, 2, 3, 4, 9, 0, 0, 1, 'c', '[]', '');"
            "UPDATE meta SET value = 3 WHERE name = 'schema_version';"
        )
    database.close()
    for _ in range(2):
        store = GroupStore(str(path))
        (row,) = TransactionRows(store).ids_behind("", 9)
        assert (row.transactional_id, row.epoch, row.prepared) == ("a", 2, "")
        assert store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
            (SCHEMA_VERSION,)
        ]
        store.close()


def test_a_database_of_version_4_is_migrated_with_its_prepared_transaction(
    tmp_path: Path,
) -> None:
    path = tmp_path / "groups.db"
    with sqlite3.connect(path) as database:
        database.executescript(GOLDEN_4.read_text())
    database.close()
    for _ in range(2):
        store = GroupStore(str(path))
        prepared, settled = sorted(TransactionRows(store).ids_behind("", 9))
        assert (prepared.transactional_id, settled.transactional_id) == ("billing", "settled")
        assert (prepared.branches, settled.branches) == ("", "")
        mark = prepared_of(prepared)
        assert mark is not None
        assert (mark.tag, mark.branches) == ("xid-4", frozenset())
        assert store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
            (SCHEMA_VERSION,)
        ]
        store.close()


def test_a_database_of_version_5_is_migrated_with_its_branches(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with sqlite3.connect(path) as database:
        database.executescript(GOLDEN_5.read_text())
    database.close()
    for _ in range(2):
        store = GroupStore(str(path))
        (row,) = TransactionRows(store).ids_behind("", 9)
        assert [one.epoch for one in pool_of(row).registered] == [3, 0]
        assert (row.transactional_id, row.metadata, row.replaced) == ("sink", "", "")
        assert store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
            (SCHEMA_VERSION,)
        ]
        store.close()


def test_a_transactional_id_of_version_7_has_nothing_staged(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(GOLDEN_7.read_text())
    for staged in ("", "text"):
        store = GroupStore(str(path))
        (row,) = TransactionRows(store).ids_behind("", 9)
        assert (row.transactional_id, row.staged) == ("copier", staged)
        TransactionRows(store).put_ids([row._replace(staged="text")])
        store.commit()
        store.close()


def test_members_of_version_6_have_no_pattern(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(GOLDEN_6.read_text())
    for pattern in ("", '["a.*",[]]'):
        store = GroupStore(str(path))
        (row,) = store.read("SELECT * FROM members")
        member = Member.of_row(MemberRow(*row), 0)
        assert (member.settings.topics, member.settings.pattern) == (("payments",), pattern)
        version = store.read("SELECT value FROM meta WHERE name = 'schema_version'")
        assert version == [(SCHEMA_VERSION,)]
        member.settings = replace(member.settings, pattern='["a.*",[]]')
        member.has_new_settings = True
        store.put_members([member.row(1)])
        store.commit()
        store.close()


def test_a_database_of_version_8_is_migrated_and_its_ids_belong_to_no_user(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(GOLDEN_8.read_text())
    for _ in range(2):
        store = GroupStore(str(path))
        (row,) = TransactionRows(store).ids_behind("", 9)
        assert (row.transactional_id, row.user_name) == ("sink", "")
        assert store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
            (SCHEMA_VERSION,)
        ]
        store.close()


def test_members_of_version_9_belong_to_no_user(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(GOLDEN_9.read_text())
    store = GroupStore(str(path))
    ((settings,),) = store.read("SELECT settings FROM members")
    row = MemberRow(1, "m1", 4, settings, '[3, "stable", false, {}, {}]', "{}")
    assert Member.of_row(row, 0).settings.user == ""
    assert Member.of_row(row, 0).settings.topics == ("orders",)
    store.close()


def test_a_migration_that_fails_leaves_version_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "groups.db"
    GroupStore(str(path)).close()
    as_version_2(path)
    broken = FROM_2_TO_NEWEST.replace("UPDATE meta", "UPDATE nothing")
    with monkeypatch.context() as patched:
        patched.setitem(MIGRATIONS, 2, broken)
        with pytest.raises(StorageError):
            GroupStore(str(path))
    with sqlite3.connect(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        version = database.execute("SELECT value FROM meta WHERE name = 'schema_version'")
        assert version.fetchone() == (2,)
    database.close()
    assert "decisions" not in tables
    GroupStore(str(path)).close()


def test_a_database_of_another_version_or_program_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    GroupStore(str(path)).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = 11 WHERE name = 'schema_version'")
    database.close()
    with pytest.raises(StorageError, match="schema version 11, this build reads 10"):
        GroupStore(str(path))
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    database.close()
    with pytest.raises(StorageError, match="schema version 0"):
        GroupStore(str(other))
    with sqlite3.connect(other) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]
    database.close()


def test_while_another_process_holds_the_database_changes_are_refused_and_undone(
    bench: Bench,
) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 5])
    bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])
    bench.store._db.execute("PRAGMA busy_timeout = 1")
    holder = sqlite3.connect(bench.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Refused) as caught:
        one.commit(["orders", 0, 6])
    assert caught.value.code == ErrorCode.STORAGE_ERROR
    assert "locked" in caught.value.message
    two = Client(bench, member_id="m2")
    with pytest.raises(Refused):
        two.heartbeat()
    with pytest.raises(Refused):
        bench.ask(Api.DELETE_GROUPS, groups=["tool", "tool"])
    assert bench.summary("tool")["state"] == "EMPTY"
    one.heartbeat()
    assert bench.offset("billing", "orders", 0) == 5, "what is there can be read"
    assert bench.summary("billing")["members"] == 1
    holder.execute("ROLLBACK")
    holder.close()
    assert one.commit(["orders", 0, 7]) == []
    settle(one, two)
    assert bench.offset("billing", "orders", 0) == 7
    assert len(two.partitions) == 2


def test_a_full_disk_refuses_what_grows_and_takes_it_when_there_is_room(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 5])
    (pages,) = bench.store.read("PRAGMA page_count")
    bench.store.read(f"PRAGMA max_page_count = {pages[0]}")
    big = "m" * 4_000
    with pytest.raises(Refused) as caught:
        one.commit(*([["orders", number, 6, -1, big] for number in range(4)]))
    assert caught.value.code == ErrorCode.DISK_FULL
    assert [row[:3] for row in bench.ask(Api.FETCH_OFFSETS, group="billing")["offsets"]] == [
        ["orders", 0, 5]
    ], "all of it, or nothing"
    epoch = one.epoch
    one.heartbeat()
    assert one.epoch == epoch
    bench.store.read("PRAGMA max_page_count = 100000")
    assert one.commit(["orders", 0, 6, -1, big]) == []
    assert bench.offset("billing", "orders", 0) == 6


def test_a_transaction_in_which_a_write_failed_is_never_kept_in_part(tmp_path: Path) -> None:
    store = GroupStore(str(tmp_path / "groups.db"))
    store.put_groups([GROUP])
    with pytest.raises(StorageError):
        store.write_many("INSERT INTO groups VALUES (?)", [(1,)])
    with pytest.raises(StorageError):
        store.put_groups([GROUP._replace(group_id=2, name="other")])
    with pytest.raises(StorageError):
        store.commit()
    store.rollback()
    assert store.groups("consumer") == []
    store.put_groups([GROUP])
    store.commit()
    assert store.groups("consumer") == [GROUP]
    store.close()


def test_a_number_beyond_64_bits_is_refused_and_nothing_of_its_transaction_is_kept(
    tmp_path: Path,
) -> None:
    store = GroupStore(str(tmp_path / "groups.db"))
    for use in (
        lambda: store.group(1 << 63),
        lambda: list(store.read_each("SELECT ?", (-(1 << 63) - 1,))),
        lambda: store.put_groups([GROUP, GROUP._replace(group_id=2, epoch=1 << 63)]),
    ):
        with pytest.raises(InvalidRequestError, match="64 bits"):
            use()
    with pytest.raises(InvalidRequestError, match="64 bits"):
        store.commit()
    store.rollback()
    assert store.groups("consumer") == []
    store.close()


def test_errors_of_the_database_have_codes() -> None:
    full, other = sqlite3.OperationalError("full"), sqlite3.OperationalError("locked")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    with pytest.raises(DiskFullError), store_module.refusals():
        raise full
    with pytest.raises(StorageError), store_module.refusals():
        raise other


@pytest.mark.parametrize("removed", [[""], ["-wal"], ["-shm"], ["", "-wal", "-shm"]])
def test_a_database_that_is_removed_while_it_is_in_use_is_written_again(
    bench: Bench, removed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = Client(bench)
    settle(one)
    assert one.commit(["orders", 0, 3], ["orders", 1, 4]) == []
    for suffix in removed:
        Path(f"{bench.path}{suffix}").unlink()
    assert one.commit(["orders", 0, 5]) == []
    assert ("groups_db_removed" in caplog.text) == (removed != ["-shm"])
    stored = sqlite3.connect(f"file:{bench.path}?mode=ro", uri=True)
    assert stored.execute("SELECT partition, committed FROM offsets").fetchall() == [(0, 5), (1, 4)]
    stored.close()
    assert bench.path.stat().st_mode & 0o777 == 0o600
    epoch = one.epoch
    bench.restart()
    assert one.heartbeat()["member_epoch"] == epoch
    assert (bench.offset("billing", "orders", 0), bench.offset("billing", "orders", 1)) == (5, 4)


def test_a_database_that_is_removed_while_nothing_is_committed_is_written_again_soon(
    bench: Bench,
) -> None:
    bench.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 0, 5]])
    bench.path.unlink()
    bench.wait(61)
    assert bench.path.exists()
    bench.restart()
    assert bench.offset("g", "orders", 0) == 5


def test_a_file_that_takes_the_place_of_a_database_in_use_is_left_alone_and_named(
    bench: Bench,
) -> None:
    bench.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 0, 5]])
    aside = bench.path.with_name("aside")
    bench.path.rename(aside)
    bench.path.write_bytes(b"somebody's")
    with pytest.raises(Refused, match="was replaced while it was in use") as refused:
        bench.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 0, 6]])
    assert refused.value.code == ErrorCode.STORAGE_ERROR
    assert bench.path.read_bytes() == b"somebody's"
    assert bench.offset("g", "orders", 0) == 5
    bench.path.unlink()
    bench.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 0, 7]])
    bench.restart()
    assert bench.offset("g", "orders", 0) == 7


@pytest.mark.parametrize(
    "damage",
    ["UPDATE members SET settings = '[[\"orders\"]'", "UPDATE members SET assignment = '[]'",
    "UPDATE members SET target = '7'",
     "UPDATE members SET settings = '[]'", "UPDATE groups SET detail = '{}'",
     "UPDATE groups SET detail = 'x'"],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_named_with_what_to_do(bench: Bench, damage: str) -> None:
    settle(Client(bench))
    bench.store.close()
    database = sqlite3.connect(bench.path)
    with database:
        database.execute(damage)
    database.close()
    with pytest.raises(
        StorageError, match=r"rows of the group 'billing' cannot be read.*move it away"
    ):
        bench.restart()
