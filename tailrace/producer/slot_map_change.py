"""What a producer does when hash slots have moved: it learns the new map, and routes anew what it
has not delivered, in order.

A worker refuses what was routed by another map than its own (STALE_SLOT_MAP), unless it has it
already. Then nothing new is sent to the topic until the fate of everything that was sent is known:
what was appended lies below the old partitions' hand-over offsets; what was refused, and all behind
it, goes by the new map, each record behind those of its key that were sent before.

    sending --STALE_SLOT_MAP, or METADATA shows another map--> waiting --all answered, and the map
    is known--> moved, sending

Owner: a Producer, under its lock.
Invariants: while a topic waits, its records go on filling the queues of the old map; records of a
    key keep their order; sequences of what was refused are given again to what stays, so that none
    is missing; a queue whose place another has taken never takes a batch again (`is_gone`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tailrace.client.connection import Connection
from tailrace.client.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.hash_slots import STAYS, Owners
from tailrace.format.batch_header import NO_PRODUCER
from tailrace.producer.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import READY, ProducerBatch
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

RETRY_INTERVAL_NS = 20 * NS_PER_MS
"""How soon the appliance is asked again that has refused a map and does not tell of another yet: it
is carrying the change out.
"""


class SplitBatch(NamedTuple):
    """Of a batch whose records go to several partitions now."""

    batches: Sequence[ProducerBatch]
    places: Sequence[tuple[int, int]]
    """Row -> (which batch, its row there)."""

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        """Where the record in `row` is now."""
        which, there = self.places[row]
        return self.batches[which], there


@dataclass(slots=True)
class _Wait:
    """A topic whose slots have moved."""

    old: TopicInfo
    """By which its queues are filled."""
    info: TopicInfo | None = None
    """With the map to go on with, once it is known."""
    is_asked: bool = False
    ask_at_ns: int = 0


class SlotMapChange:
    """See the module's docstring."""

    def __init__(
        self, accumulator: RecordAccumulator, connection: Connection, now_ns: Callable[[], int]
    ) -> None:
        self._accumulator = accumulator
        self._connection = connection
        self._now_ns = now_ns
        self._completion: dict[bytes, _Wait] = {}
        """By topic id."""
        self.on_moved: Callable[[TopicInfo], None] = lambda _info: None
        """Told when a topic's queues have others in their places."""
        self.moved_count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a topic waits."""
        return bool(self._completion)

    def begin(self, old: TopicInfo) -> None:
        """The topic's slots have moved since `old`."""
        if old.topic_id not in self._completion:
            self._completion[old.topic_id] = _Wait(old)
        for queue in self._queues(old):
            queue.awaits_map = True

    def usable(self, info: TopicInfo) -> TopicInfo:
        """METADATA says this of a topic: what records are to be routed by now. That is what was
        known, while something is under way by that.
        """
        first = self._accumulator.queues.get((info.topic_id, 0))
        if first is None:
            return info
        if (
            info.slot_map_version <= first.info.slot_map_version
        ):  # older: from a front that has not heard of the newer one yet
            return first.info if info.slot_map_version < first.info.slot_map_version else info
        self.begin(first.info)
        wait = self._completion[info.topic_id]
        wait.info = info
        return info if self._try_move(wait) else first.info

    def step(self, now_ns: int) -> None:
        """Ask for maps, and go on with those that are known where everything is answered."""
        for wait in list(self._completion.values()):
            if wait.info is not None:
                self._try_move(wait)
            elif not wait.is_asked and now_ns >= wait.ask_at_ns:
                body = requests.encode_json({"topics": [wait.old.name]})
                wait.is_asked = self._connection.request(
                    Api.METADATA, [body], partial(self._on_metadata, wait)
                )

    def _on_metadata(self, wait: _Wait, response: Response | None) -> None:
        wait.is_asked = False
        wait.ask_at_ns = self._now_ns() + RETRY_INTERVAL_NS
        if response is None or response.code is not ErrorCode.OK or wait.info is not None:
            return
        try:
            info = topics_from_metadata(requests.decode_json(response.body[0]), wait.old.name)[
                wait.old.name
            ]
        except TailraceError:
            info = None
        if info is None or info.topic_id != wait.old.topic_id:
            self._release_waiting(wait)  # it is gone: what is sent now is refused with that
        elif info.owners is not None and info.slot_map_version != wait.old.slot_map_version:
            wait.info = info
            self._try_move(wait)

    def retry(self) -> None:
        """What was asked is not answered any more."""
        for wait in self._completion.values():
            wait.is_asked = False

    def _release_waiting(self, wait: _Wait) -> None:
        if wait.old.topic_id in self._completion:
            for queue in self._queues(wait.old):
                queue.awaits_map = False
                if queue.has_work:
                    self._accumulator.mark_ready(queue)
            self._completion.pop(wait.old.topic_id, None)

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        found = (
            self._accumulator.queues.get((info.topic_id, partition))
            for partition in range(len(info.partitions))
        )
        return [queue for queue in found if queue is not None]

    # ---- moving ----------------------------------------------------------------------------------

    def _try_move(self, wait: _Wait) -> bool:
        """Go on with the new map, if everything that was sent is answered."""
        info, queues = wait.info, self._queues(wait.old)
        assert info is not None
        if any(queue.in_flight or queue.first_with_unknown_outcome() >= 0 for queue in queues):
            return False
        batches: list[tuple[int, ProducerBatch]] = []
        for queue in queues:
            self._accumulator.close_batch(queue)
            following = queue.successor(info)
            for batch in queue.ready:
                batch.producer_id = NO_PRODUCER
                batches += self._dispersed(batch, info)
            queue.ready.clear()
            queue.is_gone = True
            self._accumulator.queues[info.topic_id, queue.partition] = following
        for partition, batch in sorted(batches, key=lambda each: each[1].order):
            queue = self._accumulator.queue(info, partition)
            queue.ready.append(batch)
            self._accumulator.mark_ready(queue)
        self._completion.pop(
            info.topic_id, None
        )  # not before: what a signal's handler cuts off is done again
        self.moved_count += 1
        self.on_moved(info)
        return True

    def sort_in(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The newest batch of a queue was routed by an older map than the queue's: have its records
        where they belong.
        """
        info = queue.info
        queue.ready.remove(batch)
        for partition, part in self._dispersed(batch, info):
            target = self._accumulator.queue(info, partition)
            self._accumulator.close_batch(target)
            target.ready.append(part)
            self._accumulator.mark_ready(target)

    def _dispersed(self, batch: ProducerBatch, info: TopicInfo) -> list[tuple[int, ProducerBatch]]:
        """The batches that have its records now, and their partitions."""
        batch.info = info
        targets = _targets(batch, info.owners)
        requested = sorted(set(targets))
        if requested in ([], [batch.partition]):
            return [(batch.partition, batch)]
        if len(requested) == 1:
            _move_whole(batch, requested[0])
            return [(requested[0], batch)]
        parts = _split_batch(batch, targets, requested)
        self._accumulator.replaced(batch)
        batch.rows.clear()
        batch.data = batch.frame = None
        return [(part.partition, part) for part in parts]


def _targets(batch: ProducerBatch, owners: Owners | None) -> list[int]:
    if batch.slots is None or owners is None:
        return [batch.partition] * batch.count
    return [batch.partition if slot == STAYS else owners[slot] for slot in batch.slots]


def _move_whole(batch: ProducerBatch, partition: int) -> None:
    """Its bytes are bound to the partition that they were made for: they are made again."""
    if not batch.rows:
        batch.frame, batch.data = batch.rebuilt_frame(), None
    batch.partition = partition
    batch.attempts = 0


def _split_batch(
    batch: ProducerBatch, targets: list[int], requested: list[int]
) -> list[ProducerBatch]:
    """A batch for each partition, its rows in their order; `batch` says where each of its records
    is then.
    """
    rows_of: dict[int, list[int]] = {partition: [] for partition in requested}
    places = []
    which = {partition: index for index, partition in enumerate(requested)}
    for row, target in enumerate(targets):
        places.append((which[target], len(rows_of[target])))
        rows_of[target].append(row)
    frame = None if batch.rows else batch.rebuilt_frame()
    parts = []
    unshared = batch.reserved_bytes
    for index, partition in enumerate(requested):
        rows = rows_of[partition]
        part = ProducerBatch(
            batch.completion, batch.info, partition, batch.created_ns, (*batch.order, index)
        )
        part.count = len(rows)
        part.state = READY
        part.reserved_bytes = (
            unshared
            if index == len(requested) - 1
            else batch.reserved_bytes * len(rows) // batch.count
        )
        unshared -= part.reserved_bytes
        part.slots = [int(batch.slots[row]) for row in rows] if batch.slots is not None else None
        part.stamps_us = (
            [int(batch.stamps_us[row]) for row in rows]
            if len(batch.stamps_us) == batch.count
            else batch.stamps_us
        )
        if frame is None:
            part.rows = batch.rows.picked(rows)
        else:
            part.frame = frame.take(rows)
        parts.append(part)
    for row, callback in batch.callbacks or ():
        index, there = places[row]
        parts[index].add_callback(there, callback)
    scattered = SplitBatch(parts, places)
    batch.children = scattered
    batch.callbacks = None
    return parts
