"""The group service: the state of consumer groups, share groups and transactions over the database,
without knowing lanes or processes. `GroupRequests` handles requests.

A step of its agent:

    handle(...), session_closed(...), topics_changed(...)    change the state in memory
    step(now)                                                runs timers
    store.commit()                                           calls settle, which computes targets,
                                                             answers waiting heartbeats, writes rows
    drain_answers(), drain_pushes()                          committed messages to send

When `commit` or another call of the step raises, the agent calls `store.rollback()` and
`rolled_back(now, error)`. Then `drain_answers` has that error for each request whose change was
undone (`Answer.is_undone`). A GroupFailure names one group, which is suspended for a moment; the
requests of other groups can be handled again at once. The service is created when the whole catalog
is known (see `TopicImage`).

The client's part of the protocol, so that no partition has two readers:
- One heartbeat is in flight at a time.
- A heartbeat lists the owned partitions in `owned` in three cases: they changed since the last
  report, the last heartbeat was not answered with OK, or one without `owned` was answered with an
  assignment.
- From a heartbeat with `owned` until one is answered with OK the member starts no new partition.
- An answer to a heartbeat with `owned` always carries the assignment, since that of a lost answer
  may be outdated.

Owner: one process, one thread.
Invariants:
- A heartbeat without a change costs no write and visits no other member.
- A group's target is computed once for all changes of a step.
- A failure in the work for one group affects that group alone.
Crash: the rows are the state. Sessions restart with the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from appliance.groups.agent.deletion import GroupDeletion
from appliance.groups.agent.group_requests import GroupRequests, summary_of
from appliance.groups.agent.transaction_effects import TransactionEffects
from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.members import Member
from appliance.groups.base.messages import (
    Answer,
    GroupFailure,
    GroupsOfAKind,
    Push,
    Requester,
    SessionKey,
    TopicImage,
    work_for,
)
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.base.responses import Responses
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer.classic_leases import ClassicLeases
from appliance.groups.consumer.describe import GroupDescriber
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.hash_slot_handover import HandOvers
from appliance.groups.consumer.heartbeats import Heartbeats
from appliance.groups.consumer.membership import Sessions
from appliance.groups.consumer.offset_expiry import OffsetExpiry
from appliance.groups.consumer.offset_requests import OffsetRequests
from appliance.groups.consumer.prepared_offsets import PreparedOffsets
from appliance.groups.consumer.start_offsets import StartOffsets
from appliance.groups.store.group_store import GroupStore
from appliance.groups.transactions.clocks import Times
from appliance.groups.transactions.coordinator import TransactionCoordinator
from appliance.groups.transactions.operations.ending import OffsetCommits
from shm.runtime.elapsed_time import MARK_ALONE_MS
from tailrace.core.errors import StorageError, TailraceError

logger = logging.getLogger(__name__)


class GroupService:
    """All groups of the appliance: their requests, timers and rows."""

    def __init__(
        self, store: GroupStore, topics: TopicImage, limits: GroupLimits, answer_max: int,
        now_ns: int, wall_us: Callable[[], int], *,
        share: GroupsOfAKind | None = None, assignors: Assignors | None = None,
        transactions: Callable[[OffsetCommits, Times], TransactionCoordinator] | None = None,
    ) -> None:  # fmt: skip
        """Load the groups of the store. `answer_max`: limit of an answer's body, bytes. `wall_us`:
        wall clock. `transactions`: makes the transaction coordinator over the same store. Raises
        StorageError.
        """
        self._store = store
        self._wall_us = wall_us
        self._share = share
        self._now_ns = now_ns
        store.begin_time(now_ns)
        self._outgoing = Responses()
        self._suspended = SuspendedGroups()
        self._sessions = Sessions(now_ns, self._expired)
        self._table = GroupTable(
            store, topics, limits, self._sessions, self._share_count, self._wall_ms,
            self._elapsed_ms,
        )  # fmt: skip
        self._book = OffsetBook(store)
        self._prepared_offsets = PreparedOffsets()
        start_offsets = StartOffsets(topics, self._book, self._elapsed_ms)
        offset_requests = OffsetRequests(
            self._table, self._book, start_offsets, topics, limits, answer_max, self._wall_ms,
            self._elapsed_ms, self._prepared_offsets,
        )  # fmt: skip
        self._heartbeats = Heartbeats(
            self._table, self._sessions, self._outgoing, topics, limits,
            Assignors(()) if assignors is None else assignors, self._wall_ms(),
            HandOvers(topics, self._book), start_offsets, answer_max, self._suspended,
        )  # fmt: skip
        describing = GroupDescriber(
            store, topics, self._book, start_offsets, answer_max,
            self.summary, self._prepared_offsets,
        )  # fmt: skip
        self._expiry = OffsetExpiry(store, topics, limits, now_ns)
        classic = ClassicLeases()
        deletion = GroupDeletion(
            self._table, self._book, self._prepared_offsets, classic, share, self._suspended
        )
        effects = TransactionEffects(
            self._table, offset_requests, self._prepared_offsets, share, self._suspended,
            lambda: self._now_ns,
        )  # fmt: skip
        self._table.load(now_ns)
        self._begin(now_ns)
        self.transactions: TransactionCoordinator | None = None
        if transactions is not None:
            times = Times(self._wall_ms, self._elapsed_ms)
            self.transactions = transactions(effects.for_coordinator(), times)
        self._requests = GroupRequests(
            table=self._table, suspended=self._suspended, classic=classic,
            heartbeats=self._heartbeats, offset_requests=offset_requests,
            describing=describing, deletion=deletion, share=share,
            transactions=self.transactions, outgoing=self._outgoing,
        )  # fmt: skip
        store.before_commit.append(self.settle)
        store.after_commit.append(self._table.kept)
        if self.transactions is not None:
            store.after_commit.append(self.transactions.kept)

    def limits_changed(self) -> None:
        """The limits that this was made with have other values now."""
        if self.transactions is not None:
            self.transactions.limits_changed()

    def _begin(self, now_ns: int) -> None:
        """Compare every group with the catalog. A group that fails is suspended."""
        while True:
            try:
                self._heartbeats.topics_changed()
            except GroupFailure as failure:
                logger.error("group_failed group=%r error=%r", failure.group, failure.error)
                self._suspended.add(failure.group, now_ns)
            else:
                return

    def _wall_ms(self) -> int:
        return self._wall_us() // 1_000

    def _elapsed_ms(self) -> int:
        return self._store.elapsed_ms(self._now_ns)

    def _share_count(self) -> int:
        return 0 if self._share is None else self._share.count()

    @property
    def _has_transactions(self) -> bool:
        return self.transactions is not None and self.transactions.is_used

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """See `GroupRequests.handle`."""
        self._now_ns = now_ns
        self._requests.handle(requester, api, request, now_ns)

    def summary(self, name: str) -> dict[str, Any] | None:
        """The row of a group of any kind in LIST_GROUPS; None: deleted."""
        return summary_of(self._table, self._share, name)

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None:
        """Start the grace period of the dynamic members of a closed connection: CLOSED_GRACE_NS.
        When it closed `with_front`, the client notices it only at its next heartbeat, so a
        heartbeat interval and FRONT_GRACE_NS are added.
        """
        self._now_ns = now_ns
        self._sessions.closed(SessionKey(*session), now_ns, with_front=with_front)
        if self._share is not None:
            self._share.session_closed(session, now_ns, with_front=with_front)

    def topics_changed(self, now_ns: int) -> None:
        """Follow a change of topics, partitions or settings: assign the affected groups again and
        push to their members. Raises GroupFailure.
        """
        self._now_ns = now_ns
        self._heartbeats.topics_changed()
        self._expiry.topics_changed(now_ns)
        if self._share is not None:
            self._share.topics_changed(now_ns, self._suspended.until)

    # ---- time ------------------------------------------------------------------------------------

    def step(self, now_ns: int, last_request_ns: int | None = None) -> None:
        """Run the timers of sessions and expiry, before the commit.

        `last_request_ns`: arrival time up to which all requests were handled, if that is not now.
        Sessions time out by it, since later heartbeats may wait in the lanes. Raises GroupFailure,
        StorageError, DiskFullError: then roll back.
        """
        self._now_ns = now_ns
        last_request_ns = now_ns if last_request_ns is None else min(now_ns, last_request_ns)
        released = self._suspended.release(now_ns)
        if released:
            for name in released:
                self._heartbeats.retry(name)
            self.topics_changed(now_ns)  # changes during their suspension
        self._sessions.advance(last_request_ns)
        self._heartbeats.advance(now_ns)
        if self._expiry.is_due(now_ns):
            self._store.watch_files()
            if self._table.count or self._share_count() or self._has_transactions:
                self._store.keep_time(MARK_ALONE_MS)
            self._book.settle()
            for group_id in self._expiry.step(now_ns, self._elapsed_ms(), self._is_unused):
                group = self._table.of_id(group_id)
                with work_for(group.name):
                    self._table.delete(group)
        if self._share is not None:
            self._share.step(last_request_ns, self._suspended.until)
        if self.transactions is not None:
            self.transactions.step(now_ns, last_request_ns)

    def _is_unused(self, group_id: int) -> bool:
        """True when a group without members in the store is also unchanged in this step, and not
        suspended.
        """
        group = self._table.of_id(group_id)
        return (
            not group.members
            and group_id not in self._table.changed
            and group.name not in self._suspended.until
            and not self._prepared_offsets.has(group.name)
        )

    def _expired(self, group_id: int, member: Member, now_ns: int) -> None:
        self._heartbeats.expired(group_id, member, now_ns)

    def next_deadline_ns(self) -> int | None:
        """Time of the next timer; None: there is none."""
        deadlines = [
            self._sessions.next_deadline_ns(), self._heartbeats.next_deadline_ns(),
            self._expiry.next_deadline_ns(), self._suspended.next_deadline_ns()
        ]  # fmt: skip
        if self._share is not None:
            deadlines.append(self._share.next_deadline_ns())
        if self.transactions is not None:
            deadlines.append(self.transactions.next_deadline_ns())
        return min((one for one in deadlines if one is not None), default=None)

    # ---- the end of a step -----------------------------------------------------------------------

    def settle(self) -> None:
        """Compute targets, answer the waiting heartbeats and write rows. The store's commit calls
        it. Raises GroupFailure, StorageError, DiskFullError.
        """
        self._heartbeats.settle(self._now_ns)
        self._book.settle()
        if self._share is not None:
            self._share.settle(self._suspended.until)
        if self.transactions is not None:
            self.transactions.settle()

    def drain_answers(self) -> list[Answer]:
        """The answers of this step, after the commit or `rolled_back`."""
        answers = self._outgoing.drain_answers()
        if self._share is not None:
            answers += self._share.drain_answers()
        if self.transactions is not None:
            answers += self.transactions.drain_answers()
        return answers

    def drain_pushes(self) -> list[Push]:
        """The pushes of this step, at most one for each session."""
        pushes = self._outgoing.drain_pushes()
        return pushes if self._share is None else pushes + self._share.drain_pushes()

    def rolled_back(
        self, now_ns: int, error: TailraceError | None = None, group: str | None = None
    ) -> None:
        """Reload the groups that the step changed after a rollback of the store, and refuse their
        requests with `error`. `group`: the one whose work has failed; None: all, or a request.
        Raises StorageError when they cannot be read; then the service is unusable.
        """
        self._now_ns = now_ns
        if group is not None:
            self._suspended.add(group, now_ns)
            failed = self._table.get(group)
            if failed is not None:
                self._table.change(failed)
        if error is None:
            error = StorageError("groups.db could not commit the request; nothing of it was kept")
        self._book.forget()
        self._expiry.rolled_back()
        self._outgoing.undone(set(self._table.changed.values()), error)
        self._heartbeats.rolled_back(error)
        self._table.rolled_back(now_ns)
        if self._share is not None:
            self._share.rolled_back(now_ns, error, group)
        if self.transactions is not None:
            self.transactions.rolled_back(now_ns, error)
