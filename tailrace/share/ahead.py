"""Records that were acquired and read, and not handed out yet.

Owner: one share consumer.
Invariants: what is here is not held: nothing is accepted of it; nothing is handed out whose lock has passed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tailrace.records import Record, TopicPartition
from tailrace.share.feed import Piece
from tailrace.share.records import ShareRecord, with_delivery_count


@dataclass(slots=True)
class _Chunk:
    key: TopicPartition
    records: list[Record]
    """Of offsets that follow each other."""
    delivery_count: int
    locked_until_ns: int


class Ahead:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._chunks: deque[_Chunk] = deque()
        self._count = 0

    def __len__(self) -> int:
        """How many records."""
        return self._count

    def add(self, key: TopicPartition, piece: Piece) -> None:
        """These were read."""
        self._chunks.append(_Chunk(key, piece.records, piece.run.delivery_count, piece.run.locked_until_ns))
        self._count += len(piece.records)

    def first(self, limit: int) -> list[ShareRecord]:
        """Up to so many, in order, as they are stored; they stay here until `take`."""
        found: list[ShareRecord] = []
        for chunk in self._chunks:
            left = limit - len(found)
            if left <= 0:
                break
            found += with_delivery_count(chunk.records if left >= len(chunk.records) else chunk.records[:left], chunk.delivery_count)
        return found

    def take(self, count: int) -> list[tuple[TopicPartition, int, int]]:
        """The first `count` are handed out. Returns them as runs: (partition, first, last offset)."""
        runs: list[tuple[TopicPartition, int, int]] = []
        self._count -= count
        while count:
            chunk = self._chunks[0]
            part = chunk.records if len(chunk.records) <= count else chunk.records[:count]
            runs.append((chunk.key, part[0].offset, part[-1].offset))
            count -= len(part)
            if len(part) == len(chunk.records):
                self._chunks.popleft()
            else:
                chunk.records = chunk.records[len(part) :]
        return runs

    def drop_expired(self, limit: int, now_ns: int) -> int:
        """Forget those of the first `limit` whose locks have passed: they come again. Returns how many."""
        seen, expired = 0, False
        for chunk in self._chunks:
            if seen >= limit:
                break
            seen += len(chunk.records)
            expired = expired or chunk.locked_until_ns <= now_ns
        return self._keep([chunk for chunk in self._chunks if chunk.locked_until_ns > now_ns]) if expired else 0

    def drop_topic(self, topic: str) -> int:
        """Forget those of a topic that is another one now. Returns how many."""
        return self._keep([chunk for chunk in self._chunks if chunk.key.topic != topic])

    def clear(self) -> int:
        """The locks are gone. Returns how many records were here."""
        return self._keep([])

    def _keep(self, chunks: list[_Chunk]) -> int:
        before, self._chunks = self._count, deque(chunks)
        self._count = sum(len(chunk.records) for chunk in chunks)
        return before - self._count
