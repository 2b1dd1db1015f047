"""The batches of one partition, from open to answered, and the sequence numbers that they are
given.

Owner: a Producer, under its lock.
Invariants: batches are sent in the order in which they were begun, and their sequences ascend
    without a gap; never so many are under way that the worker could forget one whose fate is not
    known, and without sequences at most `max_in_flight_requests_per_connection`.
"""

from __future__ import annotations

from collections import deque

from tailrace.client.topic_metadata import TopicInfo
from tailrace.format.batch_header import NO_PRODUCER, SEQUENCE_MODULUS
from tailrace.kernel import OpenQueue
from tailrace.producer.producer_batch import ProducerBatch


class PartitionQueue(OpenQueue):
    """The batches of one partition, from open to answered."""

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
        """Not to be sent from before this: a retry is waiting for its time."""
        self.is_due = False
        """The open batch has filled for as long as it has to: it leaves when it may, and fills
        until then.
        """
        self.is_gone = False
        """The appliance does not know the topic any more, or another queue has taken this one's
        place: ask anew before sending to it.
        """
        self.awaits_map = False
        """The topic's hash slots have moved: nothing new is sent until everything that was sent is
        answered, and then routed anew.
        """
        self.awaits_topic = False
        """The appliance does not know the topic by this id: nothing is sent until it is known what
        has its name now (see `tailrace.producer.topic_recreation`).
        """
        self.is_queued = False
        """Whether the producer's list of queues with something that is ready holds it."""
        self.is_queued_as_due = False
        """The same of queues with an open batch that is due."""

    def requeue(self, batch: ProducerBatch) -> None:
        """A batch is to be sent again: it goes among what is ready to where it was begun."""
        position = 0
        while position < len(self.ready) and self.ready[position].order < batch.order:
            position += 1
        self.ready.insert(position, batch)

    def pop(self, batch: ProducerBatch) -> None:
        """A batch that is open or ready is not sent any more."""
        if self.open is batch:
            self.open = None
            self.is_due = False
        else:
            self.ready.remove(batch)

    def clear(self) -> None:
        """All batches have ended."""
        self.open = None
        self.is_due = False
        self.ready.clear()
        self.in_flight.clear()

    @property
    def has_work(self) -> bool:
        """Whether there is something to send."""
        return bool(self.ready) or (self.is_due and self.open is not None)

    def close_open(self, batch: ProducerBatch) -> None:
        """This batch, if it is the open one, takes no more records. No signal's handler runs
        between its leaving one place and its coming to the other.
        """
        if self.open is batch:
            self.is_due = False
            self.open = None
            self.ready.append(batch)

    def number(self, batch: ProducerBatch, producer_id: int, epoch: int) -> None:
        """Give a batch that was not sent before its sequence."""
        batch.ordinal = self.next_ordinal
        batch.number(
            producer_id, epoch, self.next_sequence
        )  # it has its number when this is done, not when a signal's handler cuts it off
        self.next_ordinal += 1
        self.next_sequence = (self.next_sequence + batch.count) % SEQUENCE_MODULUS

    def begin_epoch(self) -> None:
        """Sequences begin at 0; what is ready is numbered anew."""
        self.next_sequence = 0
        for batch in self.ready:
            batch.producer_id = NO_PRODUCER

    def successor(self, info: TopicInfo) -> PartitionQueue:
        """A queue in the place of this one, which has nothing under way and of unknown fate: the
        sequences of what was refused are given again.
        """
        following = PartitionQueue(info, self.partition)
        numbered = next((batch for batch in self.ready if batch.producer_id != NO_PRODUCER), None)
        following.next_sequence = self.next_sequence if numbered is None else numbered.base_sequence
        following.next_ordinal = self.next_ordinal
        return following

    def window_is_full(self, remembered_batches: int) -> bool:
        """Whether one more sequence would make the worker, which remembers so many, forget a batch
        whose fate is not known: answers need not come in order, and a request that has timed out
        may have been carried out.
        """
        return (
            bool(self.in_flight)
            and self.next_ordinal - min(batch.ordinal for batch in self.in_flight)
            >= remembered_batches
        )

    def first_with_unknown_outcome(self) -> int:
        """Where among `ready` the first batch stands that may have been appended, -1: there is
        none. What was never sent comes behind all that was.
        """
        for position, batch in enumerate(self.ready):
            if batch.was_sent:
                return position
            if not batch.attempts:
                break
        return -1

    def batches(self) -> list[ProducerBatch]:
        """All that have not ended, in the order in which they were begun where none is sent
        again.
        """
        return [*self.in_flight, *self.ready, *([self.open] if self.open is not None else [])]
