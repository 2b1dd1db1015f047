"""Names of topics that were deleted while a group knew them: when one is made again, the group
begins at its first record.

A topic that is deleted and made again is another topic, with another id, and everything in it is
new to a group that read the old one. Without this a consumer with auto_offset_reset=latest would
begin at its end, and skip what was written before the consumer came (docs/adr/0027).

Owner: one group; part of its row.
Invariants: at most GONE_MAX names, each for KEPT_MS of elapsed time at most; a name goes when the
    group has begun on the topic that has it now.
"""

from __future__ import annotations

from collections.abc import Mapping

GONE_MAX = 1_000
KEPT_MS = 7 * 86_400_000


class GoneTopics:
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
        """The topic of this name was deleted. The oldest names go for it."""
        self._names.pop(name, None)
        self._names[name] = elapsed_ms
        for old in [old for old, gone_ms in self._names.items() if elapsed_ms - gone_ms > KEPT_MS]:
            del self._names[old]
        while len(self._names) > GONE_MAX:
            del self._names[next(iter(self._names))]

    def forget(self, name: str) -> bool:
        """The group has begun on the topic that has the name now. Returns whether the name was
        kept.
        """
        return self._names.pop(name, None) is not None

    def to_json(self) -> dict[str, int]:
        """Name -> when it went, in elapsed time."""
        return dict(self._names)
