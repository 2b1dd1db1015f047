"""`tailrace config`: settings with their origin, errors with their place, and the default file."""

from __future__ import annotations

import json
import pathlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from appliance.config import settings, settings_sources
from appliance.config.setting_definition import SECRET_SHOWN, setting
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tailrace.toml"
    path.write_text('slots = 100\n\n[flush]\nlinger_ms = 3\nbatch_size = "2MiB"\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "20.toml").write_text('topic.retention.ms = "1d"\n')
    return path


def test_show_says_each_value_and_where_it_comes_from(file: pathlib.Path) -> None:
    options = ("--config", str(file), "--set", "fronts=2")
    rows = json.loads(run(None, "config", "show", *options, "--json").stdout)
    found = {row["name"]: (row["value"], row["source"], row["line"]) for row in rows}
    assert list(found) == list(settings.definitions())
    assert found["slots"] == (100, str(file), 1)
    assert found["flush.batch_size"] == (2 << 20, str(file), 5)
    assert found["topic.retention.ms"] == (86_400_000, f"{file.parent}/conf.d/20.toml", 1)
    assert found["fronts"] == (2, "command line", None)
    assert found["lane_bytes"] == (4 << 20, "default", None)
    shown = run(None, "config", "show", *options, "--origin", "--changed").stdout.decode()
    assert [line.split() for line in shown.splitlines()] == [
        ["SETTING", "VALUE", "FROM"],
        ["fronts", "2", "command", "line"],
        ["slots", "100", f"{file}:1"],
        ["flush.linger_ms", "3", f"{file}:4"],
        ["flush.batch_size", "2097152", f"{file}:5"],
        ["topic.retention.ms", "86400000", f"{file.parent}/conf.d/20.toml:1"],
    ]
    one = run(None, "config", "show", "slots", "--config", str(file)).stdout.decode()
    assert one.split() == ["SETTING", "VALUE", "slots", "100"]


def test_running_shows_what_serve_was_given(appliance: EmbeddedAppliance) -> None:
    """Its port 0 is given by `--set`, which no file has."""
    chosen = ("config", "show", "listen", "kafka.listen")
    [given, other] = json.loads(run(appliance, *chosen, "--running", "--json").stdout)
    assert (given["value"], given["source"]) == (["tcp://127.0.0.1:0"], "command line")
    assert (other["value"], other["source"]) == ([], "default")
    planned = json.loads(run(appliance, *chosen, "--no-config", "--json").stdout)
    assert planned[0].keys() == given.keys()
    assert planned[0]["source"] == "default"
    for options in (("--running",), ("--no-config",)):
        shown = run(appliance, *chosen, *options).stdout.decode().splitlines()
        assert shown[2].split() == ["kafka.listen", "(empty)"]
    refused = run(appliance, *chosen, "--running", "--set", "slots=100", status=2)
    assert b"leave files and --set out" in refused.stderr


def test_check_reports_all_that_is_wrong_and_where(file: pathlib.Path) -> None:
    assert run(None, "config", "check", str(file)).stdout.decode() == (
        f"{file}: right; 4 settings given\n"
    )
    file.write_text("ring_byte = 1\nslots = 'x'\n")
    done = run(None, "config", "check", str(file), status=2)
    assert done.stdout == b""
    assert done.stderr.decode().splitlines() == [
        f"tailrace: {file}:1: unknown setting 'ring_byte'; did you mean ring_bytes?",
        f"tailrace: {file}:2: slots is 'x'; it takes a whole number from 16 to 1048576",
    ]
    errors = json.loads(run(None, "config", "check", str(file), "--json", status=2).stdout)
    assert [error["place"] for error in errors["errors"]] == [f"{file}:1", f"{file}:2"]


def test_check_finds_that_the_settings_have_no_room_together(file: pathlib.Path) -> None:
    rules = [f"user={number:070} producer_byte_rate=1" for number in range(1_000)]
    file.write_text(f"slots = 64\nquotas = {json.dumps(rules)}\n")
    done = run(None, "config", "check", str(file), status=2)
    assert f"{file}:2: the settings have " in done.stderr.decode()
    assert "shorten quotas, the longest" in done.stderr.decode()


def test_check_reads_the_environment_unless_a_file_is_named(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_SLOTS", "few")
    run(None, "config", "check", str(file))
    done = run(None, "config", "check", "--config", str(file), status=2)
    assert "TAILRACE_SLOTS: slots is 'few'" in done.stderr.decode()
    run(None, "config", "check", str(file), "--no-config", status=2)


def test_an_unknown_name_to_show_is_refused_with_the_right_one() -> None:
    done = run(None, "config", "show", "ring.bytes", status=2)
    assert "unknown setting 'ring.bytes'; write ring_bytes" in done.stderr.decode()


def test_the_default_file_is_printed() -> None:
    text = run(None, "config", "default").stdout.decode()
    assert tomllib.loads(text) == {}
    assert '# listen = ["tcp://127.0.0.1:7420"]\n' in text


@dataclass(frozen=True, slots=True)
class SettingsWithASecret(settings.Settings):
    """The settings, and one that is declared as a secret of theirs would be."""

    proxy_password: str = setting("", "A password.", name="proxy.password", secret=True)


@pytest.fixture
def secret_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a setting that is a secret; there is none among those of this version."""
    for module in (settings, settings_sources):
        monkeypatch.setattr(module, "Settings", SettingsWithASecret)
    settings.definitions.cache_clear()
    yield "proxy.password"
    monkeypatch.undo()
    settings.definitions.cache_clear()


def test_a_secret_is_never_shown(
    file: pathlib.Path, secret_setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"{secret_setting} = 'hunter2'\n")
    by_flag = ("--set", f"{secret_setting}=hunter2")
    for given in (("--config", str(file)), by_flag):
        for how in ([], ["--json"], ["--origin", "--changed"]):
            out = run(None, "config", "show", *how, *given).stdout.decode()
            assert SECRET_SHOWN in out
            assert "hunter2" not in out
    monkeypatch.setenv("TAILRACE_PROXY_PASSWORD", "hunter2")
    out = run(None, "config", "show", "--origin", "--changed", "--no-config").stdout.decode()
    assert "TAILRACE_PROXY_PASSWORD" in out
    assert "hunter2" not in out
    monkeypatch.delenv("TAILRACE_PROXY_PASSWORD")
    file.write_text(f"{secret_setting} = ['hunter2']\n")
    done = run(None, "config", "check", str(file), status=2)
    assert f"{secret_setting} is '(secret)'".encode() in done.stderr
    assert b"hunter2" not in done.stderr + done.stdout
