"""Lanes: a model, wrapping, a reader killed and started again, and two processes that hammer
one.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.queues.lane import LaneError, LaneReader, LaneWriter
from tests.kit.memory import lane_region


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000) | st.none(), max_size=120))
def test_lane_behaves_like_a_bounded_queue(steps: list[int | None]) -> None:
    """A number writes a message of that length, None reads one."""
    with lane_region() as region:
        writer, reader = LaneWriter(region), LaneReader(region)
        model: deque[bytes] = deque()
        for number, step in enumerate(steps):
            if step is None:
                message = reader.peek()
                assert (message is None) == (not model)
                if message is not None:
                    assert (bytes(message.payload), message.session) == (model[0], len(model[0]))
                    model.popleft()
                    reader.advance(message)
                    reader.consume()
            else:
                payload = random.Random(number).randbytes(step)
                written = writer.try_write(
                    1, 2, 3, step, number, 0, (payload[: step // 2], payload[step // 2 :])
                )
                writer.commit()
                if written:
                    model.append(payload)
                else:
                    assert model, "an empty lane takes every message up to half its size"


def test_nothing_is_seen_before_publish_and_everything_after() -> None:
    with lane_region() as region:
        writer, reader = LaneWriter(region), LaneReader(region)
        writer.try_write(1, 0, 0, 0, 0, 0, (b"a",))
        writer.try_write(1, 0, 0, 0, 0, 0, (b"b",))
        assert reader.peek() is None
        assert writer.commit()
        assert not writer.commit()
        first = reader.peek()
        assert first is not None
        assert bytes(first.payload) == b"a"


def test_a_reader_that_was_killed_goes_on_behind_what_it_had_acted_on() -> None:
    with lane_region() as region:
        writer, reader = LaneWriter(region), LaneReader(region)
        for number in range(3):
            writer.try_write(1, 0, 0, number, 0, 0, (b"x",))
        writer.commit()
        first = reader.peek()
        assert first is not None
        # Acted on, not consumed: the lane alone would show it again; the worker's last descriptor
        # knows better.
        assert LaneReader(region).peek() == first
        successor = LaneReader(region, resume_at=first.next_position).peek()
        assert successor is not None
        assert successor.session == 1


def test_a_message_larger_than_half_the_lane_is_a_mistake_and_not_a_wait() -> None:
    with lane_region() as region, pytest.raises(ValueError, match="can never pass"):
        LaneWriter(region).try_write(1, 0, 0, 0, 0, 0, (b"x" * (1 << 14),))


def test_a_bent_length_is_found() -> None:
    with lane_region() as region:
        writer, reader = LaneWriter(region), LaneReader(region)
        writer.try_write(1, 0, 0, 0, 0, 0, (b"x",))
        writer.commit()
        reader._data[0:4] = (1 << 20).to_bytes(4, "little")
        with pytest.raises(LaneError):
            reader.peek()


def test_two_processes_pass_every_message_whole_and_in_order() -> None:
    count = 20_000
    with lane_region(1 << 15) as region:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            reader = LaneReader(region)
            digest = hashlib.sha256()
            for expected in range(count):
                while (message := reader.peek()) is None:
                    os.sched_yield()
                if message.session != expected:
                    os._exit(1)
                digest.update(message.payload)
                reader.advance(message)
                reader.consume()
            os.write(write_end, digest.digest())
            os._exit(0)
        writer = LaneWriter(region)
        digest = hashlib.sha256()
        source = random.Random(7)
        for number in range(count):
            payload = source.randbytes(source.randrange(0, 3000))
            digest.update(payload)
            while not writer.try_write(1, 0, 0, number, 0, 0, (payload,)):
                writer.commit()
                os.sched_yield()
            writer.commit()
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(read_end, 64) == digest.digest()
        os.close(read_end)
        os.close(write_end)
