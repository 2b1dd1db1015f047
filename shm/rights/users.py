"""Users: names, the keys that prove them, and the accounts of the host that stand for them.

Owner: pure, except `UserDirectory`, which belongs to one process. The controller stores users in
the catalog, where the fronts read them (`stored_rights`).

Invariants:
- A public key, and an account, belongs to one user at most.
- A secret key is never part of any value here. A password is there as its argon2id hash and its
  SCRAM credentials alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from shm.rights.acl import check_user_name
from shm.rights.scram import HASHES, ScramCredential, ScramShape, checked_credential
from tailrace.core.errors import InvalidRequestError

KEYS_MAX: Final = 32
"""Most keys of a user."""
GROUPS_MAX: Final = 100
ACCOUNTS_MAX: Final = 32
_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_PLACE: Final = {character: place for place, character in enumerate(_Z85)}
_HASH = re.compile(
    r"\$argon2id\$v=19\$m=(\d{1,7}),t=(\d{1,2}),p=(\d{1,2})"
    r"\$[A-Za-z0-9+/]{11,86}\$[A-Za-z0-9+/]{22,86}"
)
HASH_MEMORY_MAX_KIB: Final = 256 << 10
HASH_PASSES_MAX: Final = 10


class Key(NamedTuple):
    """A public key of a user."""

    name: str
    public: str
    """Z85, 40 characters."""
    created_us: int
    expires_us: int = 0
    """Time since 1970 from which it is refused. 0: it does not expire."""

    def has_expired(self, now_us: int) -> bool:
        return 0 < self.expires_us <= now_us


class User(NamedTuple):
    """A user."""

    name: str
    is_admin: bool = False
    """True: every request is allowed, without an ACL."""
    is_disabled: bool = False
    groups: tuple[str, ...] = ()
    accounts: tuple[int, ...] = ()
    """User ids of the host, which are this user over a Unix socket."""
    keys: tuple[Key, ...] = ()
    created_us: int = 0
    password_hash: str = ""
    scram: tuple[ScramCredential, ...] = ()
    """One for each mechanism at most."""

    def key(self, name: str) -> Key | None:
        """The key of this name."""
        return next((key for key in self.keys if key.name == name), None)

    def shown(self) -> dict[str, Any]:
        """The user as an object of JSON, without what proves its password."""
        return {
            "name": self.name, "admin": self.is_admin, "disabled": self.is_disabled,
            "groups": list(self.groups), "accounts": list(self.accounts),
            "keys": [key._asdict() for key in self.keys], "created_us": self.created_us,
            "has_password": bool(self.password_hash),
            "scram": {each.mechanism: each.iterations for each in self.scram},
        }  # fmt: skip

    def with_credentials(self) -> dict[str, Any]:
        """The user as an object of JSON, for the processes that verify passwords."""
        return {
            **self.shown(), "password_hash": self.password_hash,
            "scram_credentials": [each.fields() for each in self.scram],
        }  # fmt: skip

    def scram_of(self, mechanism: str) -> ScramCredential | None:
        """The credential for a mechanism."""
        return next((each for each in self.scram if each.mechanism == mechanism), None)

    def is_proven_by(self, credential: str) -> bool:
        """True if the user still has the credential that a connection was let in with: the hash of
        its password, or the stored key of a SCRAM credential (hexadecimal).
        """
        known = (self.password_hash, *(each.stored_key.hex() for each in self.scram))
        return bool(credential) and credential in known


def user_of(shown: Mapping[str, Any]) -> User:
    """The user that `User.shown` or `User.with_credentials` has made an object of."""
    return User(
        shown["name"], shown["admin"], shown["disabled"], tuple(shown["groups"]),
        tuple(shown["accounts"]), tuple(Key(**key) for key in shown["keys"]), shown["created_us"],
        shown.get("password_hash", ""),
        tuple(checked_credential(each) for each in shown.get("scram_credentials", ())),
    )  # fmt: skip


def check_public_key(text: object) -> str:
    """The key. Raises InvalidRequestError."""
    if isinstance(text, str) and len(text) == 40 and all(c in _PLACE for c in text):
        values = [
            sum(_PLACE[text[at + place]] * 85 ** (4 - place) for place in range(5))
            for at in range(0, 40, 5)
        ]
        if max(values) < 1 << 32 and any(values):
            return text
    raise InvalidRequestError(
        "a public key has 40 characters of Z85; make one with `tailrace user add`"
    )


def check_password_hash(text: object) -> str:
    """The hash. Raises InvalidRequestError for another one than argon2id, or for one that takes
    more memory or time than a login may.
    """
    found = _HASH.fullmatch(text) if isinstance(text, str) else None
    if (
        found is None
        or int(found[1]) > HASH_MEMORY_MAX_KIB
        or not 1 <= int(found[2]) <= HASH_PASSES_MAX
        or not 1 <= int(found[3]) <= 8
    ):
        raise InvalidRequestError(
            f"a password is sent as its argon2id hash of at most {HASH_MEMORY_MAX_KIB} KiB and "
            f"{HASH_PASSES_MAX} passes; `tailrace user add --password` makes it"
        )
    return found[0]


def check_scram(value: object) -> tuple[ScramCredential, ...]:
    """SCRAM credentials, one for each mechanism. Raises InvalidRequestError."""
    if not isinstance(value, list):
        raise InvalidRequestError("scram_credentials must be a list")
    found = {each.mechanism: each for each in map(checked_credential, value)}
    return tuple(found[mechanism] for mechanism in sorted(found))


def check_groups(value: object) -> tuple[str, ...]:
    """Names of groups of users. Raises InvalidRequestError."""
    if not isinstance(value, list) or len(value) > GROUPS_MAX:
        raise InvalidRequestError(f"groups must be a list of at most {GROUPS_MAX} names")
    return tuple(dict.fromkeys(check_user_name(name, "the name of a group") for name in value))


class UserDirectory:
    """Users by name, by key and by account."""

    def __init__(self) -> None:
        self._by_name: dict[str, User] = {}
        self._by_key: dict[str, str] = {}
        self._by_account: dict[int, str] = {}
        self._scram_shapes: dict[str, Counter[ScramShape]] = {name: Counter() for name in HASHES}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[User]:
        return iter(list(self._by_name.values()))

    @property
    def is_unread(self) -> bool:
        """True if there may be users that cannot be read."""
        return False

    def clear(self) -> None:
        """Forget all users."""
        for name in tuple(self._by_name):
            UserDirectory.remove(self, name)

    def put(self, user: User) -> None:
        """Add a user, or replace the one of its name."""
        UserDirectory.remove(self, user.name)
        self._by_name[user.name] = user
        self._by_key.update(dict.fromkeys((key.public for key in user.keys), user.name))
        self._by_account.update(dict.fromkeys(user.accounts, user.name))
        for each in user.scram:
            self._scram_shapes[each.mechanism][each.shape] += 1

    def remove(self, name: str) -> None:
        """Remove a user, if there is one of the name."""
        user = self._by_name.pop(name, None)
        if user is None:
            return
        for key in user.keys:
            self._by_key.pop(key.public, None)
        for account in user.accounts:
            self._by_account.pop(account, None)
        for each in user.scram:
            shapes = self._scram_shapes[each.mechanism]
            shapes[each.shape] -= 1
            if not shapes[each.shape]:
                del shapes[each.shape]

    def scram_shapes(self, mechanism: str) -> Mapping[ScramShape, int]:
        """The shapes of all credentials for a mechanism, and how many users have each."""
        return self._scram_shapes[mechanism]

    def get(self, name: str) -> User | None:
        """The user of a name."""
        return self._by_name.get(name)

    def by_key(self, public: str) -> tuple[User, Key] | None:
        """The user of a public key, and that key."""
        user = self._by_name.get(self._by_key.get(public, ""))
        if user is None:
            return None
        return user, next(key for key in user.keys if key.public == public)

    def by_account(self, account: int) -> User | None:
        """The user that an account of the host stands for."""
        return self._by_name.get(self._by_account.get(account, ""))
