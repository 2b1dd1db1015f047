"""What a consumer of a group does beside reading: takes and gives up partitions, and commits.

Everything here happens inside the caller's `poll`, `commit`, `unsubscribe` or `close`, as steps
(`tailrace.client.steps`) that a thread or an event loop takes; heartbeats go on elsewhere
(`tailrace.group.heartbeat`). Where several tasks use a consumer, one at a time makes the steps of a
rebalance. A step touches the partitions that it is about and no others: those that are kept go on,
with what is buffered of them and what is under way.

    REVOKE   commit what was delivered (auto commit), tell the listener, drop the cursors; then the appliance is told
    ASSIGN   a cursor for each, which begins at the committed offset; tell the listener
    LOST     tell the listener, drop the cursors; nothing can be committed any more

The cursors and the names of partitions are kept in `tailrace.group.assignment`.

Owner: one Consumer, one thread or event loop.
Invariants: after a step the cursors are those of the partitions that the membership has taken,
    whatever a listener raised; what it raised reaches the caller once.
"""  # noqa: E501

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

from tailrace.client.connection import Connection
from tailrace.client.runtime import Runtime
from tailrace.client.settings import ConsumerSettings
from tailrace.client.steps import Call, Steps, Wait, invoke
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRequestError, UnknownTopicError
from tailrace.core.log import logger
from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata
from tailrace.core.topic_names import with_retry_topics
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.fetcher import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.group.assignment import AssignedPartitions
from tailrace.group.heartbeat import HeartbeatManager, HeartbeatThread
from tailrace.group.membership import (
    NEVER_NS,
    NS_PER_MS,
    POLLING_NS,
    Change,
    ChangeKind,
    MemberIdentity,
    Membership,
    Phase,
)
from tailrace.group.offset_commit import PositionLookup, fetch_committed
from tailrace.group.positions import PositionTracker
from tailrace.group.rebalance_listener import RebalanceCallback, RebalanceCallbacks
from tailrace.group.retry_partitions import read_as_retries, retries_of
from tailrace.group.subscription import Subscription, missing_topics

RETRY_NS = 100 * NS_PER_MS
"""After so long a step is tried again that could not be made."""
LEAVE_WAIT_NS = 5_000 * NS_PER_MS
"""How long close() waits for the appliance to hear that this member leaves."""
POLL_STEP_NS = 1_000 * NS_PER_MS
"""A poll looks up at least so often."""


