"""Producer ids: one for each idempotent producer, and blocks for the transaction coordinator.

Owner: the controller; the last ids are in the catalog.
Invariants:
- An id is sent when it is on the disk.
- A generation of the process of groups gets one block.
Crash: ids that were stored and not sent are never given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orjson

from appliance.catalog.catalog import Catalog
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.request_fields import Requester, is_whole
from shm.crash_points import crash_point
from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import Role
from shm.messages.lane_messages import LaneKind
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tailrace.protocol.json_messages import encode_error

logger = logging.getLogger(__name__)

RETRY_NS = 1_000_000_000
"""Interval of trying to record a block."""
PRODUCER_ID_MAX = TRANSACTIONAL_PRODUCER_IDS - 1
"""Largest id whose epochs the controller gives. The transaction coordinator gives those above."""
EPOCH_MAX = 32767


class ProducerIds:
    """Gives producer ids, their next epochs, and blocks of transactional ids."""

    def __init__(
        self,
        catalog: Catalog,
        publisher: MetadataPublisher,
        requested: AtomicCounter,
        wall_us: Callable[[], int],
        send: Callable[[Requester, ErrorCode, bytes], None],
        start_ns: int,
    ) -> None:
        """`requested`: the word with the generation of the process of groups that needs
        transactional producer ids. `send`: answers a client.
        """
        self._catalog = catalog
        self._publisher = publisher
        self._requested = requested
        self._wall_us = wall_us
        self._send = send
        self._given_to = 0
        """Generation of the process of groups with a block."""
        self.retry_at_ns = start_ns
        """Earliest time of the next block, after a failure."""

    def take(self, requester: Requester, request: dict[str, Any]) -> None:
        """INIT_PRODUCER_ID: give a producer id, or its next epoch; the answer follows the commit.

        Raises: TailraceError.
        """
        producer_id, epoch = request.get("producer_id"), request.get("producer_epoch", 0)
        if producer_id is None:
            producer_id, epoch = self._catalog.producers.new()
        elif is_whole(producer_id, 0, PRODUCER_ID_MAX) and is_whole(epoch, -1, EPOCH_MAX):
            producer_id, epoch = self._catalog.producers.next_epoch(producer_id, epoch)
        else:
            raise InvalidRequestError("producer_id and producer_epoch must be whole numbers")
        body = orjson.dumps({"producer_id": producer_id, "producer_epoch": epoch})

        def kept() -> None:
            crash_point("controller.after_producer_id")
            self._send(requester, ErrorCode.OK, body)

        self._catalog.afterwards(
            kept, lambda error: self._send(requester, error.code, encode_error(error.detail))
        )

    def give_block(self, now_ns: int) -> int:
        """Give the process of groups a block of transactional producer ids, once for each of its
        generations that asks; the message follows the commit. Returns the amount of work.
        """
        generation = self._requested.load()
        if (
            generation == self._given_to
            or not self._publisher.knows_groups
            or now_ns < self.retry_at_ns
        ):
            return 0
        self._given_to = generation

        def kept() -> None:
            crash_point("controller.after_producer_id")
            self._publisher.to(Role.GROUPS, 0).put(
                LaneKind.PRODUCER_IDS, session=generation, correlation_id=first
            )

        def failed(error: TailraceError) -> None:
            logger.warning("no_producer_ids generation=%d error=%r", generation, error.detail)
            self._given_to = 0
            self.retry_at_ns = now_ns + RETRY_NS

        try:
            first = self._catalog.producers.new_transactional_block(self._wall_us())
        except TailraceError as error:
            failed(error)
        else:
            self._catalog.afterwards(kept, failed)
        return 1
