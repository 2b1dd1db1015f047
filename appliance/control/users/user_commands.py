"""Requests about users and ACLs: LIST_USERS, ALTER_USERS, LIST_ACLS, ALTER_ACLS, TEST_ACL.

Owner: the controller, which stores them in the catalog and publishes each change to the fronts.

Invariants:
- A change is on the disk before it is published, and published before it is answered.
- A repeated request succeeds: clients send one again when its response is lost.
- No response has a secret key, the hash of a password, or a SCRAM credential.

Bounds: PAGE rows of a response, CHANGES_MAX rules of a request.

Crash: a successor begins the feed of every front again.
"""

from __future__ import annotations

import logging
import pwd
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from appliance.catalog.catalog import Catalog
from appliance.catalog.database import refusals
from appliance.catalog.tables.users import (
    CHOSEN_BY,
    add_acls,
    count_users,
    delete_user,
    put_user,
    read_acls,
    read_user,
    read_users,
    remove_acls,
)
from appliance.control.users.last_administrator import keep_an_administrator
from shm.rights.acl import ANY, check_user_name, checked_acl
from shm.rights.authorizer import Decision, Principal
from shm.rights.server_keys import KeysUnusableError, ensure_admin_key
from shm.rights.stored_rights import StoredAcls
from shm.rights.users import (
    ACCOUNTS_MAX,
    KEYS_MAX,
    Key,
    User,
    check_groups,
    check_password_hash,
    check_public_key,
    check_scram,
)
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import is_integer

logger = logging.getLogger(__name__)

PAGE = 200
CHANGES_MAX = 1_000
NUMBER_MAX = (1 << 63) - 1
Changed = tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]
"""(Response, change for the fronts, the change with credentials for the gateways if that is
another one).
"""


