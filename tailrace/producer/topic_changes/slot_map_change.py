"""Topics whose hash slots moved while a producer has batches for them.

Triggered by STALE_SLOT_MAP, or by METADATA with another slot map. A worker refuses batches that
were routed by another map than its own. Appended batches lie below the hand-over offsets of the old
partitions. All others are routed by the new map, each record after those of its key that were sent
before.

Owner: a Producer, under its lock.
Invariants:
- While a topic waits for a slot map, its records still fill the queues of the old map.
- Records of a key keep their order.
- A replaced queue never takes a batch again (`is_gone`).
Crash: a change is removed last. A move that a signal handler interrupted is done again.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.batch_split import rerouted
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.producer.topic_changes.topic_change import Change, KnownTopicChange

SLOT_MAP_RETRY_NS = 20 * NS_PER_MS
"""Interval of METADATA requests while the appliance carries out the change of a slot map."""


class SlotMapChange(KnownTopicChange):
    """Topics whose hash slots moved."""

    def __init__(
        self, accumulator: RecordAccumulator, connection: Connection, now_ns: Callable[[], int]
    ) -> None:
        super().__init__(accumulator, connection, now_ns, SLOT_MAP_RETRY_NS)
        self.on_moved: Callable[[TopicInfo], None] = lambda _info: None
        """Called when a topic's queues were replaced."""

    def usable(self, info: TopicInfo) -> TopicInfo:
        """The topic to route records by, given its METADATA. It stays the known one while batches
        that were routed by that are in flight.
        """
        first = self._accumulator.queues.get((info.topic_id, 0))
        if first is None:
            return info
        if info.slot_map_version == first.info.slot_map_version:
            return info
        if info.slot_map_version < first.info.slot_map_version:
            return first.info  # from a front that does not have the newer map yet
        self.begin(first.info)
        change = self._changes[info.topic_id]
        change.new = info
        return info if self._try_move(change) else first.info

    def reroute_newest(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Route the newest batch of a queue, which was routed by an older map than the queue's."""
        info = queue.info
        queue.ready.remove(batch)
        for part in self._rerouted(batch, info):
            target = self._accumulator.queue(info, part.partition)
            self._accumulator.close_batch(target)
            target.ready.append(part)
            self._accumulator.mark_ready(target)

    def _has_changed(self, old: TopicInfo, info: TopicInfo) -> bool:
        return info.owners is not None and info.slot_map_version != old.slot_map_version

    def _try_move(self, change: Change) -> bool:
        """Route all batches by the new map, if all sent ones have an outcome."""
        info, queues = change.new, self._queues(change.old)
        assert info is not None
        if any(queue.in_flight or queue.first_with_unknown_outcome() >= 0 for queue in queues):
            return False
        batches: list[ProducerBatch] = []
        for queue in queues:
            self._accumulator.close_batch(queue)
            following = queue.successor(info)
            for batch in queue.ready:
                batch.producer_id = NO_PRODUCER
                batches += self._rerouted(batch, info)
            queue.ready.clear()
            queue.is_gone = True
            self._accumulator.queues[info.topic_id, queue.partition] = following
        for batch in sorted(batches, key=lambda batch: batch.order):
            queue = self._accumulator.queue(info, batch.partition)
            queue.ready.append(batch)
            self._accumulator.mark_ready(queue)
        self._changes.pop(info.topic_id, None)
        self.on_moved(info)
        return True

    def _rerouted(self, batch: ProducerBatch, info: TopicInfo) -> list[ProducerBatch]:
        """The batches that have its records after routing by the map of `info`."""
        parts = rerouted(batch, info)
        if parts is None:
            return [batch]
        self._accumulator.replaced(batch)
        batch.rows.clear()
        batch.data = batch.frame = None
        return parts

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        found = (
            self._accumulator.queues.get((info.topic_id, partition))
            for partition in range(len(info.partitions))
        )
        return [queue for queue in found if queue is not None]
