"""Assignors by name: the built-in ones and those of installed packages (entry point group
`tailrace.assignors`) that the operator has named in `group.assignors`.

Owner: the group service, which creates one `Assignors`.
Invariants:
- Only code that the operator has named is loaded: being installed is not enough.
- The result of an assignor is validated before use: each partition of a subscribed topic is
  assigned once, to a subscriber.
- An assignor that raises or returns an invalid result affects only its group. `sticky` decides
  instead, and the group's description carries the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Any

from appliance.groups.base.assignors import (
    BUILT_IN,
    DEFAULT_ASSIGNOR,
    Assignment,
    Assignor,
    Members,
    Topics,
)

logger = logging.getLogger(__name__)

ENTRY_POINTS = "tailrace.assignors"
NAME_MAX = 100


class InvalidAssignmentError(ValueError):
    """The result of an assignor is not a valid assignment."""


class Assignors:
    """All assignors of this appliance."""

    def __init__(
        self, allowed: Collection[str], plugins: Iterable[EntryPoint] | None = None
    ) -> None:
        """`allowed`: names of plugins that may be used; `plugins`: None means the installed ones. A
        plugin is loaded when a group first uses it.
        """
        found: Iterable[EntryPoint] = plugins or ()
        if plugins is None and allowed:
            found = entry_points(group=ENTRY_POINTS)
        self._plugins = {
            one.name: one for one in found if one.name not in BUILT_IN and one.name in allowed
        }
        self._loaded: dict[str, Assignor] = {}

    @property
    def names(self) -> list[str]:
        return [*BUILT_IN, *sorted(self._plugins)]

    def has(self, name: str) -> bool:
        return name in BUILT_IN or name in self._plugins

    def _load(self, name: str) -> Assignor:
        if name not in self._loaded:
            loaded = self._plugins[name].load()
            if not callable(loaded):
                raise InvalidAssignmentError("it is not callable")
            self._loaded[name] = loaded
        return self._loaded[name]

    def assign(
        self, name: str, members: Members, topics: Topics, group: str
    ) -> tuple[Assignment, str]:
        """Compute the assignment of a group. Returns it with the error of the group's own assignor
        (empty: none).
        """
        if name in BUILT_IN:
            return BUILT_IN[name](members, topics), ""
        try:
            if name not in self._plugins:
                raise InvalidAssignmentError(
                    "it is no longer installed, or not in group.assignors any more"
                )
            return checked(self._load(name)(dict(members), dict(topics)), members, topics), ""
        except (
            Exception,
            SystemExit,
        ) as error:  # a plugin is foreign code and may raise anything
            reason = (
                str(error)
                if isinstance(error, InvalidAssignmentError)
                else f"it raised {type(error).__name__}{_described(error)}"
            )
            trouble = (
                f"the assignor {name} cannot be used ({reason[:300]}): {DEFAULT_ASSIGNOR} "
                "decides instead"
            )
            logger.warning(
                "assignor_failed group=%s assignor=%s fallback=%s reason=%r",
                group,
                name,
                DEFAULT_ASSIGNOR,
                reason[:300],
            )
            return BUILT_IN[DEFAULT_ASSIGNOR](members, topics), trouble


def _described(error: BaseException) -> str:
    try:
        return f": {error}"
    except Exception:  # the error's __str__ may itself raise
        return ""


def checked(result: Any, members: Members, topics: Topics) -> Assignment:
    """Validate the result of an assignor. Raises InvalidAssignmentError, which names the fault."""
    if not isinstance(result, Mapping):
        raise InvalidAssignmentError(
            f"it returned a {type(result).__name__}, not a dict of member ids"
        )
    assignment: Assignment = {member_id: [] for member_id in members}
    seen: set[tuple[str, int]] = set()
    most = 1 + sum(topics.values())
    for member_id, partitions in result.items():
        if member_id not in members:
            raise InvalidAssignmentError(f"it returned an unknown member: {str(member_id)[:80]}")
        try:
            pairs = [(topic, partition) for topic, partition in islice(partitions, most)]
        except (TypeError, ValueError):
            raise InvalidAssignmentError(
                "it returned a list of something other than (topic, partition) pairs"
            ) from None
        for topic, partition in pairs:
            _check_pair(topic, partition, members[member_id].topics, topics)
            if (topic, partition) in seen:
                raise InvalidAssignmentError(f"it assigned {topic}-{partition} to two members")
            seen.add((topic, partition))
            assignment[member_id].append((topic, partition))
    subscribed = {topic for view in members.values() for topic in view.topics if topic in topics}
    missing = sum(topics[topic] for topic in subscribed) - len(seen)
    if missing:
        raise InvalidAssignmentError(f"it left {missing} partitions without a member")
    return assignment


def _check_pair(topic: Any, partition: Any, subscribed: frozenset[str], topics: Topics) -> None:
    if not isinstance(topic, str) or not isinstance(partition, int) or isinstance(partition, bool):
        raise InvalidAssignmentError(
            "it returned a list of something other than (topic, partition) pairs"
        )
    if topic not in topics or not 0 <= partition < topics[topic]:
        raise InvalidAssignmentError(f"it returned an unknown partition: {topic[:80]}-{partition}")
    if topic not in subscribed:
        raise InvalidAssignmentError(
            f"it assigned {topic[:80]}-{partition} to a member that does not subscribe to it"
        )
