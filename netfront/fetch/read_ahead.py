"""What a client will ask for next, read while its last answer is on its way and it works on it.

A client asks behind the batches of an answer only when it has the answer, and between two answers neither it nor the sockets have anything to do while this
front reads. So behind an answer that was filled the next one is read into a buffer of its own, and is there when it is asked for.

Owner: one front. Invariants: what is handed out was below the high watermark, of the leader epoch and of the topic that the request meets, and begins at
    the offset that it names: a log's bytes do not change under its watermark. One read for a session, AHEAD_MAX_BYTES in all; what was not asked for within
    AHEAD_MAX_NS gives place to others.
Crash: nothing is lost but a read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from netfront.log_reader import ColdRead, LogReader, LogReadError, Place, Span
from netfront.sessions import Session
from shm.catalog_messages import Assignment
from shm.partition_table import PartitionState

AHEAD_MAX_BYTES = 16 << 20
AHEAD_MAX_NS = 1_000_000_000


class Buffers(Protocol):
    """Of a transport."""

    def new_buffer(self, size: int) -> bytearray: ...


@dataclass(slots=True)
class NextRead:
    """One of them, made or still to be made."""

    route: Assignment
    place: Place
    room: int
    """How many bytes its answer may have."""
    began_ns: int
    leader_epoch: int = -1
    buffer: bytearray | None = None
    span: Span | None = None


class NextReads:
    """See the module's docstring."""

    def __init__(self, reader: LogReader, buffers: Buffers) -> None:
        self._reader = reader
        self._buffers = buffers
        self._by_session: dict[int, NextRead] = {}
        self._due: dict[int, None] = {}
        """Sessions whose read is still to be made."""
        self._bytes = 0

    @property
    def is_due(self) -> bool:
        """Whether there is a read to be made: when nothing else is."""
        return bool(self._due)

    def expect(self, session: Session, route: Assignment, place: Place, room: int, now_ns: int) -> None:
        """This client was sent what lies before `place`, as much as it takes at once."""
        self._forget(session.number)
        if self._bytes + room > AHEAD_MAX_BYTES:
            for number in [number for number, read in self._by_session.items() if now_ns - read.began_ns > AHEAD_MAX_NS]:
                self._forget(number)
            if self._bytes + room > AHEAD_MAX_BYTES:
                return
        self._by_session[session.number] = NextRead(route, place, room, now_ns)
        self._due[session.number] = None
        self._bytes += room

    def make_one(self) -> None:
        """Make a read that is due. What stands in its way is met again by the request, which is told."""
        number = next(iter(self._due))
        read = self._by_session[number]
        del self._due[number]
        try:
            state = self._reader.state(read.route)
            if state.log_start_offset <= read.place.offset < state.high_watermark:
                buffer = self._buffers.new_buffer(read.room)
                found = self._reader.read(read.route, state, read.place.offset, read.place, memoryview(buffer)[: read.room], False)
                if isinstance(found, Span) and not found.start and 2 * found.end > read.room:  # less of it is soon more
                    read.leader_epoch, read.buffer, read.span = state.leader_epoch, buffer, found
                    return
        except (ColdRead, LogReadError, OSError):
            pass
        self._forget(number)

    def take(self, session: Session, route: Assignment, state: PartitionState, offset: int, room: int) -> tuple[bytearray, Span] | None:
        """What was read for this request, in a buffer that is the caller's then; None: nothing was."""
        read = self._by_session.get(session.number)
        if read is None:
            return None
        self._forget(session.number)
        if read.buffer is None or read.span is None:
            return None
        is_same = (read.route.topic_id, read.route.partition, read.route.slot) == (route.topic_id, route.partition, route.slot)
        if not is_same or read.leader_epoch != state.leader_epoch or read.place.offset != offset or read.span.end > room:
            return None
        return read.buffer, read.span

    def forget_session(self, session: Session) -> None:
        """The client is gone."""
        self._forget(session.number)

    def forget_slot(self, slot: int) -> None:
        """The partition is served no more."""
        for number in [number for number, read in self._by_session.items() if read.route.slot == slot]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        read = self._by_session.pop(number, None)
        if read is not None:
            self._due.pop(number, None)
            self._bytes -= read.room
