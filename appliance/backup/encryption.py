"""Encryption of a backup's objects: AES-256-GCM in chunks, each authenticated.

Layout of an encrypted object:

    magic "TRBE" | version u8 = 1 | 3 zero bytes | salt 16 | chunks
    chunk: AES-GCM of at most CHUNK_BYTES of the content, and its tag of 16 bytes

Each object has a key of its own, HKDF-SHA256 of the key file's key and the salt, so that a chunk's
number can be its nonce. The object's name is authenticated with each chunk, as is the last chunk's
being the last: chunks, files and their ends cannot be exchanged, repeated or left out.

Owner: pure; `cryptography` does the work.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from appliance.backup.errors import BackupError
from appliance.data.credentials import named_credential

MAGIC = b"TRBE\x01\x00\x00\x00"
SALT_BYTES = 16
HEAD_BYTES = len(MAGIC) + SALT_BYTES
CHUNK_BYTES = 1 << 20
TAG_BYTES = 16
KEY_BYTES = 32


def read_key(path: str) -> bytes:
    """The key of a key file, or of `credential:NAME`: 32 bytes, or their hexadecimal or base64
    digits. Raises BackupError,
    OSError.
    """
    given = named_credential(path)
    return _key_of(path, _content(path) if given is None else given)


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            raise BackupError(
                f"other users may read the key file {path}: forbid it (chmod 0600 {path})."
            )
        return os.read(fd, 1024)
    finally:
        os.close(fd)


def _key_of(path: str, raw: bytes) -> bytes:
    for decode in (bytes.fromhex, _base64):
        try:
            key = decode(raw.decode("ascii").strip())
        except ValueError:
            continue
        if len(key) == KEY_BYTES:
            return key
    if len(raw) == KEY_BYTES:
        return raw
    raise BackupError(
        f"the key file {path} has no key of {KEY_BYTES} bytes. Make one: "
        "openssl rand -hex 32 > FILE && chmod 0600 FILE"
    )


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError from error


class Cipher:
    """Encrypts and decrypts objects with one key."""

    def __init__(self, key: bytes) -> None:
        """Raises BackupError if `cryptography` is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise BackupError(
                "encryption needs the package cryptography: pip install 'tailrace[backup]'"
            ) from None
        self._aes: Callable[[bytes], Any] = AESGCM
        self._invalid: type[Exception] = InvalidTag
        self._key = key
        self._name_key = self._derived(b"", b"tailrace backup names")
        self.key_check = self._derived(b"", b"tailrace backup key check").hex()
        """Text by which a target recognises its key."""

    def _derived(self, salt: bytes, purpose: bytes) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return bytes(HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(self._key))

    def name_of(self, digest: bytes) -> str:
        """Name of the object with this SHA-256. It tells nothing of the content without the key."""
        return hmac.new(self._name_key, digest, hashlib.sha256).hexdigest()

    def encrypted(self, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The bytes of the encrypted object of this name."""
        salt = os.urandom(SALT_BYTES)
        aes = self._aes(self._derived(salt, b"tailrace backup object"))
        yield MAGIC + salt
        number, pending = 0, bytearray()
        for piece in pieces:
            pending += piece
            while len(pending) > CHUNK_BYTES:
                yield aes.encrypt(
                    _nonce(number), bytes(pending[:CHUNK_BYTES]), _bound(name, number, False)
                )
                del pending[:CHUNK_BYTES]
                number += 1
        yield aes.encrypt(_nonce(number), bytes(pending), _bound(name, number, True))

    def decrypted(
        self, name: str, read: Callable[[int, int], bytes], size: int, start: int, length: int
    ) -> Iterator[bytes]:
        """Yield `length` bytes of the content from `start` on. `read(start, length)` reads the
        encrypted object of `size` bytes. Raises BackupError for damage or another key.
        """
        head = read(0, HEAD_BYTES)
        if len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC:
            raise BackupError(f"object {name} is damaged: it is not an encrypted object.")
        aes = self._aes(self._derived(head[len(MAGIC) :], b"tailrace backup object"))
        sealed_bytes = CHUNK_BYTES + TAG_BYTES
        last = max(0, size - HEAD_BYTES - 1) // sealed_bytes
        number, end = start // CHUNK_BYTES, start + length
        while number * CHUNK_BYTES < end:
            sealed = read(HEAD_BYTES + number * sealed_bytes, sealed_bytes)
            try:
                chunk: bytes = aes.decrypt(
                    _nonce(number), sealed, _bound(name, number, number == last)
                )
            except (self._invalid, ValueError):
                raise BackupError(
                    f"object {name} is damaged, or another key encrypted it (chunk {number})."
                ) from None
            first = number * CHUNK_BYTES
            yield chunk[max(0, start - first) : end - first]
            number += 1
            if number > last and number * CHUNK_BYTES < end:
                raise BackupError(f"object {name} is damaged: it is too short.")


def plain_size(size: int) -> int:
    """Bytes of content of an encrypted object of `size` bytes."""
    chunks = -(-(size - HEAD_BYTES) // (CHUNK_BYTES + TAG_BYTES))
    return size - HEAD_BYTES - chunks * TAG_BYTES


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _bound(name: str, number: int, is_last: bool) -> bytes:
    return b"%s|%d|%d" % (name.encode(), number, is_last)