class ConsumerCoordinator:
    """See the module's docstring."""

    def __init__(
        self,
        consumer: object,
        is_nested: Callable[[], bool],
        connection: Connection,
        settings: ConsumerSettings,
        runtime: Runtime,
        fetch_loop: FetchLoop,
        buffer: RecordBuffer,
        call: Call,
        info: Callable[[str, str, int], Steps[TopicInfo]],
        all_topics: Callable[[], Steps[list[str]]],
    ) -> None:
        """`is_nested`: whether the operation under way was called by code that another one calls.

        `info`: of the topic of this name and id with so many partitions; raises UnknownTopicError
        where there is none. `all_topics`: their names."""
        assert settings.group_id is not None
        self.group_id = settings.group_id
        self._connection = connection
        self._settings = settings
        self._runtime = runtime
        self._now_ns = runtime.monotonic_ns
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._call = call
        self._all_topics = all_topics
        self.membership = Membership(
            MemberIdentity(
                settings.group_id, uuid4().hex, settings.group_instance_id, settings.client_id,
                settings.partition_assignment_strategy,
                settings.session_timeout_ms, settings.heartbeat_interval_ms,
                settings.max_poll_interval_ms,
            ),
            self._now_ns(),
        )  # fmt: skip
        self._thread = HeartbeatThread(
            self.membership, settings.bootstrap_servers, settings.client_id, runtime
        )
        self.beats = self._thread.beats
        """Where no thread makes them, the environment's driver does."""
        self._lock = self.beats.lock
        self._has_thread = runtime.has_threads
        self._abandon = weakref.finalize(consumer, self._thread.abandon)
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self._subscription: Subscription | None = None
        self.callbacks = RebalanceCallbacks()
        self.position_tracker = PositionTracker(
            connection,
            settings,
            self._now_ns,
            fetch_loop,
            buffer,
            self._member_fields,
            self._heartbeat_now,
        )
        self._begins_at_end = settings.auto_offset_reset != "earliest"
        self._lookup = PositionLookup(
            connection,
            settings.group_id,
            self.position_tracker.begins_at,
            begins_at_end=self._begins_at_end,
        )
        self.partitions = AssignedPartitions(
            self.group_id,
            self.membership,
            fetch_loop,
            buffer,
            self.position_tracker,
            self._lookup,
            call,
            info,
        )
        self._retry_at_ns = NEVER_NS
        self._is_giving_up = False
        self._is_nested = is_nested
        self._stepper: object = None
        """Who makes the steps of a rebalance now; a listener that is told of one is the same. Or
        who was interrupted in one.
        """
        self.raised: BaseException | None = None
        """What a listener has raised last, or the group."""
        self._waiting_count = 0
        """How many callers are in a poll."""
        self.caller: Callable[[], object] = _the_thread
        """Who calls: a consumer of an event loop is used by several tasks."""
        self.on_change: Callable[[], None] = _nothing
        """Called when a caller that waits is to look again."""
        self.wakeup: Callable[[], None] = (
            self._thread.wakeup if runtime.has_threads else _step_of(self.beats)
        )
        """The heartbeats have something to do."""

    # ---- subscribing -----------------------------------------------------------------------------

    @property
    def is_subscribed(self) -> bool:
        """Whether the group decides what is read, and not `assign`."""
        return self._subscription is not None

    def topics(self) -> set[str]:
        """The names of those that are wanted now."""
        return set(self._subscription.topics if self._subscription else ())

    def subscribe(self, subscription: Subscription, callbacks: RebalanceCallbacks) -> Steps[None]:
        """Want these topics from the next poll on. Raises InvalidRequestError where `assign` has
        decided what is read.
        """
        if self._subscription is None and self._fetch_loop.cursors:
            raise InvalidRequestError(
                "partitions are assigned by assign(); write unsubscribe() before subscribe()"
            )
        self._subscription, self.callbacks = subscription, callbacks
        self._fetch_loop.topics_may_go = True
        if self.membership.phase is not Phase.OUT:
            yield from self._request_topics()

    def _request_topics(self) -> Steps[None]:
        subscription = self._subscription
        assert subscription is not None
        existing: set[str] | None = None
        if subscription.patterns:
            version = self.membership.catalog_version
            existing = set((yield from self._all_topics()))
            subscription.match(existing)
            subscription.listed_version = version
        topics = with_retry_topics(subscription.topics, self.group_id)
        if (
            existing is not None
        ):  # of thousands of topics few have one for retries, and one that is made later is in the next list  # noqa: E501
            existing.update(subscription.topics)
            topics = [name for name in topics if name in existing]
        with self._lock:
            self.membership.subscribe(topics, bool(subscription.patterns), self._now_ns())
        self.wakeup()

    def unsubscribe(self) -> Steps[None]:
        """Give everything up and leave the group. Raises what a listener raises, when that is
        done.
        """
        if self._subscription is None:
            return
        is_nested = yield from self._begin_step()
        try:
            yield from self._give_up()
        finally:
            self.leave()
            self._end_step(is_nested=is_nested)

    def leave(self) -> None:
        """Be no member any more; everything is given up already."""
        self._subscription, self._fetch_loop.topics_may_go = None, False
        with self._lock:
            self.membership.leave(self._now_ns())
        self.wakeup()

    @property
    def has_left(self) -> bool:
        """Whether the appliance has heard that this member leaves, or cannot hear it now."""
        return self.membership.phase is not Phase.LEAVING or not self.beats.connection.is_ready

    def metadata(self) -> ConsumerGroupMetadata:
        """Who this consumer is in its group."""
        one = self.membership
        epoch = one.epoch if one.phase is Phase.MEMBER else -1
        return ConsumerGroupMetadata(
            self.group_id, epoch, one.identity.member_id, one.identity.instance_id
        )

    # ---- poll ------------------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        """Whether a caller makes a step, perhaps one that was interrupted."""
        return self._stepper is not None

    def begin_poll(self) -> None:
        """A caller asks for records: what was delivered before is processed."""
        if not self._has_thread:
            self.wakeup()
        if self._thread.failure is not None:
            raise self._thread.failure
        self.position_tracker.begin_poll()
        self._waiting_count = 1 if self._has_thread else self._waiting_count + 1
        self.membership.polled_ns = POLLING_NS

    def end_poll(self) -> None:
        """It has got them, or waits no more."""
        self._waiting_count -= 1
        if self._waiting_count <= 0:
            self._waiting_count = 0
            self.membership.polled_ns = self._now_ns()

    def is_quiet(self, now_ns: int) -> bool:
        """Whether `step` has nothing to do."""
        return not (
            self._lookup
            or self.is_rebalance_due(now_ns)
            or self.position_tracker.is_due(now_ns)
            or self.membership.phase is Phase.OUT
            or not self._has_thread
        )

    def step(self) -> Steps[None]:
        """All that is due beside reading. Raises what a listener raised, or why this consumer
        cannot be a member; all is consistent then.
        """
        if self._subscription is not None and self.membership.phase is Phase.OUT:
            yield from self._request_topics()
            if self._has_thread:
                self._thread.start()
                self._fetch_loop.wake_fd = self._thread.events.fd
        if not self._has_thread:
            self.wakeup()
        if self.is_rebalance_due(self._now_ns()):
            is_nested = yield from self._begin_step()
            try:
                if not is_nested and self.is_rebalance_due(self._now_ns()):
                    yield from self._reconcile()
            finally:
                self._end_step(is_nested=is_nested)
        now_ns = self._now_ns()
        if self._lookup:
            self._lookup.poll(now_ns)
            if self._lookup.error is not None:
                error, self._lookup.error = self._lookup.error, None
                raise error
        self.position_tracker.step(now_ns)

    def _begin_step(self) -> Steps[bool]:
        """Wait until no other caller makes steps. Returns whether this one makes them already: a
        listener calls.
        """
        me = self.caller()
        if self._stepper is me and self._is_nested():
            return True
        while self._stepper is not None and self._stepper is not me:
            yield Wait(self._now_ns() + POLL_STEP_NS)
        self._stepper = me
        return False

    def _end_step(self, *, is_nested: bool) -> None:
        if not is_nested:
            self._stepper = None
            self.on_change()

    def poll(self, deadline_ns: int | None, is_filled: Callable[[], bool]) -> Steps[bool]:
        """Until something can be handed out, or the time is up. `is_filled`: whether another task
        has taken something meanwhile.
        """
        while True:
            if self._subscription is None and not self._fetch_loop.cursors:
                raise InvalidRequestError(
                    "nothing is assigned: name topics at construction, or call subscribe() or "
                    "assign()"
                )
            yield from self.step()
            now_ns = self._now_ns()
            until_ns = min(max(now_ns, self.due_ns()), now_ns + POLL_STEP_NS)
            if deadline_ns is not None:
                until_ns = min(deadline_ns, until_ns)
            if not self._has_thread:
                self._fetch_loop.wake_fd = self.beats.connection.fileno()
            is_interrupted = partial(self._is_interrupted, is_filled)
            if (
                yield from self._fetch_loop.wait(
                    until_ns, is_interrupted, once=not self._has_thread
                )
            ) or is_filled():
                return True
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                return False

    def _is_interrupted(self, is_filled: Callable[[], bool]) -> bool:
        return is_filled() or self.membership.has_events or self.position_tracker.has_ended_commits

    def due_ns(self) -> int:
        """When `step` has something to do though nothing comes."""
        beat_ns = NEVER_NS if self._has_thread else self.beats.next_ns()
        times = (self._retry_at_ns, self.position_tracker.due_ns(), self._lookup.due_ns(), beat_ns)
        return min(at_ns for at_ns in times if at_ns is not None)

    # ---- rebalances ------------------------------------------------------------------------------

    def next_change(self) -> Change | None:
        """The next step to make; what it assigns counts as taken from now on."""
        with self._lock:
            change = self.membership.next_change()
            if change is not None and change.kind is ChangeKind.ASSIGN:
                self.membership.taking(change.partitions)
        return change

    def is_rebalance_due(self, now_ns: int) -> bool:
        """Whether there may be a step to make."""
        return self.membership.has_events or now_ns >= self._retry_at_ns

    @property
    def waits_to_retry(self) -> bool:
        """Whether a step could not be made, and is made later."""
        return self._retry_at_ns != NEVER_NS

    def process_events(self) -> None:
        """What is known to be due is looked at now."""
        self._retry_at_ns = NEVER_NS
        with self._lock:
            self._thread.events.clear()
            self.membership.has_events = False

    def _reconcile(self) -> Steps[None]:
        """All steps that can be made now. The first thing that a listener raised is raised when
        they are made.
        """
        self.process_events()
        raised: Exception | None = None
        try:
            while not self.waits_to_retry and (change := self.next_change()) is not None:
                try:
                    yield from self._make(change)
                except Exception as error:
                    raised = raised or error
            yield from self._refresh_subscription()
        except BaseException:
            self.membership.has_events = True
            raise
        self.raise_after(raised)

    def raise_after(self, raised: Exception | None) -> None:
        """All steps are made: raise what a listener has raised, or why this consumer cannot be a
        member.
        """
        with self._lock:
            refusal = None if raised is not None else self.membership.pop_error(self._now_ns())
        self.wakeup()
        self.raised = raised or refusal
        if raised is not None:
            self.membership.has_events = (
                self.membership.has_events or self.membership.error is not None
            )
            raise raised
        if refusal is not None:
            raise refusal

    def _make(self, change: Change) -> Steps[None]:
        if change.kind is ChangeKind.ASSIGN:
            yield from self._assign(change)
            return
        keys = self.partitions.keys_of(change)
        try:
            if change.kind is ChangeKind.LOST:
                logger.warning(
                    "a consumer of group %r has lost its %d partitions: %s",
                    self.group_id,
                    len(keys),
                    change.reason,
                )
                yield from self._invoke(self.callbacks.lost, keys)
            else:
                yield from self.position_tracker.commit_before_revoking(keys)
                yield from self._invoke(self.callbacks.revoked, keys)
        finally:
            self.drop(change, keys)

    @staticmethod
    def _invoke(hook: RebalanceCallback | None, keys: list[TopicPartition]) -> Steps[None]:
        """Call a listener, if there is one and there is something to say. Raises what it raises."""
        if hook is not None and keys:
            yield from invoke(hook, list(keys))

    def _refresh_subscription(self) -> Steps[None]:
        """What the appliance says of topics: whose delivery is paused, and whether patterns are to
        be matched anew.
        """
        membership, subscription = self.membership, self._subscription
        self.partitions.apply_pauses()
        if (
            subscription is not None
            and subscription.patterns
            and subscription.listed_version != membership.catalog_version
        ):
            yield from self._request_topics()
        if (
            subscription is not None
            and not subscription.names_are_checked
            and membership.phase is Phase.MEMBER
        ):
            missing = yield from missing_topics(self._call, subscription.names)
            subscription.names_are_checked = True
            if missing:  # no error: they may come
                logger.warning(
                    "there is no topic %s; the consumer of group %r reads it when there is one",
                    ", ".join(missing),
                    self.group_id,
                )

    def drop(self, change: Change, keys: list[TopicPartition]) -> None:
        """Read these no more, and let the appliance know."""
        self.partitions.drop(change, keys)
        with self._lock:
            if change.kind is ChangeKind.LOST:
                self.membership.ack_lost(self._now_ns())
            else:
                self.membership.revoked(change.partitions, self._now_ns())
        self.wakeup()

    def _assign(self, change: Change) -> Steps[None]:
        try:
            infos = yield from self.partitions.infos_of(change, self._subscription)
            keys = self.partitions.take(change, infos)
        except BaseException as error:
            self.partitions.drop(change, self.partitions.keys_of(change))
            self._put_back(change)
            if isinstance(error, UnknownTopicError):
                return  # the appliance's processes learn of topics one after another
            raise
        self.wakeup()
        yield from self._invoke(self.callbacks.assigned, keys)

    def _put_back(self, change: Change) -> None:
        """What is assigned cannot be taken now: soon again."""
        with self._lock:
            self.membership.revoked(change.partitions, self._now_ns())
        self._retry_at_ns = self._now_ns() + RETRY_NS

    def _give_up(self) -> Steps[None]:
        """Give up everything that is read, unless that is under way: a listener that was told
        calls.
        """
        if self._is_giving_up and self._is_nested():
            return
        self._is_giving_up = True
        try:
            with self._lock:
                lost = self.membership.next_change()
            is_lost = lost is not None and lost.kind is ChangeKind.LOST
            yield from self._make(
                lost
                if lost is not None and is_lost
                else Change(ChangeKind.REVOKE, self.partitions.all())
            )
        finally:
            self._is_giving_up = False

    # ---- offsets ---------------------------------------------------------------------------------

    def retries_of(self, keys: list[TopicPartition]) -> Steps[list[TopicPartition]]:
        """The partitions with what the group retries of these."""
        return retries_of(self._call, keys, self.group_id)

    def read_as_retries(self, cursor: PartitionPosition) -> None:
        """Of a cursor of `assign`: see `tailrace.group.retry_partitions`."""
        read_as_retries(cursor, self.group_id)

    def read_from_committed(self, cursors: list[PartitionPosition]) -> None:
        """Partitions of `assign` begin where the group has committed."""
        self._lookup.add(cursors)
        self.position_tracker.forget([cursor.key for cursor in cursors])

    def decide(self, cursor: PartitionPosition) -> Steps[None]:
        """The cursor's position is wanted now."""
        if cursor.from_committed:
            found = yield from fetch_committed(
                self._call, self.group_id, [cursor.key], is_to_begin=self._begins_at_end
            )
            self._lookup.place(cursor, found[cursor.key])

    def committed(
        self, keys: list[TopicPartition]
    ) -> Steps[dict[TopicPartition, OffsetAndMetadata | None]]:
        """What the group has committed, asked for now."""
        return fetch_committed(self._call, self.group_id, keys)

    def _member_fields(self) -> dict[str, Any]:
        return (
            self.membership.member_fields()
            if self.is_subscribed
            else {"group": self.group_id, "member_id": None, "member_epoch": -1}
        )

    def _heartbeat_now(self) -> None:
        """Another member may have the partitions: ask."""
        with self._lock:
            self.membership.heartbeat_soon(self._now_ns())
        self.wakeup()

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, autocommit: bool = True, is_handled: bool = True) -> Steps[None]:
        """Commit, give everything up, leave the group. `is_handled`: what was delivered last is
        processed. Raises what a listener raises.
        """
        self._abandon.detach()
        self.position_tracker.auto_commits = self.position_tracker.auto_commits and autocommit
        self.position_tracker.is_handled = is_handled
        raised: Exception | None = None
        try:
            try:
                if self._subscription is not None:
                    yield from self.unsubscribe()
                else:
                    yield from self.position_tracker.commit_before_revoking(
                        list(self._fetch_loop.cursors)
                    )
            except Exception as error:
                raised = error
            yield from self._wait_until_left()
            if raised is not None:
                raise raised
        finally:
            self._thread.stop()
            self.position_tracker.run_callbacks()

    def _wait_until_left(self) -> Steps[None]:
        until_ns = self._now_ns() + LEAVE_WAIT_NS
        while not self.has_left and self._now_ns() < until_ns:
            if self._has_thread:
                self._fetch_loop.wake_fd = self._thread.events.fd
                yield Wait(until_ns)
                self._thread.events.clear()
            else:
                self._fetch_loop.wake_fd = self.beats.connection.fileno()
                yield Wait(min(until_ns, self.beats.next_ns()))
                self.wakeup()
            self._connection.process()


def _the_thread() -> object:
    """The caller, where there is but one."""
    return Phase


def _nothing() -> None:
    pass


def _step_of(beats: HeartbeatManager) -> Callable[[], None]:
    def step() -> None:
        beats.step()

    return step
