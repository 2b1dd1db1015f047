"""Histograms and counters of a process in shared memory."""

from __future__ import annotations

import pytest

from shm.memory.layout import (
    BUCKET_COUNT,
    COUNTERS_MAX,
    MEASUREMENT_BYTES,
    WORD_BYTES,
    WORKERS_MAX,
    ControlLayout,
    Measure,
    Role,
)
from shm.tables.measurements import BOUNDS_NS, Counters, Exemplar, Exemplars, Histogram


def words() -> memoryview:
    return memoryview(bytearray(4096)).cast("Q")


@pytest.mark.parametrize(
    ("duration_ns", "bucket"),
    [
        (-1, 0), (0, 0), ((1 << 14) - 1, 0), (1 << 14, 1), ((1 << 15) - 1, 1), (1 << 15, 2),
        ((1 << 36) - 1, 22), (1 << 36, 23), (1 << 60, 23),
    ],
)  # fmt: skip
def test_a_duration_is_counted_in_the_bucket_of_its_bits(duration_ns: int, bucket: int) -> None:
    histogram = Histogram(words(), 64)
    histogram.add(duration_ns)
    found = histogram.values()
    assert [number for number, count in enumerate(found.counts) if count] == [bucket]
    assert found.sum_ns == max(0, duration_ns)
    below = sum(duration_ns >= bound for bound in BOUNDS_NS)
    assert below == bucket


def test_a_successor_continues_the_words_of_its_predecessor() -> None:
    memory = words()
    Histogram(memory, 0).add(1)
    Histogram(memory, 0).add(1 << 20)
    assert sum(Histogram(memory, 0).values().counts) == 2


def test_each_bucket_keeps_its_last_trace() -> None:
    exemplars = Exemplars(words(), 0)
    assert exemplars.values() == {}
    first, second, slow = (bytes([number]) * 16 for number in (1, 2, 3))
    exemplars.store(1 << 14, first, 10)
    exemplars.store((1 << 15) - 1, second, 20)
    exemplars.store(1 << 60, slow, 30)
    assert exemplars.values() == {
        1: Exemplar(second, (1 << 15) - 1, 20),
        BUCKET_COUNT - 1: Exemplar(slow, 1 << 60, 30),
    }


def test_a_trace_that_is_being_written_is_left_out_and_the_next_one_replaces_it() -> None:
    memory = words()
    exemplars = Exemplars(memory, 0)
    exemplars.store(0, b"a" * 16, 1)
    memory[0] |= 1  # its writer was killed between the two stores of the sequence
    assert exemplars.values() == {}
    Exemplars(memory, 0).store(0, b"b" * 16, 2)
    assert exemplars.values() == {0: Exemplar(b"b" * 16, 0, 2)}


def test_counters_have_a_word_each_and_large_numbers_share_the_last() -> None:
    counters = Counters(words(), 8)
    for number in (0, 5, 5, COUNTERS_MAX - 1, 10_000):
        counters.add(number)
    assert counters.values() == {0: 1, 5: 2, COUNTERS_MAX - 1: 2}


def test_the_measurements_of_two_processes_share_no_byte_and_lie_within_the_region() -> None:
    layout = ControlLayout()
    ends = []
    for role, index in ((Role.SUPERVISOR, 0), (Role.FRONT, 0), (Role.WORKER, WORKERS_MAX - 1)):
        first = layout.histogram(role, index, Measure(0))
        end = layout.error_counters(role, index) + COUNTERS_MAX * WORD_BYTES
        assert end - first <= MEASUREMENT_BYTES
        assert first % WORD_BYTES == 0
        ends.append(end)
    assert max(ends) <= layout.size
    assert len(BOUNDS_NS) == BUCKET_COUNT - 1
