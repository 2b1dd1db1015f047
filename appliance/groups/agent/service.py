"""The group service: handles requests about consumer groups, share groups and transactions over the
database, without knowing lanes or processes.

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
from appliance.groups.agent.transaction_effects import TransactionEffects, no_offsets
from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.members import JOIN_EPOCH, Member
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
from appliance.groups.base.request_validation import (
    CONSUMER,
    SHARE,
    epoch_in,
    group_in,
    kind_in,
    member_in,
    shown,
)
from appliance.groups.base.responses import ANY, Responses
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer.classic_leases import CLASSIC, ClassicLeases
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
from shm.messages.lane_messages import PRODUCER_OWNERS
from shm.runtime.elapsed_time import MARK_ALONE_MS
from tailrace.core.errors import (
    InvalidGroupError,
    InvalidRequestError,
    NotSupportedError,
    StorageError,
    TailraceError,
    UnknownGroupError,
)
from tailrace.protocol.frame import Api

logger = logging.getLogger(__name__)


class GroupService:
    """Handles the requests of all groups of the appliance."""

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
        self._classic = ClassicLeases()
        self._sessions = Sessions(now_ns, self._expired)
        self._table = GroupTable(
            store,
            topics,
            limits,
            self._sessions,
            self._share_count,
            self._wall_ms,
            self._elapsed_ms,
        )
        self._book = OffsetBook(store)
        self._prepared_offsets = PreparedOffsets()
        start_offsets = StartOffsets(topics, self._book, self._elapsed_ms)
        self._offset_requests = OffsetRequests(
            self._table,
            self._book,
            start_offsets,
            topics,
            limits,
            answer_max,
            self._wall_ms,
            self._elapsed_ms,
            self._prepared_offsets,
        )
        self._heartbeats = Heartbeats(
            self._table,
            self._sessions,
            self._outgoing,
            topics,
            limits,
            Assignors() if assignors is None else assignors,
            self._wall_ms(),
            HandOvers(topics, self._book),
            start_offsets,
            answer_max,
            self._suspended,
        )
        self._describing = GroupDescriber(
            store, topics, self._book, start_offsets, answer_max, self.summary,
            self._prepared_offsets,
        )  # fmt: skip
        self._expiry = OffsetExpiry(store, topics, limits, now_ns)
        self._deletion = GroupDeletion(
            self._table, self._book, self._prepared_offsets, self._classic, share, self._suspended
        )
        effects = TransactionEffects(
            self._table, self._offset_requests, self._prepared_offsets, share, self._suspended,
            lambda: self._now_ns,
        )  # fmt: skip
        self._table.load(now_ns)
        self._begin(now_ns)
        self.transactions = (
            None
            if transactions is None
            else transactions(
                effects.for_coordinator(),
                Times(self._wall_ms, self._elapsed_ms),
            )
        )
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

    def _is_share(self, name: str) -> bool:
        return self._share is not None and self._share.has(name)

    # ---- requests --------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Handle one request; `drain_answers` has its answer. Raises TailraceError for a
        refusal.
        """
        self._now_ns = now_ns
        if api == Api.GROUP_HEARTBEAT:
            if not self._heartbeats.try_quiet(requester, request, now_ns):
                self._heartbeat(requester, request, now_ns)
        elif api == Api.LIST_GROUPS:
            self._outgoing.answer(requester, ANY, self._describing.list_groups(request))
        elif api == Api.DELETE_GROUPS:
            self._outgoing.answer(requester, ANY, self._deletion.delete_all(request, now_ns))
        elif api in TRANSACTION_APIS:
            if self.transactions is None:
                raise NotSupportedError("this appliance has no transactions")
            self.transactions.handle(requester, api, request, now_ns)
        elif api in _OF_ONE_GROUP:
            name = group_in(request)
            self._suspended.check(name)
            if self._share is not None and self._share.has(name):
                if api == Api.COMMIT_OFFSETS:
                    raise no_offsets(name)
                self._share.handle(requester, api, request, now_ns)
            elif api == Api.ALTER_GROUP_OFFSETS and request.get("kind") == SHARE:
                self._begin_share_group(requester, name, request, now_ns)
            else:
                self._outgoing.answer(requester, name, self._of_consumer_group(api, name, request))
        else:
            raise InvalidRequestError(f"API {api} is not served by the group coordinator")

    def _begin_share_group(
        self, requester: Requester, name: str, request: dict[str, Any], now_ns: int
    ) -> None:
        """Set start offsets of a share group that does not exist yet. It begins there."""
        if self._table.get(name) is not None:
            raise InvalidGroupError(
                f"{shown(name)} is a consumer group: use another name, or delete it first"
            )
        if self._share is None:
            raise NotSupportedError("this appliance has no share groups")
        self._classic.check_join(name, now_ns)
        self._table.check_room(name)
        self._share.handle(requester, Api.ALTER_GROUP_OFFSETS, request, now_ns)

    def _heartbeat(self, requester: Requester, request: dict[str, Any], now_ns: int) -> None:
        if request.get("kind") == CLASSIC:
            name = group_in(request)
            body = self._classic.handle(name, request, now_ns, self._member_count(name))
            self._outgoing.answer(requester, name, body)
            return
        name, kind, epoch, member_id = (
            group_in(request),
            kind_in(request),
            epoch_in(request),
            member_in(request),
        )
        self._suspended.check(name)
        taken = (
            SHARE
            if self._is_share(name)
            else CONSUMER
            if self._table.get(name) is not None
            else kind
        )
        if taken != kind:
            raise InvalidGroupError(
                f"{shown(name)} is a {taken} group: join it as such, or use another name"
            )
        if epoch == JOIN_EPOCH:
            self._classic.check_join(name, now_ns)
        if kind == SHARE:
            if self._share is None:
                raise NotSupportedError(
                    "this appliance has no share groups; join as a consumer group"
                )
            if epoch == JOIN_EPOCH and not self._share.has(name):
                self._table.check_room(name)
            self._share.handle(requester, Api.GROUP_HEARTBEAT, request, now_ns)
        elif epoch < JOIN_EPOCH:
            self._heartbeats.leave(requester, name, member_id, epoch, request, now_ns)
        elif epoch == JOIN_EPOCH:
            self._heartbeats.join(requester, name, member_id, request, now_ns)
        else:
            self._heartbeats.stay(requester, name, member_id, epoch, request, now_ns)

    def _of_consumer_group(self, api: int, name: str, request: dict[str, Any]) -> bytes:
        """The body of the answer about a consumer group."""
        if api == Api.COMMIT_OFFSETS:
            if request.get("kind") != CLASSIC:
                self._classic.check_empty(name, self._now_ns)
            return self._offset_requests.commit(name, request)
        if api == Api.ALTER_GROUP_OFFSETS:
            self._classic.check_empty(name, self._now_ns)
            return self._offset_requests.alter(name, request)
        group = self._table.get(name)
        if api == Api.FETCH_OFFSETS:
            return self._describing.fetch_offsets(group, request)
        if group is None:
            raise UnknownGroupError(f"there is no group {shown(name)}")
        if api == Api.DESCRIBE_GROUP:
            return self._describing.describe(group, request, self._now_ns)
        raise InvalidGroupError(
            f"{shown(name)} is a consumer group: records are acquired and acknowledged in share "
            "groups"
        )

    def _member_count(self, name: str) -> int:
        """The members of a group, in none of which Kafka's classic protocol is spoken."""
        summary = self.summary(name)
        return 0 if summary is None else int(summary["members"] or self._is_share(name))

    def summary(self, name: str) -> dict[str, Any] | None:
        """The row of a group of any kind in LIST_GROUPS; None: deleted."""
        group = self._table.get(name)
        if group is not None:
            return group.summary()
        return (
            self._share.summary(name) if self._share is not None and self._share.has(name) else None
        )

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


TRANSACTION_APIS = frozenset(
    (
        Api.INIT_TRANSACTIONS,
        Api.END_TRANSACTION,
        Api.LIST_TRANSACTIONS,
        Api.DESCRIBE_TRANSACTION,
        Api.ABORT_TRANSACTION,
        Api.CREATE_BRANCHES,
        Api.JOIN_TRANSACTION,
        PRODUCER_OWNERS,
    )
)
_OF_ONE_GROUP = frozenset(
    (
        Api.COMMIT_OFFSETS,
        Api.FETCH_OFFSETS,
        Api.DESCRIBE_GROUP,
        Api.ALTER_GROUP_OFFSETS,
        Api.SHARE_ACQUIRE,
        Api.SHARE_ACKNOWLEDGE,
    )
)
