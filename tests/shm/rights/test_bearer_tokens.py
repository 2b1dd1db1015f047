"""Tokens of OAUTHBEARER: who is let in, and each way of making one that must not be."""

from __future__ import annotations

import base64
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shm.rights.bearer_tokens import (
    TokenError,
    TokenKeysError,
    TokenRules,
    TokenVerifier,
    read_keys,
    token_of,
)
from tests.kit.peers.bearer_tokens import (
    AUDIENCE,
    Provider,
    first_message,
    secret_entry,
    write_keys,
)
from tests.kit.processes import HANG_LIMIT_S

RULES = TokenRules("https://id.example", (AUDIENCE, "other"), "sub", 30)
SECRET = bytes(range(48))


@pytest.fixture(scope="module")
def provider() -> Provider:
    return Provider()


@pytest.fixture
def verifier(provider: Provider, tmp_path: pathlib.Path) -> TokenVerifier:
    return TokenVerifier(write_keys(tmp_path / "keys.json", provider.public()), RULES)


def refusal(verifier: TokenVerifier, token: str) -> str:
    try:
        verifier.verify(token)
    except TokenError as error:
        return str(error)
    pytest.fail("the token is accepted")


def test_a_token_names_its_user_and_its_end(provider: Provider, verifier: TokenVerifier) -> None:
    end = int(time.time()) + 60
    proven = verifier.verify(provider.token("shop", exp=end))
    assert (proven.user, proven.ends_s) == ("shop", end + RULES.clock_skew_s)
    assert verifier.verify(provider.token(aud=["x", "other"])).user == "shop"
    assert verifier.verify(provider.token(seconds=-10)).user == "shop", "clocks differ"


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"exp": 1}, "has expired"),
        ({"exp": None}, "has no 'exp'"),
        ({"exp": "soon"}, "is malformed"),
        ({"exp": float("inf")}, "is malformed"),
        ({"exp": 10**400}, "is malformed"),
        ({"nbf": 4e9}, "not valid yet"),
        ({"iat": 4e9}, "not valid yet"),
        ({"aud": "payments"}, "is not for 'tailrace' or 'other'"),
        ({"aud": None}, "has no 'aud'"),
        ({"aud": 7}, "is not for"),
        ({"iss": "https://evil.example"}, "not of the issuer 'https://id.example'"),
        ({"iss": None}, "has no 'iss'"),
        ({"sub": None}, "has no name of a user in 'sub'"),
        ({"sub": ""}, "has no name of a user in 'sub'"),
        ({"sub": "x" * 257}, "has no name of a user in 'sub'"),
        ({"sub": ["shop"]}, "malformed"),
    ],
)
def test_a_claim_that_does_not_fit_is_named(
    provider: Provider, verifier: TokenVerifier, claims: dict[str, Any], sentence: str
) -> None:
    payload = {
        "sub": "shop", "iss": "https://id.example", "aud": AUDIENCE, "exp": time.time() + 60,
        **claims,
    }  # fmt: skip
    content = json.dumps({k: v for k, v in payload.items() if v is not None}).encode()
    if claims.get("exp") == float("inf"):
        content = content.replace(b'"exp":null', b'"exp":Infinity')
    token = jwt.PyJWS().encode(content, provider.key, "RS256", headers={"kid": "first"})
    assert sentence in refusal(verifier, token)


def test_a_public_key_is_no_secret(provider: Provider, verifier: TokenVerifier) -> None:
    """The classic attack: HS256 with the issuer's public key as the secret."""
    pem = provider.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = encoded({"alg": "HS256", "typ": "JWT", "kid": "first"})
    payload = encoded({"sub": "root", "aud": AUDIENCE, "exp": time.time() + 60})
    hmac_key = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    signature = b64(hmac_key.sign(f"{header}.{payload}".encode(), pem))
    assert "one of its key's" in refusal(verifier, f"{header}.{payload}.{signature}")


