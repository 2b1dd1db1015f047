"""The records that a producer has accepted and not completed: their batches and memory.

A batch closes when it is full. An open batch whose `linger_ms` is over is *due*: it fills on until
a request takes it, which closes it (see `tailrace.producer.sending.in_flight_requests`).

Owner: a Producer, under its lock.
Invariants:
- A batch is completed exactly once.
- `buffered_bytes` is the sum of `reserved_bytes` over incomplete batches, `incomplete_count` their
  number. `in_flight_count` is the sum of the queues' in-flight batches.
- A queue with a batch to send is listed, once in each list.
Crash: a signal handler may interrupt between two instructions, except within a straight line of
    assignments. Python runs handlers when a call returns, a function begins, or a loop repeats.
    `_alive` has every incomplete batch. Each batch knows its state, its place and its parts, and
    changes them in one straight line. `rebuild` computes everything else from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import TailraceError
from tailrace.producer.batches.batch_split import split_in_halves
from tailrace.producer.batches.callbacks import Callbacks
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import (
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
"""Most buffer memory that an open batch reserves at a time. Records within it need no further
check.
"""


class RecordAccumulator:
    """The queues of all partitions, their batches and memory."""

    def __init__(
        self,
        settings: ProducerSettings,
        now_ns: Callable[[], int],
        completion: Completion,
        callbacks: Callbacks,
        on_keyless_batch: Callable[[TopicInfo], None],
    ) -> None:
        """`callbacks` gets the callbacks of completed batches. `on_keyless_batch` is called when a
        batch closes whose last record has no key.
        """
        self._settings = settings
        self._now_ns = now_ns
        self._completion = completion
        self._callbacks = callbacks
        self._on_keyless_batch = on_keyless_batch
        self.notifies_every_batch = False
        """True if `on_keyless_batch` is called for batches with keys too."""
        self._linger_ns = settings.linger_ms * NS_PER_MS
        self.queues: dict[tuple[bytes, int], PartitionQueue] = {}
        """(topic id, partition) -> its batches."""
        self._ready_queues: deque[PartitionQueue] = deque()
        """Queues with a ready batch."""
        self._due_queues: deque[PartitionQueue] = deque()
        """Queues with a due open batch. They are apart, since many of them may wait for one
        response.
        """
        self._lingering: deque[tuple[int, PartitionQueue, ProducerBatch]] = deque()
        """(end of linger, queue, batch) of opened batches, in order. Some are closed already."""
        self.piece_bytes = RESERVE_BYTES
        """Memory that an open batch reserves at a time, adapted by
        `tailrace.producer.sending.caller_polling`.
        """
        self._order = 0
        self._alive: dict[ProducerBatch, None] = {}
        """All incomplete batches."""
        self.buffered_bytes = 0
        self.in_flight_count = 0
        self.error_count = 0
        """Number of records that failed."""
        self.make_queue: type[PartitionQueue] = PartitionQueue
        self.on_failed_batch: Callable[[ProducerBatch], None] | None = None
        """Called with a batch that has failed, perhaps twice."""

    @property
    def incomplete_count(self) -> int:
        """Number of incomplete batches."""
        return len(self._alive)

    # ---- filling ---------------------------------------------------------------------------------

    def queue(self, info: TopicInfo, partition: int) -> PartitionQueue:
        """The queue of a partition, updated with `info`."""
        queue = self.queues.setdefault((info.topic_id, partition), self.make_queue(info, partition))
        if queue.open is not None and queue.info.schema_id != info.schema_id:
            self.close_batch(queue)  # its rows have the schema before
        queue.info = info
        queue.is_gone = False
        return queue

    def open_batch(self, queue: PartitionQueue) -> ProducerBatch:
        """Open a batch in a queue without one."""
        now_ns = self._now_ns()
        batch = ProducerBatch(
            self._completion, queue.info, queue.partition, now_ns, self.next_order()
        )
        # Sent meanwhile by code that the garbage collector or a signal handler ran.
        if queue.open is not None:
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

    def add_frame(
        self, queue: PartitionQueue, piece: FrameSlice, cut_for: TopicInfo | None = None
    ) -> ProducerBatch:
        """Add a batch of rows that are columns already, as the queue's last. `cut_for`: the topic
        whose schema they have; None: that of the queue.
        """
        self.close_batch(queue)
        info = queue.info
        if cut_for is not None and cut_for.typed and cut_for.schema_id != info.schema_id:
            info = cut_for
        batch = ProducerBatch.of_frame(
            self._completion, info, piece, self._now_ns(), self.next_order()
        )
        self._alive[batch] = None
        self.buffered_bytes += batch.reserved_bytes
        queue.ready.append(batch)
        self.mark_ready(queue)
        return batch

    def next_order(self) -> tuple[int, ...]:
        """The place of the next batch among all of the producer's."""
        self._order += 1
        return (self._order,)

    def reserve(self, batch: ProducerBatch, byte_count: int, capacity: int) -> None:
        """Reserve room for `byte_count` bytes and likely successors, up to `capacity` bytes in all.

        The caller has checked that `byte_count` bytes are free.
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
        """Close the queue's open batch, if it has one. `is_draining`: `drain` is visiting the
        queue, and its visitor lists the queue again if need be.
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
        """Close all open batches."""
        for queue in self.queues.values():
            self.close_batch(queue)

    # ---- lookups ---------------------------------------------------------------------------------

    def queue_of_open(self, batch: ProducerBatch) -> PartitionQueue | None:
        """The queue in which the batch is open, or None."""
        queue = self.queues.get((batch.info.topic_id, batch.partition))
        return queue if queue is not None and queue.open is batch else None

    def incomplete(self) -> list[ProducerBatch]:
        """All incomplete batches, by partition."""
        return [batch for queue in self.queues.values() for batch in queue.batches()]

    # ---- linger ----------------------------------------------------------------------------------

    def first_linger_ns(self) -> int | None:
        """The time when the first linger ends, or None."""
        return self._lingering[0][0] if self._lingering else None

    def expire_linger(self, now_ns: int) -> None:
        """Mark open batches as due whose linger has ended."""
        lingering = self._lingering
        while lingering and (lingering[0][0] <= now_ns or lingering[0][2].state is not OPEN):
            _, queue, batch = lingering.popleft()
            if queue.open is batch:
                queue.is_due = True
                self.mark_ready(queue)

    def flush_batch(self, batch: ProducerBatch) -> None:
        """End the batch's linger, if it is open."""
        queue = self.queue_of_open(batch)
        if queue is not None:
            queue.is_due = True
            self.mark_ready(queue)

    # ---- sending ---------------------------------------------------------------------------------

    def mark_ready(self, queue: PartitionQueue, *, as_next: bool = False) -> None:
        """List the queue if it has a batch to send. `as_next` puts it first."""
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
        """Call `visit` for each ready queue in turn, until it returns False. `with_unfilled`: then
        for each queue with a due open batch.

        A visited queue is no longer listed. The visitor lists it again if it has a batch left that
        no response of its partition will release.
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
        """True if a queue has a batch to send."""
        return bool(self._ready_queues) or (with_unfilled and bool(self._due_queues))

    def first_retry_ns(self, now_ns: int, before_ns: int) -> int:
        """The end of the first retry's backoff, or `before_ns` if that is sooner."""
        for queue in self._ready_queues:
            if now_ns < queue.muted_until_ns < before_ns:
                before_ns = queue.muted_until_ns
        return before_ns

    def enter_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Mark a batch as sent and not acknowledged."""
        batch.state = IN_FLIGHT
        queue.in_flight.append(batch)
        self.in_flight_count += 1

    def leave_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Remove a batch from those in flight."""
        queue.in_flight.remove(batch)
        self.in_flight_count -= 1

    def requeue(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Make a batch ready to be sent again."""
        batch.state = READY
        queue.requeue(batch)
        self.mark_ready(queue)

    def split(self, queue: PartitionQueue, batch: ProducerBatch) -> bool:
        """Replace a ready batch by its halves. False: it has a single row."""
        halves = split_in_halves(batch)
        if halves is None:
            return False
        batches = list(queue.ready)
        position = batches.index(batch)
        batches[position : position + 1] = halves
        queue.ready = deque(batches)  # `rebuild` completes a split that a signal interrupts
        self.replaced(batch)
        return True

    def replaced(self, batch: ProducerBatch) -> None:
        """Complete a split batch. Its children have its records."""
        assert batch.children is not None
        for child in batch.children.batches:
            if child.state is not COMPLETED:
                self._alive[child] = None
        batch.state = COMPLETED
        self._alive.pop(batch, None)
        if batch.waiter is not None:
            batch.waiter.set()

    # ---- completion ------------------------------------------------------------------------------

    def end(
        self, batch: ProducerBatch, base_offset: int | None, error: TailraceError | None
    ) -> None:
        """Complete a batch, once. Its records are in the log from `base_offset` on (None with
        acks=0), or failed with `error`.
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
        """Note the callbacks of a completed batch, and release its memory. `rebuild` repeats it if
        it was interrupted.
        """
        if batch not in self._alive:
            return
        calls = batch.calls() if batch.callbacks else ()
        failed = batch.count if batch.error is not None else 0
        if failed and self.on_failed_batch is not None:
            self.on_failed_batch(batch)
        due = self._callbacks.due
        # One straight line: see the module's docstring.
        due += calls
        batch.callbacks = None
        self.error_count += failed
        self.buffered_bytes -= batch.reserved_bytes
        del self._alive[batch]
        batch.let_go()

    def end_queue(self, queue: PartitionQueue, error: TailraceError) -> None:
        """Fail all batches of a partition."""
        self._end_each(queue, lambda _batch: error)

    def _end_each(
        self, queue: PartitionQueue, error_of: Callable[[ProducerBatch], TailraceError]
    ) -> None:
        for batch in queue.batches():
            self.end(batch, None, error_of(batch))
        self.in_flight_count -= len(queue.in_flight)
        queue.clear()

    def end_unsent(self, error: TailraceError) -> None:
        """Fail the batches that are not in flight."""
        for queue in self.queues.values():
            self.close_batch(queue)
            for batch in list(queue.ready):
                queue.pop(batch)
                self.end(batch, None, error)

    def end_all(self, error: TailraceError) -> None:
        """Fail all batches."""
        for queue in self.queues.values():
            self.end_queue(queue, error)

    def end_each(self, error_of: Callable[[ProducerBatch], TailraceError]) -> None:
        """Fail all batches, each with an error of its own."""
        for queue in self.queues.values():
            self._end_each(queue, error_of)

    # ---- after an interruption -------------------------------------------------------------------

    def under_way(self) -> list[ProducerBatch]:
        """Batches that were sent, or were about to be."""
        return [batch for batch in self._alive if batch.state is IN_FLIGHT]

    def rebuild(self, *, keeps_flight: bool) -> None:
        """Compute the queues and counters from the incomplete batches, after an interruption.

        `keeps_flight`: in-flight batches stay in flight, else they are sent again. If it is
        interrupted itself, it is called again.
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
        """Finish the batches whose completion or split was interrupted."""
        while True:
            split = [batch for batch in self._alive if batch.children is not None]
            for batch in split:
                self.replaced(batch)
            for batch in [batch for batch in self._alive if batch.state is COMPLETED]:
                self._finish(batch)
            if not split:
                return

    def _finish_closing(self, queue: PartitionQueue) -> None:
        """Finish an interrupted opening or closing. A second batch that was opened in the queue has
        no records.
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
