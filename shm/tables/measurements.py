"""Measurements of a process: histograms of durations, and counters by API and by error code, in
shared memory. The process only adds to words; the console reads them.

Owner: each process writes its own measurements, in one thread. The console reads all.

Invariants:
- A word only grows while the region lives. A successor of a killed process continues its words.
- A reader may see a bucket without its sum, for the moment between the two stores.

Layout: `ControlLayout.histogram`, `request_counters`, `error_counters`.

Crash: a killed process leaves the words; at most the sum of its last duration is missing.

Buckets are powers of two from 2^14 ns (16 us) on, so that a duration finds its bucket by its number
of bits (as in HdrHistogram, with one bit of precision).
"""

from __future__ import annotations

from typing import NamedTuple

from shm.memory.atomic_word import AtomicBuffer
from shm.memory.layout import (
    BUCKET_COUNT,
    BUCKET_FIRST_BITS,
    COUNTERS_MAX,
    WORD_BYTES,
)

BOUNDS_NS = tuple(
    1 << bits for bits in range(BUCKET_FIRST_BITS, BUCKET_FIRST_BITS + BUCKET_COUNT - 1)
)
"""Upper bounds of all buckets but the last, which has none."""


class HistogramValues(NamedTuple):
    """A histogram at one moment."""

    counts: tuple[int, ...]
    """By bucket, not cumulated."""
    sum_ns: int


class Histogram:
    """Durations of one kind."""

    __slots__ = ("_first", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES

    def add(self, duration_ns: int) -> None:
        """Count one duration. A negative one counts as 0."""
        words, first = self._words, self._first
        if duration_ns < 0:
            duration_ns = 0
        bucket = (duration_ns >> BUCKET_FIRST_BITS).bit_length()
        words[first + (bucket if bucket < BUCKET_COUNT else BUCKET_COUNT - 1)] += 1
        words[first + BUCKET_COUNT] += duration_ns

    def values(self) -> HistogramValues:
        """Read it."""
        words, first = self._words, self._first
        return HistogramValues(
            tuple(words[first + bucket] for bucket in range(BUCKET_COUNT)),
            words[first + BUCKET_COUNT],
        )


class Counters:
    """Counters by a small number: an API, or an error code."""

    __slots__ = ("_first", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES

    def add(self, number: int, count: int = 1) -> None:
        """Count. Numbers above the last counter share it."""
        self._words[self._first + (number if number < COUNTERS_MAX else COUNTERS_MAX - 1)] += count

    def values(self) -> dict[int, int]:
        """Number -> count, of those that are not 0."""
        words, first = self._words, self._first
        return {number: count for number in range(COUNTERS_MAX) if (count := words[first + number])}
