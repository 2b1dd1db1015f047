"""Partitions that got hash slots from others wait, in one reader, until those are read to where they ended: so every key keeps its order.

    orders-3, hand-over {0: 1200}    nothing is asked for of orders-3 before orders-0, if it is read here, too, stands at 1200 or behind it

A partition that is not read here is not waited for: who shares a topic out by hand sees to the order between the readers. (A group's members are given such
a partition when the group has committed what is to be read before it; after a seek back this holds for them, too.)

Owner: one Consumer, one thread.
Invariants: what was let go is held again only when a partition is assigned or moved; while nothing waits, a look costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tailrace.errors import TailraceError
from tailrace.fetcher import PartitionCursor
from tailrace.offset_lookup import At
from tailrace.records import TopicPartition

ASK_AGAIN_NS = 1_000_000_000
Sources = list[tuple[PartitionCursor, int]]
"""What is read first, and to which offset."""


class HeldBack:
    """See the module's docstring."""

    def __init__(
        self, offsets: Callable[[Iterable[TopicPartition], At], dict[TopicPartition, int]], unread: Callable[[TopicPartition], int | None],
        now_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        """`offsets`: asks the appliance for an offset of each of some partitions. `unread`: the first of a partition that was taken and not handed out."""
        self._offsets = offsets
        self._unread = unread
        self._now_ns = now_ns
        self._known: list[tuple[PartitionCursor, Sources]] = []
        self._waiting: list[tuple[PartitionCursor, Sources]] = []
        self._ends: dict[TopicPartition, int] = {}
        self._ask_at_ns = 0

    def arm(self, cursors: Mapping[TopicPartition, PartitionCursor]) -> None:
        """Other partitions are read now."""
        for cursor, _ in self._waiting:
            cursor.pause(hand_over=False)
        self._known = [(cursor, sources) for cursor in cursors.values() if (sources := _sources(cursor, cursors))]
        self._ends = {}
        self.sought()

    def sought(self) -> None:
        """One of them was moved."""
        self._waiting = self._known
        for cursor, _ in self._waiting:
            cursor.pause(hand_over=True)

    def look(self) -> None:
        """Let go what need not wait any more. Before partitions are asked for; their positions are decided."""
        if not self._waiting:
            return
        self._let_go()
        if self._waiting and self._now_ns() >= self._ask_at_ns:
            self._ask_for_ends()
            self._let_go()

    def _let_go(self) -> None:
        waiting = []
        for cursor, sources in self._waiting:
            if all(self._is_read(source, offset) for source, offset in sources):
                cursor.pause(hand_over=False)
            else:
                waiting.append((cursor, sources))
        self._waiting = waiting

    def _is_read(self, source: PartitionCursor, offset: int) -> bool:
        unread = self._unread(source.key)
        position = source.position if unread is None else unread
        return position is not None and position >= min(offset, self._ends.get(source.key, offset))

    def _ask_for_ends(self) -> None:
        """A log that a broken disk has cut never comes to the offset."""
        keys = {source.key for _, sources in self._waiting for source, _ in sources} - self._ends.keys()
        if not keys:
            return
        try:
            self._ends.update(self._offsets(sorted(keys), "latest"))
        except TailraceError:  # reading such a partition says why
            self._ask_at_ns = self._now_ns() + ASK_AGAIN_NS


def _sources(cursor: PartitionCursor, cursors: Mapping[TopicPartition, PartitionCursor]) -> Sources:
    hand_over = cursor.info.hand_overs.get(cursor.key.partition, ())
    found = [(cursors.get(TopicPartition(cursor.key.topic, number)), offset) for number, offset in hand_over]
    return [(source, offset) for source, offset in found if source is not None and source.info.topic_id == cursor.info.topic_id]
