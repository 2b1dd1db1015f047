"""Users and rules that a front reads in the catalog: what it finds, forgets, and closes."""

from __future__ import annotations

import os
import pathlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import zmq

from appliance.catalog.catalog import Catalog
from appliance.catalog.tables.users import add_acls, delete_user, put_user, read_acls, remove_acls
from shm.rights import stored_rights
from shm.rights.acl import Acl, checked_acl
from shm.rights.authorizer import NO_RULE, Principal
from shm.rights.passwords import fields_of
from shm.rights.scram import SHA_256, SHA_512, of_password
from shm.rights.stored_rights import RETRY_NS, RightsDatabase, StoredAcls, StoredUsers
from shm.rights.users import Key, User, check_scram

A, B = (zmq.curve_keypair()[0].decode() for _ in range(2))


class House:
    """A catalog, and the rights that a front reads in it."""

    def __init__(self, path: pathlib.Path, *, with_credentials: bool = False) -> None:
        self.path = path
        self.catalog = Catalog(str(path), 64)
        self.now_ns = 1
        self.database = RightsDatabase(str(path), lambda: self.now_ns)
        self.users = StoredUsers(self.database, with_credentials=with_credentials)
        self.acls = StoredAcls(self.database.rows)

    def put(self, user: User) -> None:
        put_user(self.catalog.database, user)

    def allow(self, principal: str, name: str, **changed: Any) -> Acl:
        fields = {
            "principal": principal, "resource_type": "topic", "name": name, "operation": "read",
            **changed,
        }  # fmt: skip
        [stored] = add_acls(self.catalog.database, [checked_acl(fields)])
        return stored

    def principal(self, user: str, *groups: str) -> Principal:
        return Principal(user, groups, "10.0.0.1", self.acls, is_admin=False)

    def close(self) -> None:
        self.catalog.close()
        self.database.close()


@pytest.fixture
def house(tmp_path: pathlib.Path) -> Iterator[House]:
    directory = tmp_path / "100% of?users#"
    directory.mkdir()
    made = House(directory / "coordinator.db")
    yield made
    made.close()


def full_user(name: str = "a") -> User:
    fields = fields_of("correct horse")
    return User(
        name, True, False, ("g", "h"), (3, 7), (Key("k", A, 1), Key("l", B, 2, 99)), 5,
        fields["password_hash"], check_scram(fields["scram_credentials"]),
    )  # fmt: skip


@pytest.mark.parametrize("with_credentials", [False, True])
def test_a_user_is_found_by_name_key_and_account(
    tmp_path: pathlib.Path, with_credentials: bool
) -> None:
    house = House(tmp_path / "coordinator.db", with_credentials=with_credentials)
    user = full_user()
    house.put(user)
    expected = user if with_credentials else user._replace(password_hash="", scram=())
    assert house.users.by_key(B) == (expected, expected.keys[1])
    assert house.users.by_account(7) == expected
    assert house.users.get("a") == expected
    assert house.users.get("b") is None
    assert house.users.by_key("x" * 40) is None
    assert house.users.by_account(8) is None
    house.close()


def test_a_change_is_found_once_it_is_published(house: House) -> None:
    house.put(User("a", keys=(Key("k", A, 1),)))
    assert house.users.by_key(A) is not None
    changed = User("a", keys=(Key("k", B, 1),))
    house.put(changed)
    house.users.put(changed)
    assert house.users.by_key(A) is None
    assert house.users.by_key(B) == (changed, changed.keys[0])
    delete_user(house.catalog.database, "a")
    house.users.remove("a")
    assert house.users.by_key(B) is None
    assert house.users.get("a") is None
    house.put(User("a"))
    house.users.put(User("a"))
    assert house.users.get("a") == User("a")


def test_a_key_that_another_user_has_now_is_the_other_users(house: House) -> None:
    """Also between the two changes, of which the second one is not published yet."""
    house.put(User("a", keys=(Key("k", A, 1),)))
    house.put(User("b"))
    assert house.users.by_key(A) is not None
    assert house.users.get("b") is not None
    house.put(User("a"))
    house.users.put(User("a"))
    moved = User("b", keys=(Key("k", A, 2),))
    house.put(moved)
    assert house.users.by_key(A) == (moved, moved.keys[0])


