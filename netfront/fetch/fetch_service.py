"""Fetch service: answers fetches from the page cache and parks those without data.

A fetch names partitions and offsets. The first pass checks its partitions. If none has data, the
fetch is parked on the timing wheel and at its partitions' slots, and only partitions that change
are checked again. The second pass assembles the response, partition by partition. Both passes
remember their position, so that a fetch of thousands of partitions is served in slices. Reads that
would wait for the disk go through the reader pool first.

Owner: one front.

Invariants:
- A fetch is answered exactly once.
- At least one whole batch is sent however small the limits, so that every consumer makes progress.
- Bytes in flight to a client stay within `fetch_progress.allowance`.
- A session that ends and a partition that is dropped leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from netfront.fetch.fetch_progress import UNITS_OF_A_READ, FetchProgress, allowance
from netfront.fetch.fetch_response import FetchResponseEntries, Outgoing
from netfront.fetch.log.file_reader import SHORTAGES
from netfront.fetch.log.isolation import isolation_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import ColdRead
from netfront.fetch.purgatory import Fetch, FetchPurgatory
from netfront.fetch.read_ahead import ReadAhead
from netfront.fetch.reader_pool import AsyncReader
from netfront.fetch.throttled_fetches import CHECKS_PER_STEP, ThrottledFetches
from netfront.partition_routes import PartitionRoutes
from netfront.session.sessions import Session
from netfront.session.time_slicing import Task, TimeSlicer
from shm.messages.lane_messages import Assignment
from shm.runtime.timing_wheel import TimingWheel
from tailrace.protocol.fetch_messages import FetchedEntry

WAIT_MAX_MS = 60_000
METERED_MS = 500
"""Shortest time that a fetch beyond its quota waits before it is answered without batches."""
READS_MAX = 128
"""Fetches with a read in the reader pool at a time. Each holds a descriptor."""
ENTRIES_AT_ONCE = 64
"""Partitions of a fetch that are served in one go. A larger fetch is served in slices."""


Respond = Callable[[Fetch, list[FetchedEntry], memoryview], None]
Refuse = Callable[[Fetch, Exception], None]


class FetchService:
    """Every fetch of a front."""

    def __init__(
        self,
        *,
        reader: LogReader,
        routing: PartitionRoutes,
        pool: AsyncReader,
        wheel: TimingWheel[Fetch],
        outgoing: Outgoing,
        time_slicer: TimeSlicer,
        respond: Respond,
        refuse: Refuse,
    ) -> None:
        self._reader = reader
        self._routing = routing
        self._pool = pool
        self._wheel = wheel
        self._outgoing = outgoing
        self._time_slicer = time_slicer
        self._respond = respond
        self._refuse = refuse
        self._purgatory = FetchPurgatory(wheel)
        self._progress = FetchProgress(reader, routing, time_slicer)
        self._ahead = ReadAhead(reader, outgoing)
        self._entries = FetchResponseEntries(
            reader, routing, outgoing, self._purgatory, self._ahead
        )
        self._moved: dict[int, list[Fetch]] = {}
        """Fetches still to be checked after a change, by slot."""
        self._moved_meanwhile: set[int] = set()
        self._throttled = ThrottledFetches(time_slicer, self._may_answer, self._retry_fetch)
        self._reading = 0
        self._stopping = False
        self._now_ns = 0

    # ---- what happens ----------------------------------------------------------------------------

    def begin(self, fetch: Fetch, now_ns: int) -> None:
        """Serve or park a fetch. Raises WireError at a limit of parked fetches."""
        self._now_ns = fetch.begun_ns = now_ns
        try:
            if len(fetch.request.entries) > ENTRIES_AT_ONCE:
                self._purgatory.register(fetch)
            self._resume(fetch, -1)
        except Exception:
            self._end(fetch)
            raise

    def on_settled(self, slots: set[int]) -> None:
        """Check the fetches at slots whose watermarks may have moved."""
        for slot in slots:
            fetches = self._purgatory.at(slot)
            if fetches is None:
                continue
            if slot in self._moved:
                self._moved_meanwhile.add(slot)
            else:
                self._moved[slot] = list(fetches)
        if self._moved:
            self.check_moved()

    def check_moved(self) -> int:
        """Check a bounded number of fetches at changed slots. Return the number checked."""
        count = 0
        while self._moved and count < CHECKS_PER_STEP and not self._time_slicer.is_spent:
            slot, fetches = next(iter(self._moved.items()))
            while fetches and count < CHECKS_PER_STEP and not self._time_slicer.is_spent:
                count += 1
                self._time_slicer.spend(1)
                self._guarded(self._on_moved, fetches.pop(), slot)
            if not fetches:
                del self._moved[slot]
                if slot in self._moved_meanwhile:
                    self._moved_meanwhile.discard(slot)
                    self._moved[slot] = list(self._purgatory.at(slot) or ())
        if not self._moved and self._ahead.is_due and not self._time_slicer.is_spent:
            self._time_slicer.spend(UNITS_OF_A_READ)
            self._ahead.make_one()
            count += 1
        return count

    def on_dropped(self, assignment: Assignment) -> None:
        """Answer the fetches that wait for a dropped partition, and forget its state."""
        self._entries.forget_slot(assignment.slot)
        self._ahead.forget_slot(assignment.slot)
        self.on_settled({assignment.slot})

    def on_timeouts(self, now_ns: int) -> int:
        """Answer fetches whose max_wait_ms has passed with the data there is."""
        self._now_ns = now_ns
        fetches = self._wheel.advance(now_ns, CHECKS_PER_STEP)
        for fetch in fetches:
            fetch.is_immediate = True
            self._retry_fetch(fetch)
        return len(fetches)

    def on_reads_completed(self, now_ns: int) -> int:
        """Continue fetches whose pages are now in the page cache."""
        self._now_ns = now_ns
        tokens = self._pool.completed()
        for fetch in tokens:
            assert isinstance(fetch, Fetch)
            fetch.is_reading = False
            self._reading -= 1
            self._retry_fetch(fetch)
        return len(tokens)

    def on_drained(self, now_ns: int) -> int:
        """Continue fetches whose clients have read enough of their earlier responses."""
        self._now_ns = now_ns
        return self._throttled.on_drained(now_ns)

    def forget_session(self, session: Session) -> None:
        """End the fetches of a session that has ended."""
        for fetch in self._purgatory.fetches_of(session):
            self._end(fetch)
        self._ahead.forget_session(session)
        self._entries.forget_session(session, self._purgatory.forget_session(session))

    def check_rights(self) -> None:
        """Answer the waiting fetches that name a topic which their reader may not read any more."""
        for fetch in self._purgatory.all():
            principal = fetch.session.principal
            if principal is not None and any(
                self._routing.refuses_read(principal, entry.topic_id)
                for entry in fetch.request.entries
            ):
                fetch.is_immediate = True
                self._retry_fetch(fetch)

    @property
    def fetched(self) -> dict[int, list[int]]:
        """[offsets, bytes] that were sent to readers, by slot."""
        return self._entries.fetched

    @property
    def has_delayed(self) -> bool:
        """True if any fetch waits."""
        return self._purgatory.fetch_count > 0

    def answer_all(self) -> None:
        """Answer every fetch with the data there is: the front is stopping."""
        self._stopping = True
        for fetch in self._purgatory.all():
            fetch.is_immediate = True
            self._retry_fetch(fetch)

    @property
    def has_more(self) -> bool:
        """True if there is work now."""
        return bool(self._moved) or self._ahead.is_due

    def next_deadline_ns(self) -> int:
        """Return the time when `on_drained` next has work."""
        return self._throttled.check_at_ns

    # ---- deciding --------------------------------------------------------------------------------

    def _retry_fetch(self, fetch: Fetch) -> None:
        """Continue a fetch after a change: its timeout, its pages, or its client's window."""
        if not fetch.is_done and not fetch.is_reading and not fetch.is_in_slices:
            self._guarded(self._resume, fetch, -1)

    def _guarded(self, act: Callable[[Fetch, int], None], fetch: Fetch, slot: int) -> None:
        """Confine an unexpected error to its fetch."""
        try:
            act(fetch, slot)
        except Exception as error:
            self._fail(fetch, error)

    def _fail(self, fetch: Fetch, error: Exception) -> None:
        if not fetch.is_done:
            self._end(fetch)
            self._refuse(fetch, error)

    def _resume(self, fetch: Fetch, _slot: int) -> None:
        if len(fetch.request.entries) > ENTRIES_AT_ONCE:
            self._in_slices(fetch)
        else:
            self._serve(fetch)

    def _on_moved(self, fetch: Fetch, slot: int) -> None:
        """Check a fetch after one of its partitions changed."""
        if fetch.is_done:
            return
        index = fetch.slots.get(slot)
        if index is None or fetch.is_reading or fetch.is_metered:
            return
        if fetch in self._throttled.fetches:
            return
        if fetch.is_in_slices:
            fetch.has_something = fetch.has_moved = True
            return
        if not self._progress.has_something(fetch, fetch.request.entries[index]):
            return
        fetch.has_something = True
        if not fetch.was_short or self._progress.has_enough(fetch, index):
            self._resume(fetch, slot)

    # ---- serving ---------------------------------------------------------------------------------

    def _in_slices(self, fetch: Fetch) -> None:
        def work() -> Iterator[int]:
            while not self._advance(fetch, ENTRIES_AT_ONCE):
                yield ENTRIES_AT_ONCE
            fetch.is_in_slices = False

        fetch.is_in_slices = True
        self._time_slicer.begin(
            Task(fetch.session, 0, work, lambda error: self._fail(fetch, error)), try_now=False
        )

    def _serve(self, fetch: Fetch) -> None:
        """Serve a fetch in this loop step, and count its cost."""
        self._time_slicer.spend(UNITS_OF_A_READ + len(fetch.request.entries))
        while not self._advance(fetch, ENTRIES_AT_ONCE):
            pass

    def _advance(self, fetch: Fetch, units: int) -> bool:
        """Continue a fetch.

        Return True if it was answered or waits, False if the units are spent.
        """
        if fetch.is_done:
            return True
        if not fetch.is_answering:
            if not self._try_complete(fetch, units):
                return False
            if not (fetch.has_something or fetch.is_immediate):
                self._watch(fetch)
                return True
            if not self._may_answer(fetch):
                self._watch(fetch)
                if not fetch.is_metered:
                    self._throttled.add(fetch, self._now_ns)
                return True
            fetch.is_answering = True
            fetch.has_moved = False
            fetch.at = 0
        return self._answer(fetch, units)

    def _try_complete(self, fetch: Fetch, units: int) -> bool:
        """Check for data in the first pass. Return False if the units are spent.

        A large fetch indexes every partition's slot at once, since changes happen between slices.
        """
        entries = fetch.request.entries
        is_large = len(entries) > ENTRIES_AT_ONCE
        while fetch.at < len(entries):
            if units <= 0:
                return False
            units -= 1
            requested = entries[fetch.at]
            if is_large:
                route = self._routing.find(requested.topic_id, requested.partition)
                if route is not None:
                    self._purgatory.note(fetch, route.slot, fetch.at)
            fetch.at += 1
            if not fetch.has_something and self._progress.has_something(fetch, requested):
                fetch.has_something = True
                if not is_large:
                    fetch.at = len(entries)
        return True

    def _may_answer(self, fetch: Fetch) -> bool:
        """Set the limit of the response.

        Return False if the client must read earlier responses first.
        """
        limit = allowance(fetch, self._outgoing, is_stopping=self._stopping)
        if limit is None:
            return False
        quota = fetch.session.quota
        if quota is not None and quota.fetch_gate is not None and not self._stopping:
            room = quota.fetch_gate.room(0)
            if not room and not (fetch.is_immediate and fetch.timer is not None):
                if not fetch.is_metered:
                    fetch.is_metered = True
                    quota.fetch_gate.wait(fetch)
                return False
            limit = min(limit, room)
        fetch.limit = limit
        return True

    def resume_metered(self, fetch: Fetch, now_ns: int) -> None:
        """Continue a fetch that has waited at the gate of a quota."""
        self._now_ns = now_ns
        fetch.is_metered = False
        self._retry_fetch(fetch)

    def _watch(self, fetch: Fetch) -> None:
        """Park a fetch on the wheel and at the slots of its partitions."""
        if fetch.timer is None:
            self._purgatory.register(fetch)
            entries = fetch.request.entries
            if len(entries) <= ENTRIES_AT_ONCE:
                for index, requested in enumerate(entries):
                    route = self._routing.find(requested.topic_id, requested.partition)
                    if route is not None:
                        self._purgatory.note(fetch, route.slot, index)
            fetch.timer = self._wheel.add(
                self._now_ns
                + max(
                    min(fetch.request.max_wait_ms, WAIT_MAX_MS),
                    METERED_MS if fetch.is_metered else 0,
                )
                * 1_000_000,
                fetch,
            )

    def _end(self, fetch: Fetch) -> None:
        """Finish a fetch that is answered or dropped."""
        fetch.is_done = True
        fetch.is_in_slices = False
        fetch.buffer = None
        self._throttled.fetches.pop(fetch, None)
        if fetch.is_metered:
            fetch.is_metered = False
            gate = fetch.session.quota.fetch_gate if fetch.session.quota is not None else None
            if gate is not None:
                gate.forget(fetch)
        self._purgatory.remove(fetch)

    def _answer(self, fetch: Fetch, units: int) -> bool:
        """Assemble the response in the second pass, partition by partition."""
        entries = fetch.request.entries
        while fetch.at < len(entries):
            if units <= 0:
                return False
            requested = entries[fetch.at]
            try:
                entry = self._entries.make(fetch, requested)
            except ColdRead as cold:
                self._read_ahead(fetch, cold)
                return True
            fetch.cold_tries = 0
            if entry.data_length:
                units -= UNITS_OF_A_READ
                fetch.used += entry.data_length
            else:
                units -= 1
            if entry.error or (entry.resume_offset >= 0 and not entry.data_length):
                fetch.must_answer = True  # the client goes on elsewhere
            fetch.answer.append(entry)
            fetch.at += 1
        if (
            not (fetch.must_answer or fetch.is_immediate or fetch.was_short or fetch.has_moved)
            and fetch.used < fetch.min_bytes
        ):
            self._fall_short(fetch)
            return True
        data = memoryview(fetch.buffer or b"")[: fetch.used]
        answer = fetch.answer
        self._end(fetch)
        fetch.session.fetch_sent += len(data)
        quota = fetch.session.quota
        if quota is not None and quota.fetch_gate is not None:
            quota.fetch_gate.take(len(data))
        self._respond(fetch, answer, data)
        if len(answer) == 1 and 2 * len(data) > fetch.limit and not self._stopping:
            self._expect_next(fetch)
        return True

    def _expect_next(self, fetch: Fetch) -> None:
        """Read ahead for a client that takes as much as there is."""
        requested = fetch.request.entries[0]
        route = self._routing.find(requested.topic_id, requested.partition)
        place = None if route is None else self._entries.place(route.slot, fetch.session)
        if route is not None and place is not None:
            self._ahead.expect(
                fetch.session,
                route,
                place,
                min(fetch.limit, requested.max_bytes),
                self._now_ns,
                isolation_of(fetch.version, requested.flags),
            )

    def _fall_short(self, fetch: Fetch) -> None:
        """Park a fetch with less than min_bytes and count new bytes from here.

        The response is assembled once more after that, and then sent in any case.
        """
        fetch.was_short = True
        fetch.counted_bytes = fetch.used
        for index, entry in enumerate(fetch.answer):
            if entry.data_length:
                route = self._routing.find(entry.topic_id, entry.partition)
                place = None if route is None else self._entries.place(route.slot, fetch.session)
                if place is not None:
                    fetch.counted_to[index] = place
        fetch.restart()
        self._watch(fetch)

    def _read_ahead(self, fetch: Fetch, cold: ColdRead) -> None:
        """Let the reader pool load the wanted pages, or wait until the pool has room."""
        self._watch(fetch)
        if self._reading >= READS_MAX:
            self._throttled.add(fetch, self._now_ns)
            return
        try:
            self._pool.submit(cold.fd, cold.position, cold.length, fetch)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            self._throttled.add(fetch, self._now_ns)
            return
        self._reading += 1
        fetch.is_reading = True
        fetch.cold_tries += 1
