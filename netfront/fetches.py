"""Fetches: served from the page cache, parked until there is something to serve.

A fetch names partitions and offsets. It is answered at once when it finds `min_bytes`, an error, or when it does not want to wait; else
it is parked
on the timing wheel and looked at again when a watermark of its partitions moves. Reads that would wait for the disk go through the
reader pool first.

Owner: one front. Invariants: a fetch is answered exactly once; at least one whole batch is sent however small the limits, so that every
reader gets on;
    what is under way to a client stays below WINDOW_BYTES.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from netfront.log_reader import ColdRead, LogReader, LogReadError, Place
from netfront.reader_pool import ReadAhead
from netfront.routing import Routing
from netfront.sessions import Session
from shm.assignments import Assignment
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import FetchedEntry, FetchEntry, FetchRequest
from workers.timing_wheel import Timer, TimingWheel

logger = logging.getLogger(__name__)

RESPONSE_MAX_BYTES = 16 << 20
WINDOW_BYTES = 64 << 20
WAIT_MAX_MS = 60_000
COLD_TRIES = 3
PLACES_MAX = 65_536

Respond = Callable[["Fetch", list[FetchedEntry], memoryview], None]


class Fetch:
    """One request on its way to its answer."""

    __slots__ = ("cold_tries", "correlation_id", "is_done", "is_reading", "request", "session", "timer", "wants_now")

    def __init__(self, session: Session, correlation_id: int, request: FetchRequest) -> None:
        self.session = session
        self.correlation_id = correlation_id
        self.request = request
        self.timer: Timer[Fetch] | None = None
        self.is_done = False
        self.is_reading = False
        self.wants_now = request.max_wait_ms == 0
        self.cold_tries = 0


class _Attempt(NamedTuple):
    entries: list[FetchedEntry]
    byte_count: int
    must_answer: bool


class FetchService:
    """Every fetch of a front."""

    def __init__(
        self,
        reader: LogReader,
        routing: Routing,
        pool: ReadAhead,
        wheel: TimingWheel[Fetch],
        respond: Respond,
        new_buffer: Callable[[int], bytearray],
    ) -> None:
        self._reader = reader
        self._routing = routing
        self._pool = pool
        self._wheel = wheel
        self._respond = respond
        self._new_buffer = new_buffer
        self._parked: dict[int, dict[Fetch, None]] = {}
        """slot -> fetches that wait for it."""
        self._places: dict[tuple[int, int], Place] = {}
        """(session, slot) -> where that client's next read goes on, so that following a log needs no index."""
        self._said: dict[int, str] = {}
        """slot -> what was last said of it in the log; a client that tries again is no news."""

    def begin(self, fetch: Fetch, now_ns: int) -> None:
        """Serve or park."""
        if not self._attempt(fetch) and not fetch.is_reading:
            self._park(fetch, now_ns)

    def on_settled(self, slots: set[int]) -> None:
        """Watermarks of these slots may have moved."""
        for slot in slots:
            for fetch in list(self._parked.get(slot, ())):
                self._attempt(fetch)

    def on_timeouts(self, now_ns: int) -> int:
        fetches = self._wheel.advance(now_ns)
        for fetch in fetches:
            fetch.wants_now = True
            if not fetch.is_reading:
                self._attempt(fetch)
        return len(fetches)

    def on_reads_completed(self, now_ns: int) -> int:
        tokens = self._pool.completed()
        for fetch in tokens:
            assert isinstance(fetch, Fetch)
            fetch.is_reading = False
            if not fetch.is_done:
                self.begin(fetch, now_ns)
        return len(tokens)

    def forget_session(self, session: Session) -> None:
        """The client is gone: its fetches need no answer."""
        for fetches in list(self._parked.values()):
            for fetch in [f for f in fetches if f.session is session]:
                self._unpark(fetch)
                fetch.is_done = True
        for key in [key for key in self._places if key[0] == session.number]:
            del self._places[key]

    def answer_all(self) -> None:
        """The front is stopping: nobody waits longer."""
        for fetches in list(self._parked.values()):
            for fetch in list(fetches):
                fetch.wants_now = True
                self._attempt(fetch)

    # ---- parking ---------------------------------------------------------------------------------------------------------------------

    def _slots(self, fetch: Fetch) -> list[int]:
        routes = (self._routing.find(entry.topic_id, entry.partition) for entry in fetch.request.entries)
        return [route.slot for route in routes if route is not None]

    def _park(self, fetch: Fetch, now_ns: int) -> None:
        if fetch.timer is None:
            wait_ms = min(fetch.request.max_wait_ms, WAIT_MAX_MS)
            fetch.timer = self._wheel.add(now_ns + wait_ms * 1_000_000, fetch)
        for slot in self._slots(fetch):
            self._parked.setdefault(slot, {})[fetch] = None

    def _unpark(self, fetch: Fetch) -> None:
        if fetch.timer is not None:
            self._wheel.cancel(fetch.timer)
        for slot in self._slots(fetch):
            waiting = self._parked.get(slot)
            if waiting is not None:
                waiting.pop(fetch, None)
                if not waiting:
                    del self._parked[slot]

    # ---- serving ---------------------------------------------------------------------------------------------------------------------

    def _attempt(self, fetch: Fetch) -> bool:
        """Answer `fetch` if it can be answered now."""
        if fetch.is_done or fetch.is_reading:
            return fetch.is_done
        session, request = fetch.session, fetch.request
        window_full = session.fetch_sent - session.fetch_received >= WINDOW_BYTES
        if window_full and not fetch.wants_now:
            return False
        limit = 0 if window_full else min(request.max_bytes, RESPONSE_MAX_BYTES)
        buffer = self._new_buffer(limit) if limit and self._has_something(request) else bytearray()
        try:
            attempt, buffer = self._read_all(fetch, buffer, min(limit, len(buffer)))
        except ColdRead as cold:
            fetch.is_reading = True
            fetch.cold_tries += 1
            self._pool.submit(cold.fd, cold.position, cold.length, fetch)
            return False
        if not attempt.must_answer and attempt.byte_count < max(1, request.min_bytes) and not fetch.wants_now:
            return False
        self._unpark(fetch)
        fetch.is_done = True
        session.fetch_sent += attempt.byte_count
        self._respond(fetch, attempt.entries, memoryview(buffer)[: attempt.byte_count])
        return True

    def _has_something(self, request: FetchRequest) -> bool:
        """Whether any partition has records at the wanted offset: parking must not cost a buffer."""
        for entry in request.entries:
            route = self._routing.find(entry.topic_id, entry.partition)
            if route is not None:
                try:
                    if self._reader.state(route).high_watermark > entry.offset:
                        return True
                except LogReadError:
                    continue
        return False

    def _read_all(self, fetch: Fetch, buffer: bytearray, limit: int) -> tuple[_Attempt, bytearray]:
        entries: list[FetchedEntry] = []
        used = 0
        must_answer = False
        for wanted in fetch.request.entries:
            route = self._routing.find(wanted.topic_id, wanted.partition)
            if route is None:
                code = ErrorCode.PARTITION_OUT_OF_RANGE if self._routing.knows(wanted.topic_id) else ErrorCode.UNKNOWN_TOPIC
                entries.append(FetchedEntry(wanted.topic_id, wanted.partition, code, -1, 0, -1, -1, -1))
                must_answer = True
                continue
            try:
                try:
                    entry, buffer = self._read_one(fetch, wanted, route, buffer, used, limit)
                except FileNotFoundError:  # retention was here between the look and the read: look again
                    self._places.pop((fetch.session.number, route.slot), None)
                    entry, buffer = self._read_one(fetch, wanted, route, buffer, used, limit)
            except LogReadError as error:
                if error.code is not ErrorCode.NOT_READY:
                    self._say(route, f"fetch_refused code={error.code.name} reason={str(error)!r} offset={wanted.offset}")
                entry = self._refusal(wanted, route, error.code, error.resume_offset)
            except OSError as error:
                self._say(route, f"read_failed error={str(error)!r} offset={wanted.offset}")
                entry = self._refusal(wanted, route, ErrorCode.STORAGE_ERROR)
            if self._said and not entry.error:
                self._said.pop(route.slot, None)
            must_answer = must_answer or bool(entry.error)
            used += entry.data_length
            entries.append(entry)
        return _Attempt(entries, used, must_answer), buffer

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

    def _read_one(
        self, fetch: Fetch, wanted: FetchEntry, route: Assignment, buffer: bytearray, used: int, limit: int
    ) -> tuple[FetchedEntry, bytearray]:
        """One partition's batches into `buffer` from `used` on; a first batch larger than the limit gets a buffer of its own size."""
        state = self._reader.state(route)
        self._reader.check_epoch(route, state, wanted.leader_epoch, wanted.offset)
        if not state.log_start_offset <= wanted.offset <= state.high_watermark:
            raise LogReadError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {wanted.offset} is not between {state.log_start_offset} and {state.high_watermark}"
            )
        length = 0
        room = min(limit - used, wanted.max_bytes)
        if wanted.offset < state.high_watermark and room > 0:
            key = (fetch.session.number, route.slot)
            blocking = fetch.cold_tries >= COLD_TRIES
            result = self._reader.read(route, state, wanted.offset, self._places.get(key), memoryview(buffer)[used : used + room], blocking)
            while isinstance(result, int) and used == 0:
                buffer = self._new_buffer(result)
                result = self._reader.read(route, state, wanted.offset, self._places.get(key), memoryview(buffer)[:result], blocking)
            if not isinstance(result, int):
                length = result.end - result.start
                if result.start:
                    # The wanted offset lies in a later batch than the index led to: close the gap.
                    buffer[used : used + length] = buffer[used + result.start : used + result.end]
                if len(self._places) >= PLACES_MAX:
                    self._places.clear()
                self._places[key] = result.following
        return FetchedEntry(
            wanted.topic_id, wanted.partition, 0, state.leader_epoch, length, state.high_watermark, state.log_start_offset, -1
        ), buffer
