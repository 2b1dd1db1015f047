"""The offsets that a transaction of a Kafka producer commits with its records, by group.

Owner: one gateway, in memory. The coordinator has them as a text, durably, before they are
acknowledged.

Invariants:
- A group is there once, with the member that committed last.
- Of each partition the last offset stays. An earlier epoch of the same member does not replace it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

OFFSETS_MAX = 4_096
"""Offsets of one group in a transaction."""
Place = tuple[str, int]
"""A topic and a partition."""


class Committer(NamedTuple):
    """The member that commits; "" and -1: from outside the group."""

    member_id: str
    epoch: int
    is_of_coordinator: bool
    """The process of groups knows the member, and checks it once more with the commit."""


@dataclass(slots=True)
class _Group:
    committer: Committer
    entries: dict[Place, list[Any]] = field(default_factory=dict)


class TransactionOffsets:
    """The offsets of one transaction."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def keep(self, group: str, committer: Committer, place: Place, entry: list[Any]) -> bool:
        """Keep the entry of a partition, in the form of COMMIT_OFFSETS. False: there are too
        many.
        """
        found = self._groups.setdefault(group, _Group(committer))
        if len(found.entries) >= OFFSETS_MAX and place not in found.entries:
            return False
        known = found.committer
        if committer.member_id == known.member_id and committer.epoch < known.epoch:
            found.entries.setdefault(place, entry)
        else:
            found.committer = committer
            found.entries[place] = entry
        return True

    def places(self, group: str) -> set[Place]:
        """The partitions of a group that have offsets here."""
        found = self._groups.get(group)
        return set() if found is None else set(found.entries)

    def groups_json(self) -> list[dict[str, Any]]:
        """The field `offsets` of END_TRANSACTION."""
        return [
            {
                "group": name,
                **(
                    {"member_id": found.committer.member_id, "member_epoch": found.committer.epoch}
                    if found.committer.is_of_coordinator
                    else {}
                ),
                "entries": list(found.entries.values()),
            }
            for name, found in self._groups.items()
        ]

    def dump(self) -> list[list[Any]]:
        """All of them as JSON, for `restore`."""
        return [
            [name, *found.committer, list(found.entries.values())]
            for name, found in self._groups.items()
        ]

    def restore(self, dumped: list[list[Any]]) -> None:
        """Take up what was dumped."""
        for name, member_id, epoch, is_of_coordinator, entries in dumped:
            committer = Committer(member_id, epoch, is_of_coordinator)
            places = {(entry[0], entry[1]): entry for entry in entries}
            self._groups[name] = _Group(committer, places)

    def copy(self) -> TransactionOffsets:
        """Another one with the same offsets, which is changed on its own."""
        found = TransactionOffsets()
        for name, group in self._groups.items():
            found._groups[name] = _Group(group.committer, dict(group.entries))
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._groups.clear()
