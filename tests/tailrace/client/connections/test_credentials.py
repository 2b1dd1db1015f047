"""Contexts as addresses: what is read, what is refused, and that no secret is shown."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable
from typing import Any

import orjson
import pytest

import tailrace
from appliance.cli.options import contexts
from tailrace import Admin, Producer
from tailrace.client.config.setting_fields import build
from tailrace.client.config.settings import (
    DEFAULT_BOOTSTRAP,
    AdminSettings,
    default_bootstrap,
)
from tailrace.client.connections import credentials
from tailrace.client.connections.credentials import contexts_path, learn, resolve
from tailrace.consumer.table.settings import TableSettings
from tailrace.core.errors import InvalidSettingError
from tailrace.export.export import Export
from tailrace.format.directory.change_lock import changing
from tailrace.share.settings import ShareConsumerSettings
from tests.kit.appliances.secured import new_keys, write_context

PUBLIC, SECRET = new_keys()
SERVER, NEXT = new_keys()
CONTENT: dict[str, Any] = {
    "user": "a", "bootstrap": "tcp://10.0.0.5:7420", "server_keys": [SERVER, NEXT],
    "public_key": PUBLIC, "secret_key": SECRET,
}  # fmt: skip


def test_a_file_is_an_address_with_keys(tmp_path: pathlib.Path) -> None:
    address = write_context(tmp_path / "a.context", **CONTENT)
    target = resolve(address)
    assert target.address == "tcp://10.0.0.5:7420"
    assert target.credentials is not None
    assert target.credentials[:4] == ((SERVER, NEXT), PUBLIC, SECRET, "a")
    assert SECRET not in repr(target)
    assert resolve(f"{address}#tcp://127.0.0.1:1").address == "tcp://127.0.0.1:1"


def test_a_name_is_that_of_the_file_of_contexts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = pathlib.Path(contexts_path())
    path.parent.mkdir(parents=True)
    write_context(
        path, current=None, contexts={"prod": CONTENT, "plain": {"bootstrap": "tcp://h:1"}}
    )
    assert resolve("context:prod").credentials is not None
    assert resolve("context:plain") == ("tcp://h:1", None, "")
    with pytest.raises(InvalidSettingError, match="no context 'other'"):
        resolve("context:other")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"format": 2}, "no context of this version"),
        ({"bootstrap": None}, "has no address"),
        ({"bootstrap": "10.0.0.5:7420"}, "has no address"),
        ({"server_keys": []}, "is damaged"),
        ({"server_keys": "x" * 40}, "is damaged"),
        ({"public_key": None}, "is damaged"),
        ({"secret_key": "x"}, "is damaged"),
    ],
)
def test_a_damaged_context_is_refused(
    tmp_path: pathlib.Path, changed: dict[str, Any], sentence: str
) -> None:
    address = write_context(tmp_path / "a.context", **{**CONTENT, **changed})
    with pytest.raises(InvalidSettingError, match=sentence) as caught:
        resolve(address)
    assert SECRET not in str(caught.value)


def test_a_context_that_others_can_read_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.context"
    address = write_context(path, **CONTENT)
    path.chmod(0o640)
    with pytest.raises(InvalidSettingError, match="chmod 600"):
        resolve(address)


def test_what_is_no_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "text.context").write_text("x")
    for name in ("missing.context", "text.context", "."):
        with pytest.raises(InvalidSettingError):
            resolve(f"context:{tmp_path}/{name}")


def test_the_setting_context_stands_for_the_address(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.context"
    write_context(path, **CONTENT)
    for client in (
        Admin.from_context(str(path)), Producer.from_context(str(path), linger_ms=1),
        Admin(context=str(path)), Admin({"context": str(path)}),
    ):  # fmt: skip
        client.close()
        assert client.settings.bootstrap_servers == f"context:{path}"
        assert SECRET not in repr(client.settings)
    with pytest.raises(InvalidSettingError, match="exclude each other"):
        Admin("tcp://127.0.0.1:1", context=str(path))
    with pytest.raises(InvalidSettingError, match="context is 7"):
        build(AdminSettings, {"context": 7})
    monkeypatch.setenv("TAILRACE_CONTEXT", str(path))
    assert build(AdminSettings, {}).bootstrap_servers == f"context:{path}"
    given = build(AdminSettings, {"bootstrap_servers": "tcp://h:1"})
    assert given.bootstrap_servers == "tcp://h:1"
    assert build(TableSettings, {}).bootstrap_servers == f"context:{path}"
    queue = build(ShareConsumerSettings, {"group_id": "g"})
    assert queue.bootstrap_servers == f"context:{path}"
    assert default_bootstrap() == f"context:{path}"


def test_a_scan_and_an_export_without_an_address_are_of_the_context_in_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They went to tcp://127.0.0.1:7420."""
    monkeypatch.setenv("TAILRACE_CONTEXT", str(tmp_path / "missing.context"))
    with pytest.raises(InvalidSettingError, match=r"missing\.context"):
        tailrace.scan("orders")
    export = Export("orders", str(tmp_path / "lake"))
    assert export._source.bootstrap == f"context:{tmp_path / 'missing.context'}"


