"""The file of the token: its mode, damage, a link in its place."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from appliance.observe.console.access.token import FILE_NAME, Token, ensure_token, read_token


def test_the_token_is_made_once_and_only_the_owner_can_read_it(tmp_path: pathlib.Path) -> None:
    assert read_token(str(tmp_path)) is None
    token = ensure_token(str(tmp_path))
    assert ensure_token(str(tmp_path)) == token == read_token(str(tmp_path))
    assert stat.S_IMODE(os.stat(tmp_path / FILE_NAME).st_mode) == 0o600
    assert len(token) == 43


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 44, b"\xff" * 43, b"a" * 43 + b"\n\n"])
def test_a_damaged_file_is_replaced_by_another_token(
    tmp_path: pathlib.Path, content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    token = ensure_token(str(tmp_path))
    assert token.encode() not in content
    assert read_token(str(tmp_path)) == token


def test_a_link_in_its_place_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other").write_bytes(b"a" * 43)
    (tmp_path / FILE_NAME).symlink_to("other")
    with pytest.raises(OSError, match=FILE_NAME):
        read_token(str(tmp_path))


def test_a_credential_is_the_token_and_no_file_has_another(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, data_dir = tmp_path / "credentials", tmp_path / "data"
    given.mkdir()
    data_dir.mkdir()
    ensure_token(str(data_dir))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    assert Token(str(data_dir)).read() == read_token(str(data_dir))  # none was given
    (given / FILE_NAME).write_text("a-token-of-the-operator\n")
    assert Token(str(data_dir)).read() == "a-token-of-the-operator"
    assert read_token(str(data_dir)) is None


@pytest.mark.parametrize("content", [b"", b"short", b"with a space in the middle", b"x" * 70_000])
def test_a_credential_that_is_no_token_allows_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(OSError, match=r"console\.token"):
        Token(str(data_dir)).read()
    assert read_token(str(data_dir)) is None
