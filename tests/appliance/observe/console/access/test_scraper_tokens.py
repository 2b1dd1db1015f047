"""Tokens of scrapers: one scope, kept as hashes, refused once they are removed or have expired."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib

import pytest

from appliance.observe.console.access.scraper_tokens import (
    FILE_NAME,
    METRICS,
    TokensDamagedError,
    add_token,
    is_allowed,
    read_tokens,
    remove_token,
)
from tests.kit.appliances.secured import secured
from tests.kit.cli import run
from tests.kit.processes import wait_until

NOW_US = 1_700_000_000_000_000


def test_a_token_is_allowed_its_scope_until_it_expires_or_is_removed(
    tmp_path: pathlib.Path,
) -> None:
    directory = str(tmp_path)
    lasting = add_token(directory, "prometheus", METRICS, 0, NOW_US)
    short = add_token(directory, "trial", METRICS, NOW_US + 10, NOW_US)
    assert is_allowed(directory, lasting, METRICS, NOW_US)
    assert is_allowed(directory, short, METRICS, NOW_US + 9)
    assert not is_allowed(directory, short, METRICS, NOW_US + 10)
    assert not is_allowed(directory, lasting, "console", NOW_US)
    for wrong in (
        "",
        lasting[:-1],
        lasting + "x",
        lasting.swapcase(),
        read_tokens(directory)[0].sha256,
    ):
        assert not is_allowed(directory, wrong, METRICS, NOW_US)
    with pytest.raises(ValueError, match="there is a token 'trial'"):
        add_token(directory, "trial", METRICS, 0, NOW_US)
    with pytest.raises(ValueError, match="the name of the token"):
        add_token(directory, "a b", METRICS, 0, NOW_US)
    assert remove_token(directory, "prometheus")
    assert not remove_token(directory, "prometheus")
    assert not is_allowed(directory, lasting, METRICS, NOW_US)


def test_the_file_has_no_token_and_damage_lets_nobody_in(tmp_path: pathlib.Path) -> None:
    directory = str(tmp_path)
    text = add_token(directory, "prometheus", METRICS, 0, NOW_US)
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    assert text.encode() not in content
    assert os.stat(path).st_mode & 0o777 == 0o600
    path.write_bytes(content.replace(b"prometheus", b"prometheux"))
    assert not is_allowed(directory, text, METRICS, NOW_US)
    with pytest.raises(TokensDamagedError, match="is damaged"):
        read_tokens(directory)
    path.write_bytes(content)
    path.chmod(0o620)
    assert not is_allowed(directory, text, METRICS, NOW_US)


def test_a_scraper_reads_the_metrics_and_nothing_else(tmp_path: pathlib.Path) -> None:
    with secured(tmp_path, **{"http.listen": "127.0.0.1:0"}) as users:
        log = pathlib.Path(users.appliance.log_path)
        wait_until(lambda: "console address=http://" in log.read_text(), "the console listens")
        address = log.read_text().split("console address=http://")[1].split()[0]

        def status(path: str, token: str) -> int:
            connection = http.client.HTTPConnection(address, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
                return connection.getresponse().status

        place = ("--data-dir", users.appliance.data_dir)
        made = run(None, "token", "add", "prometheus", *place, "--expires", "90d", "--json")
        token = json.loads(made.stdout)["token"]
        assert status("/metrics", token) == 200
        for path in ("/api/state", "/api/records?topic=t", "/api/events", "/api/sql"):
            assert status(path, token) == 401
        assert b"prometheus" in run(None, "token", "list", *place).stdout
        shown = run(None, "token", "list", *place, "--json").stdout.decode()
        assert token not in log.read_text() + shown
        run(None, "token", "remove", "prometheus", *place)
        assert status("/metrics", token) == 401


def test_a_directory_of_no_appliance_is_refused(tmp_path: pathlib.Path) -> None:
    for words in (("list",), ("add", "prometheus"), ("remove", "prometheus")):
        said = run(None, "token", *words, "--data-dir", str(tmp_path), status=2).stderr.decode()
        assert "has no coordinator.db: name the first data directory" in said
    assert not list(tmp_path.iterdir())
