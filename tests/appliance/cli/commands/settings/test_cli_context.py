"""`tailrace context`, and which appliance a command speaks to: flags, environment, contexts,
default; the file survives what may happen to it.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
import threading
from typing import Any

import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import tailrace
from appliance.cli.options.contexts import FILE_MAX_BYTES, changing, load
from tailrace.client.connections.credentials import contexts_path
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S

NOWHERE = "tcp://127.0.0.1:1"


class Shell:
    """Runs commands with an environment of its own."""

    def __init__(self, config: pathlib.Path) -> None:
        self.file = config / "tailrace" / "contexts.json"
        self._environment: dict[str, str | None] = {
            "XDG_CONFIG_HOME": str(config),
            "TAILRACE_BOOTSTRAP": None,
            "TAILRACE_CONTEXT": None,
        }

    def try_(self, line: str, **environment: str) -> Result:
        return CliRunner().invoke(tailrace, line.split(), env={**self._environment, **environment})

    def run(self, line: str, **environment: str) -> Result:
        result = self.try_(line, **environment)
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result

    def refused(self, line: str, status: int, **environment: str) -> str:
        result = self.try_(line, **environment)
        assert result.exit_code == status, result.output + repr(result.exception)
        return result.stderr

    def listed(self, **environment: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(
            self.run("context list --json", **environment).stdout
        )
        return rows


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Shell:
    return Shell(tmp_path / "config")


def test_contexts_are_added_used_shown_listed_and_removed(shell: Shell) -> None:
    assert shell.listed() == []
    assert "no contexts yet" in shell.run("context list").stderr
    assert "no context is in use" in shell.refused("context show", 2)
    assert "it is in use" in shell.run("context add prod --bootstrap tcp://10.0.0.5:7420").stderr
    assert "in use" not in shell.run("context add test --bootstrap ipc:///run/t.sock").stderr
    assert [(row["name"], row["current"]) for row in shell.listed()] == [
        ("prod", True),
        ("test", False),
    ]
    shell.run("context use test")
    assert json.loads(shell.run("context show --json").stdout)["bootstrap"] == "ipc:///run/t.sock"
    assert (
        json.loads(shell.run("context show prod --json").stdout)["bootstrap"]
        == "tcp://10.0.0.5:7420"
    )
    assert "changed prod" in shell.run("context add prod --bootstrap [::1]:7421").stderr
    assert "no context is in use now" in shell.run("context remove test").stderr
    assert [(row["name"], row["bootstrap"], row["current"]) for row in shell.listed()] == [
        ("prod", "[::1]:7421", False)
    ]
    for line in ("use test", "remove test", "show test"):
        assert "there is no context 'test'; known are prod" in shell.refused(f"context {line}", 2)
    assert "is not an address" in shell.refused("context add x --bootstrap http://x", 2)
    assert "cannot name a context" in shell.refused("context add ../x --bootstrap tcp://h:1", 2)


def test_the_file_is_its_users_alone_and_what_a_later_version_put_there_stays(shell: Shell) -> None:
    shell.run("context add prod --bootstrap tcp://10.0.0.5:7420")
    assert stat.S_IMODE(shell.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(shell.file.parent.stat().st_mode) == 0o700
    content = json.loads(shell.file.read_text())
    content["contexts"]["prod"]["token"] = "secret"
    shell.file.write_text(json.dumps(content))
    shell.file.chmod(0o644)
    shell.file.with_name("contexts.json.new").write_text("half of a killed comm")
    shell.run("context add prod --bootstrap tcp://10.0.0.6:7420")
    assert json.loads(shell.file.read_text())["contexts"]["prod"] == {
        "token": "secret",
        "bootstrap": "tcp://10.0.0.6:7420",
    }
    assert stat.S_IMODE(shell.file.stat().st_mode) == 0o600
    assert [path.name for path in shell.file.parent.iterdir()] == ["contexts.json"]


@pytest.mark.parametrize(
    "damaged",
    ["", "{", "[]", '{"format": 1}', '{"format": 1, "current": "x", "contexts": {}}',
    ('{"format": 1, "current": null, '
                                                                                      '"contexts": {"a": {}}}'),  # noqa: E501
     '{"format": 1, "contexts": {"a": {"bootstrap": "nonsense"}}}',
     ('{"format": 1, "current": [], "contexts": '
                                                                    '{}}'),
     '{"format": 1, "current": {"a": 1}, "contexts": {}}',
     '{"format": 1, "contexts": {}}' + " " * FILE_MAX_BYTES],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_never_written_over(shell: Shell, damaged: str) -> None:
    shell.file.parent.mkdir(parents=True)
    shell.file.write_text(damaged)
    for line in (
        "context list",
        "context add b --bootstrap tcp://h:1",
        "context use a",
        "topic list",
        "status",
    ):
        assert f"{shell.file} is damaged" in shell.refused(line, 1)
    assert shell.file.read_text() == damaged


def test_what_is_no_file_in_its_place_is_refused_and_not_waited_for(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to; a link to a device without an end."""
    shell.file.parent.mkdir(parents=True)
    os.mkfifo(shell.file)
    for line in ("context list", "context add b --bootstrap tcp://h:1", "topic list"):
        assert f"{shell.file} is damaged: it is not a regular file" in shell.refused(line, 1)
    shell.file.unlink()
    shell.file.symlink_to("/dev/zero")
    assert f"{shell.file} is damaged: it is not a regular file" in shell.refused("topic list", 1)
    shell.file.unlink()
    shell.file.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.file.parents[1]))
    with pytest.raises(IsADirectoryError) as error:
        load()
    assert error.value.filename == str(shell.file)


