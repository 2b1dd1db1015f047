"""Hash slot barrier: holds back an added partition until its keys' old partitions are drained.

This keeps the order of each key within one consumer:

    orders-3, hand-over {0: 1200}    orders-3 is not fetched until the position in orders-0, if this
                                     consumer reads it, is 1200 or more

A partition that this consumer does not read is not waited for. Programs that assign partitions by
hand keep the order between consumers themselves. A group assigns an added partition only after the
group has committed its sources up to the hand-over. After a seek back, the barrier holds here as
well.

Owner: one Consumer, one thread.

Invariants:
- A released partition is held back again only after an assignment or a seek.
- While no partition waits, `step` costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tailrace.client.connections.steps import Steps
from tailrace.client.topics.list_offsets import LOG_END, At
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.partition_position import PartitionPosition

RETRY_INTERVAL_NS = 1_000_000_000
Sources = list[tuple[PartitionPosition, int]]
"""The source partitions of an added one, and the hand-over offset of each."""


class HashSlotBarrier:
    """The barrier of one consumer."""

    def __init__(
        self, offsets: Callable[[Iterable[TopicPartition], At], Steps[dict[TopicPartition, int]]],
        unread: Callable[[TopicPartition], int | None],
        now_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        """`offsets` asks the appliance for an offset of each of some partitions. `unread` is the
        first offset of a partition that was decoded and not returned by `poll`.
        """
        self._offsets = offsets
        self._unread = unread
        self._now_ns = now_ns
        self._known: list[tuple[PartitionPosition, Sources]] = []
        self._waiting: list[tuple[PartitionPosition, Sources]] = []
        self._ends: dict[TopicPartition, int] = {}
        self._ask_at_ns = 0

    def arm(self, cursors: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Set the barrier for a new assignment."""
        for cursor, _ in self._waiting:
            cursor.pause(hand_over=False)
        self._known = [
            (cursor, sources)
            for cursor in cursors.values()
            if (sources := _sources(cursor, cursors))
        ]
        self._ends = {}
        self.on_seek()

    def on_seek(self) -> None:
        """Set the barrier again after a seek."""
        self._waiting = self._known
        for cursor, _ in self._waiting:
            cursor.pause(hand_over=True)

    def step(self) -> Steps[None]:
        """Release partitions whose sources are drained.

        Call it before fetching, when all positions are known.
        """
        if not self._waiting:
            return
        self._release_waiting()
        if self._waiting and self._now_ns() >= self._ask_at_ns:
            yield from self._ask_for_ends()
            self._release_waiting()

    def _release_waiting(self) -> None:
        waiting = []
        for cursor, sources in self._waiting:
            if all(self._is_read(source, offset) for source, offset in sources):
                cursor.pause(hand_over=False)
            else:
                waiting.append((cursor, sources))
        self._waiting = waiting

    def _is_read(self, source: PartitionPosition, offset: int) -> bool:
        unread = self._unread(source.key)
        position = source.position if unread is None else unread
        return position is not None and position >= min(offset, self._ends.get(source.key, offset))

    def _ask_for_ends(self) -> Steps[None]:
        """Ask for the end of each source's log. A log that a disk failure has cut never reaches the
        offset; one with an open transaction does.
        """
        keys = {
            source.key for _, sources in self._waiting for source, _ in sources
        } - self._ends.keys()
        if not keys:
            return
        try:
            self._ends.update((yield from self._offsets(sorted(keys), LOG_END)))
        except TailraceError:  # fetching that partition raises the reason
            self._ask_at_ns = self._now_ns() + RETRY_INTERVAL_NS


def _sources(
    cursor: PartitionPosition, cursors: Mapping[TopicPartition, PartitionPosition]
) -> Sources:
    hand_over = cursor.info.hand_overs.get(cursor.key.partition, ())
    found = [
        (cursors.get(TopicPartition(cursor.key.topic, number)), offset)
        for number, offset in hand_over
    ]
    return [
        (source, offset)
        for source, offset in found
        if source is not None and source.info.topic_id == cursor.info.topic_id
    ]
