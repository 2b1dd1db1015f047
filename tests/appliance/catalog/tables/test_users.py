"""Users and ACLs in the catalog, and the controller's commands for them."""

from __future__ import annotations

import os
import pathlib
import pwd
import sqlite3
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import zmq

from appliance.catalog.catalog import Catalog
from appliance.catalog.tables.users import count_users, read_acls, read_users
from appliance.control.users.offline_users import offline_users
from appliance.control.users.user_commands import PAGE, UserCommands
from appliance.data.data_dir_lock import take
from appliance.data.directory_errors import DataDirectoryError
from shm.rights.passwords import fields_of
from shm.rights.scram import SHA_256, SHA_512, of_password
from shm.rights.server_keys import (
    AnnouncedKeys,
    KeysUnusableError,
    begin_rotation,
    ensure_keys,
    finish_rotation,
    forget_former,
    own_public_key,
    public_keys,
    read_server_key,
)
from shm.rights.users import user_of
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.format.directory import change_lock
from tailrace.format.directory.change_lock import changing
from tailrace.protocol.frame import Api

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
HASH = "$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21l$RdescudvJCsgt3ub+b4dWRWJTmaaJObG"


def key() -> str:
    return zmq.curve_keypair()[0].decode()


class Bench:
    """Commands on a catalog, with what they publish."""

    def __init__(self, path: pathlib.Path) -> None:
        self.catalog = Catalog(str(path), 64)
        self.published: list[dict[str, Any]] = []
        self.to_gateways: list[dict[str, Any]] = []
        self.commands = UserCommands(self.catalog, self._publish, lambda: 77)

    def _publish(self, change: bytes, with_credentials: bytes) -> None:
        self.published.append(orjson.loads(change))
        self.to_gateways.append(orjson.loads(with_credentials))

    def ask(self, api: Api, **request: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        errors: list[TailraceError] = []
        answer = self.commands.take(api, request, answers.append, errors.append)
        assert not errors
        return answers[0] if answer is None else answer

    def alter(self, user: str, action: str, **fields: Any) -> dict[str, Any]:
        return self.ask(Api.ALTER_USERS, user=user, action=action, **fields)

    def names(self) -> list[str]:
        return [user["name"] for user in self.ask(Api.LIST_USERS)["users"]]


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "coordinator.db")
    yield made
    made.catalog.close()


def acl(user: str, name: str, **changed: Any) -> dict[str, Any]:
    return {
        "principal": f"User:{user}", "resource_type": "topic", "name": name, "operation": "read",
        **changed,
    }  # fmt: skip


def test_a_user_is_added_changed_and_deleted(bench: Bench) -> None:
    first, second = key(), key()
    me = pwd.getpwuid(os.getuid()).pw_name
    bench.alter(
        "a", "add", keys=[{"name": "k", "public": first}], groups=["g"], accounts=[me, 7],
        password_hash=HASH,
    )  # fmt: skip
    assert not bench.catalog.has_users() or bench.names() == ["a"]
    [shown] = bench.ask(Api.LIST_USERS, name="a")["users"]
    assert shown["accounts"] == sorted([os.getuid(), 7])
    assert shown["has_password"]
    assert "argon2" not in repr([shown, bench.published])
    bench.alter("a", "add_key", key={"name": "l", "public": second}, others_expire_us=500)
    keys = bench.ask(Api.LIST_USERS, name="a")["users"][0]["keys"]
    assert [found["expires_us"] for found in keys] == [500, 0]
    bench.alter("a", "remove_key", key_name="k")
    bench.alter("a", "disable")
    bench.alter("a", "set", admin=True, groups=[], password_hash=None)
    shown = bench.alter("a", "enable")["user"]
    assert (shown["admin"], shown["disabled"], shown["groups"]) == (True, False, [])
    assert not shown["has_password"]
    bench.alter("a", "delete", force=True)
    assert bench.names() == []
    assert bench.published[-1] == {"removed_users": ["a"]}


