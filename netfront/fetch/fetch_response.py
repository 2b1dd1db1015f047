"""What a fetch's answer holds of one partition: its batches, or what is wrong with it.

Owner: one front. Invariants: whole batches, from the one that holds the wanted offset on, never beyond the high watermark; at least one, however small the
    limits, if it is the answer's first; a place is remembered only for sessions that are open and partitions that are served, at most PLACES_MAX of them.
"""

from __future__ import annotations

import logging
from typing import Protocol

from netfront.log_files import SHORTAGES
from netfront.log_reader import ColdRead, LogReader, LogReadError, Place
from netfront.next_reads import NextReads
from netfront.parked import Fetch, Parked
from netfront.routing import Routing
from netfront.sessions import Session
from shm.catalog_messages import Assignment
from shm.partition_table import PartitionState
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import FetchedEntry, FetchEntry

logger = logging.getLogger(__name__)

COLD_TRIES = 3
PLACES_MAX = 65_536


class Outgoing(Protocol):
    """What fetches need of a transport (see `router.Router`)."""

    def new_buffer(self, size: int) -> bytearray: ...
    def unsent_bytes(self, identity: bytes) -> int: ...
    def unsent_total(self) -> int: ...


class FetchEntries:
    """Makes them, and remembers where each reader goes on."""

    def __init__(self, reader: LogReader, routing: Routing, outgoing: Outgoing, parked: Parked, next_reads: NextReads) -> None:
        self._reader = reader
        self._next_reads = next_reads
        self._routing = routing
        self._outgoing = outgoing
        self._parked = parked
        self._places: dict[int, dict[int, Place]] = {}
        """slot -> session -> where that client's next read goes on, so that following a log needs no index."""
        self._place_count = 0
        self._said: dict[int, str] = {}
        """slot -> what was last said of it in the log; a client that tries again is no news."""

    def place(self, slot: int, session: Session) -> Place | None:
        """Where this client's next read goes on."""
        at_slot = self._places.get(slot)
        return None if at_slot is None else at_slot.get(session.number)

    def forget_slot(self, slot: int) -> None:
        """The partition is served no more."""
        self._said.pop(slot, None)
        self._place_count -= len(self._places.pop(slot, ()))

    def forget_session(self, session: Session, slots: set[int]) -> None:
        """The client is gone, which has places at these slots."""
        for slot in slots:
            self._forget_place(slot, session.number)

    def make(self, fetch: Fetch, wanted: FetchEntry) -> FetchedEntry:
        """One partition's part of the answer. Raises ColdRead when there is nothing before it that could be sent meanwhile."""
        route = self._routing.find(wanted.topic_id, wanted.partition)
        if route is None:
            code = ErrorCode.PARTITION_OUT_OF_RANGE if self._routing.knows(wanted.topic_id) else ErrorCode.UNKNOWN_TOPIC
            return FetchedEntry(wanted.topic_id, wanted.partition, code, -1, 0, -1, -1, -1)
        try:
            try:
                entry = self._read_one(fetch, wanted, route)
            except FileNotFoundError:  # retention was here between the look and the read: look again
                self._forget_place(route.slot, fetch.session.number)
                entry = self._read_one(fetch, wanted, route)
        except LogReadError as error:
            if error.code is not ErrorCode.NOT_READY:
                self._say(route, f"fetch_refused code={error.code.name} reason={str(error)!r} offset={wanted.offset}")
            return self._refusal(wanted, route, error.code, error.resume_offset)
        except OSError as error:
            self._say(route, f"read_failed error={str(error)!r} offset={wanted.offset}")
            return self._refusal(wanted, route, ErrorCode.NOT_READY if error.errno in SHORTAGES else ErrorCode.STORAGE_ERROR)
        if self._said:
            self._said.pop(route.slot, None)
        return entry

    def _say(self, route: Assignment, what: str) -> None:
        if self._said.get(route.slot) != what:
            self._said[route.slot] = what
            logger.warning("%s topic=%s partition=%d", what, route.topic, route.partition)

    def _refusal(self, wanted: FetchEntry, route: Assignment, code: ErrorCode, resume_offset: int = -1) -> FetchedEntry:
        try:
            state = self._reader.state(route)
        except LogReadError:
            return FetchedEntry(wanted.topic_id, wanted.partition, code, -1, 0, -1, -1, resume_offset)
        return FetchedEntry(
            wanted.topic_id, wanted.partition, code, state.leader_epoch, 0, state.high_watermark, state.log_start_offset, resume_offset
        )

    def _read_one(self, fetch: Fetch, wanted: FetchEntry, route: Assignment) -> FetchedEntry:
        """One partition's batches into the fetch's buffer; a first batch larger than the limit gets a buffer of its own size."""
        state = self._reader.state(route)
        self._reader.check_epoch(route, state, wanted.leader_epoch, wanted.offset)
        if not state.log_start_offset <= wanted.offset <= state.high_watermark:
            raise LogReadError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {wanted.offset} is not between {state.log_start_offset} and {state.high_watermark}"
            )
        length = 0
        room = min(fetch.limit - fetch.used, wanted.max_bytes)
        if wanted.offset < state.high_watermark and room > 0:
            try:
                length = self._read_batches(fetch, wanted, route, state, room)
            except ColdRead:
                if not fetch.used:
                    raise
                # What lies before it is sent; it is the first that is read when its client asks again.
        return FetchedEntry(
            wanted.topic_id, wanted.partition, 0, state.leader_epoch, length, state.high_watermark, state.log_start_offset, -1
        )

    def _read_batches(self, fetch: Fetch, wanted: FetchEntry, route: Assignment, state: PartitionState, room: int) -> int:
        """How many bytes of whole batches were put behind what is in the buffer."""
        number, used = fetch.session.number, fetch.used
        blocking = fetch.cold_tries >= COLD_TRIES
        at_slot = self._places.get(route.slot)
        hint = None if at_slot is None else at_slot.get(number)
        buffer = fetch.buffer
        if buffer is None and len(fetch.request.entries) == 1:
            made = self._next_reads.take(fetch.session, route, state, wanted.offset, room)
            if made is not None:
                fetch.buffer, span = made
                self._remember_place(fetch.session, route.slot, at_slot, span.following)
                return span.end
        if buffer is None:
            buffer = fetch.buffer = self._outgoing.new_buffer(fetch.limit)
        try:
            result = self._reader.read(route, state, wanted.offset, hint, memoryview(buffer)[used : used + room], blocking)
            while isinstance(result, int) and used == 0:
                buffer = fetch.buffer = self._outgoing.new_buffer(result)
                result = self._reader.read(route, state, wanted.offset, hint, memoryview(buffer)[:result], blocking)
        except ColdRead:
            if not used:
                fetch.buffer = None  # nothing is in it, and the disk may take long
            raise
        if isinstance(result, int):
            return 0
        length = result.end - result.start
        if result.start:
            # The wanted offset lies in a later batch than the index led to: close the gap.
            buffer[used : used + length] = buffer[used + result.start : used + result.end]
        self._remember_place(fetch.session, route.slot, at_slot, result.following)
        return length

    # ---- places ----------------------------------------------------------------------------------------------------------------------

    def _remember_place(self, session: Session, slot: int, at_slot: dict[int, Place] | None, place: Place) -> None:
        if at_slot is not None and session.number in at_slot:
            at_slot[session.number] = place
            return
        if self._place_count >= PLACES_MAX:
            self._places.clear()
            self._parked.forget_places()
            self._place_count = 0
        self._places.setdefault(slot, {})[session.number] = place
        self._place_count += 1
        self._parked.note_place(session, slot)

    def _forget_place(self, slot: int, number: int) -> None:
        at_slot = self._places.get(slot)
        if at_slot is not None and at_slot.pop(number, None) is not None:
            self._place_count -= 1
            if not at_slot:
                del self._places[slot]
