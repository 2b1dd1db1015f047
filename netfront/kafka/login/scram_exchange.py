"""SCRAM, the server's side: four messages in which both sides prove that they know a password.

    client   n,,n=USER,r=NONCE
    server   r=NONCE SERVER_NONCE,s=SALT,i=ITERATIONS
    client   c=CHANNEL_BINDING,r=NONCE SERVER_NONCE,p=PROOF
    server   v=SIGNATURE

Owner: one connection; pure but for the nonce that it is given.

Invariants:
- A user who is unknown, or has no credential, gets a salt of its own, the same each time, and fails
  at the proof like a wrong password.
- Proofs are compared in constant time.

Source: RFC 5802, RFC 7677. Channel binding is not offered.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable

from netfront.kafka.login.errors import LoginFailedError
from shm.rights.scram import HASHES, ITERATIONS, SALT_BYTES, ScramCredential

MESSAGE_MAX_BYTES = 4_096
_FIRST = re.compile(
    r"(n|y),(?:a=([^,]*))?,(n=([^,]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?)", re.DOTALL
)
_FINAL = re.compile(
    r"(c=([A-Za-z0-9+/=]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", re.DOTALL
)
_ESCAPE = re.compile(r"=(2C|3D)?")
FindCredential = Callable[[str, str], ScramCredential | None]
"""(User, mechanism) -> credential."""


def unknown_credential(secret: bytes, mechanism: str, user: str) -> ScramCredential:
    """The credential that stands for a user without one: no proof is accepted for it."""
    key = hmac.digest(secret, f"{mechanism}\0{user}".encode(), "sha512")
    size = hashlib.new(HASHES[mechanism]).digest_size
    return ScramCredential(mechanism, key[:SALT_BYTES], key[:size], key[:size], ITERATIONS)


class ScramExchange:
    """One login."""

    def __init__(self, mechanism: str, find: FindCredential, secret: bytes, nonce: str) -> None:
        """`secret`: of the appliance, for salts of unknown users. `nonce`: random, printable."""
        self.mechanism = mechanism
        self.user = ""
        """The user who logs in, once the first message is there."""
        self.credential: ScramCredential | None = None
        """The user's own credential; None: it has none."""
        self._find = find
        self._secret = secret
        self._nonce = nonce
        self._used: ScramCredential | None = None
        self._binding = b""
        self._messages = ""
        self.is_done = False

    def step(self, data: bytes) -> bytes:
        """Answer a message of the client. Raises LoginFailedError."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if len(data) > MESSAGE_MAX_BYTES or self.is_done:
            text = ""
        return self._first(text) if self._used is None else self._final(text)

    def _first(self, text: str) -> bytes:
        found = _FIRST.fullmatch(text)
        if found is None:
            raise LoginFailedError(f"the client's first message of {self.mechanism} is malformed")
        flag, authorized, bare, name, nonce = found.groups()
        self.user = _unescaped(name)
        if authorized and _unescaped(authorized) != self.user:
            raise LoginFailedError("a client cannot act as another user")
        self._nonce = nonce + self._nonce
        self.credential = self._find(self.user, self.mechanism)
        used = self._used = self.credential or unknown_credential(
            self._secret, self.mechanism, self.user
        )
        self._binding = f"{flag},{'a=' + authorized if authorized is not None else ''},".encode()
        salt = base64.b64encode(used.salt).decode()
        answer = f"r={self._nonce},s={salt},i={used.iterations}"
        self._messages = f"{bare},{answer}"
        return answer.encode()

    def _final(self, text: str) -> bytes:
        found = _FINAL.fullmatch(text)
        used = self._used
        assert used is not None
        self.is_done = True
        if found is None or found[3] != self._nonce or _decoded(found[2]) != self._binding:
            raise LoginFailedError(f"the client's final message of {self.mechanism} is malformed")
        name = HASHES[self.mechanism]
        messages = f"{self._messages},{found[1]}".encode()
        proof, signature = _decoded(found[4]), hmac.digest(used.stored_key, messages, name)
        if len(proof) != len(signature):
            proof = bytes(len(signature))
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        stored_key = hashlib.new(name, client_key).digest()
        if not hmac.compare_digest(stored_key, used.stored_key) or self.credential is None:
            raise LoginFailedError("the user is unknown or the password is wrong")
        return b"v=" + base64.b64encode(hmac.digest(used.server_key, messages, name))


def _unescaped(name: str) -> str:
    """The name of a `saslname`. Raises LoginFailedError."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] is None:
            raise LoginFailedError("the name of the user has a '=' that is not escaped")
        return "," if found[1] == "2C" else "="

    return _ESCAPE.sub(replaced, name)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