def test_a_repeated_addition_succeeds_and_another_one_of_its_name_is_refused(bench: Bench) -> None:
    public = key()
    fields = {"keys": [{"name": "k", "public": public}], "groups": ["g"]}
    assert bench.alter("a", "add", **fields) == bench.alter("a", "add", **fields)
    assert len(bench.published) == 1
    with pytest.raises(InvalidRequestError, match="there is a user a already"):
        bench.alter("a", "add", keys=[{"name": "k", "public": key()}])


def test_a_key_belongs_to_one_user(bench: Bench) -> None:
    public = key()
    bench.alter("a", "add", keys=[{"name": "k", "public": public}], accounts=[7])
    for fields in ({"keys": [{"name": "x", "public": public}]}, {"accounts": [7]}):
        with pytest.raises(InvalidRequestError, match="belongs to another user"):
            bench.alter("b", "add", **fields)
    assert bench.names() == ["a"]
    bench.alter("b", "add")
    with pytest.raises(InvalidRequestError, match="belongs to another user"):
        bench.alter("b", "add_key", key={"name": "x", "public": public})
    assert bench.ask(Api.LIST_USERS, name="b")["users"][0]["keys"] == []


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("fly", {}), (None, {}), ("disable", {}), ("delete", {}), ("add", {"groups": "g"}),
        ("add", {"keys": [7]}), ("add", {"keys": [{"name": "k", "public": "x"}]}),
        ("add", {"admin": 1}), ("add", {"accounts": ["no such account here"]}),
        ("add", {"accounts": [True]}), ("add", {"accounts": [-1]}),
        ("add", {"password_hash": "secret"}), ("set", {"admin": None}),
        ("remove_key", {"key_name": "k"}), ("add_key", {"key": None}),
        ("add_key", {"key": {"name": "k", "public": "0" * 40, "expires_us": -1}}),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_and_changes_nothing(
    bench: Bench, action: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        bench.alter("a", action, **fields)
    assert bench.names() == []
    assert bench.published == []


def test_users_and_rules_come_in_pages(bench: Bench) -> None:
    for number in range(PAGE + 5):
        bench.alter(f"u{number:04}", "add")
    page = bench.ask(Api.LIST_USERS)
    rest = bench.ask(Api.LIST_USERS, after=page["next"])
    assert len(page["users"]) == PAGE
    assert [user["name"] for user in rest["users"]][-1] == f"u{PAGE + 4:04}"
    assert rest["next"] is None
    bench.ask(Api.ALTER_ACLS, add=[acl("a", f"t{number}") for number in range(PAGE + 5)])
    page = bench.ask(Api.LIST_ACLS)
    assert len(page["acls"]) + len(bench.ask(Api.LIST_ACLS, after=page["next"])["acls"]) == PAGE + 5


@pytest.mark.parametrize("after", [1 << 63, -1, True, "1"])
def test_a_page_behind_what_is_no_number_of_a_rule_is_refused(bench: Bench, after: Any) -> None:
    with pytest.raises(InvalidRequestError, match="number of an ACL"):
        bench.ask(Api.LIST_ACLS, after=after)
    with pytest.raises(InvalidRequestError, match="64 bits"):
        read_acls(bench.catalog.database, after=1 << 63)


def test_rules_are_added_once_found_and_removed_by_their_fields(bench: Bench) -> None:
    added = bench.ask(Api.ALTER_ACLS, add=[acl("a", "t"), acl("a", "u"), acl("b", "t")])["added"]
    again = bench.ask(Api.ALTER_ACLS, add=[acl("a", "t")])["added"]
    assert again == added[:1]
    found = bench.ask(Api.LIST_ACLS, filter={"principal": "User:a"})["acls"]
    assert found == added[:2]
    removed = bench.ask(Api.ALTER_ACLS, remove=[{"principal": "User:a", "name": "t"}])["removed"]
    assert removed == added[:1]
    new = bench.ask(Api.ALTER_ACLS, add=[acl("a", "t")], remove=[{"number": added[1]["number"]}])
    assert new["added"][0]["number"] > max(each["number"] for each in added), "never again"
    assert [each["name"] for each in bench.ask(Api.LIST_ACLS)["acls"]] == ["t", "t"]


@pytest.mark.parametrize(
    "request_body",
    [
        {}, {"add": [], "remove": []}, {"remove": [{}]}, {"remove": [{"color": "red"}]},
        {"add": [acl("a", "t"), acl("a", "")]}, {"add": "x"}, {"add": [acl("a", "t")] * 1001},
        {"remove": [None]}, {"remove": [{"name": []}]},
    ],
)  # fmt: skip
def test_rules_are_changed_all_or_not_at_all(bench: Bench, request_body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        bench.ask(Api.ALTER_ACLS, **request_body)
    assert bench.ask(Api.LIST_ACLS)["acls"] == []


def test_a_test_names_the_rule_that_decides(bench: Bench) -> None:
    bench.alter("a", "add")
    [first] = bench.ask(Api.ALTER_ACLS, add=[acl("a", "t")])["added"]
    asked = {"principal": "User:a", "operation": "describe", "resource_type": "topic", "name": "t"}
    assert bench.ask(Api.TEST_ACL, **asked)["acl"] == first
    bench.ask(Api.ALTER_ACLS, add=[acl("*", "*", operation="all", permission="deny")])
    found = bench.ask(Api.TEST_ACL, **asked)
    assert (found["allowed"], found["reason"]) == (
        False, "ACL 2: User:* may not all topic of any name"
    )  # fmt: skip
    bench.alter("a", "set", admin=True)
    assert bench.ask(Api.TEST_ACL, **asked)["reason"] == "a is an administrator"
    bench.alter("a", "disable")
    assert bench.ask(Api.TEST_ACL, **asked) == {
        "allowed": False, "reason": "a is disabled", "acl": None
    }  # fmt: skip
    for wrong in ({"principal": "Group:g"}, {"principal": "User:*"}, {"principal": "User:zoe"}):
        with pytest.raises(InvalidRequestError):
            bench.ask(Api.TEST_ACL, **{**asked, **wrong})


def test_a_feed_names_the_catalog_however_many_users_there_are(
    bench: Bench, tmp_path: pathlib.Path
) -> None:
    for number in range(50):
        bench.alter(f"u{number}", "add", keys=[{"name": "k", "public": key()}])
    fed = orjson.loads(bench.commands.feed())
    assert fed == {"catalog": str(tmp_path / "coordinator.db"), "credentials": False}
    assert orjson.loads(bench.commands.feed(with_credentials=True))["credentials"]


def test_the_first_administrator_is_made_once_and_comes_back_with_its_context(
    bench: Bench, tmp_path: pathlib.Path
) -> None:
    ensure_keys(str(tmp_path), "tcp://0.0.0.0:7420")
    bench.commands.ensure_administrator(str(tmp_path), "tcp://0.0.0.0:7420")
    [admin] = read_users(bench.catalog.database)
    content = orjson.loads((tmp_path / "admin.context").read_bytes())
    assert content["bootstrap"] == "tcp://127.0.0.1:7420"
    assert content["public_key"] == admin.keys[0].public
    assert admin.is_admin
    bench.commands.ensure_administrator(str(tmp_path), "tcp://0.0.0.0:7420")
    assert count_users(bench.catalog.database) == 1
    bench.alter("admin", "delete", force=True)  # as if the catalog were lost
    bench.commands.ensure_administrator(str(tmp_path), "tcp://0.0.0.0:7420")
    [again] = read_users(bench.catalog.database)
    assert again.keys[0].public == admin.keys[0].public


def test_a_catalog_from_before_users_gets_their_tables(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    old.executescript((GOLDEN / "catalog_v3.sql").read_text())
    old.close()
    bench = Bench(path)
    assert not bench.catalog.has_users()
    bench.alter("a", "add")
    assert bench.catalog.has_users()
    bench.catalog.close()
    again = Bench(path)
    assert again.names() == ["a"]
    again.catalog.close()


def test_users_from_before_scram_credentials_keep_their_keys_and_get_credentials(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    old.executescript((GOLDEN / "catalog_v8.sql").read_text())
    old.close()
    bench = Bench(path)
    [a, b] = read_users(bench.catalog.database)
    assert (a.keys[0].name, a.accounts, a.password_hash, a.scram) == ("k", (1000,), HASH, ())
    assert b.is_disabled
    assert len(read_acls(bench.catalog.database)) == 1
    bench.alter("a", "set", scram_credentials=[of_password(SHA_256, "correct horse").fields()])
    bench.catalog.close()
    again = Bench(path)
    [a, _] = read_users(again.catalog.database)
    assert [each.mechanism for each in a.scram] == [SHA_256]
    again.catalog.close()


def test_gateways_alone_get_what_proves_a_password(bench: Bench) -> None:
    fields = fields_of("correct horse")
    shown = bench.alter("a", "add", **fields)["user"]
    assert shown["has_password"]
    assert set(shown["scram"]) == {SHA_256, SHA_512}
    [stored] = read_users(bench.catalog.database)
    for plain in (bench.published, shown):
        assert "argon2" not in repr(plain)
        assert "stored_key" not in repr(plain)
    assert bench.alter("a", "add", **fields)["user"] == shown, "a repeated request"
    [message] = [message for message in bench.to_gateways if "users" in message]
    assert user_of(message["users"][0]) == stored
    bench.alter("a", "set", password_hash=None, scram_credentials=[])
    [stored] = read_users(bench.catalog.database)
    assert (stored.password_hash, stored.scram) == ("", ())
    with pytest.raises(InvalidRequestError, match="iterations"):
        bench.alter("a", "set", scram_credentials=[{"mechanism": SHA_256}])


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("delete", {}), ("disable", {}), ("set", {"admin": False}), ("set", {"password_hash": ""}),
        ("remove_key", {"key_name": "k"}),
    ],
)  # fmt: skip
def test_the_last_administrator_stays_unless_the_request_forces_it(
    bench: Bench, action: str, fields: dict[str, Any]
) -> None:
    """One who is disabled, whose key has expired or who has no credential is none."""
    credential = (
        {"password_hash": HASH}
        if "password_hash" in fields
        else {"keys": [{"name": "k", "public": key()}]}
    )
    fields = {"password_hash": None} if "password_hash" in fields else fields
    bench.alter("last", "add", admin=True, **credential)
    bench.alter("off", "add", admin=True, accounts=[7])
    bench.alter("off", "disable")
    late = {"name": "k", "public": key(), "expires_us": 76}
    bench.alter("expired", "add", admin=True, keys=[late])
    bench.alter("bare", "add", admin=True)
    bench.alter("plain", "add", accounts=[8])
    before, count = bench.ask(Api.LIST_USERS), len(bench.published)
    with pytest.raises(InvalidRequestError, match="last is the last administrator"):
        bench.alter("last", action, **fields)
    with pytest.raises(InvalidRequestError, match="force must be"):
        bench.alter("last", action, force=1, **fields)
    assert (bench.ask(Api.LIST_USERS), len(bench.published)) == (before, count)
    bench.alter("last", action, force=True, **fields)
    assert bench.ask(Api.LIST_USERS) != before
    bench.alter("off", "enable")
    bench.alter("bare", "delete")


def test_an_administrator_beside_another_one_goes_without_force(bench: Bench) -> None:
    for name, account in (("a", 7), ("b", 8)):
        bench.alter(name, "add", admin=True, accounts=[account])
    bench.alter("a", "delete")
    with pytest.raises(InvalidRequestError, match="--force"):
        bench.alter("b", "delete")
    assert bench.names() == ["b"]


# ---- files ---------------------------------------------------------------------------------------


def test_users_of_a_directory_that_nobody_serves_are_changed_offline(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(DataDirectoryError, match=r"no coordinator\.db"):
        offline_users(str(tmp_path)).__enter__()
    for fd in take(str(tmp_path)).lock_fds:  # makes its identity
        os.close(fd)
    Bench(tmp_path / "coordinator.db").catalog.close()
    with offline_users(str(tmp_path)) as users:
        users.add_user("a", public_key=key(), admin=True)
        users.add_acls([acl("a", "t")])
        assert [user["name"] for user in users.list_users()] == ["a"]
        with pytest.raises(InvalidRequestError):
            users.delete_user("b")
        with pytest.raises(DataDirectoryError):
            take(str(tmp_path))
    opened = Bench(tmp_path / "coordinator.db")
    assert len(read_acls(opened.catalog.database)) == 1
    opened.catalog.close()


def test_keys_are_kept_and_damage_is_refused(tmp_path: pathlib.Path) -> None:
    directory = str(tmp_path)
    ensure_keys(directory, "tcp://127.0.0.1:1")
    server, own = read_server_key(directory), own_public_key(directory)
    ensure_keys(directory, "tcp://127.0.0.1:1")
    assert (read_server_key(directory), own_public_key(directory)) == (server, own)
    assert server.secret not in repr(server)
    (tmp_path / "own.context").unlink()
    ensure_keys(directory, "tcp://127.0.0.1:1")
    assert own_public_key(directory) != own
    path = tmp_path / "server.key"
    data = path.read_bytes()
    for damaged in (
        b"",
        data[:-1],
        data.replace(b"public", b"puplic"),
        data[:40] + b"0" + data[41:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(KeysUnusableError, match="is damaged"):
            ensure_keys(directory, "tcp://127.0.0.1:1")
    path.write_bytes(data)
    path.chmod(0o640)
    with pytest.raises(KeysUnusableError, match="chmod 600"):
        read_server_key(directory)


def test_the_former_server_key_is_told_until_the_next_rotation_or_it_is_forgotten(
    tmp_path: pathlib.Path,
) -> None:
    directory = str(tmp_path)
    ensure_keys(directory, "tcp://127.0.0.1:1")
    first = read_server_key(directory).public
    running = AnnouncedKeys(directory, first)
    second = begin_rotation(directory).public
    assert running() == public_keys(directory) == [first, second]
    assert finish_rotation(directory).public == second
    restarted = AnnouncedKeys(directory, second)
    assert running() == restarted() == public_keys(directory) == [second, first]
    own = orjson.loads((tmp_path / "own.context").read_bytes())
    assert own["server_keys"] == [second, first]
    third = begin_rotation(directory).public
    assert restarted() == [second, third, first]
    finish_rotation(directory)
    assert restarted() == [third, second]
    assert running() == [third, second, first], "a front tells its own one"
    assert forget_former(directory).public == third
    assert public_keys(directory) == [third]
    with pytest.raises(ValueError, match="no former key"):
        forget_former(directory)


def test_keys_are_changed_by_their_owner_alone_and_one_change_at_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(tmp_path)
    ensure_keys(directory, "tcp://127.0.0.1:1")
    before = (tmp_path / "server.key").read_bytes()
    with changing(str(tmp_path / "server.key")):
        monkeypatch.setattr(change_lock, "_RETRY_S", 0.0)
        clock = iter(range(100))
        monkeypatch.setattr(
            change_lock,
            "time",
            SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None),
        )
        with pytest.raises(TimeoutError, match="another process changes"):
            begin_rotation(directory)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"belongs to the account {owner}"):
        begin_rotation(directory)
    assert (tmp_path / "server.key").read_bytes() == before