def test_no_context_in_the_environment_is_the_ordinary_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TAILRACE_CONTEXT", raising=False)
    assert default_bootstrap() == DEFAULT_BOOTSTRAP


def test_the_file_is_read_as_it_is_written(tmp_path: pathlib.Path) -> None:
    write_context(tmp_path / "a.context", **CONTENT)
    assert orjson.loads((tmp_path / "a.context").read_bytes())["format"] == 1


def test_learned_server_keys_are_kept_in_the_file_and_known_without_it(
    tmp_path: pathlib.Path,
) -> None:
    address = write_context(tmp_path / "a.context", **{**CONTENT, "public_key": "r" * 40})
    found = resolve(address).credentials
    assert found is not None
    assert learn(found, ("short",)) is found
    assert learn(found, (NEXT, SERVER)) is found, "they are known"
    assert learn(found, (NEXT,)).server_keys == (NEXT,)
    content = orjson.loads((tmp_path / "a.context").read_bytes())
    assert (content["server_keys"], content["secret_key"]) == ([NEXT], SECRET)
    assert stat.S_IMODE((tmp_path / "a.context").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.context"]
    other = write_context(tmp_path / "b.context", **{**CONTENT, "public_key": "o" * 40})
    found = resolve(other).credentials
    assert found is not None
    write_context(tmp_path / "b.context", **{**CONTENT, "public_key": "p" * 40})
    learn(found, (NEXT,))
    content = orjson.loads((tmp_path / "b.context").read_bytes())
    assert content["server_keys"] == [SERVER, NEXT], "the file is another user's by now"


def test_a_name_in_the_file_of_contexts_learns_for_itself_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = pathlib.Path(contexts_path())
    path.parent.mkdir(parents=True)
    named = {name: {**CONTENT, "public_key": name * 40} for name in ("x", "y")}
    write_context(path, contexts=named)
    found = resolve("context:x").credentials
    assert found is not None
    learn(found, (NEXT,))
    kept = orjson.loads(path.read_bytes())["contexts"]
    assert (kept["x"]["server_keys"], kept["y"]["server_keys"]) == ([NEXT], [SERVER, NEXT])


def learned_while(
    monkeypatch: pytest.MonkeyPatch, path: pathlib.Path, public: str, function: Callable[[], object]
) -> None:
    """Learn a key for the context at `path`. `function` is called before its file is replaced."""
    write_context(path, **{**CONTENT, "public_key": public})
    found = resolve(f"context:{path}").credentials
    assert found is not None
    fsync = os.fsync

    def synced(fd: int) -> None:
        fsync(fd)
        function()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        learn(found, (NEXT,))


def test_a_new_secret_that_comes_while_a_key_is_learned_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "a.context", tmp_path / "b.context"
    write_context(other, **{**CONTENT, "public_key": "s" * 40, "secret_key": "t" * 40})
    data = other.read_bytes()
    learned_while(monkeypatch, path, "u" * 40, lambda: other.replace(path))
    assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["a.context"]


def test_a_key_is_learned_under_the_lock_of_the_commands(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, refusals = tmp_path / "a.context", []

    def change() -> None:
        with pytest.raises(TimeoutError), changing(str(path), 0.0):
            pass
        refusals.append(True)

    learned_while(monkeypatch, path, "v" * 40, change)
    assert refusals
    monkeypatch.setattr(credentials, "STORE_WAIT_S", 0.0)
    found = resolve(f"context:{path}").credentials
    assert found is not None
    with changing(str(path)):
        assert learn(found, (SERVER,)).server_keys == (SERVER,)
    assert orjson.loads(path.read_bytes())["server_keys"] == [NEXT]
    again = learn(found._replace(server_keys=(SERVER,)), (SERVER,))
    assert again.server_keys == (SERVER,)
    assert orjson.loads(path.read_bytes())["server_keys"] == [SERVER], "the next handshake"


def test_the_file_of_another_account_is_left_alone_and_its_keys_are_known(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.context"
    address = write_context(path, **{**CONTENT, "public_key": "w" * 40})
    found = resolve(address).credentials
    assert found is not None
    data, owner = path.read_bytes(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    learn(found, (NEXT, SERVER, PUBLIC))
    assert path.read_bytes() == data
    known = resolve(address).credentials
    assert known is not None
    assert known.server_keys == (NEXT, SERVER, PUBLIC)


def test_the_present_key_comes_first_in_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.context"
    found = resolve(write_context(path, **{**CONTENT, "public_key": "x" * 40})).credentials
    assert found is not None
    assert learn(found, (NEXT, SERVER)) is found, "the one that was proven stays first here"
    assert orjson.loads(path.read_bytes())["server_keys"] == [NEXT, SERVER]


def test_commands_change_the_contexts_under_the_lock_of_learned_keys(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = pathlib.Path(contexts_path())
    with contexts.changing() as found:  # makes the file
        found.by_name["x"] = {**CONTENT, "public_key": "y" * 40}
    with contexts.changing(), pytest.raises(TimeoutError), changing(str(path), 0.0):
        pass
    with changing(str(path), 0.0):
        pass
