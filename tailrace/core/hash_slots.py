"""Hash slots: the mapping of a key to one of 16,384 slots, and of each slot to a partition.

The slot of a key never changes. The partition of a slot changes only when partitions are added.

A key's slot is Redis Cluster's (CRC16 of XMODEM, modulo 16,384;
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/), without its hash tags:
the whole key counts. The slot map follows from the topic's history of partition counts. The first
map gives each partition one range. Added partitions take their share from the largest ones, and
nothing else moves (consistent hashing with slots instead of a ring of points).

Owner: pure functions. Files, catalog and protocol store their results, so the result for a history
never changes (tests/golden/slot_maps.json).

Invariants:
- Every slot has one owner.
- Two partitions differ by at most one slot.
- Adding partitions moves the fewest slots possible, all from old partitions to new ones. So a
  partition receives slots only once, when it is created.
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
"""Value of the topic setting `partitioner` that routes records by slot."""
VERSION_MAX = (1 << 24) - 1
"""The largest version of a slot map, which travels in 24 bits (see `shm.memory.layout`)."""
STAYS = -1
"""Placeholder for a slot: the record stays in its partition."""
Owners = Sequence[int]
"""The slot map: slot -> partition."""


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to SLOT_COUNT - 1."""
    return crc_hqx(key, 0) % SLOT_COUNT


class Birth(NamedTuple):
    """The origin of an added partition's slots."""

    version: int
    """The version of the slot map that added the partition."""
    sources: tuple[int, ...]
    """The partitions that gave it slots, ascending."""


def owners_after(counts: tuple[int, ...]) -> Owners:
    """The slot map of a topic after this history of partition counts.

    Its version is the length of the history.
    """
    return _history(counts)[0]


def births(counts: tuple[int, ...]) -> Mapping[int, Birth]:
    """Each added partition, with the version and the sources of its slots."""
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
        found.update(
            {
                partition: Birth(version, tuple(sorted(given)))
                for partition, given in sources.items()
            }
        )
        owners = following
    return owners, found


def _with_added(owners: Owners, before: int, after: int) -> Owners:
    sizes = [0] * before
    for owner in owners:
        sizes[owner] += 1
    share, larger_count = divmod(SLOT_COUNT, after)
    targets = [share] * after
    # The largest partitions keep the remainder, so fewer slots move.
    for partition in sorted(range(after), key=lambda p: (-sizes[p] if p < before else 0, p))[
        :larger_count
    ]:
        targets[partition] += 1
    given = [max(0, size - target) for size, target in zip(sizes, targets, strict=False)]
    moving = []
    # Each partition gives away its highest slots, so it keeps few ranges.
    for slot in range(SLOT_COUNT - 1, -1, -1):
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


# ---- as text -------------------------------------------------------------------------------------


def ranges_of(owners: Owners) -> dict[int, str]:
    """Partition -> its slots as text, such as "0-4095,9000"."""
    found: dict[int, list[str]] = {}
    start = 0
    for slot in range(1, SLOT_COUNT + 1):
        if slot == SLOT_COUNT or owners[slot] != owners[start]:
            found.setdefault(owners[start], []).append(
                str(start) if slot - start == 1 else f"{start}-{slot - 1}"
            )
            start = slot
    return {partition: ",".join(pieces) for partition, pieces in found.items()}


def slots_in(ranges: str) -> Iterator[int]:
    """Yield the slots in ranges such as "0-4095,9000". Raises ValueError."""
    for piece in ranges.split(",") if ranges else ():
        first, _, last = piece.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < SLOT_COUNT:
            raise ValueError(
                f"{piece!r} is not a range of hash slots; write 0-4095 or 9000, "
                f"at most {SLOT_COUNT - 1}"
            )
        yield from range(low, high + 1)


def owners_in(ranges: Iterable[str]) -> Owners | None:
    """The slot map built from each partition's ranges, in order of partitions.

    None if a slot has no owner or two. Raises ValueError.
    """
    none = 0xFFFF
    owners = array("H", [none]) * SLOT_COUNT
    for partition, text in enumerate(ranges):
        for slot in slots_in(text):
            if owners[slot] != none:
                return None
            owners[slot] = partition
    return None if none in owners else owners


# ---- handing over --------------------------------------------------------------------------------

HandOver = tuple[tuple[int, int], ...]
"""(source partition, hand-over offset) pairs, ascending. Every record of the slots that a source
gave away lies below its hand-over offset.
"""


def missing_sources(
    counts: tuple[int, ...], partition: int, known: Iterable[tuple[int, int]]
) -> list[int]:
    """The partitions that gave slots to this one and whose hand-over offset is unknown."""
    birth = births(counts).get(partition) if counts else None
    return [] if birth is None else sorted(set(birth.sources) - {source for source, _ in known})


def hand_over_of(described: Mapping[str, Any]) -> HandOver:
    """Parse a partition's `hand_over` in METADATA or JSON. Raises TypeError, ValueError."""
    return tuple(sorted((int(source), int(offset)) for source, offset in described.items()))


def is_drained(
    hand_over: Iterable[tuple[int, int]],
    positions: Mapping[int, int],
    start_offsets: Mapping[int, int] | None = None,
    ends: Mapping[int, int] | None = None,
) -> bool:
    """True if all records below the hand-over offsets are read, so the new partition may be read.

    A source is drained if its position (or the group's committed offset) has reached the hand-over
    offset, or if all that is left of its log is read. `start_offsets` and `ends`, where known, say
    what is left: retention or a disk failure may have removed the rest. A reader without a group
    calls this before it reads an added partition:

        described = admin.describe_topics("orders")["orders"]["partitions"][5]
        positions = {key.partition: consumer.position(key) for key in consumer.assignment()}
        is_drained(described["hand_over"].items(), positions)
    """
    start_offsets, ends = start_offsets or {}, ends or {}
    return all(
        _is_read(offset, positions.get(source), start_offsets.get(source), ends.get(source))
        for source, offset in hand_over
    )


def _is_read(offset: int, position: int | None, beginning: int | None, end: int | None) -> bool:
    if beginning is not None and beginning >= offset:
        return True
    return position is not None and position >= (offset if end is None else min(offset, end))
