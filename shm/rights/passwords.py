"""Passwords: the argon2id hash that is stored for one, and its verification.

Owner: pure. Each call takes some tens of milliseconds and MEMORY_KIB of memory.

Invariants:
- A password leaves the process that reads it as its hash alone.
- The verification of an unknown user's password takes as long as that of a known one.

Source: RFC 9106; the parameters are OWASP's.
"""

from __future__ import annotations

from typing import Any, Final

from shm.rights.scram import HASHES, of_password
from tailrace.core.errors import InvalidRequestError

MEMORY_KIB: Final = 19_456
PASSES: Final = 2
PASSWORD_MIN, PASSWORD_MAX = 8, 256
UNKNOWN_USER: Final = (
    f"$argon2id$v=19$m={MEMORY_KIB},t={PASSES},p=1"
    "$jHaeiOmSzcozQOvuUDiE/Q$WVG/qKL6ouFPuYLMdyEwv870PyoAHARUVAgBjVD2OJw"
)
"""The hash that stands for a user without one. No password is accepted for it."""


class PasswordsMissingError(RuntimeError):
    """The library for passwords is not installed."""


def _hasher() -> Any:
    try:
        import argon2  # only where a password is used
    except ImportError:
        raise PasswordsMissingError(
            "passwords need the package argon2-cffi: pip install 'tailrace[passwords]'"
        ) from None
    return argon2.PasswordHasher(time_cost=PASSES, memory_cost=MEMORY_KIB, parallelism=1)


def checked_password(password: str) -> str:
    """The password. Raises InvalidRequestError."""
    if not PASSWORD_MIN <= len(password) <= PASSWORD_MAX or not password.isprintable():
        raise InvalidRequestError(
            f"a password has {PASSWORD_MIN} to {PASSWORD_MAX} printable characters"
        )
    return password


def hash_of(password: str) -> str:
    """The argon2id hash of a password. Raises PasswordsMissingError."""
    return str(_hasher().hash(password))


def is_password(password: str, stored: str) -> bool:
    """True if the hash is the password's. `stored` "": of a user who has none; takes as long.
    Raises PasswordsMissingError.
    """
    hasher = _hasher()
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        hasher.verify(stored or UNKNOWN_USER, password)
    except (Argon2Error, InvalidHashError):
        return False
    return bool(stored)


def fields_of(password: str) -> dict[str, Any]:
    """The fields of ALTER_USERS that set a password. Raises PasswordsMissingError,
    InvalidRequestError.
    """
    checked_password(password)
    return {
        "password_hash": hash_of(password),
        "scram_credentials": [of_password(each, password).fields() for each in HASHES],
    }
