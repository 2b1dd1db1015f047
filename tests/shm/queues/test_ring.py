"""Rings: a model with a worker, a flusher and fronts; capacity; a killed worker and a killed
flusher; two processes.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.memory.layout import FLAG_BYTES, Verdict
from shm.queues.ring import Ring, RingWriter
from shm.tables.invariants import CheckedBuffer, InvariantError
from tests.kit.memory import ring_region


def append(writer: RingWriter, payload: bytes, number: int, lane_position: int = 0) -> bool:
    position = writer.try_claim(len(payload))
    if position is None:
        return False
    index = position % writer.ring_bytes
    writer.data[index : index + len(payload)] = payload
    writer.write(
        position,
        len(payload),
        3,
        number,
        number + 1,
        9,
        number,
        lane_position,
        FLAG_BYTES,
        0,
        0,
        1,
        number,
        0,
        0,
        0,
        0,
        0,
    )
    return True


def settle(flusher: Ring, end: int) -> None:
    for number in range(flusher.settled.load(), end):
        flusher.judge(number, Verdict.DURABLE)
    flusher.settled.store(end)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "settle", "front0", "front1", "reclaim", "die"]),
            st.integers(1, 16_000),
        ),
        max_size=150,
    ),
    st.booleans(),
)
def test_ring_never_overwrites_what_a_stage_has_not_passed(
    steps: list[tuple[str, int]], second_front_lives: bool
) -> None:
    with ring_region() as region:
        writer, flusher = RingWriter(region), Ring(region)
        live = [0, 1] if second_front_lives else [0]
        model: list[bytes] = []
        cursors = {0: 0, 1: 0}
        for step, amount in steps:
            producer_position = flusher.producer_position.load()
            if step == "append":
                payload = random.Random(len(model)).randbytes(amount)
                if append(writer, payload, len(model)):
                    model.append(payload)
                writer.commit()
            elif step == "settle":
                settle(flusher, min(producer_position, flusher.settled.load() + amount % 5))
            elif step in ("front0", "front1"):
                front = int(step[-1])
                cursors[front] = min(producer_position, cursors[front] + amount % 5)
                flusher.cursors[front].store(cursors[front])
            elif step == "reclaim":
                writer.reclaim(live)
            else:
                writer = RingWriter(
                    region
                )  # killed and started again: everything it needs is there
            # Invariants of the module.
            reclaimed, settled = flusher.reclaimed.load(), flusher.settled.load()
            assert reclaimed <= min([settled, *(flusher.cursors[f].load() for f in live)])
            assert settled <= flusher.producer_position.load() <= reclaimed + flusher.capacity
            for number in range(reclaimed, flusher.producer_position.load()):
                descriptor = flusher.descriptor(number)
                assert descriptor.ordinal == number + 1
                assert bytes(flusher.bytes_of(descriptor)) == model[number]


def test_a_killed_worker_leaves_nothing_of_what_it_had_not_published() -> None:
    with ring_region() as region:
        writer = RingWriter(region)
        append(writer, b"kept", 0, lane_position=64)
        writer.commit()
        append(writer, b"lost", 1, lane_position=128)
        successor = RingWriter(region)
        assert successor.next_number == 1
        assert append(successor, b"next", 1)
        successor.commit()
        assert bytes(successor.bytes_of(successor.descriptor(1))) == b"next"


def test_a_full_ring_takes_nothing_until_it_is_settled_and_answered() -> None:
    with ring_region() as region:
        writer, flusher = RingWriter(region), Ring(region)
        count = 0
        while append(writer, b"x" * 8192, count):
            count += 1
        writer.commit()
        assert count == 8
        assert flusher.is_crowded()
        settle(flusher, count)
        writer.reclaim([0])
        assert not append(writer, b"x", count), "front 0 has not answered yet"
        flusher.cursors[0].store(count)
        writer.reclaim([0])
        assert append(writer, b"x", count)


def test_descriptors_run_out_as_bytes_do() -> None:
    with ring_region(descriptors=64) as region:
        writer = RingWriter(region)
        for number in range(64):
            assert append(writer, b"", number)
        assert not append(writer, b"", 64)


def test_outcomes_belong_to_one_use_of_a_descriptor() -> None:
    with ring_region() as region:
        ring = Ring(region)
        assert ring.outcome(5).verdict is Verdict.NONE
        ring.plan(5, 100, 4096)
        assert ring.outcome(5) == (Verdict.PLANNED, 100, 4096)
        ring.judge(5, Verdict.DURABLE)
        assert ring.outcome(5) == (Verdict.DURABLE, 100, 4096)
        assert ring.outcome(5 + ring.capacity).verdict is Verdict.NONE


def test_a_place_recorded_anew_is_the_old_one_until_its_word_is_stored() -> None:
    with ring_region() as region:
        ring = Ring(region)
        words = region.words
        assert isinstance(words, CheckedBuffer)
        for number in range(3):  # the other place each time
            ring.plan(5, 100 + number, 4096)
            assert ring.outcome(5) == (Verdict.PLANNED, 100 + number, 4096)

        def die() -> None:
            raise KeyboardInterrupt

        words.before = die
        with pytest.raises(KeyboardInterrupt):
            ring.plan(5, 200, 8192)  # killed when both words of the place are written
        words.before = None
        assert ring.outcome(5) == (Verdict.PLANNED, 102, 4096)
        ring.judge(5, Verdict.WRITTEN)
        assert ring.outcome(5) == (Verdict.WRITTEN, 102, 4096)


@pytest.mark.parametrize(
    ("word", "value", "broken"),
    [
        ("producer_position", 9, "producer_position from 3 to 9"),
        ("producer_position", 2, "producer_position from 3 to 2"),
        ("settled", 4, "settled from 2 to 4"),
        ("settled", 1, "settled from 2 to 1"),
        ("settled", 3, "before the verdicts of"),
        ("reclaimed", 3, "reclaimed from 1 to 3"),
        ("reclaimed", 0, "reclaimed from 1 to 0"),
    ],
)
def test_a_store_that_breaks_an_invariant_is_found_where_it_is_made(
    word: str, value: int, broken: str
) -> None:
    with ring_region(descriptors=4) as region:
        writer, flusher = RingWriter(region), Ring(region)
        for number in range(3):
            append(writer, b"x", number)
        writer.commit()
        settle(flusher, 2)
        flusher.reclaimed.store(1)
        with pytest.raises(InvariantError, match=broken):
            getattr(flusher, word).store(value)


def test_two_processes_see_only_whole_batches() -> None:
    count = 20_000
    with ring_region(1 << 16, 256) as region:
        pid = os.fork()
        if pid == 0:
            flusher = Ring(region)
            cursor = 0
            while cursor < count:
                producer_position = flusher.producer_position.load()
                for number in range(cursor, producer_position):
                    descriptor = flusher.descriptor(number)
                    if (
                        descriptor.ordinal != number + 1
                        or zlib.crc32(flusher.bytes_of(descriptor)) != descriptor.session
                    ):
                        os._exit(1)
                settle(flusher, producer_position)
                cursor = producer_position
                os.sched_yield()
            os._exit(0)
        writer = RingWriter(region)
        source = random.Random(3)
        for number in range(count):
            payload = source.randbytes(source.randrange(1, 4000))
            while (position := writer.try_claim(len(payload))) is None:
                writer.commit()
                writer.reclaim([])
                os.sched_yield()
            index = position % writer.ring_bytes
            writer.data[index : index + len(payload)] = payload
            session = zlib.crc32(payload)
            writer.write(
                position,
                len(payload),
                0,
                number,
                number + 1,
                session,
                0,
                0,
                FLAG_BYTES,
                0,
                0,
                -1,
                -1,
                0,
                0,
                0,
                0,
                0,
            )
            if number % 7 == 0:
                writer.commit()
        writer.commit()
        assert os.waitpid(pid, 0)[1] == 0
