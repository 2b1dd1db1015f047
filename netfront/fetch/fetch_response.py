"""Fetch response entries: the batches or the error of each partition.

Owner: one front.

Invariants:
- An entry has whole batches, from the one with the requested offset, never beyond the end of its
  isolation level.
- The first entry has at least one batch, however small the limits, or a `resume_offset` that lies
  behind the requested one.
- Read positions are remembered only for open sessions and served partitions, at most PLACES_MAX.
"""

from __future__ import annotations

import logging
from typing import Protocol

from netfront.fetch.log.file_reader import SHORTAGES
from netfront.fetch.log.isolation import end_of, isolation_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import ColdRead, LogReadError, Place, Span
from netfront.fetch.purgatory import Fetch, FetchPurgatory
from netfront.fetch.read_ahead import ReadAhead
from netfront.partition_routes import PartitionRoutes
from netfront.session.sessions import Session
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.fetch_messages import (
    FETCHED_GAPS,
    SCHEMAS_FETCH_VERSION,
    FetchedEntry,
    FetchEntry,
)

logger = logging.getLogger(__name__)

_NOTHING = Span(0, 0, Place(0, 0, 0))
COLD_TRIES = 3
PLACES_MAX = 65_536


class Outgoing(Protocol):
    """Interface of the transport to fetches (see `router.Router`)."""

    def new_buffer(self, size: int) -> bytearray: ...
    def unsent_bytes(self, identity: bytes) -> int: ...
    def unsent_total(self) -> int: ...