class UserCommands:
    """Users and rules of the appliance, in the controller."""

    def __init__(
        self,
        catalog: Catalog,
        publish: Callable[[bytes, bytes], None],
        wall_us: Callable[[], int],
    ) -> None:
        """`publish` sends a change to every front, and its second form, with credentials of
        passwords, to the gateways instead. Raises StorageError.
        """
        self._catalog = catalog
        self._database = catalog.database
        self._publish = publish
        self._wall_us = wall_us

    def ensure_administrator(self, data_dir: str, address: str) -> None:
        """Make the user `admin`, whose context is in the data directory, if there are no users: at
        the first start with security, and where the catalog was lost. `address`: of the appliance.
        An error is logged; the appliance then has no users, and lets no client in.
        """
        try:
            if count_users(self._database):
                return
            public, path = ensure_admin_key(data_dir, address)
            now_us = self._wall_us()
            key = Key("first", check_public_key(public), now_us)
            put_user(self._database, User("admin", is_admin=True, keys=(key,), created_us=now_us))
        except (KeysUnusableError, OSError, TailraceError) as error:
            logger.error("no_administrator error=%r", str(error))
        else:
            logger.warning("administrator_made user=admin context=%s", path)

    # ---- fronts ----------------------------------------------------------------------------------

    def feed(self, *, with_credentials: bool = False) -> bytes:
        """The message that begins the feed of a front: it reads users and rules in the catalog.
        `with_credentials`: for one that verifies passwords.
        """
        return orjson.dumps({"catalog": self._database.path, "credentials": with_credentials})

    # ---- requests --------------------------------------------------------------------------------

    def take(
        self,
        api: int,
        request: dict[str, Any],
        answer: Callable[[dict[str, Any]], None],
        fail: Callable[[TailraceError], None],
    ) -> dict[str, Any] | None:
        """Handle a request. Returns the response of a question. A change calls `answer` when it is
        on the disk, or `fail`. Raises TailraceError.
        """
        if api == Api.LIST_USERS:
            return self._list_users(request)
        if api == Api.LIST_ACLS:
            return self._list_acls(request)
        if api == Api.TEST_ACL:
            return self._test(request)
        response, change, credentials = (
            self._alter_users(request) if api == Api.ALTER_USERS else self._alter_acls(request)
        )

        def kept() -> None:
            if change is not None:
                self._note(change)
                plain = orjson.dumps(change)
                self._publish(plain, plain if credentials is None else orjson.dumps(credentials))
            answer(response)

        self._catalog.afterwards(kept, fail)
        return None

    def _note(self, change: dict[str, Any]) -> None:
        logger.info(
            "rights_changed users=%s removed_users=%s acls=%s removed_acls=%s",
            ",".join(user["name"] for user in change.get("users", ())) or "none",
            ",".join(change.get("removed_users", ())) or "none",
            len(change.get("acls", ())), len(change.get("removed_acls", ())),
        )  # fmt: skip

    # ---- users -----------------------------------------------------------------------------------

    def _list_users(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`name`: only this one; `after`: the last of the page before."""
        name, after = request.get("name"), request.get("after")
        if name is not None:
            user = self._known(name)
            return {"users": [user.shown()], "next": None}
        if after is not None:
            check_user_name(after, "after")
        users = list(read_users(self._database, after or "", PAGE + 1))
        return {
            "users": [user.shown() for user in users[:PAGE]],
            "next": users[PAGE - 1].name if len(users) > PAGE else None,
        }

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with refusals():
            return self._database.execute(query, values).fetchall()

    def _known(self, name: object) -> User:
        user = read_user(self._database, check_user_name(name))
        if user is None:
            raise InvalidRequestError(f"there is no user {name}: `tailrace user list` shows them")
        return user

    def _alter_users(self, request: Mapping[str, Any]) -> Changed:
        action = request.get("action")
        name = check_user_name(request.get("user"))
        if action == "add":
            return self._add(name, request)
        if action == "delete":
            self._keep_an_administrator(self._known(name), None, request)
            delete_user(self._database, name)
            return {}, {"removed_users": [name]}, None
        if action == "set_scram":
            return self._set_scram(name, request)
        user = self._known(name)
        change = {
            "disable": lambda: user._replace(is_disabled=True),
            "enable": lambda: user._replace(is_disabled=False),
            "set": lambda: self._with_fields(user, request),
            "add_key": lambda: self._with_key(user, request),
            "remove_key": lambda: self._without_key(user, request),
        }.get(action) if isinstance(action, str) else None  # fmt: skip
        if change is None:
            raise InvalidRequestError(
                f"action is {action!r:.60}; it takes add, delete, disable, enable, set, "
                "set_scram, add_key or remove_key"
            )
        changed = change()
        self._keep_an_administrator(user, changed, request)
        return self._stored(changed)

    def _keep_an_administrator(
        self, before: User | None, after: User | None, request: Mapping[str, Any]
    ) -> None:
        keep_an_administrator(self._database, before, after, request, self._wall_us())

    def _set_scram(self, name: str, request: Mapping[str, Any]) -> Changed:
        """`credentials`: SCRAM credentials that are set; `removed_mechanisms`. A missing user is
        made. Where `passwd` has set a password, a credential of another one replaces all of it.
        """
        given = {each.mechanism: each for each in check_scram(request.get("credentials"))}
        removed = request.get("removed_mechanisms")
        if not isinstance(removed, list) or not (given or removed):
            raise InvalidRequestError(
                "set_scram needs `credentials` and `removed_mechanisms`, lists, and one entry"
            )
        user = read_user(self._database, name)
        if user is None:
            if not given:
                raise InvalidRequestError(f"there is no user {name}")
            user = User(name, created_us=self._wall_us())
        kept = {each.mechanism: each for each in user.scram if each.mechanism not in removed}
        if given and user.password_hash:
            user, kept = user._replace(password_hash=""), {}
        found = kept | given
        changed = user._replace(scram=tuple(found[each] for each in sorted(found)))
        self._keep_an_administrator(read_user(self._database, name), changed, request)
        return self._stored(changed)

    def _stored(self, user: User) -> Changed:
        put_user(self._database, user)
        return (
            {"user": user.shown()},
            {"users": [user.shown()]},
            {"users": [user.with_credentials()]},
        )

    def _add(self, name: str, request: Mapping[str, Any]) -> Changed:
        user = self._with_fields(User(name, created_us=self._wall_us()), request)
        for fields in _items(request, "keys"):
            user = self._with_key(user, {"key": fields})
        present = read_user(self._database, name)
        if present is not None:
            if _same(present, user):
                return {"user": present.shown()}, None, None  # a repeated request
            raise InvalidRequestError(
                f"there is a user {name} already; change it with `tailrace user rotate` or "
                "`tailrace user set`"
            )
        return self._stored(user)

    def _with_fields(self, user: User, request: Mapping[str, Any]) -> User:
        if "admin" in request:
            if not isinstance(request["admin"], bool):
                raise InvalidRequestError("admin must be true or false")
            user = user._replace(is_admin=request["admin"])
        if "groups" in request:
            user = user._replace(groups=check_groups(request["groups"]))
        if "accounts" in request:
            user = user._replace(accounts=_accounts(request["accounts"]))
        if "password_hash" in request:
            given = request["password_hash"]
            user = user._replace(password_hash="" if given is None else check_password_hash(given))
        if "scram_credentials" in request:
            user = user._replace(scram=check_scram(request["scram_credentials"]))
        return user

    def _with_key(self, user: User, request: Mapping[str, Any]) -> User:
        """`key`: {name, public, expires_us?}; `others_expire_us`: when its other keys expire."""
        fields = request.get("key")
        if not isinstance(fields, dict):
            raise InvalidRequestError("`key` must be an object with name and public")
        key = Key(
            check_user_name(fields.get("name"), "the name of a key"),
            check_public_key(fields.get("public")),
            self._wall_us(),
            _time_us(fields.get("expires_us", 0), "expires_us"),
        )
        others = [other for other in user.keys if other.name != key.name]
        present = user.key(key.name)
        if present is not None and present.public != key.public:
            raise InvalidRequestError(
                f"{user.name} has a key {key.name} already; give the new one another name"
            )
        if present is not None:
            key = key._replace(created_us=present.created_us)
        if "others_expire_us" in request:
            end_us = _time_us(request["others_expire_us"], "others_expire_us") or 1
            others = [
                other._replace(expires_us=min(other.expires_us or end_us, end_us))
                for other in others
            ]
        if len(others) >= KEYS_MAX:
            raise InvalidRequestError(
                f"{user.name} has {KEYS_MAX} keys, the most that there may be; remove one"
            )
        return user._replace(keys=(*others, key))

    @staticmethod
    def _without_key(user: User, request: Mapping[str, Any]) -> User:
        name = check_user_name(request.get("key_name"), "key_name")
        if user.key(name) is None:
            raise InvalidRequestError(f"{user.name} has no key {name}")
        return user._replace(keys=tuple(key for key in user.keys if key.name != name))

    # ---- rules -----------------------------------------------------------------------------------

    def _list_acls(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`filter`: fields that all rules have; `after`: the last number of the page before."""
        after = request.get("after") or 0
        if not is_integer(after, 0, NUMBER_MAX):
            raise InvalidRequestError("`after` must be the number of an ACL")
        acls = read_acls(self._database, _filter(request.get("filter")), after, PAGE + 1)
        return {
            "acls": [acl.shown() for acl in acls[:PAGE]],
            "next": acls[PAGE - 1].number if len(acls) > PAGE else None,
        }

    def _alter_acls(self, request: Mapping[str, Any]) -> Changed:
        """`add`: rules; `remove`: filters, each of which removes every rule that it matches. All of
        it is done, or nothing.
        """
        added = [checked_acl(_object(fields)) for fields in _items(request, "add")]
        filters = [_filter(_object(fields)) for fields in _items(request, "remove")]
        if not 0 < len(added) + len(filters) <= CHANGES_MAX:
            raise InvalidRequestError(
                f"the request needs 1 to {CHANGES_MAX} entries in `add` and `remove`"
            )
        if not all(filters):
            raise InvalidRequestError(
                "an entry of `remove` needs a field: without one it would remove every ACL"
            )
        with self._catalog.together():
            removed = {
                acl.number: acl
                for each in filters
                for acl in read_acls(self._database, each)
            }  # fmt: skip
            remove_acls(self._database, removed)
            stored = add_acls(self._database, added)
        shown = [acl.shown() for acl in stored]
        return (
            {"added": shown, "removed": [acl.shown() for acl in removed.values()]},
            {"acls": shown, "removed_acls": list(removed)},
            None,
        )

    def _test(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`principal`, `operation`, `resource_type`, `name`, `host`."""
        asked = checked_acl({name: value for name, value in request.items() if name in _TESTED})
        kind, _, name = asked.principal.partition(":")
        if kind != "User" or name == ANY:
            raise InvalidRequestError(
                "principal must be a user, User:NAME: groups have no requests"
            )
        user = self._known(name)
        principal = Principal(
            user.name, user.groups, asked.host, StoredAcls(self._rows), is_admin=user.is_admin
        )
        decision = principal.decide(asked.operation, asked.resource_type, asked.name)
        if user.is_disabled:
            return {"allowed": False, "reason": f"{user.name} is disabled", "acl": None}
        return {
            "allowed": decision.is_allowed,
            "reason": _reason(user, decision),
            "acl": None if decision.acl is None else decision.acl.shown(),
        }


_TESTED = frozenset(("principal", "operation", "resource_type", "name", "host"))


def _reason(user: User, decision: Decision) -> str:
    if decision.acl is not None:
        return f"ACL {decision.acl.number}: {decision.acl.sentence()}"
    if decision.is_allowed:
        return f"{user.name} is an administrator"
    return "no ACL allows it"


def _same(present: User, user: User) -> bool:
    """True if both say the same, times of creation aside."""
    keys = [(key.name, key.public, key.expires_us) for key in present.keys]
    return present._replace(created_us=0, keys=()) == user._replace(created_us=0, keys=()) and (
        keys == [(key.name, key.public, key.expires_us) for key in user.keys]
    )


def _items(request: Mapping[str, Any], field: str) -> list[Any]:
    value = request.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > CHANGES_MAX:
        raise InvalidRequestError(f"`{field}` must be a list of at most {CHANGES_MAX} entries")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError("an entry must be an object")
    return value


def _time_us(value: object, field: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidRequestError(f"{field} must be microseconds since 1970, or 0 for never")
    return value


def _filter(value: object) -> dict[str, Any]:
    """The fields of rules that are asked for, as the columns that have them."""
    if value is None:
        return {}
    given = dict(_object(value))
    if "permission" in given:
        given["is_allowed"] = given.pop("permission") == "allow"
    for field, text in given.items():
        if field not in CHOSEN_BY or not isinstance(text, (str, int)):
            raise InvalidRequestError(
                f"{field!r:.60} is no field of an ACL, or its value is no text"
            )
    return given


def _accounts(value: object) -> tuple[int, ...]:
    """User ids of the host, of numbers and names."""
    if not isinstance(value, list) or len(value) > ACCOUNTS_MAX:
        raise InvalidRequestError(f"accounts must be a list of at most {ACCOUNTS_MAX} accounts")
    found = []
    for account in value:
        if isinstance(account, str) and not account.isdecimal():
            try:
                account = pwd.getpwnam(account).pw_uid
            except (KeyError, ValueError):
                raise InvalidRequestError(
                    f"the appliance's host has no account {account!r:.60}"
                ) from None
        if isinstance(account, bool) or not str(account).isdecimal() or int(account) >= 1 << 32:
            raise InvalidRequestError(f"{account!r:.60} is no account of the host")
        found.append(int(account))
    return tuple(dict.fromkeys(found))
