"""What a producer has taken and not yet settled: batches that fill, wait and are under way, and the
memory that they take.

An open batch fills for `linger_ms`, or until it is full; then, and while a request that took
unfilled batches is under way, until it may leave (see `tailrace.producer.in_flight_requests`).

Owner: a Producer, under its lock.
Invariants: a batch ends exactly once; `buffered_bytes` is the sum of `reserved_bytes` over batches
    that have not ended, and `incomplete_count` their number; `in_flight_count` is the sum of what
    the queues have under way; a queue with something to send is listed, once in each list.
Crash: a signal's handler may cut off anything between two instructions, but nothing within a
    straight line of assignments: Python runs handlers where a call has returned, where a function
    begins, and where a loop goes round. `_alive` has every batch that has not ended, each batch
    knows its state, its place and its halves, and changes them in one such line; `rebuild` makes
    everything else anew from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.client.settings import ProducerSettings
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import TailraceError
from tailrace.producer.callbacks import Callbacks
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import (
    BATCH_OVERHEAD_BYTES,
    COMPLETED,
    IN_FLIGHT,
    OPEN,
    READY,
    Completion,
    ProducerBatch,
)

if TYPE_CHECKING:
    from tailrace.batch.frames import FrameSlice

NS_PER_MS = 1_000_000
RESERVE_BYTES = 64 << 10
"""How much buffer memory an open batch takes at a time, at most: between, a record is added without
looking at anything else.
"""


class RecordAccumulator:
    """See the module's docstring."""

    def __init__(
        self,
        settings: ProducerSettings,
        now_ns: Callable[[], int],
        completion: Completion,
        callbacks: Callbacks,
        on_keyless_batch: Callable[[TopicInfo], None],
    ) -> None:
        """`callbacks`: gets the calls that are due when a batch ends. `on_keyless_batch`: told when
        a batch that ended with a record without a key takes no more.
        """
        self._settings = settings
        self._now_ns = now_ns
        self._completion = completion
        self._callbacks = callbacks
        self._on_keyless_batch = on_keyless_batch
        self.notifies_every_batch = False
        """Whether `on_keyless_batch` is told of batches with keys, too."""
        self._linger_ns = settings.linger_ms * NS_PER_MS
        self.queues: dict[tuple[bytes, int], PartitionQueue] = {}
        """(topic id, partition) -> its batches."""
        self._ready_queues: deque[PartitionQueue] = deque()
        """Queues with something that is ready to be sent."""
        self._due_queues: deque[PartitionQueue] = deque()
        """Queues with an open batch that is due. Apart, because there may be many of them that wait
        for one answer.
        """
        self._lingering: deque[tuple[int, PartitionQueue, ProducerBatch]] = deque()
        """(when its linger ends, its queue, batch) of batches that were opened, in order; some are
        closed already. Not those whose linger is over.
        """
        self.piece_bytes = RESERVE_BYTES
        """How much an open batch takes now: see
        `tailrace.producer.sender_thread.SenderThread.poll_while_appending`.
        """
        self._order = 0
        self._alive: dict[ProducerBatch, None] = {}
        """All batches that have not ended."""
        self.buffered_bytes = 0
        self.in_flight_count = 0
        self.error_count = 0
        """Records that ended with an error."""

    @property
    def incomplete_count(self) -> int:
        """How many batches have not ended."""
        return len(self._alive)

    # ---- filling ---------------------------------------------------------------------------------

    def queue(self, info: TopicInfo, partition: int) -> PartitionQueue:
        """The queue of a partition, which goes on with what is known of its topic now."""
        queue = self.queues.setdefault((info.topic_id, partition), PartitionQueue(info, partition))
        queue.info = info
        queue.is_gone = False
        return queue

    def open_batch(self, queue: PartitionQueue) -> ProducerBatch:
        """A batch that fills now, in a queue that has none."""
        now_ns = self._now_ns()
        batch = ProducerBatch(
            self._completion, queue.info, queue.partition, now_ns, self.next_order()
        )
        if (
            queue.open is not None
        ):  # what the collector, or a signal's handler, ran meanwhile has sent
            return queue.open
        self._alive[batch] = None
        queue.open = batch
        self.buffered_bytes += BATCH_OVERHEAD_BYTES
        queue.is_due = not self._linger_ns
        if queue.is_due:
            self.mark_ready(queue)
        else:
            self._lingering.append((now_ns + self._linger_ns, queue, batch))
        return batch

    def add_frame(self, queue: PartitionQueue, piece: FrameSlice) -> ProducerBatch:
        """A batch of rows that are columns already; it is sent behind everything that the queue
        has.
        """
        self.close_batch(queue)
        batch = ProducerBatch.of_frame(
            self._completion, queue.info, piece, self._now_ns(), self.next_order()
        )
        self._alive[batch] = None
        self.buffered_bytes += batch.reserved_bytes
        queue.ready.append(batch)
        self.mark_ready(queue)
        return batch

    def next_order(self) -> tuple[int, ...]:
        """The place of another batch among all of the producer's."""
        self._order += 1
        return (self._order,)

    def reserve(self, batch: ProducerBatch, byte_count: int, capacity: int) -> None:
        """Give an open batch room for `byte_count` bytes, and for what is likely to follow, up to
        `capacity` bytes in all; that much memory is free.
        """
        unused = self._settings.buffer_memory - self.buffered_bytes - BATCH_OVERHEAD_BYTES
        used = batch.reserved_bytes - batch.room
        more = max(
            byte_count - batch.room, min(self.piece_bytes, unused, capacity - used - batch.room)
        )
        batch.reserved_bytes += more
        batch.room += more
        self.buffered_bytes += more

    def close_batch(self, queue: PartitionQueue, *, is_draining: bool = False) -> None:
        """The queue's open batch, if it has one, takes no more records. `is_draining`: by `drain`,
        whose visitor lists it again if need be.
        """
        batch = queue.open
        if batch is not None:
            self.buffered_bytes -= batch.close()
            queue.close_open(batch)
            if not is_draining:
                self.mark_ready(queue)
            if batch.ends_without_key or self.notifies_every_batch:
                self._on_keyless_batch(queue.info)

    def close_all(self) -> None:
        """No open batch takes more records."""
        for queue in self.queues.values():
            self.close_batch(queue)

    # ---- linger ----------------------------------------------------------------------------------

    def queue_of_open(self, batch: ProducerBatch) -> PartitionQueue | None:
        """The queue in which the batch still takes records, if it does."""
        queue = self.queues.get((batch.info.topic_id, batch.partition))
        return queue if queue is not None and queue.open is batch else None

    def incomplete(self) -> list[ProducerBatch]:
        """All batches that have not ended, by partition."""
        return [batch for queue in self.queues.values() for batch in queue.batches()]

    def first_linger_ns(self) -> int | None:
        """When the first open batch has filled long enough; None: there is none."""
        return self._lingering[0][0] if self._lingering else None

    def expire_linger(self, now_ns: int) -> None:
        """Open batches have filled long enough."""
        lingering = self._lingering
        while lingering and (lingering[0][0] <= now_ns or lingering[0][2].state is not OPEN):
            _, queue, batch = lingering.popleft()
            if queue.open is batch:
                queue.is_due = True
                self.mark_ready(queue)

    def flush_batch(self, batch: ProducerBatch) -> None:
        """The batch, if it is open, is not to wait for linger_ms to be over."""
        queue = self.queue_of_open(batch)
        if queue is not None:
            queue.is_due = True
            self.mark_ready(queue)

    # ---- what is to be sent ----------------------------------------------------------------------

    def mark_ready(self, queue: PartitionQueue, *, as_next: bool = False) -> None:
        """The queue has something to send, if anything. `as_next`: it is the first to be
        visited.
        """
        if queue.ready:
            if queue.is_queued:
                return
            queue.is_queued = True
            where = self._ready_queues
        else:
            if queue.is_queued_as_due or not queue.has_work:
                return
            queue.is_queued_as_due = True
            where = self._due_queues
        if as_next:
            where.appendleft(queue)
        else:
            where.append(queue)

    def drain(self, visit: Callable[[PartitionQueue], bool], *, with_unfilled: bool) -> None:
        """Have `visit` called for each queue with something that is ready, and then,
        `with_unfilled`, for those with an open batch that is due; in turn, until it says that it
        has enough (False). A queue with something left that an answer will not free is to be listed
        again.
        """
        for _ in range(len(self._ready_queues)):
            queue = self._ready_queues.popleft()
            queue.is_queued = False
            if not visit(queue):
                return
        for _ in range(len(self._due_queues) if with_unfilled else 0):
            queue = self._due_queues.popleft()
            queue.is_queued_as_due = False
            if not visit(queue):
                return

    def has_ready(self, *, with_unfilled: bool) -> bool:
        """Whether a queue has something to send."""
        return bool(self._ready_queues) or (with_unfilled and bool(self._due_queues))

    def first_retry_ns(self, now_ns: int, before_ns: int) -> int:
        """When the first of the retries that wait now may be sent; `before_ns` if that is
        sooner.
        """
        for queue in self._ready_queues:
            if now_ns < queue.muted_until_ns < before_ns:
                before_ns = queue.muted_until_ns
        return before_ns

    def enter_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The batch was sent and is to be answered."""
        batch.state = IN_FLIGHT
        queue.in_flight.append(batch)
        self.in_flight_count += 1

    def leave_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The batch was answered, or is given up."""
        queue.in_flight.remove(batch)
        self.in_flight_count -= 1

    def requeue(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The batch is to be sent again."""
        batch.state = READY
        queue.requeue(batch)
        self.mark_ready(queue)

    def split(self, queue: PartitionQueue, batch: ProducerBatch) -> bool:
        """Have the first ready batch, which cannot leave as it is, leave as two. False: it has one
        row.
        """
        halves = batch.split()
        if halves is None:
            return False
        queue.ready.popleft()
        queue.ready.extendleft(reversed(halves))
        self.replaced(batch)
        return True

    def replaced(self, batch: ProducerBatch) -> None:
        """Its children have its records: it has ended, and they have not."""
        assert batch.children is not None
        for child in batch.children.batches:
            if child.state is not COMPLETED:
                self._alive[child] = None
        batch.state = COMPLETED
        self._alive.pop(batch, None)
        if batch.waiter is not None:
            batch.waiter.set()

    # ---- settling --------------------------------------------------------------------------------

    def end(
        self, batch: ProducerBatch, base_offset: int | None, error: TailraceError | None
    ) -> None:
        """Settle a batch, once: its records went to `base_offset` and on (None with acks=0), or
        failed.
        """
        if batch.state is COMPLETED:
            return
        if batch.state is OPEN:
            self.buffered_bytes -= batch.close()
        batch.base_offset = base_offset
        batch.error = error
        batch.state = COMPLETED
        self._finish(batch)

    def _finish(self, batch: ProducerBatch) -> None:
        """The fate of a batch is known: note whom to tell, and give its memory back. What is cut
        off here is done again.
        """
        if batch not in self._alive:
            return
        calls = batch.calls() if batch.callbacks else ()
        failed = batch.count if batch.error is not None else 0
        due = self._callbacks.due
        # One straight line: see the module's docstring.
        due += calls
        batch.callbacks = None
        self.error_count += failed
        self.buffered_bytes -= batch.reserved_bytes
        del self._alive[batch]
        batch.let_go()

    def end_queue(self, queue: PartitionQueue, error: TailraceError) -> None:
        """Settle everything of a partition with an error."""
        for batch in queue.batches():
            self.end(batch, None, error)
        self.in_flight_count -= len(queue.in_flight)
        queue.clear()

    def end_all(self, error: TailraceError) -> None:
        """Settle everything with an error."""
        for queue in self.queues.values():
            self.end_queue(queue, error)

    # ---- after a signal's handler ----------------------------------------------------------------

    def under_way(self) -> list[ProducerBatch]:
        """Batches that were sent, or were about to be."""
        return [batch for batch in self._alive if batch.state is IN_FLIGHT]

    def rebuild(self, *, keeps_flight: bool) -> None:
        """Something was cut off: make the queues and the books anew from the batches that have not
        ended. `keeps_flight`: what is under way is, and is to be answered; else it is to be sent
        again. Cut off itself, it is done again.
        """
        self._end_completed()
        for queue in self.queues.values():
            self._finish_closing(queue)
        ready: dict[PartitionQueue, list[ProducerBatch]] = {
            queue: [] for queue in self.queues.values()
        }
        in_flight: dict[PartitionQueue, list[ProducerBatch]] = {
            queue: [] for queue in self.queues.values()
        }
        for batch in self._alive:
            queue = self.queues[batch.info.topic_id, batch.partition]
            if queue.open is batch:
                continue
            is_under_way = keeps_flight and batch.state is IN_FLIGHT
            (in_flight if is_under_way else ready)[queue].append(batch)
        for queue, batches in ready.items():
            batches.sort(key=lambda batch: batch.order)
            for batch in batches:
                batch.state = READY
            queue.ready = deque(batches)
            queue.in_flight = deque(
                [
                    batch
                    for batch in queue.in_flight
                    if batch in self._alive and batch in in_flight[queue]
                ]
            )
        self.buffered_bytes = sum(batch.reserved_bytes for batch in self._alive)
        self.in_flight_count = sum(len(queue.in_flight) for queue in self.queues.values())
        self._ready_queues.clear()
        self._due_queues.clear()
        self._lingering.clear()
        for queue in self.queues.values():
            queue.is_queued = queue.is_queued_as_due = False
            queue.is_due = queue.open is not None
            self.mark_ready(queue)

    def _end_completed(self) -> None:
        while True:
            split = [batch for batch in self._alive if batch.children is not None]
            for batch in split:
                self.replaced(batch)
            for batch in [batch for batch in self._alive if batch.state is COMPLETED]:
                self._finish(batch)
            if not split:
                return

    def _finish_closing(self, queue: PartitionQueue) -> None:
        """An open batch takes records, or is closed, or has ended; one that was opened twice has
        none.
        """
        batch = queue.open
        if batch is not None and batch not in self._alive:
            queue.open = batch = None
        if batch is not None and batch.is_closing:
            batch.close()
            queue.open = None
        for other in [
            other for other in self._alive if other.state is OPEN and other is not queue.open
        ]:
            if (other.info.topic_id, other.partition) == (queue.info.topic_id, queue.partition):
                other.close()
                if not other.count:
                    del self._alive[other]
