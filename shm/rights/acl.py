"""ACL: one rule that allows or denies a principal an operation on resources, in Kafka's words.

Owner: pure. The controller stores ACLs in the catalog, where the fronts read them
(`stored_rights`).

Invariants:
- An `Acl` that `checked_acl`, `acls_of` or `stored_acl` made is valid: its words are those below,
  its names are within bounds.
- `*` as a literal name means every resource of the type. `*` in a prefix is a plain character.

Source: Kafka's AclBinding (KIP-11) and prefixed patterns (KIP-290). Groups of users and the
resource types delay and console are ours.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from shm.rights.client_hosts import plain_host
from tailrace.core.errors import InvalidRequestError

logger = logging.getLogger(__name__)

TOPIC, GROUP, TRANSACTIONAL_ID, DELAY, CLUSTER, CONSOLE = (
    "topic", "group", "transactional-id", "delay", "cluster", "console"
)  # fmt: skip
RESOURCE_TYPES: Final = (TOPIC, GROUP, TRANSACTIONAL_ID, DELAY, CLUSTER, CONSOLE)
THE_CLUSTER: Final = "tailrace"
"""Name of the only resource of the types cluster and console."""
LITERAL, PREFIXED = "literal", "prefixed"
PATTERNS: Final = (LITERAL, PREFIXED)
ANY: Final = "*"
ALL, READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = (
    "all", "read", "write", "create", "delete", "alter", "describe"
)  # fmt: skip
CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = (
    "cluster-action", "describe-configs", "alter-configs", "idempotent-write"
)  # fmt: skip
OPERATIONS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    TOPIC: (READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS),
    GROUP: (READ, DELETE, DESCRIBE),
    TRANSACTIONAL_ID: (WRITE, DESCRIBE),
    DELAY: (DESCRIBE, ALTER),
    CLUSTER: (
        CREATE, CLUSTER_ACTION, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE,
    ),
    CONSOLE: (READ, ALTER),
}  # fmt: skip
"""The operations of each resource type, beside `all`."""
OPERATIONS: Final = (ALL, *dict.fromkeys(op for ops in OPERATIONS_OF.values() for op in ops))
IMPLIED_BY: Final[Mapping[str, frozenset[str]]] = {
    DESCRIBE: frozenset((READ, WRITE, DELETE, ALTER)),
    DESCRIBE_CONFIGS: frozenset((ALTER_CONFIGS,)),
}
"""Operation -> operations whose permission includes it. A denial includes nothing."""
USER, USERS = "User", "Group"
NAME_MAX: Final = 249
USER_NAME_MAX: Final = 100
_USER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._@-]{{0,{USER_NAME_MAX - 1}}}", re.ASCII)
_PRINCIPAL = re.compile(rf"(?:{USER}|{USERS}):{_USER_NAME.pattern}|{USER}:\*", re.ASCII)


class Acl(NamedTuple):
    """One rule. Its fields are those of `tailrace acl list --json`."""

    number: int
    """Given by the catalog, never reused. 0: it has none yet."""
    principal: str
    """`User:NAME`, `Group:NAME`, or `User:*` for everybody."""
    resource_type: str
    pattern: str
    name: str
    operation: str
    is_allowed: bool
    host: str = ANY
    """Address that the client must come from."""

    def covers(self, name: str) -> bool:
        """True if the pattern matches the name of a resource."""
        if self.pattern == PREFIXED:
            return name.startswith(self.name)
        return self.name in (ANY, name)

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything but the number: two ACLs with the same content are one."""
        return self[1:]

    def shown(self) -> dict[str, Any]:
        """The rule as an object of JSON."""
        fields = self._asdict()
        fields["permission"] = "allow" if fields.pop("is_allowed") else "deny"
        return fields

    def sentence(self) -> str:
        """The rule in words, for an operator."""
        verb = "may" if self.is_allowed else "may not"
        which = {LITERAL: repr(self.name), PREFIXED: f"{self.name!r}..."}[self.pattern]
        if self.pattern == LITERAL and self.name == ANY:
            which = "of any name"
        where = "" if self.host == ANY else f" from {self.host}"
        return f"{self.principal} {verb} {self.operation} {self.resource_type} {which}{where}"


def check_user_name(name: object, noun: str = "the name of a user") -> str:
    """The name. Raises InvalidRequestError. Names are ASCII: none looks like another one."""
    if not isinstance(name, str) or not _USER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{noun} is {name!r:.120}; write 1 to {USER_NAME_MAX} of the characters a-z, A-Z, 0-9, "
            "'.', '_', '@' and '-', the first one a letter or a digit"
        )
    return name


