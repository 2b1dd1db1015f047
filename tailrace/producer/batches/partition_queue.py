"""The batches of one partition, from open to completed, and their sequences.

Owner: a Producer, under its lock.
Invariants:
- Batches are sent in the order in which they were opened. Their sequences ascend without a gap.
- In-flight batches never exceed the worker's deduplication window. Without sequences they are at
  most `max_in_flight_requests_per_connection`.
"""

from __future__ import annotations

from collections import deque

from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.record_batch.batch_header import NO_PRODUCER, SEQUENCE_MODULUS
from tailrace.kernel import OpenQueue
from tailrace.producer.batches.producer_batch import ProducerBatch


class PartitionQueue(OpenQueue):
    """The batches of one partition, from open to completed."""

    open: ProducerBatch | None
    """The batch that takes records."""
    __slots__ = (
        "awaits_map",
        "awaits_topic",
        "in_flight",
        "info",
        "is_due",
        "is_gone",
        "is_queued",
        "is_queued_as_due",
        "muted_until_ns",
        "next_ordinal",
        "next_sequence",
        "partition",
        "ready",
    )

    def __init__(self, info: TopicInfo, partition: int) -> None:
        super().__init__()
        self.info = info
        self.partition = partition
        self.ready: deque[ProducerBatch] = deque()
        self.in_flight: deque[ProducerBatch] = deque()
        self.next_sequence = 0
        self.next_ordinal = 0
        self.muted_until_ns = 0
        """Nothing is sent before this time, the end of a retry's backoff."""
        self.is_due = False
        """The linger of the open batch is over. It fills until it can be sent."""
        self.is_gone = False
        """No record is added: the topic is unknown, or another queue has replaced this one."""
        self.awaits_map = False
        """The topic's slot map, schema or largest batch has changed. Nothing new is sent before
        everything in flight has an outcome. The rest is then routed, converted or split.
        """
        self.awaits_topic = False
        """The topic id is unknown to the appliance. Nothing is sent before the topic is found again
        (`tailrace.producer.topic_changes.topic_change`).
        """
        self.is_queued = False
        """True while the accumulator lists it among the ready queues."""
        self.is_queued_as_due = False
        """True while the accumulator lists it among the queues with a due open batch."""

    def requeue(self, batch: ProducerBatch) -> None:
        """Put a batch that is to be sent again among the ready ones, in its order."""
        position = 0
        while position < len(self.ready) and self.ready[position].order < batch.order:
            position += 1
        self.ready.insert(position, batch)

    def pop(self, batch: ProducerBatch) -> None:
        """Remove a batch that is open or ready."""
        if self.open is batch:
            self.open = None
            self.is_due = False
        else:
            self.ready.remove(batch)

    def clear(self) -> None:
        """Remove all batches."""
        self.open = None
        self.is_due = False
        self.ready.clear()
        self.in_flight.clear()

    @property
    def has_work(self) -> bool:
        """True if there is a batch to send."""
        return bool(self.ready) or (self.is_due and self.open is not None)

    def close_open(self, batch: ProducerBatch) -> None:
        """Move the batch from open to ready, if it is the open one.

        No signal handler runs between leaving one place and entering the other.
        """
        if self.open is batch:
            self.is_due = False
            self.open = None
            self.ready.append(batch)

    def number(self, batch: ProducerBatch, producer_id: int, epoch: int) -> None:
        """Give a batch its sequence before it is sent for the first time.

        The sequence counts as used once this returns. A signal handler may interrupt it before.
        """
        batch.ordinal = self.next_ordinal
        batch.number(producer_id, epoch, self.next_sequence)
        self.next_ordinal += 1
        self.next_sequence = (self.next_sequence + batch.count) % SEQUENCE_MODULUS

    def begin_epoch(self) -> None:
        """Restart the sequences at 0. Ready batches get new ones."""
        self.next_sequence = 0
        for batch in self.ready:
            batch.producer_id = NO_PRODUCER

    def take_numbers_back(self) -> None:
        """Have the sequences of the ready batches used again, by those that are sent next. None of
        them may be in the log, and nothing is in flight.
        """
        numbered = next((batch for batch in self.ready if batch.producer_id != NO_PRODUCER), None)
        if numbered is None:
            return
        self.next_sequence = numbered.base_sequence
        for batch in self.ready:
            batch.producer_id = NO_PRODUCER

    def count_numbered(self) -> None:
        """Count the sequence of a batch whose numbering was interrupted before it counted."""
        for batch in self.ready:
            if batch.producer_id != NO_PRODUCER and batch.base_sequence == self.next_sequence:
                self.next_ordinal = max(self.next_ordinal, batch.ordinal + 1)
                self.next_sequence = (self.next_sequence + batch.count) % SEQUENCE_MODULUS

    def successor(self, info: TopicInfo) -> PartitionQueue:
        """An empty queue to replace this one, of which no batch may be in the log unacknowledged.

        It uses the sequences of refused batches again.
        """
        following = PartitionQueue(info, self.partition)
        numbered = next((batch for batch in self.ready if batch.producer_id != NO_PRODUCER), None)
        following.next_sequence = self.next_sequence if numbered is None else numbered.base_sequence
        following.next_ordinal = self.next_ordinal
        return following

    def window_is_full(self, remembered_batches: int) -> bool:
        """True if another sequence would overflow the worker's deduplication window.

        The window holds the last `remembered_batches` batches. The oldest one without an outcome
        must stay in it. Responses come in any order, and a request that timed out may have
        succeeded.
        """
        return (
            bool(self.in_flight)
            and self.next_ordinal - min(batch.ordinal for batch in self.in_flight)
            >= remembered_batches
        )

    def first_with_unknown_outcome(self) -> int:
        """The index in `ready` of the first batch that may be in the log, -1 if there is none.

        Batches that were never sent come after all others.
        """
        for position, batch in enumerate(self.ready):
            if batch.was_sent:
                return position
            if not batch.attempts:
                break
        return -1

    def batches(self) -> list[ProducerBatch]:
        """All batches, in the order in which they were opened if none is sent again."""
        return [*self.in_flight, *self.ready, *([self.open] if self.open is not None else [])]
