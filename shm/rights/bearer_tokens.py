"""Bearer tokens: the JSON Web Tokens by which Kafka clients log in with OAUTHBEARER.

The keys of a JWK set verify them: public ones (RSA, EC, OKP) of an identity provider, or secrets
(oct). A token that passes names a user.

Owner: pure, but for the file of keys. The Kafka gateway uses tokens, a dry run of serve the file.

Invariants:
- The kind of a key decides by which algorithms it verifies, and `alg` of the key, if it has one.
  What a token says of its algorithm chooses among these alone, so `none` is never accepted, and no
  public key is taken for a secret.
- A token without an end (`exp`) is refused.
- No sentence has a part of a token's text but names that its issuer has signed.

Source: RFC 6750, 7517, 7519, 7628, 8725; KIP-255, KIP-768. PyJWT does the verification.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import orjson

ALGORITHMS = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("oct", None): ("HS256", "HS384", "HS512"),
}
"""Kind and curve of a key -> the algorithms by which it verifies. Others are left out."""
FILE_MAX_BYTES = 1 << 20
KEYS_MAX = 100
SECRET_MIN_BYTES = 32
MODULUS_MIN_BITS = 2_048
NAME_MAX = 256
"""Characters of a user's name in a token."""
_FIRST = re.compile(rb"n,(?:a=([^,\x01]*))?,\x01((?:[A-Za-z]+=[^\x01]*\x01)+)\x01")
_BEARER = re.compile(r"[Bb]earer +([A-Za-z0-9_=-]+\.[A-Za-z0-9_=-]+\.[A-Za-z0-9_=-]+) *")


class TokenKeysError(ValueError):
    """The file of keys cannot be used."""


class TokenError(ValueError):
    """A token that is refused."""


class TokenRules(NamedTuple):
    """Claims that a token must have beside its signature."""

    issuer: str
    audiences: tuple[str, ...]
    user_claim: str
    clock_skew_s: int


class ProvenToken(NamedTuple):
    """A token that has passed."""

    user: str
    ends_s: float
    """Unix time until which it is accepted."""


class _Key(NamedTuple):
    key_id: str | None
    algorithms: tuple[str, ...]
    key: Any


class TokenVerifier:
    """Verifies tokens by the keys of a file."""

    def __init__(self, path: str, rules: TokenRules, *, loads_late: bool = False) -> None:
        """`loads_late`: what verifies signatures, 14 MB of modules, is loaded for the first token,
        and a child of this process checks the keys now. A process with other threads loads it at
        once. Raises TokenKeysError.
        """
        self._rules = rules
        self._content = _content_of(path)
        self._path = path
        self._keys: list[_Key] = []
        if not (loads_late and _are_usable(path, self._content)):
            self._keys = _keys_in(path, self._content)

    def verify(self, token: str) -> ProvenToken:
        """The user of a token. Raises TokenError."""
        import jwt

        rules = self._rules
        self._keys = self._keys or _keys_in(self._path, self._content)
        try:
            found = self._payload(token)
            ends_s = float(found["exp"]) + rules.clock_skew_s
        except TokenError:
            raise
        except jwt.ExpiredSignatureError:
            raise TokenError("the token has expired") from None
        except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError):
            raise TokenError("the token is not valid yet: compare the clocks") from None
        except jwt.InvalidAudienceError:
            names = " or ".join(map(repr, rules.audiences))
            raise TokenError(f"the token is not for {names} (aud)") from None
        except jwt.InvalidIssuerError:
            raise TokenError(f"the token is not of the issuer {rules.issuer!r} (iss)") from None
        except jwt.MissingRequiredClaimError as error:
            raise TokenError(f"the token has no {error.claim!r}") from None
        except jwt.InvalidSignatureError:
            raise TokenError("the signature of the token is wrong") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise TokenError("the token is malformed") from None
        user = found.get(rules.user_claim)
        if not isinstance(user, str) or not 0 < len(user) <= NAME_MAX:
            raise TokenError(f"the token has no name of a user in {rules.user_claim!r}")
        return ProvenToken(user, ends_s)

    def _payload(self, token: str) -> dict[str, Any]:
        import jwt

        header = jwt.get_unverified_header(token)
        key_id, algorithm = header.get("kid"), header.get("alg")
        fitting = [key for key in self._keys if key_id is None or key.key_id in (key_id, None)]
        if not fitting:
            raise TokenError(
                "the key of the token (kid) is not among those of "
                "kafka.sasl.oauthbearer.jwks: the issuer may have new keys"
            )
        fitting = [key for key in fitting if algorithm in key.algorithms]
        if not fitting:
            raise TokenError("the algorithm of the token (alg) is not one of its key's")
        rules = self._rules
        options: Any = {"require": ["exp"], "verify_aud": bool(rules.audiences)}
        for key in fitting:
            try:
                payload = jwt.decode(
                    token, key.key, algorithms=[str(algorithm)], options=options,
                    audience=rules.audiences or None, issuer=rules.issuer or None,
                    leeway=rules.clock_skew_s,
                )  # fmt: skip
            except jwt.InvalidSignatureError:
                continue
            return dict(payload)
        raise jwt.InvalidSignatureError


