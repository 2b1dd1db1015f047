"""SCRAM credentials: what proves a password without being one.

    SaltedPassword = PBKDF2(hash, password, salt, iterations)
    ClientKey      = HMAC(SaltedPassword, "Client Key")
    StoredKey      = H(ClientKey)
    ServerKey      = HMAC(SaltedPassword, "Server Key")

Owner: pure.

Invariants:
- A credential has StoredKey and ServerKey. Neither the password nor SaltedPassword can be had from
  them without guessing passwords.
- `checked_credential` accepts ITERATIONS_MIN to ITERATIONS_MAX iterations, as Kafka does.

Source: RFC 5802, RFC 7677, KIP-84, KIP-554.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tailrace.core.errors import InvalidRequestError

SHA_256, SHA_512 = "SCRAM-SHA-256", "SCRAM-SHA-512"
HASHES: Final[Mapping[str, str]] = {SHA_256: "sha256", SHA_512: "sha512"}
"""Mechanism -> name of its hash."""
ITERATIONS: Final = 8_192
"""Iterations of new credentials."""
ITERATIONS_MIN, ITERATIONS_MAX = 4_096, 16_384
SALT_BYTES: Final = 16
SALT_BYTES_MAX: Final = 128


class ScramShape(NamedTuple):
    """All of a credential that everybody may see but the salt itself."""

    iterations: int
    salt_bytes: int
    is_text: bool
    """True if the salt has letters and digits alone, as Kafka's tools make it."""


OWN_SHAPE: Final = ScramShape(ITERATIONS, SALT_BYTES, is_text=False)
"""Shape of the credentials that `of_password` makes."""


class ScramCredential(NamedTuple):
    """A credential of a user for one mechanism."""

    mechanism: str
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"<credential of {self.mechanism}>"

    @property
    def shape(self) -> ScramShape:
        """The parts that everybody may see, but for the salt."""
        is_text = self.salt.isascii() and self.salt.isalnum()
        return ScramShape(self.iterations, len(self.salt), is_text)

    def fields(self) -> dict[str, Any]:
        """The credential as an object of JSON."""
        return {
            "mechanism": self.mechanism, "iterations": self.iterations,
            **{
                name: base64.b64encode(getattr(self, name)).decode()
                for name in ("salt", "stored_key", "server_key")
            },
        }  # fmt: skip


def of_password(
    mechanism: str, password: str, *, salt: bytes | None = None, iterations: int = ITERATIONS
) -> ScramCredential:
    """The credential of a password, with a new salt if none is given. Takes some milliseconds."""
    used = os.urandom(SALT_BYTES) if salt is None else salt
    salted = hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), used, iterations)
    return of_salted_password(mechanism, salted, used, iterations)


def of_salted_password(
    mechanism: str, salted: bytes, salt: bytes, iterations: int
) -> ScramCredential:
    """The credential of a salted password, as Kafka's tools send it."""
    name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    stored_key = hashlib.new(name, client_key).digest()
    return ScramCredential(
        mechanism, salt, stored_key, hmac.digest(salted, b"Server Key", name), iterations
    )


def checked_credential(fields: object) -> ScramCredential:
    """The credential of an object of JSON. Raises InvalidRequestError."""
    given = fields if isinstance(fields, dict) else {}
    mechanism, iterations = given.get("mechanism"), given.get("iterations")
    if not isinstance(mechanism, str) or mechanism not in HASHES:
        raise InvalidRequestError(
            f"mechanism is {mechanism!r:.60}; it takes one of {', '.join(HASHES)}"
        )
    if type(iterations) is not int or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidRequestError(
            f"iterations is {iterations!r:.60}; give {ITERATIONS_MIN} to {ITERATIONS_MAX}"
        )
    size = hashlib.new(HASHES[mechanism]).digest_size
    salt, stored_key, server_key = (
        _bytes(given.get(name)) for name in ("salt", "stored_key", "server_key")
    )
    if not 0 < len(salt) <= SALT_BYTES_MAX or {len(stored_key), len(server_key)} != {size}:
        raise InvalidRequestError(
            f"a credential of {mechanism} has a salt of 1 to {SALT_BYTES_MAX} bytes, and a "
            f"stored_key and a server_key of {size} bytes, in base64; "
            "`tailrace user passwd` makes it"
        )
    return ScramCredential(mechanism, salt, stored_key, server_key, iterations)


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        return b""
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return b""
