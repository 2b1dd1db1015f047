"""Fetches: served from the page cache, parked until there is something to serve.

A fetch names partitions and offsets. First its partitions are looked at; where none has anything to give, it is parked on the timing wheel and at the slots
of its partitions, and only what moves is looked at again. Then its answer is put together, partition by partition. Both passes remember where they are,
so that a fetch of thousands of partitions is served in slices. Reads that would wait for the disk go through the reader pool first.

Owner: one front. Invariants: a fetch is answered exactly once; at least one whole batch is sent however small the limits, so that every reader gets on;
    what is under way to a client stays within `fetch_progress.allowance`; a session that ends, and a partition that is dropped, leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from netfront.fetch_entries import FetchEntries, Outgoing
from netfront.fetch_progress import UNITS_OF_A_READ, FetchProgress, allowance
from netfront.log_files import SHORTAGES
from netfront.log_reader import ColdRead, LogReader
from netfront.next_reads import NextReads
from netfront.parked import Fetch, Parked
from netfront.reader_pool import ReadAhead
from netfront.routing import Routing
from netfront.sessions import Session
from netfront.slices import Slices, Task
from shm.catalog_messages import Assignment
from tailrace.protocol.requests import FetchedEntry
from workers.timing_wheel import NEVER_NS, TimingWheel

HELD_INTERVAL_NS = 5_000_000
"""How often fetches are looked at that wait for their client to take in what it was sent."""
WAIT_MAX_MS = 60_000
READS_MAX = 128
"""Fetches that the reader pool reads for at a time: each holds a descriptor."""
ENTRIES_AT_ONCE = 64
"""A fetch of more partitions is served in slices."""
LOOKS_PER_STEP = 256


Respond = Callable[[Fetch, list[FetchedEntry], memoryview], None]
Refuse = Callable[[Fetch, Exception], None]


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
        self._progress = FetchProgress(reader, routing, slices)
        self._next_reads = NextReads(reader, outgoing)
        self._entries = FetchEntries(reader, routing, outgoing, self._parked, self._next_reads)
        self._moved: dict[int, list[Fetch]] = {}
        """slot -> fetches that are still to be looked at since something settled there."""
        self._moved_again: set[int] = set()
        self._held: dict[Fetch, None] = {}
        """Fetches that could be answered, were their client to take in what it was sent."""
        self._look_at_held_ns = NEVER_NS
        self._reading = 0
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
        if not self._moved and self._next_reads.is_due and not self._slices.is_spent:
            self._slices.spend(UNITS_OF_A_READ)
            self._next_reads.make_one()
            count += 1
        return count

    def on_dropped(self, assignment: Assignment) -> None:
        """The partition is no longer served: fetches that wait for it are told so, and nothing of it is kept."""
        self._entries.forget_slot(assignment.slot)
        self._next_reads.forget_slot(assignment.slot)
        self.on_settled({assignment.slot})

    def on_timeouts(self, now_ns: int) -> int:
        """Fetches whose max_wait_ms has passed are answered with what there is."""
        self._now_ns = now_ns
        fetches = self._wheel.advance(now_ns, LOOKS_PER_STEP)
        for fetch in fetches:
            fetch.wants_now = True
            self._look_again(fetch)
        return len(fetches)

    def on_reads_completed(self, now_ns: int) -> int:
        """What fetches waited for is in the page cache."""
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
            if fetch not in self._held or fetch.session.number in full:
                continue  # answering another has shown that this client is gone
            if not fetch.is_answering and not self._may_answer(fetch):
                full.add(fetch.session.number)
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
        self._next_reads.forget_session(session)
        self._entries.forget_session(session, self._parked.forget_session(session))

    @property
    def are_parked(self) -> bool:
        """Whether any waits for something to settle."""
        return self._parked.fetch_count > 0

    def answer_all(self) -> None:
        """The front is stopping: every fetch is answered with what there is."""
        self._stopping = True
        for fetch in self._parked.all():
            fetch.wants_now = True
            self._look_again(fetch)

    @property
    def has_more(self) -> bool:
        """Whether there is something to look at now."""
        return bool(self._moved) or self._next_reads.is_due

    def next_deadline_ns(self) -> int:
        """When `on_drained` next has something to do."""
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
        if not self._progress.has_something(fetch.request.entries[index]):
            return
        fetch.has_something = True
        if not fetch.was_short or self._progress.has_enough(fetch, index):
            self._go_on(fetch, slot)

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
        self._slices.spend(UNITS_OF_A_READ + len(fetch.request.entries))
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
            if not fetch.has_something and self._progress.has_something(wanted):
                fetch.has_something = True
                if not is_large:
                    fetch.at = len(entries)
        return True

    def _may_answer(self, fetch: Fetch) -> bool:
        """Decide how much the client may be sent now; False: nothing, it has to take in what it was sent before."""
        limit = allowance(fetch, self._outgoing, is_stopping=self._stopping)
        if limit is None:
            return False
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
                entry = self._entries.make(fetch, wanted)
            except ColdRead as cold:
                self._read_ahead(fetch, cold)
                return True
            fetch.cold_tries = 0
            if entry.data_length:
                units -= UNITS_OF_A_READ
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
        if len(answer) == 1 and 2 * len(data) > fetch.limit and not self._stopping:
            self._expect_next(fetch)
        return True

    def _expect_next(self, fetch: Fetch) -> None:
        """Its client takes as much as there is, and will ask for what follows."""
        wanted = fetch.request.entries[0]
        route = self._routing.find(wanted.topic_id, wanted.partition)
        place = None if route is None else self._entries.place(route.slot, fetch.session)
        if route is not None and place is not None:
            self._next_reads.expect(fetch.session, route, place, min(fetch.limit, wanted.max_bytes), self._now_ns)

    def _fall_short(self, fetch: Fetch) -> None:
        """Less than min_bytes: wait, and count on from here. It is put together once more, then it is answered whatever there is."""
        fetch.was_short = True
        fetch.counted_bytes = fetch.used
        for index, entry in enumerate(fetch.answer):
            if entry.data_length:
                route = self._routing.find(entry.topic_id, entry.partition)
                place = None if route is None else self._entries.place(route.slot, fetch.session)
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
            if error.errno not in SHORTAGES:
                raise
            self._hold(fetch)
            return
        self._reading += 1
        fetch.is_reading = True
        fetch.cold_tries += 1
