"""Batches that were refused as too large, since the topic's `max.message.bytes` was lowered: they
are split, so that only records that do not fit by themselves fail.

    sending --RECORD_TOO_LARGE--> waiting --all sent batches of the partition have an outcome-->
    split --> sending

Owner: a Producer, under its lock. It is loaded with the first refused batch.
Invariants:
- While a partition waits, only its batches that may be in the log are sent.
- A batch that may be in the log is never split.
- The sequences of refused batches are used again, so that none is missing.
Crash: a batch is forgotten last. A split that a signal handler interrupted is done again, or found
to be done.
"""

from __future__ import annotations

from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch


class RefusedSizes:
    """The refused batches, by partition."""

    def __init__(self, accumulator: RecordAccumulator) -> None:
        self._accumulator = accumulator
        self._refused: list[tuple[PartitionQueue, ProducerBatch]] = []

    @property
    def is_waiting(self) -> bool:
        """True if a batch waits to be split."""
        return bool(self._refused)

    def begin(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """A batch of several records was refused, and is ready again."""
        self._refused.append((queue, batch))
        queue.awaits_map = True

    def step(self) -> None:
        """Split the batches of those partitions whose sent batches have an outcome."""
        for queue, batch in list(self._refused):
            if queue.in_flight or queue.first_with_unknown_outcome() >= 0:
                continue
            if batch in queue.ready:  # it has not expired, nor moved to another topic or partition
                queue.take_numbers_back()
                self._accumulator.split(queue, batch)
            queue.awaits_map = any(
                other is queue for other, one in self._refused if one is not batch
            )
            if queue.has_work:
                self._accumulator.mark_ready(queue)
            self._refused.remove((queue, batch))
