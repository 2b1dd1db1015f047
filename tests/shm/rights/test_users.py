"""Users: what names them, and what is no key, no password and no group."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from shm.rights.users import (
    GROUPS_MAX,
    Key,
    User,
    UserDirectory,
    check_groups,
    check_password_hash,
    check_public_key,
    user_of,
)
from tailrace.core.errors import InvalidRequestError

HASH = "$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21l$RdescudvJCsgt3ub+b4dWRWJTmaaJObG"
A, B, C = (zmq.curve_keypair()[0].decode() for _ in range(3))


def user(name: str, *keys: str, **fields: Any) -> User:
    return User(name, keys=tuple(Key(f"k{n}", key, 1) for n, key in enumerate(keys)), **fields)


def test_keys_of_libzmq_are_keys() -> None:
    for _ in range(200):
        key = zmq.curve_keypair()[0].decode()
        assert check_public_key(key) == key


def test_anything_else_is_refused() -> None:
    for text in ("", "x", "0" * 40, "#" * 40, A + "0", A[:-1] + "\n", None, 7, b"x"):
        with pytest.raises(InvalidRequestError, match="40 characters"):
            check_public_key(text)


def test_a_hash_of_a_password_takes_bounded_memory_and_time() -> None:
    assert check_password_hash(HASH) == HASH
    for bad in [
        "", "secret", None, HASH.replace("argon2id", "argon2i"), HASH.replace("65536", "4194304"),
        HASH.replace("t=3", "t=99"), HASH.replace("p=4", "p=0"), HASH + "$", HASH + "\n",
    ]:  # fmt: skip
        with pytest.raises(InvalidRequestError, match="argon2id hash"):
            check_password_hash(bad)


def test_groups_are_names() -> None:
    assert check_groups(["a", "b", "a"]) == ("a", "b")
    for bad in (None, "a", ["a b"], [7], ["x"] * (GROUPS_MAX + 1)):
        with pytest.raises(InvalidRequestError):
            check_groups(bad)


def test_a_user_is_found_by_each_of_its_keys_and_accounts_until_it_is_removed() -> None:
    directory = UserDirectory()
    directory.put(user("a", A, B, accounts=(1000,)))
    directory.put(user("b", C))
    found = directory.by_key(B)
    assert found is not None
    assert (found[0].name, found[1].name) == ("a", "k1")
    assert directory.by_account(1000) is found[0]
    directory.put(user("a", B))
    assert directory.by_key(A) is None
    assert directory.by_account(1000) is None
    directory.remove("a")
    directory.remove("a")
    assert directory.by_key(B) is None
    assert [other.name for other in directory] == ["b"]
    assert directory.get("a") is None
    assert len(directory) == 1


def test_a_key_expires_at_its_time() -> None:
    assert not Key("k", A, 0).has_expired(10**18)
    assert not Key("k", A, 0, 100).has_expired(99)
    assert Key("k", A, 0, 100).has_expired(100)


def test_a_shown_user_has_no_hash_of_its_password() -> None:
    shown = user("a", A, groups=("g",), accounts=(7,), password_hash=HASH, is_disabled=True).shown()
    assert HASH not in repr(shown)
    assert shown["has_password"] is True
    assert user_of(shown) == user("a", A, groups=("g",), accounts=(7,), is_disabled=True)
