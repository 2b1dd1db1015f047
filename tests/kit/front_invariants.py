"""What the docstrings of a front's modules promise, held against a front between two of its steps."""

from __future__ import annotations

from netfront.credits import CreditLedger
from netfront.deciders import CLOSED_MAX, QUEUED_BYTES_MAX, Decider
from netfront.fetches import FetchService
from netfront.front import Front
from netfront.next_reads import AHEAD_MAX_BYTES
from netfront.parked import ENTRIES_MAX, FETCHES_MAX, SESSION_FETCHES_MAX, Parked
from netfront.sessions import Sessions
from netfront.slices import STARTED_MAX, Slices
from netfront.tickets import TICKET_INDEX_BITS, Tickets
from netfront.unanswered import Unanswered
from shm.catalog_messages import LaneKind
from tailrace.protocol.requests import is_answered


def check_front(front: Front) -> None:
    """Every invariant that can be seen from outside a step. Raises AssertionError."""
    _check_sessions(front._sessions)
    words = set(front._sessions._by_word)
    _check_ledger(front._ledger)
    _check_tickets(front._produces._tickets, words)
    for decider in (front._decisions.coordinator, front._decisions.scheduler, front._decisions.groups):
        _check_unanswered(decider.unanswered, words)
        _check_decider(decider)
    numbers = {session.number for session in front._sessions.all()}
    _check_fetches(front._fetches, numbers)
    _check_slices(front._slices, numbers)


def _check_sessions(sessions: Sessions) -> None:
    """One session for an identity; its word and its credit lead back to it."""
    assert len(sessions._by_identity) == len(sessions._by_word)
    for identity, session in sessions._by_identity.items():
        assert session.identity == identity
        assert sessions.by_word(session.word) is sessions.by_credit(session.credit) is session
        assert session.word >> 32 == sessions.generation
        assert session.fetch_received <= session.fetch_sent


def _check_ledger(ledger: CreditLedger) -> None:
    """released <= received <= limit; held_bytes is what all hold; none waits while nothing is held."""
    for credit in ledger._accounts:
        assert 0 <= credit.released <= credit.received <= credit.limit
    assert ledger.held_bytes == sum(credit.limit - credit.released for credit in ledger._accounts)
    assert set(ledger._waiting) <= set(ledger._accounts)
    assert ledger.held_bytes or not ledger._waiting


def _check_unanswered(unanswered: Unanswered, words: set[int]) -> None:
    """What waits is counted, bounded, and of sessions that there are."""
    counts = {word: len(waiting) for word, waiting in unanswered._sessions.items()}
    assert set(counts) <= words, "a session that has ended left something behind"
    assert all(0 < count <= unanswered._session_max for count in counts.values())
    assert len(unanswered) == sum(counts.values()) == len(unanswered.timeouts)
    assert len(unanswered) <= unanswered._all_max


def _check_tickets(tickets: Tickets, words: set[int]) -> None:
    """Requests are found by number and by session alike; their batches are counted; what is in no table has no timer."""
    found = {}
    for word, session in tickets._sessions.items():
        assert word in words, "a session that has ended left something behind"
        assert 0 < session.batch_count == sum(asked.batch_count for asked in session.asked.values()) <= tickets._session_max
        for correlation_id, asked in session.asked.items():
            assert (asked.word, asked.correlation_id) == (word, correlation_id)
            found[asked.ticket >> TICKET_INDEX_BITS] = asked
            if asked.body is not None:
                unknown = sum(not is_answered(asked.body, index) for index in range(asked.batch_count))
                assert 0 < asked.left == unknown <= asked.batch_count
    assert found == tickets._by_number
    deadlines = tickets._deadlines
    assert all(deadlines[(place - 1) // 2] <= deadlines[place] for place in range(1, len(deadlines))), "not a heap"
    assert {(asked.late_at_ns, number) for number, asked in found.items()} <= set(deadlines)
    assert tickets.batch_count == sum(asked.batch_count for asked in found.values()) <= tickets._all_max


def _check_decider(decider: Decider) -> None:
    """Queued bytes are those of what is queued; what the lane has is waited for."""
    queued: dict[int, int] = {}
    requests = [item for item in decider._queue if item.kind is LaneKind.REQUEST]
    assert len(decider._queue) - len(requests) == decider._closed_count <= CLOSED_MAX
    turns = decider._turns
    for word, waiting in turns._waiting.items():
        assert waiting
        assert len(turns._under_way[word]) == turns._at_once_max, "whoever waits has others of his session before him"
        assert all(decider.unanswered.is_waiting(word, number) for number, _ in waiting)
    for item in [*requests, *(item for waiting in turns._waiting.values() for _, item in waiting)]:
        queued[item.word] = queued.get(item.word, 0) + len(item.payload)
    assert queued == decider._queued_bytes_of
    assert decider._queued_bytes == sum(queued.values()) <= QUEUED_BYTES_MAX
    assert all(decider.unanswered.is_waiting(*key) for key in decider._written)


def _check_fetches(fetches: FetchService, numbers: set[int]) -> None:
    """A fetch is in the index of a slot as long as it is registered and names a partition there."""
    parked: Parked = fetches._parked
    waiting = parked.all()
    assert set(parked._own) <= numbers, "a session that has ended left something behind"
    assert len(waiting) == parked.fetch_count <= FETCHES_MAX
    assert sum(len(fetch.request.entries) for fetch in waiting) == parked.entry_count <= ENTRIES_MAX
    assert all(len(own.fetches) <= SESSION_FETCHES_MAX for own in parked._own.values())
    assert all(fetch.is_registered and not fetch.is_done for fetch in waiting)
    indexed = {(slot, fetch) for slot, fetches in parked._by_slot.items() for fetch in fetches}
    assert indexed == {(slot, fetch) for fetch in waiting for slot in fetch.slots}
    assert set(fetches._held) <= set(waiting)
    assert (
        fetches._reading == sum(fetch.is_reading for fetch in waiting) or fetches._reading > 0
    )  # one whose client is gone is still read for
    ahead = fetches._next_reads
    assert set(ahead._due) <= set(ahead._by_session) <= numbers, "a session that has ended left a read behind"
    assert ahead._bytes == sum(read.room for read in ahead._by_session.values()) <= AHEAD_MAX_BYTES


def _check_slices(slices: Slices, numbers: set[int]) -> None:
    """Half-made answers are few, one of a session; what waits is counted."""
    started = [task.session.number for task in slices._started]
    assert len(started) <= STARTED_MAX
    assert len(started) == len(set(started))
    waiting = [task for tasks in slices._waiting.values() for task in tasks]
    assert len(slices) == len(waiting) + len(started) == sum(count for count, _ in slices._held.values())
    assert slices._bytes == sum(size for _, size in slices._held.values())
    assert set(slices._held) <= numbers
