"""Measurements of a process: histograms of durations, and counters by API and by error code, in
shared memory. The process only adds to words; the console reads them.

Owner: each process writes its own measurements, in one thread. The console reads all.

Invariants:
- A word only grows while the region lives. A successor of a killed process continues its words.
- A reader may see a bucket without its sum, for the moment between the two stores.

Layout: `ControlLayout.histogram`, `exemplars`, `credit`, `request_counters`, `error_counters`.

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
    EXEMPLAR_BYTES,
    WORD_BYTES,
)

_EXEMPLAR_WORDS = EXEMPLAR_BYTES // WORD_BYTES

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


class Exemplar(NamedTuple):
    """A duration of a histogram, with a trace that it belongs to."""

    trace_id: bytes
    duration_ns: int
    time_us: int
    """Microseconds since 1970."""


class Exemplars:
    """The last traced duration of each bucket of a histogram.

    A sequence lock guards each: the sequence is odd while its words change, and a reader takes them
    only if it was the same even number before and after. A writer that was killed leaves it odd,
    and the next one stores the next even number.
    """

    __slots__ = ("_first", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES

    def store(self, duration_ns: int, trace_id: bytes, time_us: int) -> None:
        """Replace the exemplar of the duration's bucket. `trace_id`: 16 bytes."""
        words, duration_ns = self._words, max(0, duration_ns)
        first = self._first + bucket_of(duration_ns) * _EXEMPLAR_WORDS
        sequence = words[first] | 1
        words[first] = sequence  # SYNC POINT: odd while the words change
        words[first + 1] = int.from_bytes(trace_id[:8], "big")
        words[first + 2] = int.from_bytes(trace_id[8:16], "big")
        words[first + 3] = duration_ns
        words[first + 4] = time_us
        words[first] = sequence + 1  # SYNC POINT: even again

    def values(self) -> dict[int, Exemplar]:
        """Bucket -> its exemplar. One that is being replaced is left out."""
        words, found = self._words, {}
        for bucket in range(BUCKET_COUNT):
            first = self._first + bucket * _EXEMPLAR_WORDS
            sequence = words[first]
            if not sequence or sequence & 1:
                continue
            high, low, duration_ns, time_us = (words[first + at] for at in range(1, 5))
            if words[first] == sequence:
                trace_id = high.to_bytes(8, "big") + low.to_bytes(8, "big")
                found[bucket] = Exemplar(trace_id, duration_ns, time_us)
        return found


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration, which is not negative."""
    return min((duration_ns >> BUCKET_FIRST_BITS).bit_length(), BUCKET_COUNT - 1)


CREDIT_WORDS = 3


class CreditValues(NamedTuple):
    """A front's credit at one moment."""

    used_bytes: int
    """Bytes that connections may send, or have sent and the workers do not have yet."""
    budget_bytes: int
    waiting: int
    """Connections that wait for credit."""


class CreditState:
    """The occupancy of a front's credit."""

    __slots__ = ("_first", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES

    def store(self, used_bytes: int, budget_bytes: int, waiting: int) -> None:
        words, first = self._words, self._first
        words[first] = used_bytes
        words[first + 1] = budget_bytes
        words[first + 2] = waiting

    def values(self) -> CreditValues:
        """Read it."""
        words, first = self._words, self._first
        return CreditValues(words[first], words[first + 1], words[first + 2])


THROTTLE_KINDS = (
    "producer_byte_rate", "consumer_byte_rate", "request_rate", "controller_mutation_rate"
)  # fmt: skip
"""Quotas whose excess waits, in the order of their words."""


class ThrottleState:
    """Waits for quotas at a front: their number, then microseconds by kind, in the words behind its
    credit.
    """

    __slots__ = ("_first", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES + CREDIT_WORDS

    def add(self, kind: int, waited_ns: int) -> None:
        """Count a wait of the quota at this place in THROTTLE_KINDS."""
        self._words[self._first] += 1
        self._words[self._first + 1 + kind] += waited_ns // 1_000

    def values(self) -> tuple[int, dict[str, int]]:
        """(Number of waits, quota -> microseconds)."""
        words, first = self._words, self._first
        return words[first], {
            name: words[first + 1 + place] for place, name in enumerate(THROTTLE_KINDS)
        }


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