def checked_acl(fields: Mapping[str, Any], number: int = 0) -> Acl:
    """The rule of an object of JSON, with defaults. Raises InvalidRequestError."""
    unknown = set(fields) - _GIVEN
    if unknown:
        raise InvalidRequestError(
            f"an ACL has no field {min(unknown)!r:.60}; it has {', '.join(sorted(_GIVEN))}"
        )
    kind = _one_of("resource_type", fields.get("resource_type"), RESOURCE_TYPES)
    pattern = _one_of("pattern", fields.get("pattern", LITERAL), PATTERNS)
    operation = _one_of("operation", fields.get("operation"), (ALL, *OPERATIONS_OF[kind]))
    permission = _one_of("permission", fields.get("permission", "allow"), ("allow", "deny"))
    return Acl(
        number, _principal(fields.get("principal")), kind, pattern,
        _resource_name(kind, pattern, fields.get("name")), operation, permission == "allow",
        _host(fields.get("host", ANY)),
    )  # fmt: skip


def acls_of(rules: Iterable[Mapping[str, Any]]) -> list[Acl]:
    """The rules that `Acl.shown` has made objects of. Raises InvalidRequestError.

    They are checked as by `checked_acl`, at a fifth of its time, since a start reads every rule.
    The words of a rule are looked up together, and are the same objects in every rule.
    """
    known, words_of, is_principal, new = (
        _KNOWN_WORDS,
        _words_of,
        _PRINCIPAL.fullmatch,
        tuple.__new__,
    )
    found = []
    for shown in rules:
        try:
            kind, pattern, operation, is_allowed = known[words_of(shown)]
            principal, name = shown["principal"], shown["name"]
            is_known = (
                is_principal(principal)
                and name.isprintable()
                and 1 <= len(name) <= NAME_MAX
                and len(shown) == _FIELD_COUNT
            )
            number = shown["number"]
        except (AttributeError, KeyError, TypeError):
            is_known = False
        if is_known:
            fields = number, principal, kind, pattern, name, operation, is_allowed, ANY
            found.append(new(Acl, fields))
        else:
            given = {name: value for name, value in shown.items() if name != "number"}
            found.append(checked_acl(given, shown.get("number", 0)))
    return found


def stored_acl(
    number: int, principal: str, kind: str, pattern: str, name: str, operation: str,
    is_allowed: int, host: str,
) -> Acl:  # fmt: skip
    """The rule of the catalog's row. One that is damaged denies its principal everything of its
    type: it may have been a denial.
    """
    words = kind, pattern, operation, "allow" if is_allowed else "deny", host
    if words in _KNOWN_WORDS:
        return Acl(number, principal, kind, pattern, name, operation, bool(is_allowed), host)
    fields = {"principal": principal, "name": name, **dict(zip(_WORDS, words, strict=True))}
    try:
        return checked_acl(fields, number)
    except InvalidRequestError as error:
        logger.error("acl_damaged number=%s reason=%r", number, str(error))
        of = kind if kind in OPERATIONS_OF else TOPIC
        return Acl(number, principal, of, LITERAL, ANY, ALL, False, ANY)


_WORDS: Final = ("resource_type", "pattern", "operation", "permission", "host")
_words_of = itemgetter("resource_type", "pattern", "operation", "permission", "host")
_FIELD_COUNT: Final = len(Acl._fields)
_KNOWN_WORDS: Final = {
    (kind, pattern, operation, permission, ANY): (kind, pattern, operation, permission == "allow")
    for kind in (TOPIC, GROUP, TRANSACTIONAL_ID, DELAY)
    for pattern in PATTERNS
    for operation in (ALL, *OPERATIONS_OF[kind])
    for permission in ("allow", "deny")
}
"""The words of rules for every host, of the resources that have names."""
_GIVEN = frozenset(
    ("principal", "resource_type", "pattern", "name", "operation", "permission", "host")
)


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError(f"{field} is {value!r:.60}; it takes one of {', '.join(allowed)}")
    return value


def _principal(value: object) -> str:
    kind, separator, name = str(value).partition(":")
    if not isinstance(value, str) or not separator or kind not in (USER, USERS):
        raise InvalidRequestError(
            f"principal is {value!r:.120}; write User:NAME, Group:NAME, or User:* for everybody"
        )
    if (kind, name) != (USER, ANY):
        check_user_name(name, "the name in principal")
    return value


def _resource_name(kind: str, pattern: str, value: object) -> str:
    if kind in (CLUSTER, CONSOLE) and value is None:
        value = THE_CLUSTER
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_MAX or not value.isprintable():
        raise InvalidRequestError(
            f"name is {value!r:.120}; it takes 1 to {NAME_MAX} printable characters, or * for "
            f"every {kind}"
        )
    if kind in (CLUSTER, CONSOLE) and (pattern, value) != (LITERAL, THE_CLUSTER):
        raise InvalidRequestError(f"name is {value!r:.120}; the only {kind} is {THE_CLUSTER!r}")
    return value


def _host(value: object) -> str:
    if value == ANY:
        return ANY
    import ipaddress  # rules with a host are rare

    try:
        return plain_host(str(ipaddress.ip_address(str(value))))
    except ValueError:
        raise InvalidRequestError(
            f"host is {value!r:.60}; it takes an IP address, or * for every host"
        ) from None
