"""Hash slots: Redis Cluster's vectors, maps that are balanced and move no more than they must, and
the texts that they are kept as.
"""

from __future__ import annotations

import pathlib
from collections import Counter, defaultdict

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.hash_slots import (
    SLOT_COUNT,
    births,
    hand_over_of,
    missing_sources,
    owners_after,
    owners_in,
    ranges_of,
    slot_of,
    slots_in,
)

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "slot_maps.json"
HISTORIES = ((1,), (3,), (1024,), (4, 6, 7, 11), (1, 2, 3, 4, 5), (7, 1024))
histories = (
    st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True).map(sorted).map(tuple)
)


@pytest.mark.parametrize(
    ("key", "slot"),
    # Redis Cluster's specification: CRC16 of "123456789" is 0x31C3; the others are what CLUSTER
    # KEYSLOT returns.
    [
        (b"123456789", 0x31C3 % SLOT_COUNT),
        (b"foo", 12182),
        (b"bar", 5061),
        (b"hello", 866),
        (b"", 0),
    ],
)
def test_slots_are_redis_clusters(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


@settings(max_examples=20, deadline=None)
@given(histories)
def test_every_map_is_balanced_and_says_the_same_again(counts: tuple[int, ...]) -> None:
    owners = owners_after(counts)
    sizes = Counter(owners)
    assert set(sizes) == set(range(counts[-1]))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    owners_after.__globals__["_history"].cache_clear()
    assert owners_after(counts) == owners


@settings(max_examples=20, deadline=None)
@given(histories.filter(lambda counts: len(counts) > 1))
def test_adding_partitions_moves_only_what_the_new_ones_get(counts: tuple[int, ...]) -> None:
    before, after = owners_after(counts[:-1]), owners_after(counts)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert all(old < counts[-2] <= new for old, new in moved)
    # No map that is balanced moves fewer: each new partition needs its share, and those with one
    # more are old ones where there are any.
    share, larger = divmod(SLOT_COUNT, counts[-1])
    keep_more = min(larger, sum(size > share for size in Counter(before).values()))
    assert len(moved) == share * (counts[-1] - counts[-2]) + larger - keep_more


@settings(max_examples=20, deadline=None)
@given(histories)
def test_a_partition_that_was_added_knows_who_gave_it_its_slots(counts: tuple[int, ...]) -> None:
    found = births(counts)
    assert set(found) == set(range(counts[0], counts[-1]))
    given_by: defaultdict[int, set[int]] = defaultdict(set)
    for version in range(2, len(counts) + 1):
        before, after = owners_after(counts[: version - 1]), owners_after(counts[:version])
        for giver, taker in zip(before, after, strict=True):
            if counts[version - 2] <= taker:
                given_by[taker].add(giver)
    for partition, birth in found.items():
        assert counts[birth.version - 2] <= partition < counts[birth.version - 1]
        assert set(birth.sources) == given_by[partition]
        assert missing_sources(counts, partition, []) == list(birth.sources)
        assert missing_sources(counts, partition, [(birth.sources[0], 7)]) == list(
            birth.sources[1:]
        )
    assert missing_sources(counts, 0, []) == missing_sources((), 0, []) == []


@settings(max_examples=8, deadline=None)
@given(histories)
def test_ranges_say_the_whole_map_and_what_is_no_map_is_known(counts: tuple[int, ...]) -> None:
    owners = owners_after(counts)
    texts = [ranges_of(owners)[partition] for partition in range(counts[-1])]
    assert owners_in(texts) == owners
    assert owners_in(texts[1:]) is None
    assert owners_in([*texts, "16383"]) is None


@pytest.mark.parametrize("text", ["16384", "5-4", "-1", "a", "1,,2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(slots_in(text))


def test_maps_and_births_are_the_golden_ones() -> None:
    """They are a format: a catalog is made again from the history alone."""
    found = [
        [list(counts), {str(p): r for p, r in sorted(ranges_of(owners_after(counts)).items())},
        {str(p): list(b) for p, b in births(counts).items()}]
        for counts in HISTORIES
    ]  # fmt: skip
    assert orjson.dumps(found) == GOLDEN.read_bytes()


def test_a_hand_over_as_json() -> None:
    assert hand_over_of({"3": 10, "1": 5}) == ((1, 5), (3, 10))
