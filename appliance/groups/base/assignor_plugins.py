"""Assignors by name: those built in, and those of installed packages (entry point group
`tailrace.assignors`).

Owner: the group service, which makes one.
Invariants: what an assignor returns is checked before it is used: each partition of a subscribed
    topic once, to a subscriber. One that raises or returns something else costs only its group:
    `sticky` decides instead, and a sentence says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
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


class NonsenseError(ValueError):
    """What an assignor returned is no assignment."""


class Assignors:
    """All assignors that this appliance has."""

    def __init__(self, plugins: Iterable[EntryPoint] | None = None) -> None:
        """`plugins`: None: those that are installed. A plugin is loaded when a group first names
        it.
        """
        found = entry_points(group=ENTRY_POINTS) if plugins is None else plugins
        self._plugins = {one.name: one for one in found if one.name not in BUILT_IN}
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
                raise NonsenseError("it is not a function")
            self._loaded[name] = loaded
        return self._loaded[name]

    def assign(
        self, name: str, members: Members, topics: Topics, group: str
    ) -> tuple[Assignment, str]:
        """The assignment, and a sentence about what was wrong with the group's own assignor (empty:
        nothing).
        """
        if name in BUILT_IN:
            return BUILT_IN[name](members, topics), ""
        try:
            if name not in self._plugins:
                raise NonsenseError("it is not installed any more")
            return checked(self._load(name)(dict(members), dict(topics)), members, topics), ""
        except (
            Exception,
            SystemExit,
        ) as error:  # a plugin is somebody else's code, and may raise anything
            reason = (
                str(error)
                if isinstance(error, NonsenseError)
                else f"it raised {type(error).__name__}{_described(error)}"
            )
            trouble = (
                f"the assignor {name} cannot be used ({reason[:300]}): {DEFAULT_ASSIGNOR} "
                "decides instead"
            )
            logger.warning(
                "group=%s assignor=%s fallback=%s reason=%s",
                group,
                name,
                DEFAULT_ASSIGNOR,
                reason[:300],
            )
            return BUILT_IN[DEFAULT_ASSIGNOR](members, topics), trouble


def _described(error: BaseException) -> str:
    try:
        return f": {error}"
    except Exception:  # its own text may be what is wrong with it
        return ""


def checked(result: Any, members: Members, topics: Topics) -> Assignment:
    """`result` with its types made sure of. Raises NonsenseError with what is wrong."""
    if not isinstance(result, Mapping):
        raise NonsenseError(f"it returned a {type(result).__name__}, not a dict of member ids")
    assignment: Assignment = {member_id: [] for member_id in members}
    seen: set[tuple[str, int]] = set()
    most = 1 + sum(topics.values())
    for member_id, partitions in result.items():
        if member_id not in members:
            raise NonsenseError(f"it returned a member that there is not: {str(member_id)[:80]}")
        try:
            pairs = [(topic, partition) for topic, partition in islice(partitions, most)]
        except (TypeError, ValueError):
            raise NonsenseError(
                "it returned something else than (topic, partition) pairs"
            ) from None
        for topic, partition in pairs:
            _check_pair(topic, partition, members[member_id].topics, topics)
            if (topic, partition) in seen:
                raise NonsenseError(f"it gave {topic}-{partition} to two members")
            seen.add((topic, partition))
            assignment[member_id].append((topic, partition))
    subscribed = {topic for view in members.values() for topic in view.topics if topic in topics}
    missing = sum(topics[topic] for topic in subscribed) - len(seen)
    if missing:
        raise NonsenseError(f"it gave {missing} partitions to no member")
    return assignment


def _check_pair(topic: Any, partition: Any, subscribed: frozenset[str], topics: Topics) -> None:
    if not isinstance(topic, str) or not isinstance(partition, int) or isinstance(partition, bool):
        raise NonsenseError("it returned something else than (topic, partition) pairs")
    if topic not in topics or not 0 <= partition < topics[topic]:
        raise NonsenseError(f"it returned a partition that there is not: {topic[:80]}-{partition}")
    if topic not in subscribed:
        raise NonsenseError(
            f"it gave {topic[:80]}-{partition} to a member that does not subscribe to it"
        )
