"""Changes of quotas: rules with some of an entity's quotas set or removed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shm.quotas.quota_rules import (
    Rules,
    checked_entity,
    checked_values,
    parse_rules,
    rule_texts,
)
from tailrace.core.errors import InvalidRequestError

CHANGES_MAX = 1_000


def changed_quotas(texts: Iterable[str], request: dict[str, Any]) -> list[str]:
    """The texts of rules after the changes of an ALTER_QUOTAS: each names an entity (`user`,
    `client`, `prefix`; null: not part of it), and has `set` (quota -> value) and `unset` (names, or
    null: all of the entity's). Raises InvalidRequestError, InvalidSettingError.
    """
    changes = request.get("changes")
    if not isinstance(changes, list) or not 0 < len(changes) <= CHANGES_MAX:
        raise InvalidRequestError(f"`changes` must be a list of 1 to {CHANGES_MAX} objects")
    rules = parse_rules(texts)
    for change in changes:
        _apply(rules, change)
    return rule_texts(rules)


def _apply(rules: Rules, change: Any) -> None:
    if not isinstance(change, dict):
        raise InvalidRequestError("a change of quotas must be an object")
    entity = checked_entity(change.get("user"), change.get("client"), change.get("prefix"))
    given, removed = change.get("set", {}), change.get("unset", [])
    if not isinstance(given, dict) or not isinstance(removed, list | None):
        raise InvalidRequestError("a change needs `set`, an object, or `unset`, a list or null")
    values = {} if removed is None else dict(rules.get(entity, {}))
    for name in removed or ():
        checked_values(entity, {name: 1})
        values.pop(name, None)
    values.update(checked_values(entity, given))
    if values:
        rules[entity] = values
    else:
        rules.pop(entity, None)
