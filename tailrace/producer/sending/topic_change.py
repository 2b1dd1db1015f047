"""Topics that change while a producer has batches for them: the batches wait, then move.

    sending --trigger--> waiting --METADATA shows the topic, all sent batches have an outcome-->
    moved --> sending

SlotMapChange is triggered by STALE_SLOT_MAP, or by METADATA with another slot map. A worker refuses
batches that were routed by another map than its own. Appended batches lie below the hand-over
offsets of the old partitions. All others are routed by the new map, each record after those of its
key that were sent before.

TopicRecreation is triggered by UNKNOWN_TOPIC, or by METADATA with another topic id. As in Kafka,
metadata may answer "unknown topic" for a short time. The batches go to the topic of that name once
METADATA shows it, before those that were sent to the new topic first. They fail if the topic is
missing for RECREATION_TIMEOUT_NS, so that a flush ends soon.

Owner: a Producer, under its lock.
Invariants:
- While a topic waits for a slot map, its records still fill the queues of the old map.
- While a topic waits for its recreation, nothing of its queues is sent. Nothing of the new topic is
  sent before the waiting batches have moved.
- Records of a key keep their order.
- The sequences of refused batches are used again, so that none is missing.
- A replaced queue never takes a batch again (`is_gone`).
Crash: a change is removed last. A move that a signal handler interrupted is done again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownTopicError
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.batch_split import rerouted
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response

SLOT_MAP_RETRY_NS = 20 * NS_PER_MS
"""Interval of METADATA requests while the appliance carries out the change of a slot map."""
RECREATION_TIMEOUT_NS = 5_000 * NS_PER_MS


@dataclass(slots=True)
class Change:
    """A topic, or a delay log, that waits."""

    old: TopicInfo
    """The topic as its queues know it."""
    since_ns: int
    new: TopicInfo | None = None
    """The topic that its batches move to, once METADATA shows it."""
    is_asked: bool = False
    ask_at_ns: int = 0


class TopicChange:
    """The states of changing topics. Subclasses have the trigger, and move the batches."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        connection: Connection,
        now_ns: Callable[[], int],
        retry_ns: int,
    ) -> None:
        """`retry_ns`: interval of METADATA requests for a topic that waits."""
        self._accumulator = accumulator
        self._connection = connection
        self._now_ns = now_ns
        self._retry_ns = retry_ns
        self._changes: dict[bytes, Change] = {}
        """By the id of the old topic."""

    @property
    def is_waiting(self) -> bool:
        """True if a topic waits."""
        return bool(self._changes)

    def step(self, now_ns: int) -> None:
        """Request METADATA of the topics that wait, and move the batches of those that may."""
        for change in list(self._changes.values()):
            if change.new is not None and self._try_move(change):
                continue
            if (
                self._needs_metadata(change, now_ns)
                and not change.is_asked
                and now_ns >= change.ask_at_ns
            ):
                body = encode_json({"topics": [_name(change.old)]})
                change.is_asked = self._connection.request(
                    Api.METADATA, [body], partial(self._on_metadata, change)
                )

    def restart(self) -> None:
        """Forget pending METADATA requests: their connection is lost."""
        for change in self._changes.values():
            change.is_asked = False

    def _add(self, old: TopicInfo) -> None:
        if old.topic_id not in self._changes:
            self._changes[old.topic_id] = Change(old, self._now_ns())

    def _on_metadata(self, change: Change, response: Response | None) -> None:
        change.is_asked = False
        change.ask_at_ns = self._now_ns() + self._retry_ns
        if (
            response is None
            or response.code is not ErrorCode.OK
            or self._changes.get(change.old.topic_id) is not change
        ):
            return
        name = _name(change.old)
        info: TopicInfo | None = None
        with contextlib.suppress(TailraceError):
            info = topics_from_metadata(decode_json(response.body[0]), name)[name]
        self._on_described(change, info)

    def _needs_metadata(self, change: Change, now_ns: int) -> bool:
        """True if the topic, whose batches cannot move now, needs METADATA."""
        raise NotImplementedError

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        """METADATA shows the topic, or (None) that there is none of its name."""
        raise NotImplementedError

    def _try_move(self, change: Change) -> bool:
        """Move the batches to `change.new` if they may. False: the topic still waits."""
        raise NotImplementedError


class KnownTopicChange(TopicChange):
    """Changes of topics that keep their id. Their queues wait until METADATA shows the change."""

    def begin(self, old: TopicInfo) -> None:
        """The topic has changed since `old`."""
        self._add(old)
        for queue in self._queues(old):
            queue.awaits_map = True

    def _needs_metadata(self, change: Change, now_ns: int) -> bool:
        return change.new is None

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        old = change.old
        if change.new is not None:
            return
        if info is not None:
            info = self._described(old, info)
        if info is None or info.topic_id != old.topic_id:
            self._release(change)  # the topic is gone: the next response says so
        elif self._has_changed(old, info):
            change.new = info
            self._try_move(change)

    def _described(self, old: TopicInfo, info: TopicInfo) -> TopicInfo | None:
        """The topic or delay log that `old` is, in the METADATA of its topic."""
        return info

    def _has_changed(self, old: TopicInfo, info: TopicInfo) -> bool:
        """True if METADATA shows the change."""
        raise NotImplementedError

    def _release(self, change: Change) -> None:
        for queue in self._queues(change.old):
            queue.awaits_map = False
            if queue.has_work:
                self._accumulator.mark_ready(queue)
        self._changes.pop(change.old.topic_id, None)

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        """The queues of the topic."""
        raise NotImplementedError


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
            self.on_abandoned(_name(change.old))
            return False
        if change.new is None and now_ns - change.since_ns >= RECREATION_TIMEOUT_NS:
            self._fail_batches(change)
            return False
        return True

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        if info is not None:
            self.on_found(info)

    def _fail_batches(self, change: Change) -> None:
        """Fail all batches that wait and are not in flight."""
        error = UnknownTopicError(
            f"topic {_name(change.old)!r} was deleted, and not created again within "
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


def _name(info: TopicInfo) -> str:
    """The topic to request METADATA of. A delay log has no METADATA of its own."""
    return info.delay_of or info.name
