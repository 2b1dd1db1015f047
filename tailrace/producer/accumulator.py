"""What a producer has taken and not yet settled: batches that fill, wait and are under way, and the memory that they take.

An open batch fills for `linger_ms`, or until it is full; then, and while a request that took unfilled batches is under way, until it may leave (see
`tailrace.produce_request`).

Owner: a Producer, under its lock.
Invariants: a batch ends exactly once; `buffered_bytes` is the sum of `reserved_bytes` over batches that have not ended, and `unended_count` their number;
    `in_flight_count` is the sum of what the queues have under way; a queue with something to send is listed, once in each list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tailrace.callbacks import Callbacks
from tailrace.errors import TailraceError
from tailrace.partition_queue import PartitionQueue
from tailrace.producer_batch import BATCH_OVERHEAD_BYTES, ENDED, IN_FLIGHT, OPEN, READY, ProducerBatch, Waits
from tailrace.settings import ProducerSettings
from tailrace.topics import TopicInfo

if TYPE_CHECKING:
    from tailrace.arrow_frames import Piece

NS_PER_MS = 1_000_000
RESERVE_BYTES = 64 << 10
"""How much buffer memory an open batch takes at a time, at most: between, a record is added without looking at anything else."""


class Accumulator:
    """See the module's docstring."""

    def __init__(
        self,
        settings: ProducerSettings,
        now_ns: Callable[[], int],
        waits: Waits,
        callbacks: Callbacks,
        on_keyless_batch: Callable[[TopicInfo], None],
    ) -> None:
        """`callbacks`: gets the calls that are due when a batch ends. `on_keyless_batch`: told when a batch that ended with a record without a key takes no
        more.
        """
        self._settings = settings
        self._now_ns = now_ns
        self._waits = waits
        self._callbacks = callbacks
        self._on_keyless_batch = on_keyless_batch
        self.tells_every_batch = False
        """Whether `on_keyless_batch` is told of batches with keys, too."""
        self._linger_ns = settings.linger_ms * NS_PER_MS
        self.queues: dict[tuple[bytes, int], PartitionQueue] = {}
        """(topic id, partition) -> its batches."""
        self._listed: deque[PartitionQueue] = deque()
        """Queues with something that is ready to be sent."""
        self._due: deque[PartitionQueue] = deque()
        """Queues with an open batch that is due. Apart, because there may be many of them that wait for one answer."""
        self._lingering: deque[tuple[int, PartitionQueue, ProducerBatch]] = deque()
        """(when its linger ends, its queue, batch) of batches that were opened, in order; some are closed already. Not those whose linger is over."""
        self.piece_bytes = RESERVE_BYTES
        """How much an open batch takes now: see `tailrace.sender.Sender.look_between`."""
        self._order = 0
        self.buffered_bytes = 0
        self.in_flight_count = 0
        self.unended_count = 0
        self.error_count = 0
        """Records that ended with an error."""

    # ---- filling ---------------------------------------------------------------------------------------------------------------------

    def queue(self, info: TopicInfo, partition: int) -> PartitionQueue:
        """The queue of a partition, which goes on with what is known of its topic now."""
        queue = self.queues.setdefault((info.topic_id, partition), PartitionQueue(info, partition))
        queue.info = info
        queue.is_gone = False
        return queue

    def open_batch(self, queue: PartitionQueue) -> ProducerBatch:
        """A batch that fills now, in a queue that has none."""
        now_ns = self._now_ns()
        batch = ProducerBatch(self._waits, queue.info, queue.partition, now_ns, self.next_order())
        if queue.open is not None:  # what the collector, or a signal's handler, ran meanwhile has sent
            return queue.open
        queue.open = batch
        self.unended_count += 1
        self.buffered_bytes += BATCH_OVERHEAD_BYTES
        queue.is_due = not self._linger_ns
        if queue.is_due:
            self.enlist(queue)
        else:
            self._lingering.append((now_ns + self._linger_ns, queue, batch))
        return batch

    def add_frame(self, queue: PartitionQueue, piece: Piece) -> ProducerBatch:
        """A batch of rows that are columns already; it is sent behind everything that the queue has."""
        self.close_batch(queue)
        batch = ProducerBatch.of_frame(self._waits, queue.info, piece, self._now_ns(), self.next_order())
        self.buffered_bytes += batch.reserved_bytes
        self.unended_count += 1
        queue.ready.append(batch)
        self.enlist(queue)
        return batch

    def next_order(self) -> tuple[int, ...]:
        """The place of another batch among all of the producer's."""
        self._order += 1
        return (self._order,)

    def reserve(self, batch: ProducerBatch, byte_count: int, capacity: int) -> None:
        """Give an open batch room for `byte_count` bytes, and for what is likely to follow, up to `capacity` bytes in all; that much memory is free."""
        unused = self._settings.buffer_memory - self.buffered_bytes - BATCH_OVERHEAD_BYTES
        used = batch.reserved_bytes - batch.room
        more = max(byte_count - batch.room, min(self.piece_bytes, unused, capacity - used - batch.room))
        batch.reserved_bytes += more
        batch.room += more
        self.buffered_bytes += more

    def close_batch(self, queue: PartitionQueue, *, is_visited: bool = False) -> None:
        """The queue's open batch, if it has one, takes no more records. `is_visited`: by `visit_listed`, whose visitor lists it again if need be."""
        batch = queue.open
        if batch is not None:
            # Before it is among what is ready: what a signal's handler cuts off here is open still, and closed again.
            self.buffered_bytes -= batch.close()
            queue.close_open()
            if not is_visited:
                self.enlist(queue)
            if batch.ends_without_key or self.tells_every_batch:
                self._on_keyless_batch(queue.info)

    def close_all(self) -> None:
        """No open batch takes more records."""
        for queue in self.queues.values():
            self.close_batch(queue)

    # ---- linger ----------------------------------------------------------------------------------------------------------------------

    def queue_of_open(self, batch: ProducerBatch) -> PartitionQueue | None:
        """The queue in which the batch still takes records, if it does."""
        queue = self.queues.get((batch.info.topic_id, batch.partition))
        return queue if queue is not None and queue.open is batch else None

    def unended(self) -> list[ProducerBatch]:
        """All batches that have not ended, by partition."""
        return [batch for queue in self.queues.values() for batch in queue.batches()]

    def first_linger_ns(self) -> int | None:
        """When the first open batch has filled long enough; None: there is none."""
        return self._lingering[0][0] if self._lingering else None

    def note_due(self, now_ns: int) -> None:
        """Open batches have filled long enough."""
        lingering = self._lingering
        while lingering and (lingering[0][0] <= now_ns or lingering[0][2].state is not OPEN):
            _, queue, batch = lingering.popleft()
            if queue.open is batch:
                queue.is_due = True
                self.enlist(queue)

    def hurry(self, batch: ProducerBatch) -> None:
        """The batch, if it is open, is not to wait for linger_ms to be over."""
        queue = self.queue_of_open(batch)
        if queue is not None:
            queue.is_due = True
            self.enlist(queue)

    # ---- what is to be sent ------------------------------------------------------------------------------------------------------------

    def enlist(self, queue: PartitionQueue, *, as_next: bool = False) -> None:
        """The queue has something to send, if anything. `as_next`: it is the first to be visited."""
        if queue.ready:
            if queue.is_listed:
                return
            queue.is_listed = True
            where = self._listed
        else:
            if queue.is_listed_as_due or not queue.has_work:
                return
            queue.is_listed_as_due = True
            where = self._due
        if as_next:
            where.appendleft(queue)
        else:
            where.append(queue)

    def visit_listed(self, visit: Callable[[PartitionQueue], bool], *, with_unfilled: bool) -> None:
        """Have `visit` called for each queue with something that is ready, and then, `with_unfilled`, for those with an open batch that is due; in turn, until
        it says that it has enough (False). A queue with something left that an answer will not free is to be listed again.
        """
        for _ in range(len(self._listed)):
            queue = self._listed.popleft()
            queue.is_listed = False
            if not self._visited(queue, visit):
                return
        for _ in range(len(self._due) if with_unfilled else 0):
            queue = self._due.popleft()
            queue.is_listed_as_due = False
            if not self._visited(queue, visit):
                return

    def _visited(self, queue: PartitionQueue, visit: Callable[[PartitionQueue], bool]) -> bool:
        try:
            return visit(queue)
        except BaseException:  # a signal's handler: what it cut off is to be done again
            self.enlist(queue)
            raise

    def has_listed(self, *, with_unfilled: bool) -> bool:
        """Whether a queue has something to send."""
        return bool(self._listed) or (with_unfilled and bool(self._due))

    def first_retry_ns(self, now_ns: int, before_ns: int) -> int:
        """When the first of the retries that wait now may be sent; `before_ns` if that is sooner."""
        for queue in self._listed:
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

    def put_back(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The batch is to be sent again."""
        batch.state = READY
        queue.put_back(batch)
        self.enlist(queue)

    def take_back(self, entries: Iterable[tuple[PartitionQueue, ProducerBatch, Any]]) -> None:
        """What was to be sent is not: a signal's handler has cut it off, each batch's move too, and the books are made anew from what the queues have."""
        for queue, batch, _ in entries:
            if batch in queue.in_flight:
                queue.in_flight.remove(batch)
            if batch not in queue.ready:
                queue.put_back(batch)
            batch.state = READY
            self.enlist(queue)
        unended = self.unended()
        self.unended_count = len(unended)
        self.buffered_bytes = sum(batch.reserved_bytes for batch in unended)
        self.in_flight_count = sum(len(queue.in_flight) for queue in self.queues.values())

    def split(self, queue: PartitionQueue, batch: ProducerBatch) -> bool:
        """Have the first ready batch, which cannot leave as it is, leave as two. False: it has one row."""
        halves = batch.split()
        if halves is None:
            return False
        self.unended_count += 1
        queue.ready.popleft()
        queue.ready.extendleft(reversed(halves))
        batch.state = ENDED
        if batch.waiter is not None:
            batch.waiter.set()
        return True

    # ---- settling --------------------------------------------------------------------------------------------------------------------

    def end(self, batch: ProducerBatch, base_offset: int | None, error: TailraceError | None) -> None:
        """Settle a batch, once: its records went to `base_offset` and on (None with acks=0), or failed."""
        if batch.state is ENDED:
            return
        if batch.state is OPEN:
            self.buffered_bytes -= batch.close()
        if error is not None:
            self.error_count += batch.count
        self.buffered_bytes -= batch.reserved_bytes
        self.unended_count -= 1
        self._callbacks.due += batch.end(base_offset, error)

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