@pytest.mark.parametrize("name", ["none", "None", "NONE", "", None, 7, ["RS256"], "RS512"])
def test_an_algorithm_of_the_tokens_choice_is_refused(
    provider: Provider, verifier: TokenVerifier, name: Any
) -> None:
    _, payload, signature = provider.token().split(".")
    header = encoded({"alg": name, "kid": "first"})
    for end in ("", signature):
        assert refusal(verifier, f"{header}.{payload}.{end}")


def test_keys_of_the_token_are_not_believed(verifier: TokenVerifier) -> None:
    stranger = Provider()
    now = time.time()
    payload = {"sub": "root", "iss": "https://id.example", "aud": AUDIENCE, "exp": now + 60}
    for header in (
        {"kid": "first"}, {"kid": "first", "jwk": stranger.public()},
        {"kid": "first", "jku": "http://127.0.0.1:1/keys"}, {"x5u": "http://127.0.0.1:1/"},
    ):  # fmt: skip
        token = jwt.encode(payload, stranger.key, "RS256", headers=header)
        assert refusal(verifier, token) == "the signature of the token is wrong"
    assert "(kid) is not among" in refusal(
        verifier, jwt.encode(payload, stranger.key, "RS256", headers={"kid": "../../x"})
    )


def test_every_changed_character_is_noticed(provider: Provider, verifier: TokenVerifier) -> None:
    token = provider.token()
    for at in range(0, len(token), 7):
        changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        assert refusal(verifier, changed)
    for text in ("", ".", "..", "a.b.c", token[:-5], token + "A", token.replace(".", "", 1)):
        assert refusal(verifier, text)


