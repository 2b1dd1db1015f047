"""Fetches: served from the page cache, parked until there is something to serve.

A fetch names partitions and offsets. First its partitions are looked at; where none has anything to give, it is parked on the timing wheel and at the slots
of its partitions, and only what moves is looked at again. Then its answer is put together, partition by partition. Both passes remember where they are,
so that a fetch of thousands of partitions is served in slices. Reads that would wait for the disk go through the reader pool first.

Owner: one front. Invariants: a fetch is answered exactly once; at least one whole batch is sent however small the limits, so that every reader gets on;
    what is under way to a client stays below its window, and one answer; a session that ends, and a partition that is dropped, leave nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from netfront.log_reader import ColdRead, LogReader, LogReadError, Place
from netfront.lookups import OUT_OF_RESOURCES
from netfront.parked import Fetch, Parked
from netfront.reader_pool import ReadAhead
from netfront.routing import Routing
from netfront.sessions import Session
from netfront.slices import Slices, Task
from shm.assignments import Assignment
from shm.partition_table import PartitionState
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import FetchedEntry, FetchEntry
from workers.timing_wheel import NEVER_NS, TimingWheel

logger = logging.getLogger(__name__)

RESPONSE_MAX_BYTES = 16 << 20
WINDOW_BYTES = 64 << 20
"""What a client may not have reported as received."""
SESSION_UNSENT_MAX_BYTES = 32 << 20
UNSENT_MAX_BYTES = 256 << 20
"""Of answers that ZeroMQ still holds, for one client and for all. Above the second, who has nothing under way still gets SCARCE_BYTES, up to twice as much."""
SCARCE_BYTES = 64 << 10
HELD_INTERVAL_NS = 5_000_000
"""How often fetches are looked at that wait for their client to take in what it was sent."""
WAIT_MAX_MS = 60_000
COLD_TRIES = 3
READS_MAX = 128
"""Fetches that the reader pool reads for at a time: each holds a descriptor."""
PLACES_MAX = 65_536
ENTRIES_AT_ONCE = 64
"""A fetch of more partitions is served in slices."""
LOOKS_PER_STEP = 256
_UNITS_OF_A_READ = 8
_SCRATCH_BYTES = 64 << 10


Respond = Callable[[Fetch, list[FetchedEntry], memoryview], None]
Refuse = Callable[[Fetch, Exception], None]


class Outgoing(Protocol):
    """What fetches need of a transport (see `router.Router`)."""

    def new_buffer(self, size: int) -> bytearray: ...
    def unsent_bytes(self, identity: bytes) -> int: ...
    def unsent_total(self) -> int: ...


class FetchService:
    """Every fetch of a front."""

    def __init__(
        self,
        *,
        reader: LogReader,
        routing: Routing,
        pool: ReadAhead,
        wheel: TimingWheel[Fetch],
        outgoing: Outgoing,
        slices: Slices,
        respond: Respond,
        refuse: Refuse,
    ) -> None:
        self._reader = reader
        self._routing = routing
        self._pool = pool
        self._wheel = wheel
        self._outgoing = outgoing
        self._slices = slices
        self._respond = respond
        self._refuse = refuse
        self._parked = Parked(wheel)
        self._places: dict[int, dict[int, Place]] = {}
        """slot -> session -> where that client's next read goes on, so that following a log needs no index."""
        self._place_count = 0
        self._said: dict[int, str] = {}
        """slot -> what was last said of it in the log; a client that tries again is no news."""
        self._moved: dict[int, list[Fetch]] = {}
        """slot -> fetches that are still to be looked at since something settled there."""
        self._moved_again: set[int] = set()
        self._held: dict[Fetch, None] = {}
        """Fetches that could be answered, were their client to take in what it was sent."""
        self._look_at_held_ns = NEVER_NS
        self._reading = 0
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._stopping = False
        self._now_ns = 0

    # ---- what happens ----------------------------------------------------------------------------------------------------------------

    def begin(self, fetch: Fetch, now_ns: int) -> None:
        """Serve or park. Raises WireError when too much of this client, or of all, is parked."""
        self._now_ns = now_ns
        try:
            if len(fetch.request.entries) > ENTRIES_AT_ONCE:
                self._parked.register(fetch)
            self._go_on(fetch, -1)
        except Exception:
            self._end(fetch)
            raise

    def on_settled(self, slots: set[int]) -> None:
        """Watermarks of these slots may have moved."""
        for slot in slots:
            fetches = self._parked.at(slot)
            if fetches is None:
                continue
            if slot in self._moved:
                self._moved_again.add(slot)
            else:
                self._moved[slot] = list(fetches)
        if self._moved:
            self.look_at_moved()

    def look_at_moved(self) -> int:
        """Fetches at slots where something has settled, a bounded number in a turn."""
        count = 0
        while self._moved and count < LOOKS_PER_STEP and not self._slices.is_spent:
            slot, fetches = next(iter(self._moved.items()))
            while fetches and count < LOOKS_PER_STEP and not self._slices.is_spent:
                count += 1
                self._slices.spend(1)
                self._guarded(self._on_moved, fetches.pop(), slot)
            if not fetches:
                del self._moved[slot]
                if slot in self._moved_again:
                    self._moved_again.discard(slot)
                    self._moved[slot] = list(self._parked.at(slot) or ())
        return count

    def on_dropped(self, assignment: Assignment) -> None:
        """The partition is served no more: who waits for it hears so, and nothing of it is kept."""
        slot = assignment.slot
        self._said.pop(slot, None)
        self._place_count -= len(self._places.pop(slot, ()))
        self.on_settled({slot})

    def on_timeouts(self, now_ns: int) -> int:
        self._now_ns = now_ns
        fetches = self._wheel.advance(now_ns, LOOKS_PER_STEP)
        for fetch in fetches:
            fetch.wants_now = True
            self._look_again(fetch)
        return len(fetches)

    def on_reads_completed(self, now_ns: int) -> int:
        self._now_ns = now_ns
        tokens = self._pool.completed()
        for fetch in tokens:
            assert isinstance(fetch, Fetch)
            fetch.is_reading = False
            self._reading -= 1
            self._look_again(fetch)
        return len(tokens)

    def on_drained(self, now_ns: int) -> int:
        """Clients may have taken in what they were sent."""
        self._now_ns = now_ns
        if not self._held:
            self._look_at_held_ns = NEVER_NS
            return 0
        self._look_at_held_ns = now_ns + HELD_INTERVAL_NS
        full: set[int] = set()
        count = 0
        for fetch in list(self._held):
            if fetch.session.number in full:
                continue
            if count == LOOKS_PER_STEP or self._slices.is_spent:
                break
            del self._held[fetch]
            self._look_again(fetch)
            if fetch in self._held:
                full.add(fetch.session.number)
            else:
                count += 1
        return count

    def forget_session(self, session: Session) -> None:
        """The client is gone: its fetches need no answer."""
        for fetch in self._parked.fetches_of(session):
            self._end(fetch)
        for slot in self._parked.forget_session(session):
            places = self._places.get(slot)
            if places is not None and places.pop(session.number, None) is not None:
                self._place_count -= 1
                if not places:
                    del self._places[slot]

    def answer_all(self) -> None:
        """The front is stopping: nobody waits longer."""
        self._stopping = True
        for fetch in self._parked.all():
            fetch.wants_now = True
            self._look_again(fetch)

    @property
    def has_more(self) -> bool:
        """Whether there is something to look at now."""
        return bool(self._moved)

    def next_deadline_ns(self) -> int:
        return self._look_at_held_ns

    # ---- deciding --------------------------------------------------------------------------------------------------------------------

    def _look_again(self, fetch: Fetch) -> None:
        """Something has changed: its time is up, its pages are in memory, its client has room."""
        if not fetch.is_done and not fetch.is_reading and not fetch.is_in_slices:
            self._guarded(self._go_on, fetch, -1)

    def _guarded(self, act: Callable[[Fetch, int], None], fetch: Fetch, slot: int) -> None:
        """What was not expected of one fetch is the end of that fetch only."""
        try:
            act(fetch, slot)
        except Exception as error:
            self._fail(fetch, error)

    def _fail(self, fetch: Fetch, error: Exception) -> None:
        if not fetch.is_done:
            self._end(fetch)
            self._refuse(fetch, error)

    def _go_on(self, fetch: Fetch, _slot: int) -> None:
        if len(fetch.request.entries) > ENTRIES_AT_ONCE:
            self._in_slices(fetch)
        else:
            self._serve(fetch)

    def _on_moved(self, fetch: Fetch, slot: int) -> None:
        """Something settled in one of its partitions."""
        if fetch.is_done:
            return
        index = fetch.slots.get(slot)
        if index is None or fetch.is_reading or fetch in self._held:
            return
        if fetch.is_in_slices:
            fetch.has_something = fetch.has_moved = True
            return
        if not self._has_something(fetch.request.entries[index]):
            return
        fetch.has_something = True
        if not fetch.was_short or self._has_enough(fetch, index):
            self._go_on(fetch, slot)

    def _has_something(self, wanted: FetchEntry) -> bool:
        """Whether this partition has records at the wanted offset, or something is wrong with it: parking must not cost a buffer."""
        route = self._routing.find(wanted.topic_id, wanted.partition)
        if route is None:
            return True
        try:
            return self._reader.state(route).high_watermark != wanted.offset
        except LogReadError:
            return True

    def _has_enough(self, fetch: Fetch, index: int) -> bool:
        """Of a fetch that fell short of its min_bytes: count what has come since in one partition, from where the last count ended."""
        wanted = fetch.request.entries[index]
        route = self._routing.find(wanted.topic_id, wanted.partition)
        if route is None:
            return True
        try:
            state = self._reader.state(route)
            while fetch.counted_bytes < fetch.min_bytes:
                place = fetch.counted_to.get(index)
                offset = wanted.offset if place is None else place.offset
                if offset >= state.high_watermark:
                    return False
                found = self._reader.read(route, state, offset, place, memoryview(self._scratch), False)
                if isinstance(found, int):
                    return True  # a batch larger than what is counted with
                self._slices.spend(_UNITS_OF_A_READ)
                if found.end == found.start:
                    return False
                fetch.counted_bytes += found.end - found.start
                fetch.counted_to[index] = found.following
        except (LogReadError, ColdRead, OSError):
            return True
        return True

    # ---- serving ---------------------------------------------------------------------------------------------------------------------

    def _in_slices(self, fetch: Fetch) -> None:
        def work() -> Iterator[int]:
            while not self._advance(fetch, ENTRIES_AT_ONCE):
                yield ENTRIES_AT_ONCE
            fetch.is_in_slices = False

        fetch.is_in_slices = True
        self._slices.begin(Task(fetch.session, 0, work, lambda error: self._fail(fetch, error)), try_now=False)

    def _serve(self, fetch: Fetch) -> None:
        """At once. What it costs is written on this turn's account."""
        self._slices.spend(_UNITS_OF_A_READ + len(fetch.request.entries))
        while not self._advance(fetch, ENTRIES_AT_ONCE):
            pass

    def _advance(self, fetch: Fetch, units: int) -> bool:
        """Go on with a fetch. True: it is answered, or it waits; False: these units are spent."""
        if fetch.is_done:
            return True
        if not fetch.is_answering:
            if not self._look(fetch, units):
                return False
            if not (fetch.has_something or fetch.wants_now):
                self._park(fetch)
                return True
            if not self._may_answer(fetch):
                self._park(fetch)
                self._hold(fetch)
                return True
            fetch.is_answering = True
            fetch.has_moved = False
            fetch.at = 0
        return self._answer(fetch, units)

    def _look(self, fetch: Fetch, units: int) -> bool:
        """The first pass: whether there is something to give. Of a large fetch each partition's slot is noted at once, since things go on between slices."""
        entries = fetch.request.entries
        is_large = len(entries) > ENTRIES_AT_ONCE
        while fetch.at < len(entries):
            if units <= 0:
                return False
            units -= 1
            wanted = entries[fetch.at]
            if is_large:
                route = self._routing.find(wanted.topic_id, wanted.partition)
                if route is not None:
                    self._parked.note(fetch, route.slot, fetch.at)
            fetch.at += 1
            if not fetch.has_something and self._has_something(wanted):
                fetch.has_something = True
                if not is_large:
                    fetch.at = len(entries)
        return True

    def _may_answer(self, fetch: Fetch) -> bool:
        """Decide how much the client may be sent now; False: nothing, it has to take in what it was sent before."""
        session, request = fetch.session, fetch.request
        limit = min(request.max_bytes, RESPONSE_MAX_BYTES)
        if session.fetch_sent - session.fetch_received >= WINDOW_BYTES:
            limit = 0
            if not fetch.wants_now:
                return False
        if not self._stopping:
            unsent = self._outgoing.unsent_bytes(session.identity)
            if unsent >= SESSION_UNSENT_MAX_BYTES:
                return False
            total = self._outgoing.unsent_total()
            if total >= UNSENT_MAX_BYTES:
                if unsent or total >= 2 * UNSENT_MAX_BYTES:
                    return False
                limit = min(limit, SCARCE_BYTES)
        fetch.limit = limit
        return True

    def _hold(self, fetch: Fetch) -> None:
        self._held[fetch] = None
        if self._look_at_held_ns == NEVER_NS:
            self._look_at_held_ns = self._now_ns + HELD_INTERVAL_NS

    def _park(self, fetch: Fetch) -> None:
        """Wait: on the wheel, and at the slots of its partitions."""
        if fetch.timer is None:
            self._parked.register(fetch)
            entries = fetch.request.entries
            if len(entries) <= ENTRIES_AT_ONCE:
                for index, wanted in enumerate(entries):
                    route = self._routing.find(wanted.topic_id, wanted.partition)
                    if route is not None:
                        self._parked.note(fetch, route.slot, index)
            fetch.timer = self._wheel.add(self._now_ns + min(fetch.request.max_wait_ms, WAIT_MAX_MS) * 1_000_000, fetch)

    def _end(self, fetch: Fetch) -> None:
        """Answered, or not to be."""
        fetch.is_done = True
        fetch.is_in_slices = False
        fetch.buffer = None
        self._held.pop(fetch, None)
        self._parked.remove(fetch)

    def _answer(self, fetch: Fetch, units: int) -> bool:
        """The second pass: each partition's entry, and its batches."""
        entries = fetch.request.entries
        while fetch.at < len(entries):
            if units <= 0:
                return False
            wanted = entries[fetch.at]
            try:
                entry = self._entry(fetch, wanted)
            except ColdRead as cold:
                self._read_ahead(fetch, cold)
                return True
            fetch.cold_tries = 0
            if entry.data_length:
                units -= _UNITS_OF_A_READ
                fetch.used += entry.data_length
            else:
                units -= 1
            if entry.error:
                fetch.must_answer = True
            fetch.answer.append(entry)
            fetch.at += 1
        if not (fetch.must_answer or fetch.wants_now or fetch.was_short or fetch.has_moved) and fetch.used < fetch.min_bytes:
            self._fall_short(fetch)
            return True
        data = memoryview(fetch.buffer or b"")[: fetch.used]
        answer = fetch.answer
        self._end(fetch)
        fetch.session.fetch_sent += len(data)
        self._respond(fetch, answer, data)
        return True

    def _fall_short(self, fetch: Fetch) -> None:
        """Less than min_bytes: wait, and count on from here. It is put together once more, then it is answered whatever there is."""
        fetch.was_short = True
        fetch.counted_bytes = fetch.used
        for index, entry in enumerate(fetch.answer):
            if entry.data_length:
                route = self._routing.find(entry.topic_id, entry.partition)
                place = None if route is None else self._places.get(route.slot, {}).get(fetch.session.number)
                if place is not None:
                    fetch.counted_to[index] = place
        fetch.begin_again()
        self._park(fetch)

    def _read_ahead(self, fetch: Fetch, cold: ColdRead) -> None:
        """Have the reader pool bring what is wanted into memory, or wait until it has a place free."""
        self._park(fetch)
        if self._reading >= READS_MAX:
            self._hold(fetch)
            return
        try:
            self._pool.submit(cold.fd, cold.position, cold.length, fetch)
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            self._hold(fetch)
            return
        self._reading += 1
        fetch.is_reading = True
        fetch.cold_tries += 1

    def _entry(self, fetch: Fetch, wanted: FetchEntry) -> FetchedEntry:
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
            return self._refusal(wanted, route, ErrorCode.NOT_READY if error.errno in OUT_OF_RESOURCES else ErrorCode.STORAGE_ERROR)
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
