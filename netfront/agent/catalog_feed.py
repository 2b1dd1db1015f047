"""Catalog feed of a front: what the controller sends of partitions, users and rights.

Owner: one front.

Invariants:
- `is_complete` from the end of the first feed on. Input is not read before.
- Files and fetches of a partition that is dropped, or has moved to another slot, are let go of.
- A message that cannot be applied is reported and counted. The others are applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from netfront.fetch.fetch_service import FetchService
from netfront.fetch.log.log_reader import LogReader
from netfront.partition_routes import PartitionRoutes
from netfront.produce.produce_service import ProduceService
from shm.messages.lane_messages import Assignment
from shm.runtime.error_handler import CountedErrorHandler

if TYPE_CHECKING:
    from netfront.access.gate import Gate


class CatalogFeed:
    """Applies the controller's messages to a front's copy of the catalog."""

    def __init__(
        self,
        *,
        routing: PartitionRoutes,
        reader: LogReader,
        produce_service: ProduceService,
        fetches: FetchService,
        gate: Gate | None,
        error_handler: CountedErrorHandler,
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called once, when the feed is complete."""
        self._routing = routing
        self._reader = reader
        self._produce_service = produce_service
        self._fetches = fetches
        self._gate = gate
        self._error_handler = error_handler
        self._on_ready = on_ready
        self.is_complete = False

    def on_fed(self) -> None:
        """Note that the controller has sent everything."""
        if self._gate is not None:
            self._gate.on_fed()
            self._fetches.check_rights()
        if not self.is_complete:
            self.is_complete = True
            self._on_ready()

    def on_rights(self, payload: bytes, begins: bool) -> None:
        """Apply a message of users and rights; the first of a whole set if it `begins`."""
        if self._gate is None:
            return
        try:
            self._gate.on_rights(payload, begins)
            self._fetches.check_rights()
        except Exception as error:
            self._error_handler.on_error("message=rights", error)

    def on_assignment(self, payload: bytes) -> None:
        """Apply the assignment of a partition."""
        try:
            assignment = Assignment.decode(payload)
        except Exception as error:
            self._error_handler.on_error("message=assignment", error)
            return
        if not assignment.dropped:
            self._produce_service.reach(assignment.worker)
        try:
            known = self._routing.find(assignment.topic_id, assignment.partition)
            has_moved = known is not None and known.slot != assignment.slot
            gone = known if has_moved and known is not None else assignment
            if assignment.dropped or has_moved:
                self._reader.files.forget(gone)
            self._routing.apply(assignment)
            if assignment.dropped or has_moved:
                self._fetches.on_dropped(gone)
        except Exception as error:
            self._error_handler.on_error(
                f"message=assignment topic={assignment.topic} partition={assignment.partition}",
                error,
            )
