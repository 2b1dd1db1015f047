"""Who a producer is to the appliance: its id and epoch, by which a worker recognises a batch that
it has already (KIP-98's idea).

Each batch carries id, epoch and a sequence number. When that is no longer enough (the worker knows
nothing of a sequence, or a batch was given up whose fate is not known), nothing new is sent until
the fate of everything that was sent is known; then comes a new epoch, and sequences begin at 0.

Owner: a Producer, under its lock.
"""

from __future__ import annotations

from typing import Any

from tailrace.format.batch_header import NO_PRODUCER


class ProducerIdAndEpoch:
    """See the module's docstring."""

    def __init__(self, is_used: bool) -> None:
        """`is_used`: whether batches carry an identity at all (idempotence)."""
        self.is_used = is_used
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.needs_epoch = False
        """The one at hand is used up: see the module's docstring."""
        self.is_asked = False
        """Whether a request for one is under way."""
        self.bump_count = 0
        """How many epochs followed the first."""

    @property
    def is_known(self) -> bool:
        """Whether there is an id."""
        return self.producer_id >= 0

    @property
    def is_missing(self) -> bool:
        """Whether the appliance has to be asked for an id, or for another epoch."""
        return self.is_used and (self.producer_id < 0 or self.needs_epoch)

    def use_up(self) -> None:
        """A sequence is missing for good, or its fate cannot be known: no batch may follow under
        this epoch.
        """
        self.needs_epoch = self.needs_epoch or self.is_used

    def request(self) -> dict[str, int]:
        """The body of INIT_PRODUCER_ID."""
        return (
            {"producer_id": self.producer_id, "producer_epoch": self.epoch} if self.is_known else {}
        )

    def take(self, answer: dict[str, Any]) -> None:
        """The answer to that."""
        if self.needs_epoch:
            self.bump_count += 1
        self.producer_id, self.epoch = int(answer["producer_id"]), int(answer["producer_epoch"])
        self.needs_epoch = False
