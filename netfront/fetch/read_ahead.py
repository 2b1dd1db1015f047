"""Read-ahead: reads a client's next fetch while its last response is in flight.

A client requests the next batches only after it has received the last response. Meanwhile the
front, the sockets and the client would wait for each other. So after a full response the next one
is read into its own buffer.

Owner: one front.

Invariants:
- A read that is handed out matches the request's topic, leader epoch, offset and isolation level,
  and lies below the level's end. What a level shows below its end never changes.
- Each session has one read, and all together hold AHEAD_MAX_BYTES. After AHEAD_MAX_NS an unused
  read gives way to others.

Crash: only the reads are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from netfront.fetch.log.isolation import Isolation, end_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import ColdRead, LogReadError, Place, Span
from netfront.session.sessions import Session
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState

AHEAD_MAX_BYTES = 16 << 20
AHEAD_MAX_NS = 1_000_000_000


class Buffers(Protocol):
    """Source of response buffers: the transport."""

    def new_buffer(self, size: int) -> bytearray: ...


@dataclass(slots=True)
class PendingRead:
    """One read, done or still due."""

    route: Assignment
    place: Place
    room: int
    """Size limit of its response, in bytes."""
    began_ns: int
    isolation: Isolation
    leader_epoch: int = -1
    buffer: bytearray | None = None
    span: Span | None = None


class ReadAhead:
    """Reads ahead of all sessions of a front."""

    def __init__(self, reader: LogReader, buffers: Buffers) -> None:
        self._reader = reader
        self._buffers = buffers
        self._by_session: dict[int, PendingRead] = {}
        self._due: dict[int, None] = {}
        """Sessions whose read is still due."""
        self._bytes = 0

    @property
    def is_due(self) -> bool:
        """True if a read is due. Do it when there is no other work."""
        return bool(self._due)

    def expect(
        self,
        session: Session,
        route: Assignment,
        place: Place,
        room: int,
        now_ns: int,
        isolation: Isolation,
    ) -> None:
        """Schedule a read at `place` for a client that was sent a full response up to there."""
        self._forget(session.number)
        if self._bytes + room > AHEAD_MAX_BYTES:
            for number in [
                number
                for number, read in self._by_session.items()
                if now_ns - read.began_ns > AHEAD_MAX_NS
            ]:
                self._forget(number)
            if self._bytes + room > AHEAD_MAX_BYTES:
                return
        self._by_session[session.number] = PendingRead(route, place, room, now_ns, isolation)
        self._due[session.number] = None
        self._bytes += room

    def make_one(self) -> None:
        """Do one due read. Errors are ignored: the client's own request reports them."""
        number = next(iter(self._due))
        read = self._by_session[number]
        del self._due[number]
        try:
            state = self._reader.state(read.route)
            if state.log_start_offset <= read.place.offset < end_of(state, read.isolation):
                buffer = self._buffers.new_buffer(read.room)
                found = self._reader.read(
                    read.route,
                    state,
                    read.place.offset,
                    read.place,
                    memoryview(buffer)[: read.room],
                    False,
                    read.isolation,
                )
                # a small read is worth little: more records may arrive soon
                if isinstance(found, Span) and not found.start and 2 * found.end > read.room:
                    read.leader_epoch, read.buffer, read.span = state.leader_epoch, buffer, found
                    return
        except (ColdRead, LogReadError, OSError):
            pass
        self._forget(number)

    def take(
        self,
        session: Session,
        route: Assignment,
        state: PartitionState,
        offset: int,
        room: int,
        isolation: Isolation,
    ) -> tuple[bytearray, Span] | None:
        """Return the read for this request, or None. The caller owns its buffer."""
        read = self._by_session.get(session.number)
        if read is None:
            return None
        self._forget(session.number)
        if read.buffer is None or read.span is None:
            return None
        is_same = (read.route.topic_id, read.route.partition, read.route.slot) == (
            route.topic_id,
            route.partition,
            route.slot,
        )
        if (
            not is_same
            or read.leader_epoch != state.leader_epoch
            or read.place.offset != offset
            or read.isolation is not isolation
            or read.span.end > room
        ):
            return None
        return read.buffer, read.span

    def forget_session(self, session: Session) -> None:
        """Drop the read of a session that has ended."""
        self._forget(session.number)

    def forget_slot(self, slot: int) -> None:
        """Drop the reads of a partition that is no longer served."""
        for number in [
            number for number, read in self._by_session.items() if read.route.slot == slot
        ]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        read = self._by_session.pop(number, None)
        if read is not None:
            self._due.pop(number, None)
            self._bytes -= read.room
