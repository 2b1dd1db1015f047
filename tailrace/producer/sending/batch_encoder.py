"""Encodes the batches of a producer, and splits those that are too large to be sent.

Owner: a Producer, under its lock.
Invariants:
- A batch that cannot be encoded fails its own records only.
- A batch that may be in the log is never split.
"""

from __future__ import annotations

from tailrace.client.config.settings import ProducerSettings
from tailrace.core.errors import InvalidRecordError, RecordTooLargeError, TailraceError
from tailrace.core.log import logger
from tailrace.format.record_batch.batch_validation import ROWS_FREE, is_too_large_unpacked
from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch

REQUEST_MIN_BYTES = 4096


class BatchEncoder:
    """Encodes ready batches with the compression of the producer or the topic."""

    def __init__(self, settings: ProducerSettings, accumulator: RecordAccumulator) -> None:
        self._settings = settings
        self._accumulator = accumulator

    def encode_ahead(self, queue: PartitionQueue, window: int) -> None:
        """Encode the newest ready batch if it is among the next `window` ones. It can then be sent
        as soon as a response comes.
        """
        if len(queue.ready) <= window:
            self.encode_now(queue, queue.ready[-1])

    def encode_now(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Encode a batch that need not be sent yet, if it is not encoded."""
        if batch.data is None:
            try:
                batch.encode(self._compression(queue))
            except Exception as error:  # `encode` meets it again and fails the batch
                logger.debug("a batch could not be encoded ahead of its turn: %s", error)

    def encode(self, queue: PartitionQueue, batch: ProducerBatch) -> bytearray | None:
        """The bytes of a ready batch. None: it was split or failed, and another is the first."""
        compression = self._compression(queue)
        try:
            data = batch.encode(compression)
        except Exception as error:  # fails no other batch; a half without the cause still succeeds
            if batch.was_sent or not self._accumulator.split(queue, batch):
                queue.pop(batch)
                self._accumulator.end(batch, None, _encoding_error(error))
            return None
        if batch.was_sent:
            return data
        largest = queue.info.settings["max.message.bytes"]
        limit = min(max(self._settings.max_request_size, REQUEST_MIN_BYTES), largest)
        is_too_large = len(data) > limit
        if not is_too_large and (compression != "none" or batch.count > ROWS_FREE):
            is_too_large = is_too_large_unpacked(
                data, max_message_bytes=largest, is_delay_log=bool(queue.info.delay_of)
            )
        if not is_too_large:
            return data
        if not self._accumulator.split(queue, batch):
            queue.pop(batch)
            error_text = (
                f"a record takes {len(data)} bytes as a batch, or more when decompressed; the "
                f"limit is {limit} bytes, the smaller of max_request_size and the topic's "
                "max.message.bytes"
            )
            self._accumulator.end(batch, None, RecordTooLargeError(error_text))
        return None

    def _compression(self, queue: PartitionQueue) -> str:
        chosen: str = self._settings.compression_type or queue.info.settings["compression.type"]
        return "none" if chosen == "producer" else chosen


def _encoding_error(error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    logger.error("a batch could not be encoded", exc_info=error)
    return InvalidRecordError(f"the batch cannot be encoded ({type(error).__name__}: {error})")
