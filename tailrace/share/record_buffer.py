"""Records that were acquired and read, and not handed out yet.

Owner: one share consumer.
Invariants: what is here is not held: nothing is accepted of it, and it is no delivery; nothing is
    handed out whose lock has passed. `chunks` is a value: handing records out stores another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.share.acquired_ranges import FetchedRange
from tailrace.share.record import ShareRecord, with_delivery_count


class Chunk(NamedTuple):
    """Records of offsets that follow each other, from the index `start` on."""

    key: TopicPartition
    records: list[Record]
    start: int
    delivery_count: int
    locked_until_ns: int

    def __len__(self) -> int:
        return len(self.records) - self.start


class HandedOut(NamedTuple):
    """Offsets `first` to `last`, whose lock lasts until then."""

    key: TopicPartition
    first: int
    last: int
    locked_until_ns: int


class AcquiredRecords:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.chunks: tuple[Chunk, ...] = ()

    def __len__(self) -> int:
        """How many records."""
        return sum(map(len, self.chunks))

    def add(self, key: TopicPartition, piece: FetchedRange) -> None:
        """These were read."""
        self.chunks = (
            *self.chunks,
            Chunk(key, piece.records, 0, piece.run.delivery_count, piece.run.locked_until_ns),
        )

    def first(self, limit: int) -> list[ShareRecord]:
        """Up to so many, in order, as they are stored; they stay here."""
        found: list[ShareRecord] = []
        for _, records, start, delivery_count, _ in self.chunks:
            left = limit - len(found)
            if left <= 0:
                break
            found += with_delivery_count(records[start : start + left], delivery_count)
        return found

    def without(self, count: int) -> tuple[list[HandedOut], tuple[Chunk, ...]]:
        """The first `count` as runs, and what is left then."""
        runs: list[HandedOut] = []
        chunks = list(self.chunks)
        while count:
            key, records, start, delivery_count, until_ns = chunks[0]
            end = min(len(records), start + count)
            runs.append(HandedOut(key, records[start].offset, records[end - 1].offset, until_ns))
            count -= end - start
            if end == len(records):
                del chunks[0]
            else:
                chunks[0] = Chunk(key, records, end, delivery_count, until_ns)
        return runs, tuple(chunks)

    def drop_expired(self, until_ns: int) -> list[HandedOut]:
        """Forget those whose locks pass by that time. Returns them."""
        return self._drop(lambda chunk: chunk.locked_until_ns <= until_ns)

    def drop_topic(self, topic: str) -> int:
        """Forget those of a topic that is another one now. Returns how many."""
        return _count(self._drop(lambda chunk: chunk.key.topic == topic))

    def clear(self) -> list[HandedOut]:
        """Forget all. Returns them."""
        return self._drop(lambda _: True)

    def _drop(self, is_dropped: Callable[[Chunk], bool]) -> list[HandedOut]:
        dropped = [chunk for chunk in self.chunks if is_dropped(chunk)]
        if dropped:
            self.chunks = tuple(chunk for chunk in self.chunks if not is_dropped(chunk))
        return [
            HandedOut(
                chunk.key,
                chunk.records[chunk.start].offset,
                chunk.records[-1].offset,
                chunk.locked_until_ns,
            )
            for chunk in dropped
        ]


def _count(runs: list[HandedOut]) -> int:
    return sum(run.last - run.first + 1 for run in runs)
