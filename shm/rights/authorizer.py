"""Authorizer: decides from ACLs what a principal may do, and remembers its decisions.

Owner: one process; each front has its own.

Invariants:
- A denial that matches wins over every permission. Without a permission the answer is no.
- A decision is that of the ACLs now: each change forgets what was remembered.
- Remembered decisions of a principal are at most DECISIONS_MAX, and principals at most
  PRINCIPALS_MAX.
- Rules that cannot be read allow nothing, and that decision is not remembered.

A remembered decision costs one look-up. A new one costs a look-up for each name of the principal
and each length of a prefix that its ACLs have, however many ACLs others have.

Source: Kafka's StandardAuthorizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shm.rights.acl import (
    ALL,
    ANY,
    IMPLIED_BY,
    LITERAL,
    PREFIXED,
    USER,
    USERS,
    Acl,
)
from shm.rights.client_hosts import plain_host

DECISIONS_MAX = 10_000
PRINCIPALS_MAX = 10_000
_EVERYBODY = f"{USER}:{ANY}"
Resource = tuple[str, str]
"""(Type, name)."""


class Decision(NamedTuple):
    """A decision and its reason."""

    is_allowed: bool
    acl: Acl | None
    """The rule that decided. None: no rule matches, or the principal needs none."""


NO_RULE = Decision(False, None)
BY_ROLE = Decision(True, None)


class RightsUnreadError(Exception):
    """Users or rules cannot be read."""


class PrincipalRules:
    """The ACLs of one name of a principal."""

    __slots__ = ("by_name", "by_prefix", "lengths")

    def __init__(self, acls: Iterable[Acl]) -> None:
        self.by_name: dict[Resource, list[Acl]] = {}
        self.by_prefix: dict[Resource, list[Acl]] = {}
        self.lengths: dict[str, dict[int, int]] = {}
        """Resource type -> length of prefixes -> number of ACLs with such a prefix."""
        for acl in acls:
            self.add(acl)

    def add(self, acl: Acl) -> None:
        key = acl.resource_type, acl.name
        if acl.pattern == LITERAL:
            self.by_name.setdefault(key, []).append(acl)
            return
        self.by_prefix.setdefault(key, []).append(acl)
        counts = self.lengths.setdefault(acl.resource_type, {})
        counts[len(acl.name)] = counts.get(len(acl.name), 0) + 1

    def remove(self, acl: Acl) -> None:
        key = acl.resource_type, acl.name
        rules = self.by_name if acl.pattern == LITERAL else self.by_prefix
        kept = [other for other in rules[key] if other.number != acl.number]
        if kept:
            rules[key] = kept
        else:
            del rules[key]
        if acl.pattern == PREFIXED:
            counts = self.lengths[acl.resource_type]
            counts[len(acl.name)] -= 1
            if not counts[len(acl.name)]:
                del counts[len(acl.name)]

    def is_empty(self) -> bool:
        return not self.by_name and not self.by_prefix

    def __iter__(self) -> Iterator[Acl]:
        for rules in (self.by_name, self.by_prefix):
            for acls in rules.values():
                yield from acls

    def matching(self, kind: str, name: str) -> Iterator[Acl]:
        yield from self.by_name.get((kind, name), ())
        if name != ANY:
            yield from self.by_name.get((kind, ANY), ())
        for length in self.lengths.get(kind, ()):
            if length <= len(name):
                yield from self.by_prefix.get((kind, name[:length]), ())

    def of_type(self, kind: str) -> Iterator[Acl]:
        for rules in (self.by_name, self.by_prefix):
            for (other, _), acls in rules.items():
                if other == kind:
                    yield from acls


class AclTable:
    """All ACLs, by the principal that they name."""

    def __init__(self) -> None:
        self._by_number: dict[int, Acl] = {}
        self._by_principal: dict[str, PrincipalRules] = {}
        self.is_unread = False
        """True if the last decision was a refusal because rules could not be read."""

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, acl: Acl) -> None:
        """Add a rule, in place of one with its number."""
        self.add_all((acl,))

    def add_all(self, acls: Iterable[Acl]) -> None:
        """Add rules, each in place of one with its number."""
        for acl in acls:
            self.remove(acl.number)
            self._by_number[acl.number] = acl
            rules = self._by_principal.get(acl.principal)
            if rules is None:
                rules = self._by_principal[acl.principal] = PrincipalRules(())
            rules.add(acl)

    def remove(self, number: int) -> None:
        """Remove a rule, if it is there."""
        acl = self._by_number.pop(number, None)
        if acl is not None:
            rules = self._by_principal[acl.principal]
            rules.remove(acl)
            if rules.is_empty():
                del self._by_principal[acl.principal]

    def decide(
        self, names: Iterable[str], host: str, operation: str, kind: str, name: str
    ) -> Decision:
        """Decide for a principal with these names (`User:a`, `Group:b`), from this address."""
        try:
            all_rules = self._rules_of(names)
        except RightsUnreadError:
            return NO_RULE
        found: Acl | None = None
        implied_by = IMPLIED_BY.get(operation, frozenset())
        for rules in all_rules:
            for acl in rules.matching(kind, name):
                if acl.host not in (ANY, host):
                    continue
                if acl.operation in (ALL, operation):
                    if not acl.is_allowed:
                        return Decision(False, acl)
                    found = found or acl
                elif acl.is_allowed and acl.operation in implied_by:
                    found = found or acl
        return NO_RULE if found is None else Decision(True, found)

    def decide_any(self, names: Iterable[str], host: str, operation: str, kind: str) -> Decision:
        """Decide whether some resource of the type, which may not exist, is allowed."""
        try:
            all_rules = self._rules_of(names)
        except RightsUnreadError:
            return NO_RULE
        denials: list[Acl] = []
        permissions: list[Acl] = []
        for rules in all_rules:
            for acl in rules.of_type(kind):
                if acl.host in (ANY, host) and acl.operation in (ALL, operation):
                    (permissions if acl.is_allowed else denials).append(acl)
        for acl in permissions:
            if not any(_covers_all_of(denial, acl) for denial in denials):
                return Decision(True, acl)
        return Decision(False, denials[0]) if permissions else NO_RULE

    def _rules_of(self, names: Iterable[str]) -> list[PrincipalRules]:
        """All of them, or RightsUnreadError: one that is missing may be a denial."""
        self.is_unread = True
        found = [self._rules(name) for name in (*names, _EVERYBODY)]
        self.is_unread = False
        return [rules for rules in found if rules is not None]

    def _rules(self, principal: str) -> PrincipalRules | None:
        """The rules of a name. Raises RightsUnreadError."""
        return self._by_principal.get(principal)


def _covers_all_of(denial: Acl, acl: Acl) -> bool:
    """True if a denial matches every resource that the other rule matches."""
    if denial.pattern == LITERAL:
        return denial.name == ANY or (acl.pattern == LITERAL and denial.name == acl.name)
    if acl.pattern == LITERAL and acl.name == ANY:
        return False
    return acl.name.startswith(denial.name)


APPLIANCE = "(appliance)"
"""Name of the appliance's own principal: the console's and the tools' of its host. No user can have
it: the names of users have no parentheses.
"""


class Principal:
    """A user at one address, with what was decided for it."""

    __slots__ = (
        "_decisions",
        "_table",
        "change_count",
        "host",
        "is_admin",
        "names",
        "targets",
        "targets_of",
        "user",
    )

    def __init__(
        self, user: str, groups: Iterable[str], host: str, table: AclTable, *, is_admin: bool
    ) -> None:
        """`is_admin`: every request is allowed, without a rule."""
        self.user = user
        self.names = (f"{USER}:{user}", *(f"{USERS}:{group}" for group in groups))
        self.host = plain_host(host)
        self.is_admin = is_admin
        self._table = table
        self._decisions: dict[tuple[str, str, str], bool] = {}
        self.change_count = 0
        """Times that its decisions were forgotten."""
        self.targets: dict[tuple[bytes, int], Any] = {}
        """Targets of the partitions that it may write to, by topic id and number. The front's
        produce service fills it.
        """
        self.targets_of = (-1, -1)
        """Numbers of the changes of routes and quotas that the targets were made after."""

    @property
    def is_appliance(self) -> bool:
        """True for the appliance's own clients."""
        return self.user == APPLIANCE

    def may(self, operation: str, kind: str, name: str) -> bool:
        """True if the operation on the resource is allowed."""
        key = operation, kind, name
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            found = self.decide(operation, kind, name).is_allowed
            if not self._table.is_unread or self.is_admin:
                self._decisions[key] = found
        return found

    def decide(self, operation: str, kind: str, name: str) -> Decision:
        """The decision with its reason; not remembered."""
        if self.is_admin:
            return BY_ROLE
        return self._table.decide(self.names, self.host, operation, kind, name)

    def may_any(self, operation: str, kind: str) -> bool:
        """True if the operation is allowed on some resource of the type."""
        return (
            self.is_admin
            or self._table.decide_any(self.names, self.host, operation, kind).is_allowed
        )

    def forget_decisions(self) -> None:
        """Decide again from now on: ACLs have changed."""
        self._decisions.clear()
        self.targets.clear()
        self.change_count += 1
