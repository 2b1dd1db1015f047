"""A partition's queue whose batches say at which offset they belong.

The appliance appends such a batch only where the log ends at that offset. So records of a copy are
appended once, in order and at known offsets, whatever becomes of the connection, of the program
that copies, or of another one that copies the same.

Owner: a PositionedProducer, under its lock.
Invariants:
- `end` is the offset of the next batch that gets a sequence, if all before it are appended.
- After a record has failed, no batch is appended any more: its successors require another end.
"""

from __future__ import annotations

from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.record_batch.header_stamps import stamp_required_end
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch

NOWHERE = (1 << 62) - 1
"""An end that no log has."""
ANYWHERE = -1
"""No end is required."""


class PositionedQueue(PartitionQueue):
    """The batches of one partition, each with its offset."""

    __slots__ = ("end",)

    def __init__(self, info: TopicInfo, partition: int, end: int = NOWHERE) -> None:
        super().__init__(info, partition)
        self.end = end

    def number(self, batch: ProducerBatch, producer_id: int, epoch: int) -> None:
        """Give a batch its offset and its sequence before it is sent for the first time."""
        assert batch.data is not None
        if batch.attempts:  # ZeroMQ may still be sending the old bytes
            batch.data = bytearray(batch.data)
        with memoryview(batch.data) as view:
            stamp_required_end(view, self.end)
        super().number(batch, producer_id, epoch)
        if self.end not in (NOWHERE, ANYWHERE):
            self.end += batch.count

    def successor(self, info: TopicInfo) -> PartitionQueue:
        """A queue for another topic of the same name, which appends nothing."""
        following = PositionedQueue(info, self.partition)
        following.next_sequence = super().successor(info).next_sequence
        return following
