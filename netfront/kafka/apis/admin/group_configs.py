"""Changes of groups' settings: `kafka-configs --entity-type groups`.

`cluster.group_settings` has where they are kept, and reads them.

Invariants:
- Changes of several clients come one after the other: none undoes another.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.admin.config_values import DEFAULT_SOURCE, GROUP_SOURCE, described
from netfront.kafka.apis.call import Call, Services
from netfront.kafka.apis.cluster.group_settings import (
    SESSION_LIMITS,
    SETTING,
    groups_with_settings,
    session_limits_ms,
)
from netfront.kafka.exchange.waiter import Steps, Waiter
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.messages.kafka_group_settings import (
    FIXED,
    GROUP_SETTINGS,
    GroupValues,
    checked_group,
    checked_setting,
    complete,
    group_texts,
    parse_groups,
)
from tailrace.core.errors import InvalidSettingError
from tailrace.protocol.frame import Api

_CHANGES = "group_setting_changes"


def described_group(services: Services, group: str, keys: set[str] | None) -> list[dict[str, Any]]:
    """The settings of a group; `keys`: these only."""
    given = groups_with_settings(services).get(group, {})
    values = {**FIXED, **complete(given)}
    return [
        described(name, values[name], source, read_only=False)
        for name in sorted(values)
        if keys is None or name in keys
        for source in [GROUP_SOURCE if name in given else DEFAULT_SOURCE]
    ]


def alter_group(call: Call, group: str, given: dict[str, str | None], *, whole: bool) -> Steps:
    """Set settings of a group; None: the default. `whole`: those that are not named get it, too.
    Returns (KafkaError, sentence).
    """
    changes: list[Waiter] = call.services.state.setdefault(_CHANGES, [])
    change = Waiter()
    changes.append(change)
    try:
        if len(changes) > 1:
            yield change
        try:
            texts = _changed(call.services, group, given, whole)
        except InvalidSettingError as error:
            return KafkaError.INVALID_CONFIG, error.detail
        answer = yield call.ask(
            Api.ALTER_CONFIGS,
            {
                "set": {SETTING: texts}, "unset": [],
                "validate_only": bool(call.request["validate_only"]),
            },
        )  # fmt: skip
        return kafka_error(answer.code), answer.sentence
    finally:
        is_first = changes[0] is change
        changes.remove(change)
        if is_first and changes:
            changes[0].complete()


def _changed(
    services: Services, group: str, given: dict[str, str | None], whole: bool
) -> list[str]:
    """The texts of all groups with the change. Raises InvalidSettingError."""
    groups = dict(groups_with_settings(services))
    values: GroupValues = {} if whole else dict(groups.get(checked_group(group), {}))
    for name, value in given.items():
        if name in FIXED:
            if value not in (None, FIXED[name]):
                raise InvalidSettingError(
                    f"{name} is {value!r:.100}; it cannot be chosen here: leave it out, or use "
                    f"{FIXED[name]!r}"
                )
        elif value is None:
            if name in GROUP_SETTINGS:
                values.pop(name, None)
            else:
                checked_setting(name, "")  # refuses it by its name
        else:
            values[name] = _within_limits(services, name, checked_setting(name, value))
    complete(values)
    groups[checked_group(group)] = values
    texts = group_texts(groups)
    parse_groups(texts)
    return texts


def _within_limits(services: Services, name: str, value: str | int) -> str | int:
    """The value. Raises InvalidSettingError if it is a session timeout beyond the limits."""
    low, high = session_limits_ms(services)
    if name.endswith("session.timeout.ms") and not low <= int(value) <= high:
        raise InvalidSettingError(
            f"{name} is {value}; it takes {low} to {high}: see {' and '.join(SESSION_LIMITS)} "
            "of the appliance"
        )
    return value