def test_keys_of_each_kind_verify_by_their_own_algorithms(tmp_path: pathlib.Path) -> None:
    algorithms = jwt.algorithms
    pairs: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name, curve in (("ES256", ec.SECP256R1()), ("ES384", ec.SECP384R1())):
        key = ec.generate_private_key(curve)
        entry = algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        pairs[name] = key, entry
    edwards = ed25519.Ed25519PrivateKey.generate()
    pairs["EdDSA"] = (
        edwards, algorithms.OKPAlgorithm.to_jwk(edwards.public_key(), as_dict=True)
    )  # fmt: skip
    pairs["HS512"] = SECRET + SECRET, secret_entry(SECRET + SECRET)
    wide = rsa.generate_private_key(65537, 2048)
    pairs["PS256"] = wide, algorithms.RSAAlgorithm.to_jwk(wide.public_key(), as_dict=True)
    entries = [{**entry, "kid": name} for name, (_, entry) in pairs.items()]
    path = write_keys(
        tmp_path / "keys.json", *entries, {"kty": "new"}, {"kty": "RSA", "use": "enc"}
    )
    verifier = TokenVerifier(path, RULES._replace(issuer="", audiences=()))
    payload = {"sub": "shop", "exp": time.time() + 60}
    for name, (key, _) in pairs.items():
        token = jwt.encode(payload, key, name, headers={"kid": name})
        assert verifier.verify(token).user == "shop"
        assert verifier.verify(jwt.encode(payload, key, name)).user == "shop", "without kid"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it is no JWK set"),
        (b"[]", "it is no JWK set"),
        (b'{"keys": 3}', "is no list"),
        (b'{"keys": []}', "no key that verifies"),
        (b'{"keys": [3, {"kty": "oct", "use": "enc"}, {"kty": 1}]}', "no key that verifies"),
        (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "fewer than 32 bytes"),
        (b'{"keys": [{"kty": "oct", "k": 5}]}', "key 0 is malformed"),
        (b'{"keys": [{"kty": "oct"}]}', "key 0 is malformed"),
        (b'{"keys": [{"kty": "EC", "crv": []}]}', "it has no key that verifies signatures"),
        (b'{"keys": [{"kty": "RSA", "n": "AQAB"}]}', "key 0 is malformed"),
        (b'{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB", "d": "x"}]}', "is a private key"),
        (b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}', "key 0 is malformed"),
        (b'{"keys": "' + b"x" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: pathlib.Path, content: bytes, sentence: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(TokenKeysError, match=r"kafka\.sasl\.oauthbearer\.jwks") as refused:
        read_keys(str(path))
    assert sentence in str(refused.value)
    assert "c2VjcmV0" not in str(refused.value)
    with pytest.raises(TokenKeysError) as late:
        TokenVerifier(str(path), RULES, loads_late=True)
    assert str(late.value) == str(refused.value)


def output_of(program: str, path: str, provider: Provider) -> str:
    """Output of a process that runs `program` with the path of the keys and a token of "shop"."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, path, provider.token("shop", aud=None, iss=None)],
        capture_output=True, text=True, check=False, timeout=HANG_LIMIT_S,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout


def test_keys_are_checked_at_once_and_loaded_for_the_first_token(
    provider: Provider, tmp_path: pathlib.Path
) -> None:
    path = write_keys(tmp_path / "keys.json", provider.public())
    program = """if True:
        import sys
        from shm.rights.bearer_tokens import TokenRules, TokenVerifier
        verifier = TokenVerifier(sys.argv[1], TokenRules("", (), "sub", 0), loads_late=True)
        loaded = [name in sys.modules for name in ("jwt", "cryptography")]
        open(sys.argv[1], "w").close()  # the keys are those that were checked
        print(*loaded, verifier.verify(sys.argv[2]).user)
    """
    assert output_of(program, path, provider) == "False False shop\n"


def test_a_process_with_other_threads_forks_none_to_check_keys(
    provider: Provider, tmp_path: pathlib.Path
) -> None:
    """Threads of libraries count too: Python does not know of them."""
    path = write_keys(tmp_path / "keys.json", provider.public())
    program = """if True:
        import os, sys, threading, zmq
        from shm.rights.bearer_tokens import TokenRules, TokenVerifier
        def refuse():
            raise AssertionError("forked")
        os.fork = refuse
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        assert threading.active_count() == 1
        verifier = TokenVerifier(sys.argv[1], TokenRules("", (), "sub", 0), loads_late=True)
        print("jwt" in sys.modules, verifier.verify(sys.argv[2]).user)
        context.destroy(0)
    """
    assert output_of(program, path, provider) == "True shop\n"


def test_weak_keys_and_missing_files_are_refused(tmp_path: pathlib.Path) -> None:
    weak = rsa.generate_private_key(65537, 1024)
    entry = jwt.algorithms.RSAAlgorithm.to_jwk(weak.public_key(), as_dict=True)
    with pytest.raises(TokenKeysError, match="1024 bits, fewer than 2048"):
        read_keys(write_keys(tmp_path / "weak.json", entry))
    with pytest.raises(TokenKeysError, match="No such file"):
        read_keys(str(tmp_path / "none.json"))


def test_the_first_message_of_clients() -> None:
    assert token_of(first_message("a.b.c")) == ("", "a.b.c")
    assert token_of(first_message("a.b.c", "sh=2Cop")) == ("sh,op", "a.b.c")
    assert token_of(b"n,,\1auth=Bearer a.b.c\1traceId=9\1\1") == ("", "a.b.c")
    for message in (
        b"", b"n,,", b"n,,\1\1", b"y,,\1auth=Bearer a.b.c\1\1", b"n,,\1auth=Basic a.b.c\1\1",
        b"n,,\1auth=Bearer a.b\1\1", b"n,,\1auth=Bearer a.b.c\1", b"n,,\1auth=Bearer a b.c.d\1\1",
        b"n,,\1traceId=9\1\1", b"\0shop\0password", b"\xff" * 100,
    ):  # fmt: skip
        with pytest.raises(TokenError):
            token_of(message)


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encoded(content: dict[str, Any]) -> str:
    return b64(orjson.dumps(content))