class FetchResponseEntries:
    """Makes the entries of fetch responses and remembers each consumer's read position."""

    def __init__(
        self,
        reader: LogReader,
        routing: PartitionRoutes,
        outgoing: Outgoing,
        purgatory: FetchPurgatory,
        read_ahead: ReadAhead,
    ) -> None:
        self._reader = reader
        self._ahead = read_ahead
        self._routing = routing
        self._outgoing = outgoing
        self._purgatory = purgatory
        self._places: dict[int, dict[int, Place]] = {}
        """Next read position by slot and session, so that sequential reads need no index."""
        self._place_count = 0
        self.fetched: dict[int, list[int]] = {}
        """Offsets and bytes that this front has sent to readers, by slot."""
        self._warned: dict[int, str] = {}
        """Last warning by slot. A client's retries do not repeat it."""

    def place(self, slot: int, session: Session) -> Place | None:
        """Return the client's next read position, or None."""
        at_slot = self._places.get(slot)
        return None if at_slot is None else at_slot.get(session.number)

    def forget_slot(self, slot: int) -> None:
        """Forget a partition that is no longer served."""
        self._warned.pop(slot, None)
        self.fetched.pop(slot, None)
        self._place_count -= len(self._places.pop(slot, ()))

    def forget_session(self, session: Session, slots: set[int]) -> None:
        """Forget a session that has read positions at these slots."""
        for slot in slots:
            self._forget_place(slot, session.number)

    def make(self, fetch: Fetch, requested: FetchEntry) -> FetchedEntry:
        """Make one partition's entry. Raises ColdRead if the response has no batches yet that could
        be sent meanwhile.
        """
        route = self._routing.find(requested.topic_id, requested.partition)
        if route is None:
            code = (
                ErrorCode.PARTITION_OUT_OF_RANGE
                if self._routing.knows(requested.topic_id)
                else ErrorCode.UNKNOWN_TOPIC_ID
            )
            return FetchedEntry(requested.topic_id, requested.partition, code, -1, 0, -1, -1, -1)
        principal = fetch.session.principal
        if principal is not None and self._routing.refuses_read(principal, requested.topic_id):
            name = self._routing.topic_name(requested.topic_id) or ""
            is_visible = principal.may("describe", "topic", name)
            code = ErrorCode.NOT_AUTHORIZED if is_visible else ErrorCode.UNKNOWN_TOPIC_ID
            return FetchedEntry(requested.topic_id, requested.partition, code, -1, 0, -1, -1, -1)
        try:
            try:
                entry = self._read_one(fetch, requested, route)
            except FileNotFoundError:
                # retention deleted the segment after the lookup: look up again
                self._forget_place(route.slot, fetch.session.number)
                entry = self._read_one(fetch, requested, route)
        except LogReadError as error:
            if error.code is not ErrorCode.NOT_READY and self._differs(
                route, f"{error.code.name} {error} {requested.offset}"
            ):
                logger.warning(
                    "fetch_refused topic=%s partition=%d offset=%d code=%s reason=%r",
                    route.topic, route.partition, requested.offset, error.code.name, str(error),
                )  # fmt: skip
            return self._refusal(requested, route, error.code, error.resume_offset)
        except OSError as error:
            if self._differs(route, f"{error} {requested.offset}"):
                logger.warning(
                    "read_failed topic=%s partition=%d offset=%d error=%r",
                    route.topic, route.partition, requested.offset, str(error),
                )  # fmt: skip
            return self._refusal(
                requested,
                route,
                ErrorCode.NOT_READY if error.errno in SHORTAGES else ErrorCode.STORAGE_ERROR,
            )
        if self._warned:
            self._warned.pop(route.slot, None)
        return entry

    def _differs(self, route: Assignment, message: str) -> bool:
        """True if the partition's last warning, since a successful read, was another one."""
        differs = self._warned.get(route.slot) != message
        self._warned[route.slot] = message
        return differs

    def _refusal(
        self, requested: FetchEntry, route: Assignment, code: ErrorCode, resume_offset: int = -1
    ) -> FetchedEntry:
        try:
            state = self._reader.state(route)
        except LogReadError:
            return FetchedEntry(
                requested.topic_id, requested.partition, code, -1, 0, -1, -1, resume_offset
            )
        return FetchedEntry(
            requested.topic_id,
            requested.partition,
            code,
            state.leader_epoch,
            0,
            state.high_watermark,
            state.log_start_offset,
            resume_offset,
            state.last_stable_offset,
        )

    def _read_one(self, fetch: Fetch, requested: FetchEntry, route: Assignment) -> FetchedEntry:
        """Read one partition's batches into the fetch's buffer. A first batch above the limit gets
        a buffer of its own size.
        """
        if fetch.version < SCHEMAS_FETCH_VERSION and route.older_schemas:
            raise LogReadError(
                ErrorCode.UNSUPPORTED_VERSION,
                "the schema of the topic was altered, which this client cannot read; upgrade it",
            )
        state = self._reader.state(route)
        self._reader.check_epoch(route, state, requested.leader_epoch, requested.offset)
        if not state.log_start_offset <= requested.offset <= state.high_watermark:
            raise LogReadError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {requested.offset} is not between {state.log_start_offset} and "
                f"{state.high_watermark}",
            )
        span = _NOTHING
        room = min(fetch.limit - fetch.used, requested.max_bytes)
        isolation = isolation_of(fetch.version, requested.flags)
        if requested.offset < end_of(state, isolation) and room > 0:
            try:
                span = self._read_batches(fetch, requested, route, state, room)
            except ColdRead:
                if not fetch.used:
                    raise
                # Send the batches so far. The cold one comes first in the client's next fetch.
        if span.end > span.start:
            self._count(route.slot, span, requested.offset)
            if span.following.offset >= state.high_watermark:
                fetch.newest_append_us = max(fetch.newest_append_us, state.last_append_us)
        return FetchedEntry(
            requested.topic_id,
            requested.partition,
            0,
            state.leader_epoch,
            span.end - span.start,
            state.high_watermark,
            state.log_start_offset,
            span.resume_offset,
            state.last_stable_offset,
            FETCHED_GAPS if span.has_gaps else 0,
        )

    def _read_batches(
        self,
        fetch: Fetch,
        requested: FetchEntry,
        route: Assignment,
        state: PartitionState,
        room: int,
    ) -> Span:
        """Append whole batches to the buffer. Return their Span."""
        number, used = fetch.session.number, fetch.used
        isolation = isolation_of(fetch.version, requested.flags)
        blocking = fetch.cold_tries >= COLD_TRIES
        at_slot = self._places.get(route.slot)
        hint = None if at_slot is None else at_slot.get(number)
        buffer = fetch.buffer
        if buffer is None and len(fetch.request.entries) == 1:
            made = self._ahead.take(fetch.session, route, state, requested.offset, room, isolation)
            if made is not None:
                fetch.buffer, span = made
                self._remember_place(fetch.session, route.slot, at_slot, span.following)
                return span
        if buffer is None:
            buffer = fetch.buffer = self._outgoing.new_buffer(fetch.limit)
        try:
            result = self._reader.read(
                route,
                state,
                requested.offset,
                hint,
                memoryview(buffer)[used : used + room],
                blocking,
                isolation,
            )
            while isinstance(result, int) and used == 0:
                buffer = fetch.buffer = self._outgoing.new_buffer(result)
                result = self._reader.read(
                    route,
                    state,
                    requested.offset,
                    hint,
                    memoryview(buffer)[:result],
                    blocking,
                    isolation,
                )
        except ColdRead:
            if not used:
                fetch.buffer = None  # it is empty, and the disk read may take long
            raise
        if isinstance(result, int):
            return _NOTHING
        length = result.end - result.start
        if result.start:
            # The requested offset lies in a later batch than the index led to. Close the gap.
            buffer[used : used + length] = buffer[used + result.start : used + result.end]
        self._remember_place(fetch.session, route.slot, at_slot, result.following)
        return result

    def _count(self, slot: int, span: Span, offset: int) -> None:
        """Count what a response reads of a partition."""
        fetched = self.fetched.get(slot)
        if fetched is None:
            fetched = self.fetched[slot] = [0, 0]
        fetched[0] += max(0, span.following.offset - offset)
        fetched[1] += span.end - span.start

    # ---- read positions --------------------------------------------------------------------------

    def _remember_place(
        self, session: Session, slot: int, at_slot: dict[int, Place] | None, place: Place
    ) -> None:
        if at_slot is not None and session.number in at_slot:
            at_slot[session.number] = place
            return
        if self._place_count >= PLACES_MAX:
            self._places.clear()
            self._purgatory.forget_places()
            self._place_count = 0
        self._places.setdefault(slot, {})[session.number] = place
        self._place_count += 1
        self._purgatory.note_place(session, slot)

    def _forget_place(self, slot: int, number: int) -> None:
        at_slot = self._places.get(slot)
        if at_slot is not None and at_slot.pop(number, None) is not None:
            self._place_count -= 1
            if not at_slot:
                del self._places[slot]