def test_a_file_of_a_later_version_is_not_guessed_at(shell: Shell) -> None:
    shell.file.parent.mkdir(parents=True)
    shell.file.write_text('{"format": 2}')
    assert "later version" in shell.refused("context add b --bootstrap tcp://h:1", 1)


def test_changes_at_once_lose_none(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.file.parents[1]))
    assert contexts_path() == str(shell.file)

    def add(first: int) -> None:
        for number in range(first, first + 5):
            with changing() as contexts:
                contexts.by_name[f"c{number}"] = {"bootstrap": f"tcp://h:{number + 1}"}

    threads = [threading.Thread(target=add, args=(first,)) for first in range(0, 20, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert len(load().by_name) == 20


def test_a_relative_configuration_directory_is_not_used(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert contexts_path() == f"{tmp_path}/.config/tailrace/contexts.json"


def test_the_flag_wins_over_the_environment_and_that_over_the_context(
    appliance: EmbeddedAppliance, shell: Shell, topic: str
) -> None:
    """The address that does not win leads nowhere: a command that took it would not be answered."""
    shell.run(f"context add here --bootstrap {appliance.address}")
    assert topic in shell.run(f"topic create {topic} --json").stdout, "the context in use"
    shell.run(f"context add nowhere --bootstrap {NOWHERE} --use")
    line = "topic list --json"
    assert topic in shell.run(line, TAILRACE_CONTEXT="here").stdout
    assert [row["name"] for row in shell.listed(TAILRACE_CONTEXT="here") if row["current"]] == [
        "here"
    ]
    assert topic in shell.run(line, TAILRACE_BOOTSTRAP=appliance.address).stdout
    assert (
        topic
        in shell.run(line, TAILRACE_BOOTSTRAP=appliance.address, TAILRACE_CONTEXT="nowhere").stdout
    )
    assert (
        topic
        in shell.run(
            f"{line} --bootstrap {appliance.address}",
            TAILRACE_BOOTSTRAP=NOWHERE,
            TAILRACE_CONTEXT="none",
        ).stdout
    )
    assert "TAILRACE_CONTEXT is 'none'; known are here, nowhere" in shell.refused(
        line, 2, TAILRACE_CONTEXT="none"
    )
    assert (
        "wins over the context in use"
        in shell.run("context use here", TAILRACE_BOOTSTRAP=NOWHERE).stderr
    )
    shell.file.write_text("{")
    assert topic in shell.run(line, TAILRACE_BOOTSTRAP=appliance.address).stdout, (
        "the file is not even read"
    )
