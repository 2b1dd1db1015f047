"""SCRAM, the server's side: four messages in which both sides prove that they know a password.

    client   n,,n=USER,r=NONCE
    server   r=NONCE SERVER_NONCE,s=SALT,i=ITERATIONS
    client   c=CHANNEL_BINDING,r=NONCE SERVER_NONCE,p=PROOF
    server   v=SIGNATURE

Owner: one connection; pure but for the nonce that it is given.

Invariants:
- A user who is unknown, or has no credential, gets a salt of its own, the same each time. Its
  iterations and length are those of one that is in use. The login fails at the proof, like a wrong
  password.
- Proofs are compared in constant time.

Source: RFC 5802, RFC 7677. Channel binding is not offered.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping

from netfront.kafka.login.errors import LoginFailedError
from shm.rights.scram import HASHES, OWN_SHAPE, ScramCredential, ScramShape

MESSAGE_MAX_BYTES = 4_096
_FIRST = re.compile(
    r"(n|y),(?:a=([^,]*))?,(n=([^,]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?)", re.DOTALL
)
_FINAL = re.compile(
    r"(c=([A-Za-z0-9+/=]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", re.DOTALL
)
_LETTERS = b"0123456789abcdefghijklmnopqrstuvwxyz"
_ESCAPE = re.compile(r"=(2C|3D)?")
FindCredential = Callable[[str, str], ScramCredential | None]
"""(User, mechanism) -> credential."""


def unknown_credential(
    secret: bytes, mechanism: str, user: str, shapes: Mapping[ScramShape, int]
) -> ScramCredential:
    """The credential that stands for a user without one: no proof is accepted for it.

    Its shape is drawn from those of the users, each as often as users have it. The draw depends on
    the name, and changes for few names when users change (weighted rendezvous hashing).
    """

    def drawn(name: str) -> bytes:
        return hmac.digest(secret, f"{mechanism}\0{user}\0{name}".encode(), "sha512")

    def score(shape: ScramShape) -> float:
        uniform = (int.from_bytes(drawn(repr(shape))[:6], "big") + 1) / (1 << 48 | 1)
        return -shapes[shape] / math.log(uniform)

    shape = max(shapes, key=score) if shapes else OWN_SHAPE
    salt = hashlib.shake_256(drawn("salt")).digest(shape.salt_bytes)
    if shape.is_text:
        salt = bytes(_LETTERS[byte % len(_LETTERS)] for byte in salt)
    key = drawn("key")[: hashlib.new(HASHES[mechanism]).digest_size]
    return ScramCredential(mechanism, salt, key, key, shape.iterations)


class ScramExchange:
    """One login."""

    def __init__(
        self,
        mechanism: str,
        find: FindCredential,
        secret: bytes,
        nonce: str,
        shapes: Mapping[ScramShape, int],
    ) -> None:
        """`secret`: of the appliance, for salts of unknown users. `nonce`: random, printable.
        `shapes`: those of the users' credentials, and how many have each.
        """
        self.mechanism = mechanism
        self.user = ""
        """The user who logs in, once the first message is there."""
        self.credential: ScramCredential | None = None
        """The user's own credential; None: it has none."""
        self._find = find
        self._secret = secret
        self._nonce = nonce
        self._shapes = shapes
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
        stand_in = unknown_credential(self._secret, self.mechanism, self.user, self._shapes)
        used = self._used = self.credential or stand_in
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
