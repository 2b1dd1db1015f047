"""New offsets for `tailrace group reset-offsets`: the selected partitions and the offset of each.

Invariants:
- An offset that is set lies between a partition's beginning and its end, both included.
- An offset that was moved to satisfy this has a note.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import click

from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import check_offsets_answer
from tailrace.core.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition

WAYS = "--to-earliest, --to-latest, --to-datetime, --shift-by, --to-offset"


class Reset(NamedTuple):
    """The kind of target; exactly one field is set."""

    at: str | dt.datetime | None = None
    """ "earliest", "latest", or a time."""
    shift_by: int | None = None
    to_offset: int | None = None

    @staticmethod
    def chosen(
        to_earliest: bool,
        to_latest: bool,
        to_datetime: dt.datetime | None,
        shift_by: int | None,
        to_offset: int | None,
    ) -> Reset:
        """The target that the options choose.

        Raises: UsageError unless exactly one is given.
        """
        given = sum(
            (
                to_earliest,
                to_latest,
                to_datetime is not None,
                shift_by is not None,
                to_offset is not None,
            )
        )
        if given != 1:
            raise click.UsageError(f"give {'only ' if given else ''}one of {WAYS}")
        return Reset(
            "earliest" if to_earliest else "latest" if to_latest else to_datetime,
            shift_by,
            to_offset,
        )


class Selection(NamedTuple):
    """Selected partitions: topic -> partition numbers (None: all). Empty: every partition with a
    committed offset.
    """

    topics: dict[str, list[int] | None]

    @staticmethod
    def parsed(texts: Iterable[str]) -> Selection:
        """Parse `TOPIC` and `TOPIC:0,1`.

        Raises: UsageError.
        """
        topics: dict[str, list[int] | None] = {}
        for text in texts:
            name, colon, numbers = text.partition(":")
            if not name or (
                colon and not all(part.strip().isdecimal() for part in numbers.split(","))
            ):
                raise click.UsageError(f"--topic is {text!r}; write TOPIC or TOPIC:0,1")
            requested, known = (
                [int(part) for part in numbers.split(",")] if colon else None,
                topics.get(name, []),
            )
            topics[name] = None if requested is None or known is None else [*known, *requested]
        return Selection(topics)


class Change(NamedTuple):
    """The old and the new offset of a partition."""

    committed: int | None
    offset: int
    end: int


@dataclass(slots=True)
class Found:
    """Changes to make, and notes for the user."""

    changes: dict[TopicPartition, Change] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def new_offsets(
    admin: Admin,
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    selection: Selection,
    reset: Reset,
) -> Found:
    """Compute the new offset of each selected partition.

    Raises: UnknownTopicError, PartitionOutOfRangeError, ClickException.
    """
    found = Found()
    counts = admin.partition_counts()
    keys = _partitions(committed, selection, counts)
    if not selection.topics:
        gone = sorted({key.topic for key in keys if key.topic not in counts})
        found.notes += [f"topic {name} is left out: it does not exist any more" for name in gone]
        keys = [key for key in keys if key.topic in counts]
        if not keys:
            raise click.ClickException(
                "the group has no committed offsets: name a topic with --topic"
            )
    for key, item in admin.offsets(dict.fromkeys(keys, reset.at or "latest")).items():
        answer = check_offsets_answer(item)
        known = committed.get(key)
        current = None if known is None else known.offset
        begin, end = int(answer["beginning"]), int(answer["end"])
        if reset.shift_by is not None:
            if current is None:
                found.notes.append(
                    f"{key.topic}-{key.partition} is left out: it has no committed offset to shift"
                )
                continue
            requested = current + reset.shift_by
        elif reset.to_offset is not None:
            requested = reset.to_offset
        else:
            requested = int(answer["offset"])
            # -1: no record is as late as the given time.
            requested = end if requested < 0 else requested
        offset = min(max(requested, begin), end)
        if offset != requested:
            found.notes.append(
                f"{key.topic}-{key.partition} has offsets from {begin} to {end}: {offset} is used "
                f"instead of {requested}"
            )
        found.changes[key] = Change(current, offset, end)
    return found


def _partitions(
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    selection: Selection,
    counts: Mapping[str, int],
) -> list[TopicPartition]:
    if not selection.topics:
        return sorted(committed)
    keys = []
    for name, numbers in selection.topics.items():
        if name not in counts:
            raise UnknownTopicError(f"there is no topic {name}")
        for number in range(counts[name]) if numbers is None else sorted(set(numbers)):
            if number >= counts[name]:
                raise PartitionOutOfRangeError(
                    f"topic {name} has {counts[name]} partitions, numbered from 0; partition "
                    f"{number} does not exist"
                )
            keys.append(TopicPartition(name, number))
    return keys