def token_of(message: bytes) -> tuple[str, str]:
    """The user to act as ("": that of the token) and the token of a client's first message. Raises
    TokenError.
    """
    found = _FIRST.fullmatch(message)
    if found is not None:
        pairs = found[2].decode("latin-1").rstrip("\1").split("\1")
        fields = dict(pair.split("=", 1) for pair in pairs)
        token = _BEARER.fullmatch(fields.get("auth", ""))
        if token is not None:
            acts_as = (found[1] or b"").decode("utf-8", "replace")
            return acts_as.replace("=2C", ",").replace("=3D", "="), token[1]
    raise TokenError("the token of OAUTHBEARER is malformed")


# ---- the file of keys ----------------------------------------------------------------------------


def read_keys(path: str) -> list[_Key]:
    """The keys of a JWK set that verify signatures. Raises TokenKeysError."""
    return _keys_in(path, _content_of(path))


def _are_usable(path: str, content: bytes) -> bool:
    """True if a child of this process can use the keys. False: they are to be read here, for their
    error, or because there is no child: one that is forked beside other threads, also those of
    libraries, may find their locks taken for ever.
    """
    try:
        if len(os.listdir("/proc/self/task")) > 1:
            return False
        child = os.fork()
    except OSError:
        return False
    if not child:
        try:
            _keys_in(path, content)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _content_of(path: str) -> bytes:
    """Raises TokenKeysError."""
    for package in ("jwt", "cryptography"):
        if find_spec(package) is None:
            raise TokenKeysError(
                "OAUTHBEARER needs PyJWT and cryptography: pip install 'tailrace[kafka]'"
            )
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    if len(content) > FILE_MAX_BYTES:
        raise _unusable(path, f"it has more than {FILE_MAX_BYTES} bytes")
    return content


def _keys_in(path: str, content: bytes) -> list[_Key]:
    """Raises TokenKeysError."""
    try:
        entries = orjson.loads(content)["keys"]
    except (ValueError, TypeError, KeyError):
        raise _unusable(path, 'it is no JWK set: {"keys": [...]}') from None
    if not isinstance(entries, list) or len(entries) > KEYS_MAX:
        raise _unusable(path, f'"keys" is no list of at most {KEYS_MAX} keys')
    found = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
            continue
        curve = entry.get("crv")
        allowed = ALGORITHMS.get((str(entry.get("kty")), None if curve is None else str(curve)), ())
        if entry.get("alg") is not None:
            allowed = tuple(name for name in allowed if name == entry["alg"])
        if allowed:  # others are for something else, as providers have them
            found.append(_Key(entry.get("kid"), allowed, _read_key(path, number, entry)))
    if not found:
        raise _unusable(path, "it has no key that verifies signatures")
    return found


def _read_key(path: str, number: int, entry: dict[str, Any]) -> Any:
    import jwt

    is_secret = entry["kty"] == "oct"
    if "d" in entry and not is_secret:
        raise _unusable(path, f"key {number} is a private key: write its public half")
    try:
        key = jwt.PyJWK({name: each for name, each in entry.items() if name != "alg"}).key
    except (jwt.PyJWTError, LookupError, ValueError, TypeError) as error:  # it may show the secret
        raise _unusable(path, f"key {number} is malformed ({type(error).__name__})") from None
    if is_secret and len(key) < SECRET_MIN_BYTES:
        raise _unusable(path, f"the secret of key {number} has fewer than {SECRET_MIN_BYTES} bytes")
    if entry["kty"] == "RSA" and key.key_size < MODULUS_MIN_BITS:
        raise _unusable(
            path, f"key {number} has {key.key_size} bits, fewer than {MODULUS_MIN_BITS}"
        )
    return key


def _unusable(path: str, reason: str) -> TokenKeysError:
    return TokenKeysError(f"{path} (kafka.sasl.oauthbearer.jwks) cannot be used: {reason}")


def file_version(path: str) -> tuple[Any, ...]:
    """Changes with the file's content."""
    try:
        status = os.stat(path)
    except OSError:
        return (path, None)
    return (path, status.st_ino, status.st_size, status.st_mtime_ns)
