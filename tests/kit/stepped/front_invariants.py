"""Invariants of a front's modules, as their docstrings state them, held against a front between two
of its steps.
"""

from __future__ import annotations

from netfront.agent.front_agent import Front
from netfront.fetch.fetch_service import FetchService
from netfront.fetch.purgatory import ENTRIES_MAX, FETCHES_MAX, SESSION_FETCHES_MAX, FetchPurgatory
from netfront.fetch.read_ahead import AHEAD_MAX_BYTES
from netfront.forward.forwarder import CLOSED_MAX, QUEUED_BYTES_MAX, Forwarder
from netfront.forward.forwarding_service import OWN_WORD
from netfront.produce.pending_produces import TOKEN_INDEX_BITS, PendingProduces
from netfront.session.pending_requests import PendingRequests
from netfront.session.sessions import Sessions
from netfront.session.time_slicing import STARTED_MAX, TimeSlicer
from netfront.socket.flow_control import CreditLedger
from shm.messages.lane_messages import LaneKind
from tailrace.protocol.produce_messages import is_answered


def check_front(front: Front) -> None:
    """Every invariant that can be seen from outside a step. Raises AssertionError."""
    _check_sessions(front._sessions)
    words = {*front._sessions._by_word, OWN_WORD}
    _check_ledger(front._ledger)
    _check_pending_produces(front._produce_service._pending_produces, words)
    for forwarder in (
        front._forwarding.controller,
        front._forwarding.scheduler,
        front._forwarding.groups,
    ):
        _check_unanswered(forwarder.pending_requests, words)
        _check_decider(forwarder)
    numbers = {session.number for session in front._sessions.all()}
    _check_fetches(front._fetches, numbers)
    _check_slices(front._time_slicer, numbers)


def _check_sessions(sessions: Sessions) -> None:
    """One session for an identity; its word and its credit lead back to it."""
    assert len(sessions._by_identity) == len(sessions._by_word)
    for identity, session in sessions._by_identity.items():
        assert session.identity == identity
        assert sessions.by_word(session.word) is sessions.by_credit(session.credit) is session
        assert session.word >> 32 == sessions.generation
        assert session.fetch_received <= session.fetch_sent


def _check_ledger(ledger: CreditLedger) -> None:
    """released <= received <= limit; outstanding_bytes is what all hold; none waits while nothing
    is held.
    """
    for credit in ledger._accounts:
        assert 0 <= credit.released <= credit.received <= credit.limit
    assert ledger.outstanding_bytes == sum(
        credit.limit - credit.released for credit in ledger._accounts
    )
    assert set(ledger._waiting) <= set(ledger._accounts)
    assert ledger.outstanding_bytes or not ledger._waiting


def _check_unanswered(pending_requests: PendingRequests, words: set[int]) -> None:
    """Check that what waits is counted, bounded, and of sessions that there are."""
    counts = {word: len(waiting) for word, waiting in pending_requests._sessions.items()}
    assert set(counts) <= words, "a session that has ended left something behind"
    assert all(0 < count <= pending_requests._session_max for count in counts.values())
    assert len(pending_requests) == sum(counts.values()) == len(pending_requests.timeouts)
    assert len(pending_requests) <= pending_requests._all_max


def _check_pending_produces(pending_produces: PendingProduces, words: set[int]) -> None:
    """Requests are found by number and by session alike; their batches are counted; what is in no
    table has no timer.
    """
    found = {}
    for word, session in pending_produces._sessions.items():
        assert word in words, "a session that has ended left something behind"
        assert (
            0
            < session.batch_count
            == sum(asked.batch_count for asked in session.asked.values())
            <= pending_produces._session_max
        )
        for correlation_id, asked in session.asked.items():
            assert (asked.word, asked.correlation_id) == (word, correlation_id)
            found[asked.batch_token >> TOKEN_INDEX_BITS] = asked
            if asked.body is not None:
                unknown = sum(
                    not is_answered(asked.body, index) for index in range(asked.batch_count)
                )
                assert 0 < asked.left == unknown <= asked.batch_count
    assert found == pending_produces._by_number
    deadlines = pending_produces._deadlines
    assert all(
        deadlines[(place - 1) // 2] <= deadlines[place] for place in range(1, len(deadlines))
    ), "not a heap"
    assert {(asked.expires_at_ns, number) for number, asked in found.items()} <= set(deadlines)
    assert (
        pending_produces.batch_count
        == sum(asked.batch_count for asked in found.values())
        <= pending_produces._all_max
    )


def _check_decider(forwarder: Forwarder) -> None:
    """Queued bytes are those of what is queued; what the lane has is waited for."""
    queued: dict[int, int] = {}
    requests = [item for item in forwarder._queue if item.kind is LaneKind.REQUEST]
    assert len(forwarder._queue) - len(requests) == forwarder._closed_count <= CLOSED_MAX
    fair_queue = forwarder._fair_queue
    for word, waiting in fair_queue._waiting.items():
        assert waiting
        assert len(fair_queue._under_way[word]) == fair_queue._at_once_max, (
            "whoever waits has others of his session before him"
        )
        assert all(forwarder.pending_requests.is_waiting(word, number) for number, _ in waiting)
    for item in [
        *requests,
        *(item for waiting in fair_queue._waiting.values() for _, item in waiting),
    ]:
        queued[item.word] = queued.get(item.word, 0) + len(item.payload)
    assert queued == forwarder._queued_bytes_of
    assert forwarder._queued_bytes == sum(queued.values()) <= QUEUED_BYTES_MAX
    assert all(forwarder.pending_requests.is_waiting(*key) for key in forwarder._written)


def _check_fetches(fetches: FetchService, numbers: set[int]) -> None:
    """A fetch is in the index of a slot as long as it is registered and names a partition there."""
    purgatory: FetchPurgatory = fetches._purgatory
    waiting = purgatory.all()
    assert set(purgatory._own) <= numbers, "a session that has ended left something behind"
    assert len(waiting) == purgatory.fetch_count <= FETCHES_MAX
    assert (
        sum(len(fetch.request.entries) for fetch in waiting) == purgatory.entry_count <= ENTRIES_MAX
    )
    assert all(len(own.fetches) <= SESSION_FETCHES_MAX for own in purgatory._own.values())
    assert all(fetch.is_registered and not fetch.is_done for fetch in waiting)
    indexed = {(slot, fetch) for slot, fetches in purgatory._by_slot.items() for fetch in fetches}
    assert indexed == {(slot, fetch) for fetch in waiting for slot in fetch.slots}
    assert set(fetches._throttled.fetches) <= set(waiting)
    assert (
        fetches._reading == sum(fetch.is_reading for fetch in waiting) or fetches._reading > 0
    )  # one whose client is gone is still read for
    ahead = fetches._ahead
    assert set(ahead._due) <= set(ahead._by_session) <= numbers, (
        "a session that has ended left a read behind"
    )
    assert ahead._bytes == sum(read.room for read in ahead._by_session.values()) <= AHEAD_MAX_BYTES


def _check_slices(time_slicer: TimeSlicer, numbers: set[int]) -> None:
    """Half-made answers are few, one of a session; what waits is counted."""
    started = [task.session.number for task in time_slicer._started]
    assert len(started) <= STARTED_MAX
    assert len(started) == len(set(started))
    waiting = [task for tasks in time_slicer._waiting.values() for task in tasks]
    assert (
        len(time_slicer)
        == len(waiting) + len(started)
        == sum(count for count, _ in time_slicer._queued_of.values())
    )
    assert time_slicer._bytes == sum(size for _, size in time_slicer._queued_of.values())
    assert set(time_slicer._queued_of) <= numbers
