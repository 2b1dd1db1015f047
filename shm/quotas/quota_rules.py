"""Quota rules: which entity may use how much, their texts, and their precedence. Pure.

An entity is a user, a client id, both, or a prefix of topic names. `*` is the default of its kind.
For users and clients the most specific rule with the quota in question decides, as in Kafka
(KIP-257):

    user + client, user + *, user, * + client, * + *, *, client, client default

A rule that names a user, or the default of users, gives each user a share of its own, counted over
all client ids. A rule that names a client id too counts that pair. A rule of clients alone counts
the client id over all users. Every rule of a prefix that a topic's name begins with applies.

Text of a rule: `user=NAME client=NAME quota=value ...`, or `prefix=NAME quota=value ...`. Names are
percent-encoded as in URLs.

Invariants:
- An entity has one rule. A rule has at least one quota.
- The texts of a set of rules, parsed, are that set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import whole_number

DEFAULT = "*"
ANONYMOUS = "ANONYMOUS"
"""User of every connection while users are not required."""
RULES_MAX = 1_000
NAME_MAX = 255
VALUE_MAX = 1 << 50


class Quota(NamedTuple):
    """Description of a quota."""

    is_rate: bool
    """True for an amount a second, whose excess waits. False for a sum, whose excess is refused."""
    of_prefix: bool
    """True for a quota of prefixes, False for one of users and clients."""
    is_bytes: bool
    doc: str


QUOTAS: dict[str, Quota] = {
    "producer_byte_rate": Quota(True, False, True, "Bytes of batches sent to the appliance a "
                                "second."),
    "consumer_byte_rate": Quota(True, False, True, "Bytes of batches fetched a second."),
    "request_rate": Quota(True, False, False, "Requests a second, of every API."),
    "controller_mutation_rate": Quota(True, False, False, "Partitions created and deleted a "
                                      "second."),
    "connections_max": Quota(False, False, False, "Connections open at a time, at each front."),
    "transactions_max": Quota(False, False, False, "Transactional ids in use at a time: those of "
                              "open connections, and those whose transaction may be open still."),
    "stored_bytes_max": Quota(False, True, True, "Bytes of the log. Producers are refused above "
                              "it."),
    "topics_max": Quota(False, True, False, "Topics."),
    "partitions_max": Quota(False, True, False, "Partitions of all topics."),
    "delayed_records_max": Quota(False, True, False, "Delayed records pending."),
}  # fmt: skip


class Entity(NamedTuple):
    """An entity of quotas. None: not part of it. "*": the default."""

    user: str | None = None
    client: str | None = None
    prefix: str | None = None

    @property
    def text(self) -> str:
        """Its text in a rule."""
        parts = [("user", self.user), ("client", self.client), ("prefix", self.prefix)]
        return " ".join(f"{kind}={_encoded(name)}" for kind, name in parts if name is not None)


Rules = dict[Entity, dict[str, int]]
"""Entity -> quota -> value."""


def _encoded(name: str) -> str:
    """`*` is the default; a name that is an asterisk is encoded."""
    return name if name == DEFAULT else quote(name, safe=".:@-_")


def checked_entity(
    user: str | None = None, client: str | None = None, prefix: str | None = None
) -> Entity:
    """An entity. Raises InvalidSettingError."""
    for kind, name in (("user", user), ("client", client), ("prefix", prefix)):
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= NAME_MAX):
            raise InvalidSettingError(
                f"the {kind} of a quota is {name!r:.100}; it takes a name of at most {NAME_MAX} "
                "characters, or * for the default"
            )
    if prefix is not None and (user is not None or client is not None):
        raise InvalidSettingError("a quota is of a prefix, or of a user and a client; not of both")
    if prefix is None and user is None and client is None:
        raise InvalidSettingError("a quota needs an entity: user=NAME, client=NAME or prefix=NAME")
    return Entity(user, client, prefix)


def checked_values(entity: Entity, given: Mapping[str, object]) -> dict[str, int]:
    """Quotas of an entity, as numbers. Raises InvalidSettingError."""
    values = {}
    for name, value in given.items():
        row = QUOTAS.get(name)
        if row is None:
            raise InvalidSettingError(
                f"{name!r:.100} is no quota; there are {', '.join(sorted(QUOTAS))}"
            )
        if row.of_prefix != (entity.prefix is not None):
            whose = "a prefix" if row.of_prefix else "users and clients"
            raise InvalidSettingError(f"{name} is a quota of {whose}, not of {entity.text}")
        number = whole_number("quota_bytes" if row.is_bytes else name, value)
        low = 1 if row.is_rate else 0
        if number is None or not low <= number <= VALUE_MAX:
            unit = " of bytes, or a size such as 10MiB" if row.is_bytes else ""
            raise InvalidSettingError(
                f"{name} is {value!r:.100}; it takes a whole number from {low} to {VALUE_MAX}{unit}"
            )
        values[name] = number
    return values


def parse_rules(texts: Iterable[str]) -> Rules:
    """Rules from their texts. Raises InvalidSettingError."""
    rules: Rules = {}
    for text in texts:
        names: dict[str, str] = {}
        values: dict[str, object] = {}
        for part in text.split():
            name, sign, value = part.partition("=")
            if not sign or name in names or name in values:
                raise InvalidSettingError(
                    f"quotas has {text!r:.200}: write it as `user=NAME client=NAME quota=value`"
                )
            if name in ("user", "client", "prefix"):
                names[name] = value if value == DEFAULT else unquote(value)
            else:
                values[name] = value
        entity = checked_entity(**names)
        if entity in rules:
            raise InvalidSettingError(f"quotas has two rules of {entity.text}; write them as one")
        if not values:
            raise InvalidSettingError(f"quotas has {text!r:.200}, which sets nothing")
        rules[entity] = checked_values(entity, values)
    if len(rules) > RULES_MAX:
        raise InvalidSettingError(f"quotas has {len(rules)} rules; at most {RULES_MAX}")
    return rules


def rule_texts(rules: Rules) -> list[str]:
    """The texts of rules, sorted."""
    return sorted(
        " ".join([entity.text, *(f"{name}={values[name]}" for name in sorted(values))])
        for entity, values in rules.items()
        if values
    )


class Share(NamedTuple):
    """The rule that decides about one quota of a connection."""

    key: Entity
    """The entity that is counted. Connections with the same one share the amount."""
    value: int


def share_of(rules: Rules, quota: str, user: str, client: str) -> Share | None:
    """The share of a connection in a quota. None: there is no limit."""
    for rule_user, rule_client in (
        (user, client), (user, DEFAULT), (user, None), (DEFAULT, client), (DEFAULT, DEFAULT),
        (DEFAULT, None), (None, client), (None, DEFAULT),
    ):  # fmt: skip
        values = rules.get(Entity(rule_user, rule_client))
        if values is not None and quota in values:
            key = Entity(
                None if rule_user is None else user, None if rule_client is None else client
            )
            return Share(key, values[quota])
    return None


def of_topic(rules: Rules, quota: str, topic: str) -> list[Share]:
    """The shares of a topic in a quota of prefixes."""
    return [
        Share(entity, values[quota])
        for entity, values in rules.items()
        if entity.prefix is not None and quota in values and begins(topic, entity.prefix)
    ]


def begins(topic: str, prefix: str) -> bool:
    """True if a topic's name begins with a rule's prefix."""
    return prefix == DEFAULT or topic.startswith(prefix)
