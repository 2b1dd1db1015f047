"""Topics that were deleted, and perhaps created again, while a producer has batches for them.

Triggered by UNKNOWN_TOPIC, or by METADATA with another topic id. As in Kafka, metadata may answer
"unknown topic" for a short time. The batches go to the topic of that name once METADATA shows it,
before those that were sent to the new topic first. They fail if the topic is missing for
RECREATION_TIMEOUT_NS, so that a flush ends soon. Where the appliance allows it, the producer
creates the topic (`on_missing`).

Owner: a Producer, under its lock.
Invariants:
- While a topic waits for its recreation, nothing of its queues is sent. Nothing of the new topic is
  sent before the waiting batches have moved.
- Records of a key keep their order.
- A replaced queue never takes a batch again (`is_gone`).
Crash: a change is removed last. A move that a signal handler interrupted is done again.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import UnknownTopicError
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.producer.topic_changes.topic_change import Change, TopicChange, topic_name

RECREATION_TIMEOUT_NS = 5_000 * NS_PER_MS


class TopicRecreation(TopicChange):
    """Topics, and delay logs, that the appliance does not know by their id any more."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        connection: Connection,
        now_ns: Callable[[], int],
        retry_ms: int,
    ) -> None:
        """`retry_ms`: the setting retry_backoff_ms."""
        super().__init__(accumulator, connection, now_ns, max(1, retry_ms) * NS_PER_MS)
        self.on_found: Callable[[TopicInfo], None] = lambda _info: None
        """Called with the METADATA of a topic that waits. It calls `found`."""
        self.on_missing: Callable[[TopicInfo], None] = lambda _old: None
        """Called with a deleted topic, as it was, while METADATA shows none of its name."""
        self.on_abandoned: Callable[[str], None] = lambda _name: None
        """Called with the name of a topic that was not recreated, when no batch waits for it."""

    def begin(self, old: TopicInfo) -> None:
        """The appliance does not know the topic by its id."""
        self._add(old)
        for queue in self._queues(old):
            queue.is_gone = queue.awaits_topic = True
            self._accumulator.close_batch(queue)  # the next record looks the topic up

    def found(self, info: TopicInfo) -> None:
        """METADATA shows a topic, and its queues are made."""
        for change in list(self._changes.values()):
            if change.old.topic_id == info.topic_id:
                self._resume(change)
            elif change.old.name == info.name:
                change.new = info
                self._try_move(change)

    def _needs_metadata(self, change: Change, now_ns: int) -> bool:
        if not any(queue.batches() for queue in self._queues(change.old)):
            self._end(change)
            self.on_abandoned(topic_name(change.old))
            return False
        if change.new is None and now_ns - change.since_ns >= RECREATION_TIMEOUT_NS:
            self._fail_batches(change)
            return False
        return True

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        if info is not None:
            self.on_found(info)
        elif change.new is None:
            self.on_missing(change.old)

    def _fail_batches(self, change: Change) -> None:
        """Fail all batches that wait and are not in flight."""
        error = UnknownTopicError(
            f"topic {topic_name(change.old)!r} was deleted, and not created again within "
            f"{RECREATION_TIMEOUT_NS // 10**9} s"
        )
        for queue in self._queues(change.old):
            self._accumulator.close_batch(queue)
            for batch in list(queue.ready):
                queue.pop(batch)
                self._accumulator.end(batch, None, error)

    def _resume(self, change: Change) -> None:
        """Go on with the same queues: the front that refused did not have the topic yet, or another
        front has it.
        """
        for queue in self._queues(change.old):
            queue.is_gone = queue.awaits_topic = False
            queue.muted_until_ns = self._now_ns() + self._retry_ns
            if queue.has_work:
                self._accumulator.mark_ready(queue)
        self._changes.pop(change.old.topic_id, None)

    def _end(self, change: Change) -> None:
        for queue in self._queues(change.old):
            self._accumulator.queues.pop((change.old.topic_id, queue.partition), None)
        self._changes.pop(change.old.topic_id, None)

    def _try_move(self, change: Change) -> bool:
        """Move the batches to the recreated topic, if all sent ones have an outcome. Batches of a
        partition that it lacks wait on.
        """
        new, queues = change.new, self._queues(change.old)
        assert new is not None
        targets = [
            self._accumulator.queues.get((new.topic_id, partition))
            for partition in range(len(new.partitions))
        ]
        is_answered = not any(queue.in_flight for queue in queues)
        for queue in queues if is_answered else ():
            if queue.partition < len(targets) and (target := targets[queue.partition]) is not None:
                self._accumulator.close_batch(queue)
                for batch in queue.ready:
                    self._move(batch, target)
                queue.ready.clear()
                self._accumulator.queues.pop((change.old.topic_id, queue.partition), None)
        is_done = is_answered and not any(queue.batches() for queue in self._queues(change.old))
        if is_done:
            self._end(change)
        for target in targets:
            if target is not None and new.topic_id not in self._changes:
                target.awaits_topic = not is_answered
                if target.has_work:
                    self._accumulator.mark_ready(target)
        return is_done

    def _move(self, batch: ProducerBatch, target: PartitionQueue) -> None:
        old, new = batch.info, target.info
        if (
            old.typed != new.typed
            or old.schema != new.schema
            or bool(old.slot_map_version) != bool(new.slot_map_version)
        ):
            error = UnknownTopicError(
                f"topic {new.name!r} was deleted and created again with another schema or "
                "partitioner; send the record again"
            )
            self._accumulator.end(batch, None, error)
            return
        batch.made_for(new)
        batch.producer_id = NO_PRODUCER
        target.requeue(batch)

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        return [
            queue
            for (topic_id, _), queue in self._accumulator.queues.items()
            if topic_id == info.topic_id
        ]
