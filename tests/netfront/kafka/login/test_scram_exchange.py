"""SCRAM: who knows the password is let in, and nobody learns who exists."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from netfront.kafka.login.errors import LoginFailedError
from netfront.kafka.login.scram_exchange import ScramExchange
from shm.rights.scram import (
    HASHES,
    OWN_SHAPE,
    SHA_256,
    SHA_512,
    ScramCredential,
    ScramShape,
    of_password,
)
from shm.rights.users import User, UserDirectory

KNOWN = {
    (user, mechanism): of_password(mechanism, f"password of {user}", iterations=4096)
    for user in ("shop", "a=b,c")
    for mechanism in HASHES
}


def find(user: str, mechanism: str) -> ScramCredential | None:
    return KNOWN.get((user, mechanism))


def begin(mechanism: str = SHA_256, nonce: str = "server") -> ScramExchange:
    return ScramExchange(mechanism, find, b"secret", nonce, {})


def final(mechanism: str, password: str, first: str, answer: bytes, binding: str = "n,,") -> str:
    """The last message of a client that knows the password."""
    fields = dict(field.split("=", 1) for field in answer.decode().split(","))
    name = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(
        name, password.encode(), base64.b64decode(fields["s"]), int(fields["i"])
    )
    client_key = hmac.digest(salted, b"Client Key", name)
    bare = f"c={base64.b64encode(binding.encode()).decode()},r={fields['r']}"
    message = f"{first},{answer.decode()},{bare}".encode()
    signature = hmac.digest(hashlib.new(name, client_key).digest(), message, name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return f"{bare},p={base64.b64encode(proof).decode()}"


def log_in(exchange: ScramExchange, user: str, password: str, binding: str = "n,,") -> bytes:
    first = f"n={user},r=client"
    answer = exchange.step(f"{binding}{first}".encode())
    return exchange.step(
        final(exchange.mechanism, password, first, answer, binding).encode()
    )  # fmt: skip


@pytest.mark.parametrize("mechanism", [SHA_256, SHA_512])
@pytest.mark.parametrize("binding", ["n,,", "y,,", "n,a=shop,"])
def test_a_user_proves_its_password(mechanism: str, binding: str) -> None:
    exchange = begin(mechanism)
    assert log_in(exchange, "shop", "password of shop", binding).startswith(b"v=")
    assert exchange.is_done
    assert (exchange.user, exchange.credential) == ("shop", KNOWN["shop", mechanism])
    with pytest.raises(LoginFailedError):
        exchange.step(b"c=biws,r=x,p=eA==")


def test_a_name_with_escapes_is_read() -> None:
    exchange = begin()
    log_in(exchange, "a=3Db=2Cc", "password of a=b,c")
    assert exchange.user == "a=b,c"


def test_an_unknown_user_and_a_wrong_password_look_alike() -> None:
    told = set()
    for user, password in (("shop", "wrong"), ("nobody", "password of nobody"), ("nobody", "")):
        exchange = begin()
        with pytest.raises(LoginFailedError) as refused:
            log_in(exchange, user, password)
        told.add(str(refused.value))
    assert len(told) == 1
    salts = [begin(nonce=nonce).step(b"n,,n=nobody,r=c").split(b",s=")[1] for nonce in "abc"]
    assert len(set(salts)) == 1, "the salt of an unknown user is the same each time"
    assert salts[0] != begin().step(b"n,,n=nobody2,r=c").split(b",s=")[1]


def shape_of(answer: bytes) -> ScramShape:
    fields = dict(field.split("=", 1) for field in answer.decode().split(","))
    salt = base64.b64decode(fields["s"])
    return ScramShape(int(fields["i"]), len(salt), salt.isascii() and salt.isalnum())


def test_unknown_users_have_the_iterations_and_salts_of_the_users() -> None:
    def made(name: str, salt: bytes, iterations: int) -> User:
        scram = of_password(SHA_256, "x", salt=salt, iterations=iterations)
        return User(name, scram=(scram,))

    def answers(count: int) -> list[ScramShape]:
        shapes = users.scram_shapes(SHA_256)
        return [
            shape_of(
                ScramExchange(SHA_256, find, b"secret", "n", shapes).step(
                    f"n,,n=unknown-{number},r=c".encode()
                )
            )
            for number in range(count)
        ]

    users = UserDirectory()
    assert set(answers(20)) == {OWN_SHAPE}
    kafka = ScramShape(4_096, 26, is_text=True)
    for number in range(3):
        users.put(made(f"kafka-{number}", b"1x" * 13, 4_096))
    assert set(answers(20)) == {kafka}
    own = bytes(range(16))
    users.put(made("own", own, 8_192))
    before = answers(200)
    assert 120 < before.count(kafka) < 180
    assert before.count(kafka) + before.count(OWN_SHAPE) == 200
    assert answers(200) == before, "a name has the same shape each time"
    users.put(made("own-2", own, 8_192))
    changed = sum(a != b for a, b in zip(before, answers(200), strict=True))
    assert 0 < changed < 60, "few names change with the users"
    for name in ("own", "own-2", "kafka-0"):
        users.remove(name)
    assert set(answers(20)) == {kafka}


@pytest.mark.parametrize(
    "first",
    [
        b"", b"\xff", b"p=tls-unique,,n=shop,r=c", b"n,,n=shop", b"n,,r=c,n=shop", b"n,,n=,r=c",
        b"n,,n=a=b,r=c", b"n,a=other,n=shop,r=c", b"n,,m=x,n=shop,r=c", b"n,,n=shop,r=a b",
        b"n,,n=shop,r=" + b"x" * 5_000,
    ],
)  # fmt: skip
def test_a_malformed_beginning_is_refused(first: bytes) -> None:
    with pytest.raises(LoginFailedError):
        begin().step(first)


def test_a_replayed_or_bent_end_is_refused() -> None:
    first = "n=shop,r=client"
    earlier = begin(nonce="earlier")
    answer = earlier.step(f"n,,{first}".encode())
    replayed = final(SHA_256, "password of shop", first, answer)
    assert earlier.step(replayed.encode()).startswith(b"v=")
    for bend in (
        lambda text: text,
        lambda text: text.replace("biws", "eSws"),
        lambda text: text[:-8] + "AAAAAAA=",
        lambda text: text.split(",p=")[0] + ",p=",
        lambda text: text.split(",p=")[0] + ",p=AAAA",
        lambda text: "",
    ):
        exchange = begin(nonce="earlier" if bend("x") != "x" else "server")
        exchange.step(f"n,,{first}".encode())
        with pytest.raises(LoginFailedError):
            exchange.step(bend(replayed).encode())
