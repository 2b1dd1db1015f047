"""The producer's id and epoch, by which a worker recognises a duplicate batch (KIP-98).

Each batch carries id, epoch and a sequence. A new epoch is needed when a worker does not know a
sequence, or a batch was given up that may be in the log. Nothing new is then sent before each sent
batch has an outcome. Under the new epoch sequences begin at 0.

Owner: a Producer, under its lock.
"""

from __future__ import annotations

from tailrace.client.connection import Connection
from tailrace.core.error_codes import ErrorCode
from tailrace.format.batch_header import NO_PRODUCER
from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import decode_json, encode_json
from tailrace.protocol.session import Response


class ProducerIdAndEpoch:
    """The id and epoch, and the requests for them."""

    def __init__(
        self, is_used: bool, connection: Connection, accumulator: RecordAccumulator
    ) -> None:
        """`is_used`: batches carry an id (idempotence)."""
        self.is_used = is_used
        self._connection = connection
        self._accumulator = accumulator
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.needs_epoch = False
        """True if a new epoch is needed; see the module's docstring."""
        self.is_asked = False
        """True while an INIT_PRODUCER_ID request has no response."""
        self.bump_count = 0
        """Number of epochs after the first."""

    @property
    def is_known(self) -> bool:
        """True if there is an id."""
        return self.producer_id >= 0

    @property
    def is_missing(self) -> bool:
        """True if an id or a new epoch must be requested."""
        return self.is_used and (self.producer_id < 0 or self.needs_epoch)

    def use_up(self) -> None:
        """Require a new epoch: a sequence is missing for good, or its outcome is unknown."""
        self.needs_epoch = self.needs_epoch or self.is_used

    def obtain(self) -> None:
        """Request an id, or a new epoch once each sent batch has an outcome."""
        if self.is_asked:
            return
        if self.needs_epoch and any(
            q.in_flight or (not q.awaits_topic and q.first_with_unknown_outcome() >= 0)
            for q in self._accumulator.queues.values()
        ):
            return
        request = (
            {"producer_id": self.producer_id, "producer_epoch": self.epoch} if self.is_known else {}
        )
        self.is_asked = self._connection.request(
            Api.INIT_PRODUCER_ID, [encode_json(request)], self._on_response
        )

    def _on_response(self, response: Response | None) -> None:
        self.is_asked = False
        if response is None or response.code is not ErrorCode.OK:
            return  # `obtain` is called again in the next run
        answer = decode_json(response.body[0])
        if self.needs_epoch:
            self.bump_count += 1
        self.producer_id, self.epoch = int(answer["producer_id"]), int(answer["producer_epoch"])
        self.needs_epoch = False
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            if queue.has_work:
                self._accumulator.mark_ready(queue)
