"""Fetches that wait, found by slot and by session.

Owner: one front. Invariants: a fetch is in the index of a slot as long as it is registered and names a partition there; what one session may have waiting, and
    all together, is bounded by number and by partitions named; taking one fetch out costs its own partitions, ending a session its own fetches.
"""

from __future__ import annotations

from netfront.log_reader import Place
from netfront.sessions import Session
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import FetchedEntry, FetchRequest
from tailrace.protocol.wire import WireError
from workers.timing_wheel import Timer, TimingWheel

SESSION_FETCHES_MAX = 1_024
SESSION_ENTRIES_MAX = 16_384
FETCHES_MAX = 65_536
ENTRIES_MAX = 262_144
"""About 0.4 kB of memory each."""


class Fetch:
    """One request on its way to its answer."""

    __slots__ = (
        "answer", "at", "buffer", "cold_tries", "correlation_id", "counted_bytes", "counted_to", "has_moved", "has_something", "is_answering", "is_done",
        "is_in_slices", "is_reading", "is_registered", "limit", "min_bytes", "must_answer", "request", "session", "slots", "timer", "used", "version",
        "wants_now", "was_short",
    )  # fmt: skip

    def __init__(self, session: Session, version: int, correlation_id: int, request: FetchRequest) -> None:
        self.session = session
        self.version = version
        """Of the request, and of its answer."""
        self.correlation_id = correlation_id
        self.request = request
        self.min_bytes = max(1, min(request.min_bytes, request.max_bytes))
        self.timer: Timer[Fetch] | None = None
        self.slots: dict[int, int] = {}
        """slot -> which of its partitions lies there; filled when it is to wait."""
        self.is_done = self.is_registered = False
        self.is_reading = False
        """The reader pool has it."""
        self.is_in_slices = False
        """A task of `slices` has it: what changes meanwhile is noted in flags, and the task looks at them."""
        self.wants_now = request.max_wait_ms == 0
        self.has_something = False
        """One of its partitions has records for it, or an error."""
        self.has_moved = False
        """Something settled in one of its partitions while its answer was put together."""
        self.was_short = False
        """It was put together once and had less than `min_bytes`; since then new bytes are counted."""
        self.counted_bytes = 0
        self.counted_to: dict[int, Place] = {}
        self.at = 0
        """The partition that is next in the pass that it is in."""
        self.cold_tries = 0
        self.is_answering = False
        self.limit = 0
        self.begin_again()
        self.at = 0

    def begin_again(self) -> None:
        """Throw away what was put together of its answer; it was looked at."""
        self.is_answering = self.must_answer = False
        self.answer: list[FetchedEntry] = []
        self.used = 0
        self.buffer: bytearray | None = None
        self.at = len(self.request.entries)


class _Own:
    """What one session has here."""

    __slots__ = ("entry_count", "fetches", "places")

    def __init__(self) -> None:
        self.fetches: dict[Fetch, None] = {}
        self.entry_count = 0
        self.places: set[int] = set()
        """Slots where its next place is remembered."""


class Parked:
    """The index."""

    def __init__(self, wheel: TimingWheel[Fetch]) -> None:
        self._wheel = wheel
        self._by_slot: dict[int, dict[Fetch, None]] = {}
        self._own: dict[int, _Own] = {}
        self.fetch_count = 0
        self.entry_count = 0

    def register(self, fetch: Fetch) -> None:
        """It is going to wait. Raises WireError when too much does."""
        if fetch.is_registered:
            return
        count = len(fetch.request.entries)
        own = self._own.get(fetch.session.number)
        if own is None:
            own = self._own[fetch.session.number] = _Own()
        if len(own.fetches) >= SESSION_FETCHES_MAX or own.entry_count + count > SESSION_ENTRIES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{len(own.fetches)} fetches of this connection wait, for {own.entry_count} partitions; wait for some",
            )
        if self.fetch_count >= FETCHES_MAX or self.entry_count + count > ENTRIES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self.fetch_count} fetches of all connections wait, for {self.entry_count} partitions; ask again shortly",
            )
        fetch.is_registered = True
        own.fetches[fetch] = None
        own.entry_count += count
        self.fetch_count += 1
        self.entry_count += count

    def note(self, fetch: Fetch, slot: int, index: int) -> None:
        """The fetch wants partition number `index` of its own, which lies at `slot`."""
        fetch.slots[slot] = index
        fetches = self._by_slot.get(slot)
        if fetches is None:
            self._by_slot[slot] = {fetch: None}
        else:
            fetches[fetch] = None

    def remove(self, fetch: Fetch) -> None:
        """It waits no more."""
        if not fetch.is_registered:
            return
        fetch.is_registered = False
        if fetch.timer is not None:
            self._wheel.cancel(fetch.timer)
            fetch.timer = None  # they refer to each other
        for slot in fetch.slots:
            fetches = self._by_slot.get(slot)
            if fetches is not None:
                fetches.pop(fetch, None)
                if not fetches:
                    del self._by_slot[slot]
        fetch.slots = {}
        count = len(fetch.request.entries)
        self.fetch_count -= 1
        self.entry_count -= count
        own = self._own.get(fetch.session.number)
        if own is not None:
            own.fetches.pop(fetch, None)
            own.entry_count -= count

    def at(self, slot: int) -> dict[Fetch, None] | None:
        """Fetches that wait at a slot; None: none."""
        return self._by_slot.get(slot)

    def all(self) -> list[Fetch]:
        """Every fetch that is registered."""
        return [fetch for own in self._own.values() for fetch in own.fetches]

    def fetches_of(self, session: Session) -> list[Fetch]:
        own = self._own.get(session.number)
        return [] if own is None else list(own.fetches)

    # ---- places ----------------------------------------------------------------------------------------------------------------------

    def note_place(self, session: Session, slot: int) -> None:
        """A place of this session's at this slot is remembered."""
        own = self._own.get(session.number)
        if own is None:
            own = self._own[session.number] = _Own()
        own.places.add(slot)

    def forget_places(self) -> None:
        """All remembered places are gone."""
        for own in self._own.values():
            own.places.clear()

    def forget_session(self, session: Session) -> set[int]:
        """The client is gone, its fetches are taken out; returns the slots where places of its are."""
        own = self._own.pop(session.number, None)
        return set() if own is None else own.places
