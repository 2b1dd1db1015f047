"""Committed offsets of groups, translated by the maps of the partitions.

Owner: pure, but for what it asks of both sides.
Invariants: a group's offset in the target is that of the first record which the group has not
processed in the source. An offset behind the copy waits for the copy.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from appliance.migrate.errors import MigrationError
from appliance.migrate.journal import Journal
from tailrace.core.topic_partition import TopicPartition

Offsets = Mapping[TopicPartition, tuple[int, str]]


class GroupSource(Protocol):
    """Groups of the source."""

    def groups(self) -> list[str]: ...

    def offsets(self, group: str) -> dict[TopicPartition, tuple[int, str]]: ...

    def member_count(self, group: str) -> int: ...


class GroupTarget(Protocol):
    """Groups of the target."""

    def set_group_offsets(self, group: str, offsets: Offsets) -> None: ...


@dataclass(slots=True)
class CopiedGroups:
    """The result of a copy of groups."""

    groups: list[str] = field(default_factory=list)
    offset_count: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Group -> why its offsets were not set."""
    waiting: list[str] = field(default_factory=list)
    """Groups with an offset behind the copy."""


def copy_groups(
    source: GroupSource,
    target: GroupTarget,
    journal: Journal,
    ends: Mapping[TopicPartition, int],
    patterns: Sequence[str],
) -> CopiedGroups:
    """Set the offsets of the groups that match. `ends`: how far each partition is copied. Raises
    MigrationError, InterruptedSessionError.
    """
    result = CopiedGroups()
    for group in source.groups():
        if not any(fnmatch.fnmatchcase(group, pattern) for pattern in patterns):
            continue
        found = {
            partition: offset
            for partition, offset in source.offsets(group).items()
            if partition in journal.maps
        }
        if not found:
            continue
        translated = translate(found, journal, ends)
        if len(translated) < len(found):
            result.waiting.append(group)
        if not translated:
            continue
        try:
            target.set_group_offsets(group, translated)
        except MigrationError as error:
            result.refused[group] = str(error)
            continue
        result.groups.append(group)
        result.offset_count += len(translated)
    return result


def active_groups(
    source: GroupSource, partitions: Set[TopicPartition], patterns: Sequence[str]
) -> list[str]:
    """Groups with offsets of these partitions that have members. Raises MigrationError."""
    return [
        group
        for group in source.groups()
        if any(fnmatch.fnmatchcase(group, pattern) for pattern in patterns)
        and not partitions.isdisjoint(source.offsets(group))
        and source.member_count(group)
    ]


def translate(
    offsets: Offsets, journal: Journal, ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, str]]:
    """Offsets of the target, of the partitions that are copied as far."""
    return {
        partition: (journal.maps[partition].target_of(offset), metadata)
        for partition, (offset, metadata) in offsets.items()
        if offset <= ends.get(partition, -1)
    }


def patterns_of(given: Sequence[str]) -> list[str]:
    """Patterns of groups: all without any given, none for `none`."""
    parts = [part.strip() for each in given for part in each.split(",") if part.strip()]
    if parts == ["none"]:
        return []
    return parts or ["*"]
