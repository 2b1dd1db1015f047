"""The outcome of sent batches: acknowledged, sent again, or failed.

Owner: a Producer, under its lock.
Invariants:
- A batch with an unknown outcome keeps its sequence, and may be in the log (`was_sent`).
- A batch that was refused is not in the log.
- Failing a batch that may be in the log, or has a sequence, needs a new epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import Runtime
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import (
    DeliveryTimeoutError,
    NotReachableError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.producer.sending.full_disk_log import FullDiskLog
from tailrace.producer.sending.producer_id import Identity
from tailrace.producer.topic_changes.slot_map_change import SlotMapChange
from tailrace.producer.topic_changes.topic_recreation import TopicRecreation
from tailrace.protocol.produce_messages import ProducedEntry

RETRY_BACKOFF_MAX_MS = 1_000
RESENDS_BEFORE_NEW_EPOCH = 3
"""Attempts of a partition's first batch that may be out of order. After that the batch before it is
lost, and only a new epoch helps.
"""
CONCURRENT_RETRY_NS = 2 * NS_PER_MS
CONCURRENT_RETRY_MAX_NS = 64 * NS_PER_MS
"""The pause while the end of the transaction before is carried out, doubled with each attempt. The
worker has it within a millisecond, unless the appliance restarts.
"""
_RESEND_CODES = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE})
_OUTCOME_UNKNOWN_CODES = frozenset({ErrorCode.TIMED_OUT, ErrorCode.STORAGE_ERROR})
_NEW_EPOCH_CODES = frozenset({ErrorCode.UNKNOWN_SEQUENCE})


class BatchOutcomes:
    """Completes batches by their responses and deadlines, or has them sent again."""

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        connection: Connection,
        accumulator: RecordAccumulator,
        identity: Identity,
        slot_map_change: SlotMapChange,
        topic_recreation: TopicRecreation,
        begin_schema_change: Callable[[TopicInfo], None],
        begin_split: Callable[[PartitionQueue, ProducerBatch], None],
        request_metadata: Callable[[], None],
    ) -> None:
        """`begin_schema_change` is called with the topic whose schema a refused batch has,
        `begin_split` with a batch of several records that is refused as too large,
        `request_metadata` when a refusal may show that a topic's settings have changed.
        """
        self._settings = settings
        self._now_ns = runtime.monotonic_ns
        self._random = runtime.random
        self._connection = connection
        self._accumulator = accumulator
        self._identity = identity
        self._slot_map_change = slot_map_change
        self._topic_recreation = topic_recreation
        self._begin_schema_change = begin_schema_change
        self._begin_split = begin_split
        self._request_metadata = request_metadata
        self.retry_count = 0
        self._full_disk_log = FullDiskLog()

    def settle(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        answer: ProducedEntry | tuple[ErrorCode, str] | None,
        correlation_id: int = 0,
    ) -> None:
        """Handle the response to an in-flight batch. None: the connection was lost before it.
        `correlation_id`: of the request.
        """
        if answer is None:
            self._retry(
                queue, batch, ErrorCode.SESSION_UNKNOWN, "the connection was lost", pause=False
            )
        elif not isinstance(answer, ProducedEntry):
            self._on_refusal(queue, batch, *answer, correlation_id)
        elif answer.error:
            code = code_of(answer.error)
            self._on_refusal(queue, batch, code, ERROR_TABLE[code].meaning, correlation_id)
        else:
            self._accumulator.leave_flight(queue, batch)
            if queue.info.settings["message.timestamp.type"] == "LogAppendTime":
                batch.stamps_us = np.array([answer.append_time_us])
            self._accumulator.end(batch, answer.base_offset, None)
            if self._full_disk_log:
                self._full_disk_log.on_success(queue.info.name, queue.partition, self._now_ns())

    def _on_refusal(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        code: ErrorCode,
        detail: str,
        correlation_id: int,
    ) -> None:
        error = error_for(code, detail, correlation_id)
        if code not in _OUTCOME_UNKNOWN_CODES:
            batch.was_sent = False
        if code is ErrorCode.DISK_FULL:
            self._full_disk_log.on_refusal(queue.info.name, queue.partition, self._now_ns())
        if code is ErrorCode.STALE_SLOT_MAP and queue.info.slot_map_version:
            self.retry_count += 1
            batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.requeue(queue, batch)
            self._slot_map_change.begin(queue.info)
        elif code is ErrorCode.SCHEMA_MISMATCH and batch.info.typed:
            self.retry_count += 1
            batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.requeue(queue, batch)
            self._begin_schema_change(batch.info if batch.sent_as is None else batch.sent_as)
        elif code is ErrorCode.RECORD_TOO_LARGE and batch.count > 1:
            self.retry_count += 1
            batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.requeue(queue, batch)
            self._begin_split(queue, batch)
            self._request_metadata()
        elif code is ErrorCode.UNKNOWN_TOPIC:
            self._retry(queue, batch, code, detail, pause=False)
            self._topic_recreation.begin(queue.info)
        elif code is ErrorCode.PRODUCER_FENCED and self._identity.is_fenced(detail):
            self._retry(queue, batch, code, detail, pause=False)
        elif code is ErrorCode.CONCURRENT_TRANSACTIONS:
            self._wait_for_end(queue, batch, code, detail)
        elif not self._identity.bumps_epoch and self._is_out_of_sequence(queue, batch, code):
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.end(batch, None, error)
        elif code in _NEW_EPOCH_CODES:
            # The worker has forgotten the batches before. Once each sent batch has an outcome, this
            # one is sent again under a new epoch.
            self._identity.use_up()
            self._retry(queue, batch, code, detail, pause=False)
        elif code in _RESEND_CODES or error.retriable:
            is_first = queue.in_flight[0] is batch
            if self._is_out_of_sequence(queue, batch, code):
                self._identity.use_up()
            self._retry(queue, batch, code, detail, pause=code not in _RESEND_CODES or is_first)
        else:
            self._accumulator.leave_flight(queue, batch)
            self._identity.use_up()  # its sequence is missing for good
            self._accumulator.end(batch, None, error)
            self._request_metadata()

    def _wait_for_end(
        self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode, detail: str
    ) -> None:
        """Send a batch again after a short pause, which counts as no retry."""
        self.retry_count += 1
        batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
        queue.muted_until_ns = self._now_ns() + min(
            CONCURRENT_RETRY_MAX_NS, CONCURRENT_RETRY_NS << min(batch.attempts - 1, 10)
        )
        self._accumulator.leave_flight(queue, batch)
        self._accumulator.requeue(queue, batch)

    def _is_out_of_sequence(
        self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode
    ) -> bool:
        """True if only a new epoch would help."""
        return code in _NEW_EPOCH_CODES or (
            code in _RESEND_CODES
            and queue.in_flight[0] is batch
            and batch.attempts > RESENDS_BEFORE_NEW_EPOCH
        )

    def _retry(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        code: ErrorCode,
        detail: str,
        *,
        pause: bool,
    ) -> None:
        """Requeue a batch, or fail it when its retries are used up. `pause`: after a backoff."""
        self._accumulator.leave_flight(queue, batch)
        if batch.attempts > self._settings.retries:
            self._identity.use_up()
            self._accumulator.end(batch, None, error_for(code, detail))
            return
        self.retry_count += 1
        batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
        if pause:
            base_ms = min(
                RETRY_BACKOFF_MAX_MS, self._settings.retry_backoff_ms << min(batch.attempts - 1, 10)
            )
            queue.muted_until_ns = self._now_ns() + int(
                base_ms * NS_PER_MS * (0.8 + 0.4 * self._random())
            )
        self._accumulator.requeue(queue, batch)

    def expire(self, now_ns: int) -> None:
        """Fail the batches that are older than delivery_timeout_ms. One that may be in the log
        leaves a gap in the sequences, so a new epoch is needed.
        """
        if self._connection.fatal is not None:
            self._accumulator.end_all(self._connection.fatal)
            return
        oldest_ns = now_ns - self._settings.delivery_timeout_ms * NS_PER_MS
        for queue in self._accumulator.queues.values():
            for batch in [b for b in queue.batches() if b.created_ns <= oldest_ns]:
                if batch in queue.in_flight:
                    self._accumulator.leave_flight(queue, batch)
                else:
                    queue.pop(batch)
                if batch.was_sent:
                    self._identity.use_up()
                self._accumulator.end(batch, None, self._timeout_of(queue, batch))

    def _timeout_of(self, queue: PartitionQueue, batch: ProducerBatch) -> TailraceError:
        limit = f"delivery_timeout_ms ({self._settings.delivery_timeout_ms / 1000:g} s)"
        if queue.awaits_topic:
            return UnknownTopicError(
                f"topic {queue.info.name!r} was deleted, and not created again with partition "
                f"{queue.partition} within {limit}"
            )
        if self._connection.is_ready or batch.was_sent:
            reason = f"; the last response was: {batch.last_refusal}" if batch.last_refusal else ""
            return DeliveryTimeoutError(f"not acknowledged within {limit}{reason}")
        return NotReachableError(
            f"not sent within {limit}: no appliance answers at {self._settings.bootstrap_servers}"
        )
