"""Administration of users and ACLs. `tailrace.Admin` has these methods.

Each call makes a request or a few in the caller's thread. A change is in force everywhere within a
second of the method's return.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import to_timestamp_us
from tailrace.core.validation import name_of
from tailrace.protocol.frame import Api

T = TypeVar("T")
_ACL = '{"principal": "User:a", "resource_type": "topic", "name": "orders", "operation": "read"}'


class UserAdmin:
    """The methods of `Admin` for users and ACLs."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    def _alter_user(self, user: str, action: str, **fields: Any) -> Steps[dict[str, Any]]:
        request = {"user": name_of("the name of a user", user), "action": action, **fields}
        answer = yield from self._call(Api.ALTER_USERS, request)
        found: dict[str, Any] = answer.get("user", {})
        return found

    def _user_pages(
        self, api: Api, field: str, request: dict[str, Any]
    ) -> Steps[list[dict[str, Any]]]:
        self._connection.check_usable()
        found: list[dict[str, Any]] = []
        while True:
            answer = yield from self._call(api, request)
            found += answer[field]
            if answer["next"] is None:
                return found
            request = {**request, "after": answer["next"]}

    # ---- users -----------------------------------------------------------------------------------

    @operation
    def list_users(self, user: str | None = None) -> Steps[list[dict[str, Any]]]:
        """Users, or one: name, admin, disabled, groups, accounts (user ids of the appliance's
        host), keys (each with name, public, created_us and expires_us, 0 for never), created_us,
        has_password and scram (iterations by mechanism). Raises InvalidRequestError if there is no
        such user.
        """
        request = {} if user is None else {"name": name_of("the name of a user", user)}
        return (yield from self._user_pages(Api.LIST_USERS, "users", request))

    @operation
    def add_user(
        self,
        user: str,
        *,
        public_key: str | None = None,
        key_name: str = "first",
        expires: dt.datetime | None = None,
        admin: bool = False,
        groups: Iterable[str] = (),
        accounts: Iterable[str | int] = (),
        password_hash: str | None = None,
        scram_credentials: Iterable[Mapping[str, Any]] | None = None,
    ) -> Steps[dict[str, Any]]:
        """Add a user, who may do nothing before an ACL allows it, or everything as an `admin`.
        `public_key` is that of a CURVE key pair, whose secret key stays with the client; it expires
        at `expires`. `groups` are groups of users. `accounts` of the appliance's host stand for the
        user over `ipc://`. `password_hash` (argon2id) and `scram_credentials` prove a password to
        the console and to the Kafka port; `tailrace user add --password` makes them. Returns the
        user. Raises InvalidRequestError.
        """
        keys = []
        if public_key is not None:
            keys.append(_key(key_name, public_key, expires))
        fields: dict[str, Any] = {
            "admin": admin, "groups": _names("groups", groups), "keys": keys,
            "accounts": list(accounts),
        }  # fmt: skip
        if password_hash is not None:
            fields["password_hash"] = password_hash
        if scram_credentials is not None:
            fields["scram_credentials"] = [dict(each) for each in scram_credentials]
        self._connection.check_usable()
        return (yield from self._alter_user(user, "add", **fields))

    @operation
    def alter_user(
        self,
        user: str,
        *,
        admin: bool | None = None,
        groups: Iterable[str] | None = None,
        accounts: Iterable[str | int] | None = None,
        password_hash: str | None = None,
        scram_credentials: Iterable[Mapping[str, Any]] | None = None,
        force: bool = False,
    ) -> Steps[dict[str, Any]]:
        """Change a user; what is None stays. `password_hash` "" removes the password, and
        `scram_credentials` replaces all of them. Connections that were let in with what is gone end
        within a second. Returns the user. Raises InvalidRequestError, also for the last
        administrator without `force`.
        """
        fields = _forced(force)
        if admin is not None:
            fields["admin"] = admin
        if groups is not None:
            fields["groups"] = _names("groups", groups)
        if accounts is not None:
            fields["accounts"] = list(accounts)
        if password_hash is not None:
            fields["password_hash"] = password_hash or None
        if scram_credentials is not None:
            fields["scram_credentials"] = [dict(each) for each in scram_credentials]
        self._connection.check_usable()
        return (yield from self._alter_user(user, "set", **fields))

    @operation
    def delete_user(self, user: str, *, force: bool = False) -> Steps[None]:
        """Delete a user, and end its sessions. ACLs that name it stay. Raises
        InvalidRequestError, also for the last administrator without `force`.
        """
        self._connection.check_usable()
        yield from self._alter_user(user, "delete", **_forced(force))

    @operation
    def disable_user(self, user: str, *, force: bool = False) -> Steps[dict[str, Any]]:
        """Disable a user, and end its sessions. Returns the user. Raises InvalidRequestError,
        also for the last administrator without `force`.
        """
        self._connection.check_usable()
        return (yield from self._alter_user(user, "disable", **_forced(force)))

    @operation
    def enable_user(self, user: str) -> Steps[dict[str, Any]]:
        """Enable a user that was disabled. Returns the user. Raises InvalidRequestError."""
        self._connection.check_usable()
        return (yield from self._alter_user(user, "enable"))

    @operation
    def add_user_key(
        self,
        user: str,
        key_name: str,
        public_key: str,
        *,
        expires: dt.datetime | None = None,
        others_expire: dt.datetime | None = None,
    ) -> Steps[dict[str, Any]]:
        """Give a user another key. Its other keys expire at `others_expire`, if that is given.
        Returns the user. Raises InvalidRequestError.
        """
        fields: dict[str, Any] = {"key": _key(key_name, public_key, expires)}
        if others_expire is not None:
            fields["others_expire_us"] = to_timestamp_us(others_expire)
        self._connection.check_usable()
        return (yield from self._alter_user(user, "add_key", **fields))

    @operation
    def remove_user_key(
        self, user: str, key_name: str, *, force: bool = False
    ) -> Steps[dict[str, Any]]:
        """Remove a key, and end the sessions that use it. Returns the user. Raises
        InvalidRequestError, also for the last key of the last administrator without `force`.
        """
        self._connection.check_usable()
        return (
            yield from self._alter_user(user, "remove_key", key_name=key_name, **_forced(force))
        )

    # ---- ACLs ------------------------------------------------------------------------------------

    @operation
    def list_acls(self, filter: Mapping[str, str] | None = None) -> Steps[list[dict[str, Any]]]:
        """ACLs, or those with the fields of `filter`. Each has number, principal, resource_type,
        pattern, name, operation, permission and host. Raises InvalidRequestError.
        """
        return (yield from self._user_pages(Api.LIST_ACLS, "acls", {"filter": dict(filter or {})}))

    @operation
    def add_acls(self, acls: Iterable[Mapping[str, Any]]) -> Steps[list[dict[str, Any]]]:
        """Add ACLs. Each has principal (`User:NAME`, `Group:NAME`, `User:*`), resource_type, name
        and operation, and may have pattern ("literal" or "prefixed"), permission ("allow" or
        "deny") and host. One that is there already stays. Returns them with their numbers. All are
        added, or none. Raises InvalidRequestError.
        """
        self._connection.check_usable()
        answer = yield from self._call(Api.ALTER_ACLS, {"add": _objects(acls)})
        added: list[dict[str, Any]] = answer["added"]
        return added

    @operation
    def remove_acls(self, filters: Iterable[Mapping[str, Any]]) -> Steps[list[dict[str, Any]]]:
        """Remove every ACL that has the fields of one of `filters`, such as its number. Returns
        them. Raises InvalidRequestError.
        """
        self._connection.check_usable()
        answer = yield from self._call(Api.ALTER_ACLS, {"remove": _objects(filters)})
        removed: list[dict[str, Any]] = answer["removed"]
        return removed

    @operation
    def test_acl(
        self, principal: str, operation: str, resource_type: str, name: str, host: str = "*"
    ) -> Steps[dict[str, Any]]:
        """Decide as the appliance would: `allowed`, `reason`, and the `acl` that decides, or None.
        Raises InvalidRequestError.
        """
        self._connection.check_usable()
        request = {
            "principal": principal, "operation": operation, "resource_type": resource_type,
            "name": name, "host": host,
        }  # fmt: skip
        return (yield from self._call(Api.TEST_ACL, request))


def _forced(force: bool) -> dict[str, Any]:
    return {"force": True} if force else {}


def _key(name: str, public: str, expires: dt.datetime | None) -> dict[str, Any]:
    expires_us = 0 if expires is None else to_timestamp_us(expires)
    return {"name": name, "public": public, "expires_us": expires_us}


def _names(field: str, value: Iterable[str]) -> list[str]:
    if isinstance(value, str):
        raise InvalidRequestError(f"{field} is {value!r:.100}; give a list of names")
    return list(value)


def _objects(value: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{value!r:.100} is no list of ACLs; write [{_ACL}]")
    found = list(value)
    if not all(isinstance(each, Mapping) for each in found):
        raise InvalidRequestError(f"an ACL is an object; write {_ACL}")
    return [dict(each) for each in found]
