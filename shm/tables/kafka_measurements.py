"""Measurements of the Kafka gateway in shared memory.

Requests, errors and durations by API, errors by code, bytes and connections.

Owner: the gateway, in one thread. The console reads.

Invariants:
- A word other than `connections` only grows while the region lives. A successor of a killed gateway
  continues its words.

Layout: words | requests by API | errors by API | errors by code, from -1 on | histograms by API.

Crash: a killed gateway leaves the words; at most the sum of its last duration is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shm.memory.atomic_word import AtomicBuffer
from shm.memory.layout import (
    HISTOGRAM_BYTES,
    KAFKA_APIS_MAX,
    KAFKA_CODES_MAX,
    KAFKA_WORDS,
    WORD_BYTES,
)
from shm.tables.measurements import Histogram, HistogramValues

_CONNECTIONS, _RECEIVED, _SENT = range(3)


class KafkaValues(NamedTuple):
    """The measurements at one moment."""

    requests: Mapping[int, int]
    """API -> requests."""
    errors: Mapping[int, int]
    """API -> errors of requests, or of parts of them."""
    codes: Mapping[int, int]
    """Kafka's error code -> errors."""
    durations: Mapping[int, HistogramValues]
    """API -> from the receipt of a request to its response, with all that it waits for."""
    connections: int
    received_bytes: int
    sent_bytes: int


class KafkaMeasurements:
    """See the module."""

    __slots__ = ("_codes", "_errors", "_first", "_histograms", "_position", "_requests", "_words")

    def __init__(self, words: AtomicBuffer, position: int) -> None:
        self._words = words
        self._first = position // WORD_BYTES
        self._requests = self._first + KAFKA_WORDS
        self._errors = self._requests + KAFKA_APIS_MAX
        self._codes = self._errors + KAFKA_APIS_MAX
        self._position = (self._codes + KAFKA_CODES_MAX) * WORD_BYTES
        self._histograms: dict[int, Histogram] = {}

    def began(self, api: int, byte_count: int) -> None:
        """Count a request of an API that there is."""
        self._words[self._requests + api] += 1
        self._words[self._first + _RECEIVED] += byte_count

    def ended(self, api: int, duration_ns: int, byte_count: int) -> None:
        """Count a response."""
        histogram = self._histograms.get(api)
        if histogram is None:
            histogram = self._histograms[api] = self._histogram(api)
        histogram.add(duration_ns)
        self._words[self._first + _SENT] += byte_count

    def failed(self, api: int, code: int) -> None:
        """Count an error of a request, or of a part of one."""
        self._words[self._errors + api] += 1
        self._words[self._codes + min(max(code, -1) + 1, KAFKA_CODES_MAX - 1)] += 1

    def set_connections(self, count: int) -> None:
        """Store the number of open connections."""
        self._words[self._first + _CONNECTIONS] = count

    def _histogram(self, api: int) -> Histogram:
        return Histogram(self._words, self._position + api * HISTOGRAM_BYTES)

    def values(self) -> KafkaValues:
        """Read them."""
        words = self._words

        def counts(first: int, count: int, offset: int = 0) -> dict[int, int]:
            return {
                number + offset: found
                for number in range(count)
                if (found := words[first + number])
            }

        requests = counts(self._requests, KAFKA_APIS_MAX)
        return KafkaValues(
            requests,
            counts(self._errors, KAFKA_APIS_MAX),
            counts(self._codes, KAFKA_CODES_MAX, -1),
            {api: self._histogram(api).values() for api in requests},
            *(words[self._first + at] for at in (_CONNECTIONS, _RECEIVED, _SENT)),
        )
