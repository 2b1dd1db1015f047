"""Fetch purgatory: the waiting fetches, indexed by table slot and by session.

Owner: one front.

Invariants:
- A registered fetch is in the index of every slot where it has a partition.
- The number of waiting fetches and their partitions is bounded for each session and in all.
- Removing a fetch costs its own partitions only. Ending a session costs its own fetches only.
"""

from __future__ import annotations

from netfront.fetch.log.read_result import Place
from netfront.session.sessions import Session
from shm.runtime.timing_wheel import Timer, TimingWheel
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.fetch_messages import FetchedEntry, FetchRequest
from tailrace.protocol.frame import WireError

SESSION_FETCHES_MAX = 1_024
SESSION_ENTRIES_MAX = 16_384
FETCHES_MAX = 65_536
ENTRIES_MAX = 262_144
"""Partitions in all waiting fetches. Each takes about 0.4 kB of memory."""


class Fetch:
    """One FETCH request, until its response is sent."""

    __slots__ = (
        "answer",
        "at",
        "begun_ns",
        "buffer",
        "cold_tries",
        "correlation_id",
        "counted_bytes",
        "counted_to",
        "has_moved",
        "has_something",
        "is_answering",
        "is_done",
        "is_immediate",
        "is_in_slices",
        "is_metered",
        "is_reading",
        "is_registered",
        "limit",
        "min_bytes",
        "must_answer",
        "newest_append_us",
        "request",
        "session",
        "slots",
        "timer",
        "used",
        "version",
        "was_short",
    )  # fmt: skip

    def __init__(
        self, session: Session, version: int, correlation_id: int, request: FetchRequest
    ) -> None:
        self.session = session
        self.version = version
        """Version of the request and of its response."""
        self.correlation_id = correlation_id
        self.request = request
        self.begun_ns = 0
        """Time of its receipt."""
        self.min_bytes = max(1, min(request.min_bytes, request.max_bytes))
        self.timer: Timer[Fetch] | None = None
        self.slots: dict[int, int] = {}
        """Index of its partition by slot. Filled when it begins to wait."""
        self.is_done = self.is_registered = False
        self.is_reading = False
        """True while the reader pool has it."""
        self.is_in_slices = False
        """True while a task of `time_slicer` has it. Changes meanwhile are noted in flags, which
        the task reads.
        """
        self.is_metered = False
        """True while it waits at the gate of its session's quota."""
        self.is_immediate = request.max_wait_ms == 0
        self.has_something = False
        """True if one of its partitions has records for it, or an error."""
        self.has_moved = False
        """True if a partition changed while the response was being assembled."""
        self.was_short = False
        """True after an assembled response had less than `min_bytes`.

        New bytes are counted since then.
        """
        self.counted_bytes = 0
        self.counted_to: dict[int, Place] = {}
        self.at = 0
        """Index of the next partition in the current pass."""
        self.cold_tries = 0
        self.is_answering = False
        self.limit = 0
        self.restart()
        self.at = 0

    def restart(self) -> None:
        """Discard the partial response and mark every partition as checked."""
        self.is_answering = self.must_answer = False
        self.newest_append_us = 0
        """Append time of the newest batch, if the response goes up to the end of a partition."""
        self.answer: list[FetchedEntry] = []
        self.used = 0
        self.buffer: bytearray | None = None
        self.at = len(self.request.entries)


class _Own:
    """Fetches and places of one session."""

    __slots__ = ("entry_count", "fetches", "places")

    def __init__(self) -> None:
        self.fetches: dict[Fetch, None] = {}
        self.entry_count = 0
        self.places: set[int] = set()
        """Slots where a read position of this session is remembered."""


class FetchPurgatory:
    """Waiting fetches of a front, by slot and by session."""

    def __init__(self, wheel: TimingWheel[Fetch]) -> None:
        self._wheel = wheel
        self._by_slot: dict[int, dict[Fetch, None]] = {}
        self._own: dict[int, _Own] = {}
        self.fetch_count = 0
        self.entry_count = 0

    def register(self, fetch: Fetch) -> None:
        """Register a fetch that is going to wait. Raises WireError at a limit."""
        if fetch.is_registered:
            return
        count = len(fetch.request.entries)
        own = self._own.get(fetch.session.number)
        if own is None:
            own = self._own[fetch.session.number] = _Own()
        if len(own.fetches) >= SESSION_FETCHES_MAX or own.entry_count + count > SESSION_ENTRIES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{len(own.fetches)} fetches of this connection wait for {own.entry_count} "
                f"partitions; the limits are {SESSION_FETCHES_MAX} and {SESSION_ENTRIES_MAX}. "
                "Wait for some responses",
            )
        if self.fetch_count >= FETCHES_MAX or self.entry_count + count > ENTRIES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self.fetch_count} fetches of all connections wait for {self.entry_count} "
                f"partitions; the limits are {FETCHES_MAX} and {ENTRIES_MAX}. Retry shortly",
            )
        fetch.is_registered = True
        own.fetches[fetch] = None
        own.entry_count += count
        self.fetch_count += 1
        self.entry_count += count

    def note(self, fetch: Fetch, slot: int, index: int) -> None:
        """Index the fetch at the slot of its partition number `index`."""
        fetch.slots[slot] = index
        fetches = self._by_slot.get(slot)
        if fetches is None:
            self._by_slot[slot] = {fetch: None}
        else:
            fetches[fetch] = None

    def remove(self, fetch: Fetch) -> None:
        """Remove a fetch that no longer waits."""
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
        """Return the fetches that wait at a slot, or None."""
        return self._by_slot.get(slot)

    def all(self) -> list[Fetch]:
        """Return every registered fetch."""
        return [fetch for own in self._own.values() for fetch in own.fetches]

    def fetches_of(self, session: Session) -> list[Fetch]:
        own = self._own.get(session.number)
        return [] if own is None else list(own.fetches)

    # ---- places ----------------------------------------------------------------------------------

    def note_place(self, session: Session, slot: int) -> None:
        """Note that a read position of this session is remembered at this slot."""
        own = self._own.get(session.number)
        if own is None:
            own = self._own[session.number] = _Own()
        own.places.add(slot)

    def forget_places(self) -> None:
        """Forget all remembered read positions."""
        for own in self._own.values():
            own.places.clear()

    def forget_session(self, session: Session) -> set[int]:
        """Remove the session. Return the slots with its read positions.

        Its fetches must have been removed before.
        """
        own = self._own.pop(session.number, None)
        return set() if own is None else own.places
