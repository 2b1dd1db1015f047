"""Buffer of acquired records that were fetched and not delivered.

Owner: one share consumer.

Invariants:
- Buffered records are not delivered, and none of them is accepted.
- A record whose lock has expired is never delivered.
- `chunks` is an immutable value. A delivery replaces it with the remaining chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.share.acquired.ranges import FetchedRange
from tailrace.share.record import ShareRecord, with_delivery_count


class Chunk(NamedTuple):
    """Records with consecutive offsets, from the index `start` on."""

    key: TopicPartition
    records: list[Record]
    start: int
    delivery_count: int
    locked_until_ns: int

    def __len__(self) -> int:
        return len(self.records) - self.start


class LockedRange(NamedTuple):
    """The offsets `first` to `last` with the expiry of their lock."""

    key: TopicPartition
    first: int
    last: int
    locked_until_ns: int


class AcquiredRecords:
    """The buffer of one share consumer."""

    def __init__(self) -> None:
        self.chunks: tuple[Chunk, ...] = ()

    def __len__(self) -> int:
        """The number of buffered records."""
        return sum(map(len, self.chunks))

    def add(self, key: TopicPartition, piece: FetchedRange) -> None:
        """Store a fetched part of a range."""
        run = piece.run
        chunk = Chunk(key, piece.records, 0, run.delivery_count, run.locked_until_ns)
        self.chunks, run.first = (*self.chunks, chunk), piece.last + 1

    def first(self, limit: int) -> list[ShareRecord]:
        """The first `limit` records, in order. They stay in the buffer."""
        found: list[ShareRecord] = []
        for _, records, start, delivery_count, _ in self.chunks:
            left = limit - len(found)
            if left <= 0:
                break
            found += with_delivery_count(records[start : start + left], delivery_count)
        return found

    def without(self, count: int) -> tuple[list[LockedRange], tuple[Chunk, ...]]:
        """Split off the first `count` records: (their ranges, the remaining chunks)."""
        runs: list[LockedRange] = []
        chunks = list(self.chunks)
        while count:
            key, records, start, delivery_count, until_ns = chunks[0]
            end = min(len(records), start + count)
            runs.append(LockedRange(key, records[start].offset, records[end - 1].offset, until_ns))
            count -= end - start
            if end == len(records):
                del chunks[0]
            else:
                chunks[0] = Chunk(key, records, end, delivery_count, until_ns)
        return runs, tuple(chunks)

    def drop_expired(self, until_ns: int) -> list[LockedRange]:
        """Remove and return the records whose locks expire by `until_ns`."""
        return self._drop(lambda chunk: chunk.locked_until_ns <= until_ns)

    def drop_topic(self, topic: str) -> int:
        """Remove the records of a recreated topic. Returns how many."""
        return record_count(self._drop(lambda chunk: chunk.key.topic == topic))

    def drop_others(self, topics: Collection[str]) -> list[LockedRange]:
        """Remove and return the records that are not of these topics."""
        return self._drop(lambda chunk: chunk.key.topic not in topics)

    def clear(self) -> list[LockedRange]:
        """Remove and return all records."""
        return self._drop(lambda _: True)

    def _drop(self, is_dropped: Callable[[Chunk], bool]) -> list[LockedRange]:
        dropped = [chunk for chunk in self.chunks if is_dropped(chunk)]
        if dropped:
            self.chunks = tuple(chunk for chunk in self.chunks if not is_dropped(chunk))
        return [
            LockedRange(
                chunk.key,
                chunk.records[chunk.start].offset,
                chunk.records[-1].offset,
                chunk.locked_until_ns,
            )
            for chunk in dropped
        ]


def record_count(runs: list[LockedRange]) -> int:
    """The number of records in these ranges."""
    return sum(run.last - run.first + 1 for run in runs)
