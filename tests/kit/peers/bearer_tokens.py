"""An identity provider for tests: a key, its file for the appliance, and tokens."""

from __future__ import annotations

import base64
import pathlib
import time
from typing import Any

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric import rsa

AUDIENCE = "tailrace"


class Provider:
    """An issuer with one RSA key."""

    def __init__(self, key_id: str = "first") -> None:
        self.key_id = key_id
        self.key = rsa.generate_private_key(65537, 2048)

    def public(self, **changed: Any) -> dict[str, Any]:
        """The key as an entry of a JWK set."""
        entry = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {**entry, "kid": self.key_id, "alg": "RS256", "use": "sig", **changed}

    def token(self, user: str = "shop", seconds: float = 600, **claims: Any) -> str:
        """A token of a user. A claim that is None is left out."""
        now = time.time()
        payload = {
            "sub": user, "iss": "https://id.example", "aud": AUDIENCE, "iat": now,
            "exp": now + seconds, **claims,
        }  # fmt: skip
        kept = {name: value for name, value in payload.items() if value is not None}
        return str(jwt.encode(kept, self.key, "RS256", headers={"kid": self.key_id}))


def write_keys(path: pathlib.Path, *entries: dict[str, Any]) -> str:
    """A JWK set of these entries, put in place at once. Returns its path."""
    part = path.with_suffix(".new")
    part.write_bytes(orjson.dumps({"keys": entries}))
    part.rename(path)
    return str(path)


def secret_entry(secret: bytes, **changed: Any) -> dict[str, Any]:
    """A secret as an entry of a JWK set."""
    text = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return {"kty": "oct", "k": text, **changed}


def first_message(token: str, acts_as: str = "") -> bytes:
    """The client's first message of OAUTHBEARER."""
    name = f"a={acts_as}" if acts_as else ""
    return f"n,{name},\1auth=Bearer {token}\1\1".encode()


def token_settings(path: str) -> dict[str, Any]:
    """Settings of an appliance whose Kafka clients log in with tokens or with passwords."""
    return {
        "kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true",
        "kafka.sasl.enabled.mechanisms": "OAUTHBEARER,PLAIN,SCRAM-SHA-256",
        "kafka.sasl.oauthbearer.jwks": path,
        "kafka.sasl.oauthbearer.expected.audience": AUDIENCE,
    }  # fmt: skip
