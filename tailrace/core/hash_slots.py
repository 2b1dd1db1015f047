"""Hash slots: a key belongs to one of 16,384 slots for ever, a slot to a partition until partitions are added.

The slot of a key is Redis Cluster's (CRC16 of XMODEM, modulo 16,384; https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/), without
its hash tags: the whole key counts. Which partition owns a slot follows from the numbers of partitions that the topic has had, in order: the first map gives
each partition one range; partitions that are added take their share from those that have too many, and nothing else moves (the idea of consistent hashing,
with slots as in Redis Cluster in the place of a ring of points).

Owner: pure. Files, catalog and wire hold what these functions return: what they return for a history never changes (tests/golden/slot_maps.json).
Invariants: every slot has one owner; two partitions differ by one slot at most; adding partitions moves the fewest slots that this allows, all of them from
    partitions that were there to partitions that were not. So a partition gets slots from others only once, when it is made.
"""

from __future__ import annotations

from array import array
from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

SLOT_COUNT = 16_384
HASH_SLOTS = "hash_slots"
"""What the topic setting `partitioner` says where records go by slot."""
VERSION_MAX = (1 << 24) - 1
"""Of a slot map: it travels in 24 bits (see `shm.layout`)."""
Owners = Sequence[int]
"""Slot -> partition."""


def slot_of(key: bytes) -> int:
    """The slot of a key: 0 to SLOT_COUNT - 1."""
    return crc_hqx(key, 0) % SLOT_COUNT


class Birth(NamedTuple):
    """How a partition that was added got its slots."""

    version: int
    """Of the map with which it was made."""
    sources: tuple[int, ...]
    """The partitions that gave it slots, ascending."""


def owners_after(counts: tuple[int, ...]) -> Owners:
    """The map of a topic that has had so many partitions, one after the other: its version is the length of that history."""
    return _history(counts)[0]


def births(counts: tuple[int, ...]) -> Mapping[int, Birth]:
    """Of each partition that was added: when, and from which others its slots came."""
    return _history(counts)[1]


@lru_cache(maxsize=64)
def _history(counts: tuple[int, ...]) -> tuple[Owners, Mapping[int, Birth]]:
    first = counts[0]
    owners: Owners = array("H", (slot * first // SLOT_COUNT for slot in range(SLOT_COUNT)))
    found: dict[int, Birth] = {}
    for version, (before, after) in enumerate(pairwise(counts), 2):
        following = _with_added(owners, before, after)
        sources: dict[int, set[int]] = {partition: set() for partition in range(before, after)}
        for old, new in zip(owners, following, strict=True):
            if old != new:
                sources[new].add(old)
        found.update({partition: Birth(version, tuple(sorted(given))) for partition, given in sources.items()})
        owners = following
    return owners, found


def _with_added(owners: Owners, before: int, after: int) -> Owners:
    sizes = [0] * before
    for owner in owners:
        sizes[owner] += 1
    share, larger_count = divmod(SLOT_COUNT, after)
    targets = [share] * after
    # Those that have most keep one more: what a partition keeps does not move.
    for partition in sorted(range(after), key=lambda p: (-sizes[p] if p < before else 0, p))[:larger_count]:
        targets[partition] += 1
    given = [max(0, size - target) for size, target in zip(sizes, targets, strict=False)]
    moving = []
    for slot in range(SLOT_COUNT - 1, -1, -1):  # of each, its highest: what it keeps stays in few ranges
        owner = owners[slot]
        if given[owner]:
            given[owner] -= 1
            moving.append(slot)
    moved = array("H", owners)
    slots = reversed(moving)
    for partition in range(before, after):
        for _ in range(targets[partition]):
            moved[next(slots)] = partition
    return moved


# ---- as text -----------------------------------------------------------------------------------------------------------------------------


def ranges_of(owners: Owners) -> dict[int, str]:
    """Partition -> its slots as text: "0-4095,9000"."""
    found: dict[int, list[str]] = {}
    start = 0
    for slot in range(1, SLOT_COUNT + 1):
        if slot == SLOT_COUNT or owners[slot] != owners[start]:
            found.setdefault(owners[start], []).append(str(start) if slot - start == 1 else f"{start}-{slot - 1}")
            start = slot
    return {partition: ",".join(pieces) for partition, pieces in found.items()}


def slots_in(ranges: str) -> Iterator[int]:
    """The slots that such a text names. Raises ValueError."""
    for piece in ranges.split(",") if ranges else ():
        first, _, last = piece.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < SLOT_COUNT:
            raise ValueError(f"{piece!r} is no range of slots")
        yield from range(low, high + 1)


def owners_in(ranges: Iterable[str]) -> Owners | None:
    """The map in which each partition, in order, owns these; None where a slot has no owner, or two. Raises ValueError."""
    none = 0xFFFF
    owners = array("H", [none]) * SLOT_COUNT
    for partition, text in enumerate(ranges):
        for slot in slots_in(text):
            if owners[slot] != none:
                return None
            owners[slot] = partition
    return None if none in owners else owners


# ---- handing over ------------------------------------------------------------------------------------------------------------------------

HandOver = tuple[tuple[int, int], ...]
"""(source partition, offset there below which every record of the slots lies that it gave away), ascending."""


def missing_sources(counts: tuple[int, ...], partition: int, known: Iterable[tuple[int, int]]) -> list[int]:
    """The partitions that gave slots to this one and of which it is not known where they ended."""
    birth = births(counts).get(partition) if counts else None
    return [] if birth is None else sorted(set(birth.sources) - {source for source, _ in known})


def hand_over_of(described: Mapping[str, Any]) -> HandOver:
    """What METADATA, or JSON elsewhere, says of a partition. Raises TypeError, ValueError."""
    return tuple(sorted((int(source), int(offset)) for source, offset in described.items()))


def is_drained(
    hand_over: Iterable[tuple[int, int]],
    positions: Mapping[int, int],
    beginnings: Mapping[int, int] | None = None,
    ends: Mapping[int, int] | None = None,
) -> bool:
    """Whether all that was handed over is read, so that the partition that got it may be: per source partition, `positions` (or what a group has committed)
    has passed its hand-over offset, or all that is left of the log (`beginnings`, `ends`, where they are known: retention, or a disk that failed, may have
    taken the rest). A reader without a group, which takes partitions as it likes, asks this itself before it reads a partition that was added:

        described = admin.describe_topics("orders")["orders"]["partitions"][5]
        is_drained(described["hand_over"].items(), {key.partition: consumer.position(key) for key in consumer.assignment()})
    """
    beginnings, ends = beginnings or {}, ends or {}
    return all(_is_read(offset, positions.get(source), beginnings.get(source), ends.get(source)) for source, offset in hand_over)


def _is_read(offset: int, position: int | None, beginning: int | None, end: int | None) -> bool:
    if beginning is not None and beginning >= offset:
        return True
    return position is not None and position >= (offset if end is None else min(offset, end))
