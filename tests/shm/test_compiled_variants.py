"""Compiled lanes, rings, tables and the fronts' walk against the same in Python: any history, the
same results and the same bytes in memory.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netfront.produce.ring_acks import AckWalker, Answer
from shm.memory.atomic_word import AtomicCounter, is_compiled
from shm.memory.layout import (
    LANE_MESSAGE_BYTES,
    LaneLayout,
    RegionKind,
    RingLayout,
    SlotState,
    TableLayout,
    Verdict,
)
from shm.memory.region import Region
from shm.queues.lane import LaneError, LaneReader, LaneWriter
from shm.queues.ring import Ring, RingWriter
from shm.tables.partition_table import PartitionState, PartitionTable
from tailrace import kernel
from tailrace.format.crc32c import Readable
from tests.kit.memory import region as real_region
from tests.kit.memory import simulated

pytestmark = pytest.mark.skipif(kernel.compiled is None, reason="no compiled kernel is used here")


def pair(kind: RegionKind, size: int, first: int, second: int = 0) -> list[Region]:
    """One region for compiled code, one whose words are instrumented."""
    return [
        simulated(kind, size, first, second, is_checked=is_checked) for is_checked in (False, True)
    ]


def same(results: list[Any]) -> Any:
    assert results[0] == results[1]
    return results[0]


def outcome(act: Any) -> Any:
    """Result of a call, or the error that it raises, with its sentence."""
    try:
        return act()
    except (ValueError, LaneError) as error:
        return type(error), str(error)


def check_memory(regions: list[Region]) -> None:
    assert bytes(regions[0].bytes) == bytes(regions[1].bytes)


LANE_STEP = st.tuples(
    st.sampled_from(["write", "write", "write", "publish", "read", "read", "consume", "restart"]),
    st.integers(0, 2600),
    st.integers(0, 3),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(LANE_STEP, max_size=60))
def test_lanes(steps: list[tuple[str, int, int]]) -> None:
    regions = pair(RegionKind.LANE, LaneLayout(4096).size, 4096)
    writers, readers = [LaneWriter(r) for r in regions], [LaneReader(r) for r in regions]
    assert [is_compiled(each) for each in (*writers, *readers)] == [True, False, True, False]
    for number, (what, length, pieces) in enumerate(steps):
        data = random.Random(number).randbytes(length)
        payload: list[Readable] = (
            [memoryview(data)[: length // 2], bytearray(data[length // 2 :])]
            if pieces == 2
            else [data]
            if pieces
            else []
        )
        if what == "write":
            same(
                [
                    outcome(
                        partial(
                            w.try_write, 1, number, pieces, 2**63 + number, length, number, payload
                        )
                    )
                    for w in writers
                ]
            )
        elif what == "publish":
            same([w.commit() for w in writers])
        elif what == "read":
            found = same([r.peek() for r in readers])
            if found is not None:
                for reader in readers:
                    reader.advance(found)
        elif what == "consume":
            same([r.consume() for r in readers])
        else:
            writers = [LaneWriter(r) for r in regions]
            readers = [LaneReader(r, resume_at=readers[0].position) for r in regions]
        same([(w.position, w.consumed_before(7), w.is_empty()) for w in writers])
        same([(r.position, r.has_more()) for r in readers])
    check_memory(regions)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 70).map(lambda n: 64 * n), st.integers(0, 63))
def test_a_lane_whose_bytes_contradict_its_words_is_refused_alike(
    length: int, tail: int, start: int
) -> None:
    regions = pair(RegionKind.LANE, LaneLayout(4096).size, 4096)
    layout = LaneLayout(4096)
    position = 64 * start
    for region in regions:
        memory = region.bytes
        memory.cast("Q")[layout.consumer_position // 8] = position
        memory.cast("Q")[layout.producer_position // 8] = position + tail
        memory[layout.data + position : layout.data + position + 4] = length.to_bytes(4, "little")
    same([outcome(LaneReader(r).peek) for r in regions])


APPEND = st.tuples(
    st.just("append"), st.integers(0, 1500), st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 10]),
    st.integers(0, 1), st.booleans(), st.integers(0, 3),
)  # fmt: skip
RING_STEP = APPEND | st.tuples(
    st.sampled_from(["publish", "settle", "walk", "reclaim", "restart", "plan"]), st.integers(0, 8)
)


def append(writer: RingWriter, number: int, step: tuple[Any, ...]) -> bool:
    _, length, acks, result, front, is_duplicate, slot = step
    position = writer.try_claim(length)
    if position is None:
        return False
    index = position % writer.ring_bytes
    writer.data[index : index + length] = random.Random(number).randbytes(length)
    flags = acks | (16 if length else 0) | (8 if is_duplicate else 0)
    session = (77 if number % 5 else 78) << 32 | number
    writer.write(
        position, length, slot, number, number + 1, session, number * 3, number * 64, flags, front,
        result, -1 if number % 2 else number, number, 3,
        0, 2, 10**15 + number, -number, number, 5,
    )  # fmt: skip
    return True


@settings(max_examples=80, deadline=None)
@given(st.lists(RING_STEP, max_size=80))
def test_rings_and_the_walk_of_a_front(steps: list[tuple[Any, ...]]) -> None:
    regions = pair(RegionKind.RING, RingLayout(8192, 16).size, 8192, 16)
    writers, flushers = [RingWriter(r) for r in regions], [Ring(r) for r in regions]
    walkers = [AckWalker(ring, 0, 77) for ring in flushers]
    assert [is_compiled(each) for each in (*writers, *flushers, *walkers)] == [True, False] * 3
    answers: list[list[Answer]] = [[], []]
    slots: list[set[int]] = [set(), set()]
    for number, step in enumerate(steps):
        what = step[0]
        if what == "append":
            same([append(w, number, step) for w in writers])
        elif what == "publish":
            same([w.commit() for w in writers])
        elif what == "settle":
            settled, head = flushers[0].settled.load(), flushers[0].producer_position.load()
            for each in range(settled, min(head, settled + step[1])):
                for ring in flushers:
                    if step[1] % 2:
                        ring.plan(each, 1 << 40, each * 64)
                    ring.judge(each, list(Verdict)[2 + each % 4])
                    ring.settled.store(each + 1)
        elif what == "plan" and flushers[0].settled.load() < flushers[0].producer_position.load():
            for ring in flushers:
                ring.plan(ring.settled.load(), step[1], number)
        elif what == "walk":
            same([w.has_more() for w in walkers])
            same(
                [
                    w.walk(found.append, seen)
                    for w, found, seen in zip(walkers, answers, slots, strict=True)
                ]
            )
            same([w.is_caught_up() for w in walkers])
        elif what == "reclaim":
            for writer in writers:
                writer.reclaim([0])
        elif what == "restart":
            writers = [RingWriter(r) for r in regions]
        same([(w.next_number, w.next_position, w.used(), w.is_crowded()) for w in writers])
        same([[f.descriptor(n) for n in range(16)] for f in flushers])
        same([[f.outcome(n) for n in range(16)] for f in flushers])
    assert same(answers) == answers[0]
    assert all(
        type(code) is type(answers[1][i].code) for i, (_, _, code, *_) in enumerate(answers[0])
    )
    same(slots)
    check_memory(regions)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16)),
        max_size=20,
    )
)
def test_partition_tables(writes: list[tuple[int, list[int]]]) -> None:
    regions = pair(RegionKind.TABLE, TableLayout(4).size, 4)
    tables = [
        PartitionTable(simulated(RegionKind.TABLE, TableLayout(4).size, 4, is_checked=False)),
        PartitionTable(regions[0]),
    ]
    reference = simulated(RegionKind.TABLE, TableLayout(4).size, 4, is_checked=False)
    reference.words = reference.bytes.cast("Q")
    tables[0] = PartitionTable(reference)
    assert [is_compiled(table) for table in tables] == [False, True]
    for slot, numbers in writes:
        state = PartitionState(bytes(16), numbers[0], SlotState(numbers[1] % 5), *numbers[2:])
        for table in tables:
            table.write(slot, state)
        same([[table.append_state(s) for s in range(4)] for table in tables])
        same([[table.read(s) for s in range(4)] for table in tables])
    with pytest.raises(IndexError):
        tables[1].append_state(4)


def test_words_of_a_closed_region_are_refused_and_what_points_into_it_keeps_it_mapped() -> None:
    with real_region(RegionKind.LANE, LaneLayout(4096).size, 4096) as region:
        plain = Region.attach(region.name, RegionKind.LANE)
        word, writer, reader = (
            AtomicCounter(plain.words, LaneLayout(4096).producer_position),
            LaneWriter(plain),
            LaneReader(plain),
        )
        assert is_compiled(writer)
        plain.close()
        with pytest.raises(IndexError, match="closed"):
            word.load()
        with pytest.raises(IndexError, match="closed"):
            word.store(1)
        assert writer.try_write(1, 0, 0, 0, 0, 0, (b"still there",))
        writer.commit()
        message = reader.peek()
        assert message is not None
        assert bytes(message.payload) == b"still there"
        other = LaneReader(region).peek()
        assert other == message


def test_words_are_bounded_and_aligned() -> None:
    words = simulated(RegionKind.CONTROL, 256, 0, is_checked=False).words
    words[31] = 2**64 - 1
    assert words[31] == 2**64 - 1
    for index in (32, -1, 2**62):
        with pytest.raises(IndexError):
            words[index]
        with pytest.raises(IndexError):
            words[index] = 1
    with pytest.raises(OverflowError):
        words[0] = 2**64
    with pytest.raises(ValueError, match="not aligned"):
        AtomicCounter(words, 12)


def test_a_piece_that_is_longer_than_it_says_stays_in_its_message() -> None:
    region = simulated(RegionKind.LANE, LaneLayout(4096).size, 4096, is_checked=False)
    writer = LaneWriter(region)
    wide = memoryview(bytes(800)).cast("Q")  # 100 items of 8 bytes
    with pytest.raises(ValueError, match="more bytes"):
        writer.try_write(1, 0, 0, 0, 0, 0, (wide,))
    assert not writer.commit()
    assert writer.position == 0


def test_a_region_too_small_for_what_its_header_says_is_refused() -> None:
    layout = LaneLayout(4096)
    with pytest.raises(ValueError, match="not in a region"):
        LaneWriter(simulated(RegionKind.LANE, layout.size - 4096, 4096, is_checked=False))
    assert layout.data + LANE_MESSAGE_BYTES < layout.size
