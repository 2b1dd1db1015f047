"""A producer for copies: each record is appended at a known offset, or not at all.

The caller says at which offset the next record of a partition belongs. The appliance appends it if
the log ends there. So each record is in the log once and in order, behind all earlier ones: also
after a kill, a lost connection, and beside another program that copies the same. Then batches fail
with OffsetConflictError, and the caller looks up where the log ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from tailrace.client.config.settings import ProducerOptions
from tailrace.client.connections.runtime import SYSTEM, Runtime
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import NotSupportedError
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.batches.positioned_queue import ANYWHERE, NOWHERE, PositionedQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.producer.producer import Producer
from tailrace.protocol.frame import Api
from tailrace.protocol.produce_messages import POSITIONED_PRODUCE_VERSION


class PositionedProducer(Producer):
    """A Producer whose records have a partition, and whose partitions have a position. A record of
    a partition without one fails.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """As for Producer."""
        super().__init__(bootstrap, runtime=runtime, **settings)
        accumulator = self._sender_thread.accumulator
        accumulator.make_queue = PositionedQueue
        if accumulator.on_failed_batch is None:  # a failed record ends its transaction
            accumulator.on_failed_batch = self._stop_partition

    def _stop_partition(self, batch: ProducerBatch) -> None:
        """Append nothing behind a record that failed."""
        queues = self._sender_thread.accumulator.queues
        queue = queues.get((batch.info.topic_id, batch.partition))
        if isinstance(queue, PositionedQueue):
            queue.end = NOWHERE

    @operation
    def set_position(self, partition: TopicPartition, offset: int | None) -> Steps[None]:
        """Append the partition's next record at `offset`, and its successors behind it. None: at
        any offset. No record of the partition may be without an outcome. Raises NotSupportedError
        for an older appliance, UnknownTopicError.
        """
        route = yield from self._metadata.of(partition.topic)
        sender_thread = self._sender_thread
        session = sender_thread.connection.session
        if session.version(Api.PRODUCE) < POSITIONED_PRODUCE_VERSION:
            raise NotSupportedError(
                "the appliance is of an older version, which appends no record at a required "
                "offset; upgrade it first"
            )
        with sender_thread.lock:
            queue = sender_thread.accumulator.queues[route.info.topic_id, partition.partition]
            if isinstance(queue, PositionedQueue):
                queue.end = ANYWHERE if offset is None else offset
