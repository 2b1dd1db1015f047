"""Encrypted objects: every byte is bound to its place, its object and its end."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.backup.encryption import (
    CHUNK_BYTES,
    HEAD_BYTES,
    TAG_BYTES,
    Cipher,
    plain_size,
    read_key,
)
from appliance.backup.errors import BackupError

pytest.importorskip("cryptography")
KEY = bytes(range(32))
NAME = "a" * 64


def encrypted(content: bytes, name: str = NAME, piece: int = 300_000) -> bytes:
    pieces = [content[at : at + piece] for at in range(0, len(content), piece)]
    return b"".join(Cipher(KEY).encrypted(name, pieces))


def decrypted(data: bytes, start: int, length: int, name: str = NAME, key: bytes = KEY) -> bytes:
    def read(at: int, count: int) -> bytes:
        return data[at : at + count]

    return b"".join(Cipher(key).decrypted(name, read, len(data), start, length))


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
)
def test_what_was_encrypted_is_read_back(size: int) -> None:
    content = bytes(index * 7 & 255 for index in range(1_000)) * (size // 1_000 + 1)
    content = content[:size]
    data = encrypted(content)
    assert plain_size(len(data)) == size
    assert decrypted(data, 0, size) == content


@given(st.integers(0, 2 * CHUNK_BYTES + 10), st.integers(0, 2 * CHUNK_BYTES + 10))
def test_any_range_is_read_back(one: int, other: int) -> None:
    start, end = sorted((one, other))
    assert decrypted(WHOLE, start, end - start) == CONTENT[start:end]


CONTENT = b"".join(b"%07d" % index for index in range((2 * CHUNK_BYTES + 10) // 7 + 1))
CONTENT = CONTENT[: 2 * CHUNK_BYTES + 10]
try:
    WHOLE = encrypted(CONTENT)
except BackupError:  # skipped above
    WHOLE = b""


def test_damage_exchange_and_cuts_are_refused() -> None:
    sealed = CHUNK_BYTES + TAG_BYTES
    first, second = HEAD_BYTES, HEAD_BYTES + sealed
    flipped = bytearray(WHOLE)
    flipped[second + 5] ^= 1
    exchanged = (
        WHOLE[:first] + WHOLE[second : second + sealed] + WHOLE[first:second]
        + WHOLE[second + sealed :]
    )  # fmt: skip
    for wrong in (bytes(flipped), exchanged, WHOLE[: second + sealed], WHOLE[:-1], b""):
        with pytest.raises(BackupError, match="damaged"):
            decrypted(wrong, 0, len(CONTENT))


def test_another_name_or_key_is_refused() -> None:
    with pytest.raises(BackupError):
        decrypted(WHOLE, 0, 10, name="b" * 64)
    with pytest.raises(BackupError):
        decrypted(WHOLE, 0, 10, key=bytes(32))


def test_a_key_is_read_as_bytes_or_digits_and_only_from_a_private_file(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "key"
    for text in (KEY, KEY.hex().encode() + b"\n", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="):
        path.write_bytes(text)
        path.chmod(0o600)
        assert read_key(str(path)) == KEY
    path.write_bytes(b"short")
    with pytest.raises(BackupError, match="32 bytes"):
        read_key(str(path))
    path.write_bytes(KEY)
    path.chmod(0o640)
    with pytest.raises(BackupError, match="chmod 0600"):
        read_key(str(path))


def test_a_key_is_read_from_a_credential_of_the_service_manager(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backup").write_text(KEY.hex())
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_key("credential:backup") == KEY
    with pytest.raises(OSError, match="there is no credential:other; add LoadCredential="):
        read_key("credential:other")
    (tmp_path / "short").write_text("abc")
    with pytest.raises(BackupError, match="no key of 32 bytes"):
        read_key("credential:short")
