"""Passwords: their hashes, and SCRAM's credentials, against RFC 7677's example."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest

from shm.rights.passwords import PASSWORD_MAX, fields_of, hash_of, is_password
from shm.rights.scram import (
    HASHES,
    ITERATIONS_MAX,
    SHA_256,
    SHA_512,
    checked_credential,
    of_password,
)
from shm.rights.users import User, check_password_hash, check_scram, user_of
from tailrace.core.errors import InvalidRequestError


def test_a_password_is_known_by_its_hash_alone() -> None:
    stored = hash_of("correct horse")
    assert check_password_hash(stored) == stored
    assert is_password("correct horse", stored)
    for wrong in ("correct hors", "correct horse ", "", "\0"):
        assert not is_password(wrong, stored)
    assert hash_of("correct horse") != stored


def test_nobody_without_a_password_is_let_in_by_one() -> None:
    assert not is_password("abc", ""), "the password of the hash that stands for unknown users"
    assert not is_password("anything", "no hash")


def test_the_exchange_of_rfc_7677_proves_the_stored_credential() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    stored = of_password(SHA_256, "pencil", salt=salt, iterations=4096)
    message = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,"
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    )
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    signature = hmac.digest(stored.stored_key, message, "sha256")
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    assert hashlib.sha256(client_key).digest() == stored.stored_key
    expected = base64.b64decode("6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    assert hmac.digest(stored.server_key, message, "sha256") == expected


@pytest.mark.parametrize(
    "password", ["short", "x" * (PASSWORD_MAX + 1), "a\0bcdefgh", "ab\ncdefgh"]
)
def test_a_password_that_clients_could_not_send_is_refused(password: str) -> None:
    with pytest.raises(InvalidRequestError, match="8 to 256 printable"):
        fields_of(password)


def test_the_fields_of_a_password_are_stored_shown_and_fed() -> None:
    fields = fields_of("correct horse")
    scram = check_scram(fields["scram_credentials"])
    user = User("a", password_hash=fields["password_hash"], scram=scram)
    assert user.shown()["scram"] == {SHA_256: 8192, SHA_512: 8192}
    hidden = repr([user.shown(), scram])
    assert scram[0].stored_key.hex() not in hidden
    assert base64.b64encode(scram[0].stored_key).decode() not in hidden
    assert user_of(user.with_credentials()) == user
    assert user_of(user.shown()) == user._replace(password_hash="", scram=())
    assert user.is_proven_by(user.password_hash)
    assert user.is_proven_by(scram[1].stored_key.hex())
    assert not user.is_proven_by("")
    assert not User("b").is_proven_by("")
    assert user.scram_of(SHA_512) == scram[1]


def damaged(**changed: Any) -> dict[str, Any]:
    return of_password(SHA_256, "correct horse").fields() | changed


@pytest.mark.parametrize(
    "bad",
    [
        None, [], {}, damaged(mechanism="PLAIN"), damaged(mechanism=7), damaged(iterations=4095),
        damaged(iterations=ITERATIONS_MAX + 1), damaged(iterations=True), damaged(salt=""),
        damaged(salt="?"), damaged(salt=base64.b64encode(bytes(200)).decode()),
        damaged(stored_key="AA=="), damaged(server_key=None), damaged(mechanism=SHA_512),
    ],
)  # fmt: skip
def test_a_damaged_credential_is_refused(bad: object) -> None:
    with pytest.raises(InvalidRequestError):
        checked_credential(bad)


def test_one_credential_of_a_mechanism_is_kept() -> None:
    first, second = (of_password(SHA_256, word) for word in ("correct horse", "battery staple"))
    assert check_scram([first.fields(), second.fields()]) == (second,)
    assert set(HASHES) == {SHA_256, SHA_512}
    with pytest.raises(InvalidRequestError, match="list"):
        check_scram("x")