def test_rules_decide_as_they_are_on_the_disk(house: House) -> None:
    house.allow("User:a", "t")
    house.allow("Group:g", "p.", pattern="prefixed")
    house.allow("User:*", "open")
    house.allow("User:a", "p.closed", permission="deny")
    user = house.principal("a", "g")
    assert [user.may("read", "topic", name) for name in ("t", "p.x", "open", "p.closed", "u")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert user.may_any("read", "topic")
    assert not user.may_any("write", "topic")
    assert not house.principal("b").may("read", "topic", "t")


def test_a_changed_rule_decides_with_the_next_decision(house: House) -> None:
    user = house.principal("a")
    assert not user.may("read", "topic", "t")
    rule = house.allow("User:a", "t")
    house.acls.add(rule)
    user.forget_decisions()
    assert user.may("read", "topic", "t")
    remove_acls(house.catalog.database, [rule.number])
    house.acls.remove(rule.number)
    house.acls.remove(999)
    user.forget_decisions()
    assert not user.may("read", "topic", "t")


def test_what_is_remembered_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rights, "USERS_KEPT", 3)
    monkeypatch.setattr(stored_rights, "PRINCIPALS_KEPT", 3)
    for number in range(20):
        house.put(User(f"u{number}", accounts=(number,)))
        house.allow(f"User:u{number}", "t")
    for _ in range(2):
        for number in range(20):
            assert house.users.by_account(number) is not None
            assert house.principal(f"u{number}").may("read", "topic", "t")
            assert len(house.users) <= 3
            assert len(house.acls) <= 3


def damage(house: House) -> None:
    house.catalog.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(house.path, "r+b") as file:
        file.write(b"x" * os.path.getsize(house.path))


