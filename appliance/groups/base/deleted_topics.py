"""Names of topics that were deleted while a group used them.

A recreated topic is another topic, with another id, and all its records are new to a group that
read the old one. The group starts at its first record. Otherwise a consumer with
auto_offset_reset=latest would start at the end and skip the records written before it came
(docs/adr/0027).

Owner: one group; part of its row.
Invariants:
- There are at most DELETED_MAX names, each for at most KEPT_MS of elapsed time.
- A name is removed when the group has started to read the topic that has the name now.
"""

from __future__ import annotations

from collections.abc import Mapping

DELETED_MAX = 1_000
KEPT_MS = 7 * 86_400_000


class DeletedTopics:
    """See the module's docstring."""

    __slots__ = ("_names",)

    def __init__(self, kept: Mapping[str, int] | None = None) -> None:
        """`kept`: as `to_json` returned it."""
        self._names = dict(kept or {})

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, elapsed_ms: int) -> None:
        """Add the name of a deleted topic. Names beyond the bounds are removed, oldest first."""
        self._names.pop(name, None)
        self._names[name] = elapsed_ms
        for old in [old for old, gone_ms in self._names.items() if elapsed_ms - gone_ms > KEPT_MS]:
            del self._names[old]
        while len(self._names) > DELETED_MAX:
            del self._names[next(iter(self._names))]

    def forget(self, name: str) -> bool:
        """Remove a name, since the group has started to read the topic that has it now. Returns
        whether it was there.
        """
        return self._names.pop(name, None) is not None

    def to_json(self) -> dict[str, int]:
        """Name -> elapsed time of the deletion, ms."""
        return dict(self._names)
