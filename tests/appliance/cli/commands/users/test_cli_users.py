"""`tailrace user`, `acl` and `server-key`, as an administrator uses them."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import stat
import sys
from collections.abc import Iterator
from typing import Any

import click
import orjson
import pytest

from appliance.cli.commands.users.common import given_password
from shm.rights.server_keys import ensure_keys
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.secured import Place, Users, admin_address, secured, server_key
from tests.kit.cli import run


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("cli")) as found:
        found.admin.create_topics(NewTopic("shop.orders"))
        yield found


def text(users: Users, *arguments: str, status: int = 0) -> str:
    done = run(Place(admin_address(users.appliance)), *arguments, status=status)  # type: ignore[arg-type]
    return (done.stdout + done.stderr).decode()


def json(users: Users, *arguments: str) -> Any:
    done = run(Place(admin_address(users.appliance)), *arguments, "--json")  # type: ignore[arg-type]
    return orjson.loads(done.stdout)


def test_a_user_with_a_role_gets_a_context_that_works(users: Users, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "shop.context"
    told = text(
        users, "user", "add", "shop", "--role", "producer", "--topic", "shop.", "--prefix",
        "--out", str(out),
    )  # fmt: skip
    assert "added shop" in told
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    content = orjson.loads(out.read_bytes())
    assert content["secret_key"] not in told
    assert content["server_keys"] == [server_key(users.appliance)]
    with Admin(f"context:{out}") as admin:
        assert admin.list_topics() == ["shop.orders"]
    assert text(users, "acl", "test", "User:shop", "write", "topic:shop.orders") == (
        f"yes: ACL {json(users, 'acl', 'list', '--principal', 'User:shop')[0]['number']}: "
        "User:shop may write topic 'shop.'...\n"
    )
    assert "no: no ACL" in text(
        users, "acl", "test", "User:shop", "read", "topic:shop.orders", status=1
    )
    assert "exists already" in text(users, "user", "add", "other", "--out", str(out), status=1)
    again = tmp_path / "again.context"
    told = text(users, "user", "rotate", "shop", "--out", str(again), "--overlap", "1d")
    assert "the others expire in 1d\n" in told
    [found] = json(users, "user", "list", "shop")
    assert [key["expires_us"] > 0 for key in found["keys"]] == [True, False]
    with Admin(f"context:{out}") as old, Admin(f"context:{again}") as new:
        assert old.list_topics() == new.list_topics() == ["shop.orders"]
    text(users, "user", "remove-key", "shop", "first")
    text(users, "user", "disable", "shop")
    assert "disabled" in text(users, "user", "list")
    text(users, "user", "enable", "shop")
    assert "ACLs" in text(users, "user", "delete", "shop", "--acls")
    assert json(users, "acl", "list", "--principal", "User:shop") == []


def test_a_password_comes_from_a_file_and_is_stored_as_its_proofs(
    users: Users, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "password"
    path.write_text("correct horse\nmore\n")
    told = text(users, "user", "add", "legacy", "--password-file", str(path))
    assert "correct" not in told
    [found] = json(users, "user", "list", "legacy")
    assert (found["has_password"], found["keys"]) == (True, [])
    assert found["scram"] == {"SCRAM-SHA-256": 8192, "SCRAM-SHA-512": 8192}
    text(users, "user", "passwd", "legacy", "--remove")
    [found] = json(users, "user", "list", "legacy")
    assert (found["has_password"], found["scram"]) == (False, {})
    told = text(users, "user", "passwd", "legacy", "--password-file", str(path))
    assert told == "legacy has a new password\n"
    path.write_text("short\n")
    refused = text(users, "user", "passwd", "legacy", "--password-file", str(path), status=1)
    assert "8 to 256 printable characters" in refused
    missing = str(tmp_path / "missing")
    assert "cannot be read" in text(
        users, "user", "passwd", "legacy", "--password-file", missing, status=1
    )
    text(users, "user", "passwd", "legacy", "--password-file", "x", "--password-stdin", status=2)
    [found] = json(users, "user", "list", "legacy")
    assert found["has_password"], "a refused change has changed nothing"


def test_a_user_whom_another_authority_proves_needs_no_key_here(users: Users) -> None:
    refused = text(users, "user", "add", "robot", status=2)
    assert "--external" in refused
    told = text(
        users, "user", "add", "robot", "--external", "--role", "producer", "--topic", "made"
    )
    assert "added robot" in told
    [found] = json(users, "user", "list", "robot")
    assert (found["has_password"], found["keys"]) == (False, [])


def test_rules_are_removed_by_the_options_that_added_them(users: Users) -> None:
    who = ("--principal", "User:twin")
    for options in (
        ("--producer", "--topic", "a"), ("--consumer", "--topic", "a", "--group", "g"),
        ("--operation", "read", "--operation", "write", "--topic", "b", "--topic", "c"),
        ("--operation", "describe", "--cluster"),
        ("--operation", "read", "--topic", "d.", "--prefix", "--deny"),
    ):  # fmt: skip
        added = json(users, "acl", "add", *who, *options)
        shown = json(users, "acl", "list", *who)
        kept = json(users, "acl", "remove", *who, *options)
        assert sorted(acl["number"] for acl in kept) == sorted(acl["number"] for acl in added)
        assert len(json(users, "acl", "list", *who)) == len(shown) - len(added)
    text(users, "acl", "remove", "--producer", "--topic", "a", status=2)
    refused = text(users, "acl", "remove", *who, "--producer", "--topic", "a", status=1)
    assert "none was removed; see tailrace acl list" in refused


def test_a_password_is_not_asked_for_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(*_arguments: object) -> int:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    monkeypatch.setattr(os, "open", no_terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(click.UsageError, match="--password-stdin"):
        given_password(True, None, False)


def test_rules_are_added_listed_and_removed(users: Users) -> None:
    text(users, "user", "add", "bill", "--account", "54321")
    text(
        users, "acl", "add", "--principal", "User:bill", "--consumer", "--topic", "a",
        "--group", "g", "--retries",
    )  # fmt: skip
    text(
        users, "acl", "add", "--principal", "User:bill", "--operation", "describe", "--cluster",
        "--topic", "*", "--deny", "--host", "10.0.0.9",
    )  # fmt: skip
    found = json(users, "acl", "list", "--principal", "User:bill")
    assert {(acl["operation"], acl["permission"]) for acl in found} >= {
        ("read", "allow"), ("describe", "deny"), ("create", "allow"),
    }  # fmt: skip
    text(users, "acl", "remove", "--number", str(found[0]["number"]))
    assert "removed" in text(users, "acl", "remove", "--principal", "User:bill")
    for arguments in (
        ("acl", "add", "--principal", "User:bill", "--topic", "a"),
        ("acl", "add", "--principal", "User:bill", "--operation", "read"),
        ("acl", "add", "--principal", "User:bill", "--producer"),
        ("acl", "remove"), ("acl", "test", "User:bill", "read", "orders"),
        ("user", "add", "x"), ("user", "add", "x", "--account", "1", "--role", "producer"),
    ):  # fmt: skip
        text(users, *arguments, status=2)


def test_rules_that_outlive_their_user_are_named_when_it_goes_and_when_it_comes_again(
    users: Users,
) -> None:
    add = ("user", "add", "heir", "--account", "54322")
    assert "may do nothing yet" in text(users, *add)
    text(
        users, "acl", "add", "--principal", "User:heir", "--operation", "read", "--topic", "a",
        "--topic", "b",
    )  # fmt: skip
    told = text(users, "user", "delete", "heir")
    assert "2 ACLs that name it stay" in told
    assert "--acls" in told
    told = text(users, *add)
    assert "heir has 2 ACLs that name it already" in told
    assert "may do nothing" not in told
    assert text(users, "user", "delete", "heir", "--acls") == "deleted heir and 2 ACLs\n"


def test_the_last_administrator_is_deleted_by_force_alone_and_is_told_the_way_back(
    tmp_path: pathlib.Path,
) -> None:
    directory = str(tmp_path / "data")
    appliance = start_embedded(data_dir=directory, settings={"security.enabled": "true"})
    try:
        own = Place(admin_address(appliance))
        for arguments in (("delete",), ("disable",), ("set", "--no-admin")):
            refused = run(own, "user", arguments[0], "admin", *arguments[1:], status=1)  # type: ignore[arg-type]
            assert b"last administrator" in refused.stderr
        gone = run(own, "user", "delete", "admin", "--force")  # type: ignore[arg-type]
        assert b"deleted admin" in gone.stderr
        out = str(tmp_path / "a.context")
        run(None, "user", "add", "a", "--role", "admin", "--out", out, "--data-dir", directory)
        with Admin(f"context:{out}#{appliance.address}") as admin:
            assert [user["name"] for user in admin.list_users()] == ["a"]
    finally:
        appliance.stop()


def test_a_token_and_server_keys_are_the_standard_output(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    place = ("--data-dir", str(directory))
    ensure_keys(str(directory), "tcp://127.0.0.1:7420")
    (directory / "coordinator.db").touch()
    refused = run(None, "token", "list", "--data-dir", str(tmp_path / "none"), status=2)
    assert b"there is no directory" in refused.stderr
    token = run(None, "token", "add", "prometheus", *place)
    assert len(token.stdout.split()) == 1
    assert token.stderr == b""
    [first] = run(None, "server-key", "show", *place).stdout.split()
    [following] = run(None, "server-key", "rotate", *place).stdout.split()
    assert run(None, "server-key", "show", *place).stdout.split() == [first, following]
    assert run(None, "server-key", "finish", *place).stdout.split() == [following]


def test_an_address_that_is_the_file_of_a_context_is_told_how_to_be_written() -> None:
    refused = run(None, "user", "list", "--bootstrap", "billing.context", status=1)
    assert b"or context:billing.context" in refused.stderr


def test_the_server_key_is_shown(users: Users) -> None:
    key = server_key(users.appliance)
    assert text(users, "server-key", "show").strip() == key
    shown = text(users, "server-key", "show", "--data-dir", users.appliance.data_dir)
    assert shown.strip() == key


def test_a_context_is_kept_under_a_name(
    users: Users, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = users.add("named", "describe topic shop.").removeprefix("context:")
    text(users, "context", "add", "prod", path, "--use")
    shown = text(users, "context", "list", "--json") + text(users, "context", "show")
    assert "named" in shown
    assert orjson.loads(pathlib.Path(path).read_bytes())["secret_key"] not in shown
    with Admin.from_context("prod") as admin:
        assert admin.list_topics() == ["shop.orders"]


def test_users_are_administered_by_the_data_directory_while_it_is_served_and_after(
    tmp_path: pathlib.Path,
) -> None:
    directory = str(tmp_path / "data")
    settings = {"security.enabled": "true"}
    appliance = start_embedded(data_dir=directory, settings=settings)
    out = str(tmp_path / "a.context")
    run(None, "user", "add", "a", "--role", "admin", "--out", out, "--data-dir", directory)
    with Admin(f"context:{out}#{appliance.address}") as admin:
        assert [user["name"] for user in admin.list_users()] == ["a", "admin"]
    appliance.stop()
    run(None, "user", "disable", "admin", "--data-dir", directory)
    late = str(tmp_path / "b.context")
    run(None, "user", "add", "b", "--out", late, "--data-dir", directory)
    run(
        None, "acl", "add", "--principal", "User:b", "--operation", "describe", "--cluster",
        "--data-dir", directory,
    )  # fmt: skip
    appliance = start_embedded(data_dir=directory, settings=settings)
    with Admin(f"context:{late}#{appliance.address}") as admin:
        assert len(admin.list_users()) == 3
    appliance.stop()


def test_a_lost_catalog_lets_nobody_in_but_the_first_administrator(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    settings = {"security.enabled": "true"}
    appliance = start_embedded(data_dir=str(directory), settings=settings)
    users = Users(appliance, tmp_path)
    users.admin.create_topics(NewTopic("kept"))
    lost = users.add("lost", admin=True).removeprefix("context:")
    users.close()
    appliance.stop()
    for name in os.listdir(directory):
        if name.startswith("coordinator.db"):
            (directory / name).unlink()
    appliance = start_embedded(data_dir=str(directory), settings=settings)
    try:
        with Admin(admin_address(appliance)) as admin:
            assert admin.list_topics() == ["kept"]
            assert [user["name"] for user in admin.list_users()] == ["admin"]
        with (
            Admin(f"context:{lost}#{appliance.address}", connect_timeout_ms=60_000) as admin,
            pytest.raises(Exception, match="does not know the key"),
        ):
            admin.list_topics()
    finally:
        appliance.stop()
    (directory / "server.key").write_bytes(b"damaged")
    with pytest.raises(Exception, match=r"server\.key is damaged"):
        start_embedded(data_dir=str(directory), settings=settings)


@pytest.mark.parametrize("verb", ["rotate", "finish", "forget"])
def test_a_server_key_that_is_not_there_is_not_called_damaged(
    verb: str, tmp_path: pathlib.Path
) -> None:
    for directory, reason in (
        (tmp_path, f"there is no {tmp_path}/server.key: name the first data directory"),
        (tmp_path / "mistyped", f"there is no directory {tmp_path}/mistyped: name the data dir"),
    ):
        done = run(None, "server-key", verb, "--data-dir", str(directory), status=1)
        assert reason in done.stderr.decode()
        assert b"damaged" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_secrets_are_in_no_log_command_line_or_answer(users: Users, tmp_path: pathlib.Path) -> None:
    """Secrets of the server, the first administrator, the appliance itself, and a user."""
    import psutil

    data = pathlib.Path(users.appliance.data_dir)
    planted = set()
    for name in ("admin.context", "own.context"):
        planted.add(orjson.loads((data / name).read_bytes())["secret_key"])
    planted.add(orjson.loads((data / "server.key").read_bytes())["content"]["secret"])
    path = users.add("planted", "describe cluster").removeprefix("context:")
    planted.add(orjson.loads(pathlib.Path(path).read_bytes())["secret_key"])
    with Admin(f"context:{path}") as admin:
        seen = repr(admin.describe_cluster()) + repr(admin.list_users()) + repr(admin.settings)
    for arguments in (("config", "show"), ("status",), ("user", "list"), ("acl", "list")):
        seen += text(users, *arguments)
    seen += pathlib.Path(users.appliance.log_path).read_text()
    supervisor = psutil.Process(users.appliance.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        seen += repr(process.cmdline()) + repr(process.environ())
    for file in data.iterdir():
        if file.is_file() and file.name not in ("server.key", "admin.context", "own.context"):
            seen += file.read_bytes().decode("latin-1")
    assert len(planted) == 4
    for secret in planted:
        assert secret not in seen
