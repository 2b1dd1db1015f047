"""Gate: the users and rules of a front, and the principal of each session.

Owner: one front; the controller feeds it.

Invariants:
- Until the feed is complete, no user is admitted. A feed names the catalog, where users and rules
  are read when they are asked for. A later feed replaces what is in force at its end.
- Users that cannot be read are not admitted.
- A session's principal is that of its user now. When the user is deleted or disabled, or the key is
  removed or expires, the session ends with the next step.
- A rule that changes is in force with the next decision.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import orjson
from zmq.utils import z85

from netfront.access.delay_owners import with_owners
from netfront.access.page_tokens import SEALED, PageTokens
from netfront.access.rules import OPEN, RULES, Need, refuse_unless
from netfront.session.sessions import Session
from netfront.socket.zap import CERTIFICATE, TOKEN, Claim
from shm.rights.acl import acls_of
from shm.rights.authorizer import APPLIANCE, PRINCIPALS_MAX, AclTable, Principal
from shm.rights.scram import ScramShape
from shm.rights.users import User, UserDirectory, user_of
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError

logger = logging.getLogger(__name__)

EXPIRY_CHECK_NS = 250_000_000
"""Interval of the checks for expired keys, while a session has a key that expires."""
_NAME_USER = frozenset(
    (
        int(Api.GROUP_HEARTBEAT), int(Api.COMMIT_OFFSETS),
        int(Api.SHARE_ACQUIRE), int(Api.SHARE_ACKNOWLEDGE),
        int(Api.END_TRANSACTION), int(Api.INIT_TRANSACTIONS), int(Api.CREATE_BRANCHES),
        int(Api.JOIN_TRANSACTION), int(Api.DESCRIBE_TRANSACTION),
        int(Api.LEASE_OFFSETS),
    )
)  # fmt: skip
_TOKENS = ("next", "after")
"""Fields of page tokens, in requests and responses: a name, or a list that begins with one."""
TopicName = Callable[[str], str | None]


class Rights(NamedTuple):
    """Users and rules."""

    users: UserDirectory
    acls: AclTable


class Gate:
    """See the module's docstring."""

    def __init__(self, own_key: str, wall_us: Callable[[], int]) -> None:
        """`own_key`: public key of the appliance's own clients."""
        self._own_key = own_key
        self.tokens = PageTokens(os.urandom(32))
        """The front gives it those of the appliance."""
        self.server_keys: Callable[[], list[str]] = list
        """Public keys of the server that clients are told: the one in use, and the next one."""
        self.topic_name: TopicName = lambda _topic_id: None
        """The front's (see `rules`)."""
        self.on_unknown_key: Callable[[str], None] = lambda _host: None
        """Called with the address of a connection whose key no user has."""
        self.fulfilled: Container[Need] = ()
        """Needs of requests that this process has the right for, whoever sends them."""
        self.answer_connections: Callable[[], int] = lambda: 0
        """Answers connections that wait for a decision. The front calls it once it is fed."""
        self._wall_us = wall_us
        self._rights: Rights | None = None
        self._collected: Rights | None = None
        """Users and rules of a feed that is not complete."""
        self._sessions: dict[str, dict[int, tuple[Session, Claim]]] = {}
        """Sessions by user and number."""
        self._principals: dict[tuple[str, str], Principal] = {}
        """By user and host."""
        self._ended: list[tuple[Session, str]] = []
        self._expiring: dict[int, tuple[int, str]] = {}
        """(Time, user) of sessions whose key expires, by number."""
        self.check_at_ns = NEVER_NS

    # ---- feed ------------------------------------------------------------------------------------

    def on_rights(self, payload: bytes, begins: bool) -> None:
        """Apply a message of the controller. `begins`: the first of a feed of everything."""
        change = orjson.loads(payload)
        if begins:
            self._collected = _rights_of(change)
        if self._collected is not None:
            _apply(self._collected, change)
        else:
            self._change(change)

    def on_fed(self) -> None:
        """Put the collected feed into force: it is complete. Without any message of it there are no
        users.
        """
        rights = self._collected
        if rights is None:
            if self._rights is None:
                self._rights = _rights_of({})
            return
        self._collected = None
        self._rights = rights
        self._principals.clear()
        for user in list(self._sessions):
            self._review(user)

    def _change(self, change: dict[str, Any]) -> None:
        rights = self._rights
        if rights is None:  # the first change precedes the first feed
            rights = self._collected = _rights_of({})
            _apply(rights, change)
            return
        _apply(rights, change)
        if change.get("acls") or change.get("removed_acls"):
            for principal in self._principals.values():
                principal.forget_decisions()
        names = [user["name"] for user in change.get("users", ())]
        for name in [*names, *change.get("removed_users", ())]:
            self._review(name)

    # ---- connections -----------------------------------------------------------------------------

    def allows(self, claim: Claim) -> bool:
        """Decide about a connection. A known key is let in even if its user is disabled, and any
        key while users cannot be read, so that the response to its handshake can tell why it is
        refused: `admit` decides.
        """
        if not claim.key:
            return True  # whoever may open the socket learns at the handshake
        public = z85.encode(claim.key).decode()
        rights = self._rights
        if public == self._own_key:
            return True
        if rights is None:
            return False
        is_known = rights.users.by_key(public) is not None or rights.users.is_unread
        if not is_known:
            self.on_unknown_key(claim.host)
        return is_known

    def admit(self, claim: Claim | None) -> Principal:
        """The principal of a connection that opens a session. Raises WireError."""
        if claim is None or self._rights is None:
            raise _refused("the appliance does not know who this connection belongs to")
        if claim.key and z85.encode(claim.key).decode() == self._own_key:
            return self._principal(User(APPLIANCE, is_admin=True), claim.host)
        if self._is_own_account(claim):
            return self._principal(User(APPLIANCE, is_admin=True), claim.host)
        user, _ = self._identify(claim)
        return self._principal(user, claim.host)

    @property
    def own_claim(self) -> Claim:
        """The claim of a client of the appliance's own within this process."""
        return Claim(z85.decode(self._own_key.encode()), -1, "")

    def user(self, name: str) -> User | None:
        """The user of a name, with the credentials of its password in a gateway."""
        return None if self._rights is None else self._rights.users.get(name)

    def scram_shapes(self, mechanism: str) -> Mapping[ScramShape, int]:
        """The shapes of the users' credentials for a mechanism (see `UserDirectory`)."""
        return {} if self._rights is None else self._rights.users.scram_shapes(mechanism)

    def _is_own_account(self, claim: Claim) -> bool:
        """True over a Unix socket for the account that the appliance runs as, which can read its
        keys anyway, unless the account stands for a user.
        """
        return (
            not claim.key
            and not claim.user
            and claim.account == os.geteuid()
            and self._rights is not None
            and self._rights.users.by_account(claim.account) is None
            and not self._rights.users.is_unread
        )

    def note(self, session: Session, claim: Claim | None) -> None:
        """Follow a session that `admit` has let in, until `forget`."""
        assert session.principal is not None
        assert claim is not None
        self._sessions.setdefault(session.principal.user, {})[session.number] = session, claim
        if session.principal.user == APPLIANCE:
            return
        self._note_expiry(session, self._identify(claim)[1])

    def _note_expiry(self, session: Session, expires_us: int) -> None:
        assert session.principal is not None
        if expires_us:
            self._expiring[session.number] = expires_us, session.principal.user
            self.check_at_ns = 0
        else:
            self._expiring.pop(session.number, None)

    def forget(self, session: Session) -> None:
        """Forget a session that has ended."""
        if session.principal is None:
            return
        of_user = self._sessions.get(session.principal.user)
        if of_user is not None:
            of_user.pop(session.number, None)
            if not of_user:
                del self._sessions[session.principal.user]
        self._expiring.pop(session.number, None)

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` has sessions that a change has ended."""
        return bool(self._ended)

    def take_ended(self, now_ns: int) -> list[tuple[Session, str]]:
        """Sessions that must end, with the reason."""
        if now_ns >= self.check_at_ns:
            self.check_at_ns = now_ns + EXPIRY_CHECK_NS if self._expiring else NEVER_NS
            now_us = self._wall_us() if self._expiring else 0
            for user in {user for end_us, user in self._expiring.values() if end_us <= now_us}:
                self._review(user)
        ended, self._ended = self._ended, []
        return ended

    def _identify(self, claim: Claim) -> tuple[User, int]:
        """The user of a claim, and when it expires (0: never). Raises WireError."""
        assert self._rights is not None
        users = self._rights.users
        expires_us = 0
        if claim.key:
            found = users.by_key(z85.encode(claim.key).decode())
            if found is None:
                raise _missing(users, "the key of this client is unknown")
            user, key = found
            expires_us = key.expires_us
            if key.has_expired(self._wall_us()):
                when = dt.datetime.fromtimestamp(key.expires_us // 1_000_000, dt.UTC)
                raise _refused(
                    f"the key {key.name!r} of user {user.name!r} has expired at "
                    f"{when:%Y-%m-%dT%H:%M:%SZ}: `tailrace user rotate {user.name}` makes a new one"
                )
        elif claim.user:
            user = self._logged_in(users, claim)
        else:
            by_account = users.by_account(claim.account)
            if by_account is None:
                raise _missing(
                    users,
                    f"account {claim.account} of this host stands for no user: "
                    f"`tailrace user set NAME --account {claim.account}` gives it one",
                )
            user = by_account
        if user.is_disabled:
            raise _refused(f"user {user.name!r} is disabled")
        return user, expires_us

    @staticmethod
    def _logged_in(users: UserDirectory, claim: Claim) -> User:
        user = users.get(claim.user)
        if user is None:
            raise _missing(users, f"there is no user {claim.user!r}")
        if claim.credential not in (CERTIFICATE, TOKEN) and not user.is_proven_by(claim.credential):
            raise _refused(f"the password of user {claim.user!r} has changed: log in again")
        return user

    def _principal(self, user: User, host: str) -> Principal:
        assert self._rights is not None
        key = user.name, host
        found = self._principals.get(key)
        if found is None:
            if len(self._principals) >= PRINCIPALS_MAX:
                self._forget_idle_principals()
            found = self._principals[key] = Principal(
                user.name, user.groups, host, self._rights.acls, is_admin=user.is_admin
            )
        return found

    def _forget_idle_principals(self) -> None:
        live = {
            session.principal
            for of_user in self._sessions.values()
            for session, _ in of_user.values()
        }
        self._principals = {
            key: principal for key, principal in self._principals.items() if principal in live
        }

    def _review(self, name: str) -> None:
        """Identify a user's sessions again: it, or its keys, have changed."""
        for key in [key for key in self._principals if key[0] == name and name != APPLIANCE]:
            del self._principals[key]
        for session, claim in list(self._sessions.get(name, {}).values()):
            if name == APPLIANCE:
                continue
            try:
                user, expires_us = self._identify(claim)
                if user.name != name:
                    raise _refused("its key belongs to another user now")
            except WireError as error:
                self._end(session, error.detail)
                continue
            session.principal = self._principal(user, claim.host)
            self._note_expiry(session, expires_us)

    def _end(self, session: Session, reason: str) -> None:
        self._expiring.pop(session.number, None)
        self._ended.append((session, reason))
        self.check_at_ns = 0

    # ---- requests --------------------------------------------------------------------------------

    @staticmethod
    def apis_to_check(apis: Iterable[int], forwarded: Container[int]) -> list[int]:
        """The APIs that the front answers by itself, and that need rights or have no rule."""
        return [
            api
            for api in apis
            if api not in forwarded
            and not ((rule := RULES.get(api)) and (rule is OPEN or rule.is_checked_by_route))
        ]

    def check(self, principal: Principal, api: int, request: dict[str, Any], body: bytes) -> bytes:
        """The body of a request, without the names that its principal may not see. Raises WireError
        if it may not make the request.
        """
        if principal.is_admin:
            return body
        rule = RULES.get(api)
        if rule is None:
            raise WireError(
                ErrorCode.NOT_AUTHORIZED,
                f"API {api} has no rule in this version: administrators alone may use it",
            )
        seen = request if rule.cuts is None else rule.cuts(principal, request)
        if rule.needs is not None:
            refuse_unless(principal, rule.needs(seen, self.topic_name), self.fulfilled)
        return body if seen == request else orjson.dumps(seen)

    def with_user(self, principal: Principal, api: int, body: bytes) -> bytes:
        """The body of a request, with its user in `user` where a member of a group, an owner of
        transactions or a lease belongs to one, and in the entries of changes of delayed records.
        """
        if api == Api.CHANGE_DELAYS:
            return orjson.dumps(with_owners(principal, orjson.loads(body), self.topic_name))
        if api not in _NAME_USER:
            return body
        request = orjson.loads(body)
        parts = [request.get(field) for field in ("acknowledgements", "offsets")]
        lists = [part for part in parts if isinstance(part, list)]
        for holder in (request, *chain.from_iterable(lists)):
            if isinstance(holder, dict):
                holder["user"] = principal.user
        return orjson.dumps(request)

    def shown(self, principal: Principal, api: int, body: bytes) -> bytes:
        """The part of a response that the principal may see. A page token that names something else
        is sealed.
        """
        rule = RULES.get(api)
        if principal.is_admin or rule is None or rule.lists is None:
            return body
        shown = rule.lists(principal, orjson.loads(body))
        for field in _TOKENS:
            token = shown.get(field)
            name = token[0] if isinstance(token, list) and token else token
            if isinstance(name, str) and (name.startswith(SEALED) or not _is_shown(shown, name)):
                sealed = self.tokens.seal(name)
                shown[field] = [sealed, *token[1:]] if isinstance(token, list) else sealed
        return orjson.dumps(shown)

    def opened(self, principal: Principal, api: int, request: dict[str, Any]) -> bool:
        """Open the page token of a request that lists. False: it has none that is sealed. Raises
        WireError.
        """
        rule = RULES.get(api)
        if principal.is_admin or rule is None or rule.lists is None:
            return False
        has_opened = False
        for field in _TOKENS:
            token = request.get(field)
            name = token[0] if isinstance(token, list) and token else token
            if isinstance(name, str) and name.startswith(SEALED):
                name = self.tokens.open(name)
                request[field] = [name, *token[1:]] if isinstance(token, list) else name
                has_opened = True
        return has_opened


def _is_shown(shown: dict[str, Any], name: str) -> bool:
    """True if the last row of a page has the name of the page's token."""
    for field, rows in shown.items():
        if isinstance(rows, list) and rows and field not in _TOKENS:
            last = rows[-1]
            if name in (last.values() if isinstance(last, dict) else last):
                return True
    return False


def _rights_of(fed: dict[str, Any]) -> Rights:
    """The rights of a feed's first message."""
    if "catalog" not in fed:
        return Rights(UserDirectory(), AclTable())
    from shm.rights.stored_rights import RightsDatabase, StoredAcls, StoredUsers

    database = RightsDatabase(fed["catalog"])
    users = StoredUsers(database, with_credentials=fed["credentials"])
    return Rights(users, StoredAcls(database.rows))


def _apply(rights: Rights, change: dict[str, Any]) -> None:
    for name in change.get("removed_users", ()):
        rights.users.remove(name)
    for shown in change.get("users", ()):
        rights.users.put(user_of(shown))
    for number in change.get("removed_acls", ()):
        rights.acls.remove(number)
    rights.acls.add_all(acls_of(change.get("acls", ())))


def _missing(users: UserDirectory, reason: str) -> WireError:
    """The refusal of a user that was not found."""
    if users.is_unread:
        reason = "the appliance cannot read its users: `rights_unread` in its log says why"
    return _refused(reason)


def _refused(reason: str) -> WireError:
    return WireError(ErrorCode.NOT_AUTHENTICATED, reason)
