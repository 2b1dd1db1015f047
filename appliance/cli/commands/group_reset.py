"""Where `tailrace group reset-offsets` sets a group: which partitions, and to which offsets.

Invariants: an offset that is set lies between a partition's beginning and its end, both included; one that had to be moved for that has a note.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import click

from tailrace.admin import Admin
from tailrace.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.offset_lookup import check_offsets_answer
from tailrace.records import OffsetAndMetadata, TopicPartition

WAYS = "--to-earliest, --to-latest, --to-datetime, --shift-by, --to-offset"


class Reset(NamedTuple):
    """Where to: one of these."""

    at: str | dt.datetime | None = None
    """ "earliest", "latest", or a time."""
    shift_by: int | None = None
    to_offset: int | None = None

    @staticmethod
    def chosen(to_earliest: bool, to_latest: bool, to_datetime: dt.datetime | None, shift_by: int | None, to_offset: int | None) -> Reset:
        """What the options say. Raises UsageError unless it is exactly one."""
        given = sum((to_earliest, to_latest, to_datetime is not None, shift_by is not None, to_offset is not None))
        if given != 1:
            raise click.UsageError(f"say where to, with {'only ' if given else ''}one of {WAYS}")
        return Reset("earliest" if to_earliest else "latest" if to_latest else to_datetime, shift_by, to_offset)


class Selection(NamedTuple):
    """Which partitions: topic -> their numbers (None: all); empty: all that the group has committed for."""

    topics: dict[str, list[int] | None]

    @staticmethod
    def parsed(texts: Iterable[str]) -> Selection:
        """Of `TOPIC` and `TOPIC:0,1`. Raises UsageError."""
        topics: dict[str, list[int] | None] = {}
        for text in texts:
            name, colon, numbers = text.partition(":")
            if not name or (colon and not all(part.strip().isdecimal() for part in numbers.split(","))):
                raise click.UsageError(f"--topic {text!r} is not of the form TOPIC or TOPIC:0,1")
            wanted, known = [int(part) for part in numbers.split(",")] if colon else None, topics.get(name, [])
            topics[name] = None if wanted is None or known is None else [*known, *wanted]
        return Selection(topics)


class Change(NamedTuple):
    """Of one partition."""

    committed: int | None
    offset: int
    end: int


@dataclass(slots=True)
class Found:
    """What is to be set, and what a person should know of it."""

    changes: dict[TopicPartition, Change] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def new_offsets(admin: Admin, committed: Mapping[TopicPartition, OffsetAndMetadata | None], selection: Selection, reset: Reset) -> Found:
    """What `reset` means for each partition of the selection. Raises UnknownTopicError, PartitionOutOfRangeError, ClickException."""
    found = Found()
    counts = admin.partition_counts()
    keys = _partitions(committed, selection, counts)
    if not selection.topics:
        gone = sorted({key.topic for key in keys if key.topic not in counts})
        found.notes += [f"{name} is left out: there is no such topic any more" for name in gone]
        keys = [key for key in keys if key.topic in counts]
        if not keys:
            raise click.ClickException("the group has committed nothing; say which topic with --topic")
    for key, item in admin.offsets(dict.fromkeys(keys, reset.at or "latest")).items():
        answer = check_offsets_answer(item)
        known = committed.get(key)
        current = None if known is None else known.offset
        begin, end = int(answer["beginning"]), int(answer["end"])
        if reset.shift_by is not None:
            if current is None:
                found.notes.append(f"{key.topic}-{key.partition} is left out: nothing is committed that could be shifted")
                continue
            wanted = current + reset.shift_by
        elif reset.to_offset is not None:
            wanted = reset.to_offset
        else:
            wanted = int(answer["offset"])
            wanted = end if wanted < 0 else wanted  # no record is as late
        offset = min(max(wanted, begin), end)
        if offset != wanted:
            found.notes.append(f"{key.topic}-{key.partition} has offsets from {begin} to {end}: {offset} is used instead of {wanted}")
        found.changes[key] = Change(current, offset, end)
    return found


def _partitions(
    committed: Mapping[TopicPartition, OffsetAndMetadata | None], selection: Selection, counts: Mapping[str, int]
) -> list[TopicPartition]:
    if not selection.topics:
        return sorted(committed)
    keys = []
    for name, numbers in selection.topics.items():
        if name not in counts:
            raise UnknownTopicError(f"there is no topic {name}")
        for number in range(counts[name]) if numbers is None else sorted(set(numbers)):
            if number >= counts[name]:
                raise PartitionOutOfRangeError(f"{name} has {counts[name]} partitions, from 0 on; there is none {number}")
            keys.append(TopicPartition(name, number))
    return keys