def test_a_database_that_cannot_be_read_closes_and_opens_again(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.put(User("a", keys=(Key("k", A, 1),)))
    house.put(User("b", accounts=(7,)))
    house.allow("User:a", "t")
    house.allow("Group:g", "t", permission="deny")
    assert house.users.by_key(A) is not None
    reader, outsider = house.principal("a"), house.principal("a", "g")
    assert reader.may("read", "topic", "t")
    content = house.path.parent / "kept.db"
    house.catalog.database.execute(f"VACUUM INTO '{content}'")
    house.database.close()
    damage(house)
    assert house.users.get("a") is not None, "read before"
    assert reader.may("read", "topic", "t")
    for _ in range(2):
        assert house.users.by_account(7) is None
        assert house.users.get("b") is None
        assert house.users.is_unread
        assert not outsider.may("read", "topic", "t"), "a denial may be among what cannot be read"
        assert not outsider.may_any("read", "topic")
        assert outsider.decide("read", "topic", "t") == NO_RULE
        house.now_ns += RETRY_NS
    assert caplog.text.count("rights_unread") == 1
    assert outsider._decisions == {}
    assert house.users.get("b") is None
    os.replace(content, house.path)
    for name in ("-wal", "-shm"):
        pathlib.Path(f"{house.path}{name}").unlink(missing_ok=True)
    assert house.users.by_account(7) is None, "it is left alone for a while"
    house.now_ns += RETRY_NS
    assert house.users.by_account(7) is not None
    assert not house.users.is_unread
    assert not outsider.may("read", "topic", "t")
    assert outsider._decisions != {}


def test_a_missing_database_is_not_made(tmp_path: pathlib.Path) -> None:
    users = StoredUsers(RightsDatabase(str(tmp_path / "none.db")), with_credentials=False)
    assert users.by_key(A) is None
    assert users.is_unread
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_user_is_let_in_no_more_and_a_damaged_rule_denies(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        house.put(User(name, groups=("g",)))
        house.allow(f"User:{name}", "t")
    database = house.catalog.database
    database.execute("UPDATE users SET user_groups = '[\"g' WHERE name = 'a'")
    database.execute("UPDATE acls SET operation = 'wr' WHERE principal = 'User:b'")
    assert [house.users.get(name).is_disabled for name in ("a", "b", "c")] == [  # type: ignore[union-attr]
        True, False, False,
    ]  # fmt: skip
    assert not house.principal("b").may("read", "topic", "t")
    assert house.principal("b").decide("read", "topic", "t").acl is not None
    assert house.principal("c").may("read", "topic", "t")
    assert "user_damaged user='a'" in caplog.text
    assert "acl_damaged number=2" in caplog.text


def test_readers_keep_no_transaction_that_the_controllers_checkpoint_waits_for(
    house: House,
) -> None:
    house.put(User("a", keys=(Key("k", A, 1),)))
    house.allow("User:a", "t")
    for _ in range(3):
        house.users.remove("a")
        assert house.users.by_key(A) is not None
        assert house.principal("a").may("read", "topic", "t")
        house.put(User("b"))
        [(busy, *_)] = house.catalog.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert busy == 0


def test_a_change_does_not_wait_for_a_reader_that_stands_still(house: House) -> None:
    """A front can be stopped in the middle of a query."""
    house.put(User("a"))
    other = sqlite3.connect(stored_rights.read_only(str(house.path)), uri=True)
    cursor = other.execute("SELECT name FROM users UNION ALL SELECT name FROM acls")
    house.put(User("b"))
    house.allow("User:a", "t")
    assert house.users.get("b") is not None
    cursor.close()
    other.close()


def test_the_shapes_of_credentials_are_counted_at_most_a_tenth_of_the_time(
    tmp_path: pathlib.Path,
) -> None:
    house = House(tmp_path / "coordinator.db", with_credentials=True)
    assert house.users.scram_shapes(SHA_256) == {}
    user = full_user()
    house.put(user)
    house.users.put(user)
    [(shape, count)] = house.users.scram_shapes(SHA_256).items()
    assert (shape, count) == (user.scram[0].shape, 1)
    assert list(house.users.scram_shapes(SHA_512)) == [shape]
    ticks = iter(range(10, 10**9, 1_000))
    house.database.monotonic_ns = lambda: next(ticks)
    strange = User("b", scram=(of_password(SHA_256, "x", salt=b"abc", iterations=4_096),))
    house.put(strange)
    house.users.put(strange)
    assert len(house.users.scram_shapes(SHA_256)) == 2
    house.put(strange._replace(scram=()))
    house.users.put(strange)
    counts = [len(house.users.scram_shapes(SHA_256)) for _ in range(12)]
    assert counts[0] == 2, "not counted again at once"
    assert counts[-1] == 1
    house.close()


def test_decisions_are_those_of_all_rules_in_memory(house: House) -> None:
    for number in range(30):
        house.allow(
            f"User:u{number % 3}", f"t{number % 7}", operation=("read", "write", "all")[number % 3],
            permission="deny" if number % 11 == 0 else "allow",
            pattern="prefixed" if number % 4 == 0 else "literal",
        )  # fmt: skip
    from shm.rights.authorizer import AclTable

    table = AclTable()
    table.add_all(read_acls(house.catalog.database))
    for user in ("u0", "u1", "u2", "u3"):
        for operation in ("read", "write", "describe"):
            for name in (f"t{number}" for number in range(8)):
                asked = (f"User:{user}",), "h", operation, "topic", name
                assert house.acls.decide(*asked) == table.decide(*asked)


def test_a_feed_of_the_controller_opens_as_it_is(house: House) -> None:
    from appliance.control.users.user_commands import UserCommands
    from netfront.access.gate import Gate
    from netfront.socket.zap import Claim

    house.put(User("a", accounts=(7,)))
    commands = UserCommands(house.catalog, lambda _plain, _other: None, lambda: 0)
    gate = Gate(B, lambda: 0)
    gate.on_rights(commands.feed(), True)
    gate.on_fed()
    assert gate.admit(Claim(b"", 7, "")).user == "a"
    assert orjson.loads(commands.feed())["catalog"] == str(house.path)
