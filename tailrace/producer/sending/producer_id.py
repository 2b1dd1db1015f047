"""The producer's id and epoch, by which a worker recognises a duplicate batch (KIP-98).

Each batch carries id, epoch and a sequence. A new epoch is needed when a worker does not know a
sequence, or a batch was given up that may be in the log. Nothing new is then sent before each sent
batch has an outcome. Under the new epoch sequences begin at 0.

Owner: a Producer, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from tailrace.client.connections.connection import Connection
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import error_for
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response


class Identity(Protocol):
    """The id and epoch that the sender writes into batches, and what it does without them."""

    @property
    def is_used(self) -> bool:
        """True if batches carry an id (idempotence)."""
        ...

    @property
    def producer_id(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_known(self) -> bool:
        """True if batches may be sent."""
        ...

    @property
    def is_missing(self) -> bool:
        """True if `obtain` has something to do before batches may be sent."""
        ...

    @property
    def needs_epoch(self) -> bool:
        """True if only batches that may be in the log may be sent."""
        ...

    @property
    def is_asked(self) -> bool:
        """True while a request of `obtain` has no response."""
        ...

    @property
    def bump_count(self) -> int:
        """Number of epochs after the first that were taken because of a lost sequence."""
        ...

    @property
    def bumps_epoch(self) -> bool:
        """True if `use_up` brings a new epoch, under which refused batches are sent again. Else
        they fail.
        """
        ...

    @property
    def transaction(self) -> int:
        """The number of the transaction, 0 without transactions."""
        ...

    def use_up(self) -> None:
        """A sequence is missing for good, or its outcome is unknown."""
        ...

    def obtain(self) -> None:
        """Request what is missing."""
        ...

    def restart(self) -> None:
        """Recover from an interrupted run: the connection was given up."""
        ...

    def is_fenced(self, detail: str) -> bool:
        """A batch was refused with PRODUCER_FENCED. True: it waits until the reason is known."""
        ...

    def check_may_add(self) -> None:
        """Raise if no record may be added now."""
        ...

    def begin_epoch(self) -> None:
        """Begin the sequences of all partitions at 0."""
        ...


class ProducerIdAndEpoch:
    """The id and epoch of a producer without transactions, and the requests for them."""

    bumps_epoch = True
    transaction = 0

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

    def restart(self) -> None:
        """Take a new epoch: the sequences may be wrong."""
        self.is_asked = False
        self.use_up()

    def is_fenced(self, _detail: str) -> bool:
        """False: the batch fails."""
        return False

    def check_may_add(self) -> None:
        """Nothing to check."""

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
        if response is not None and response.code is ErrorCode.NOT_AUTHORIZED:
            self._accumulator.end_all(error_for(response.code, response.detail()))
            return
        if response is None or response.code is not ErrorCode.OK:
            return  # `obtain` is called again in the next run
        answer = decode_json(response.body[0])
        if self.needs_epoch:
            self.bump_count += 1
        self.producer_id, self.epoch = int(answer["producer_id"]), int(answer["producer_epoch"])
        self.needs_epoch = False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin the sequences of all partitions at 0. Ready batches get new ones."""
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            if queue.has_work:
                self._accumulator.mark_ready(queue)


MakeIdentity: TypeAlias = "Callable[[Connection, RecordAccumulator], Identity]"
"""Makes the identity of a producer that has transactions."""
