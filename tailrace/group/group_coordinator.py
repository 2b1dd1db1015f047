"""Consumer coordinator: a consumer's membership in its group, beside fetching. It subscribes,
rebalances and commits.

Everything here runs inside the caller's `poll`, `commit`, `unsubscribe` or `close`, as steps
(`tailrace.client.connections.steps`) for a thread or an event loop. Heartbeats are made elsewhere
(`tailrace.group.heartbeat`). If several tasks use a consumer, one at a time (`StepLock`) makes the
steps of a rebalance (`tailrace.group.reconciliation`).

Owner: one Consumer, one thread or event loop.

Invariants: those of `tailrace.group.reconciliation`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import NEVER_NS, Runtime
from tailrace.client.connections.steps import Call, Steps, Wait
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import ClientClosedError, InvalidRequestError
from tailrace.core.log import logger
from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata
from tailrace.core.topic_names import with_retry_topics
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.group.assignment import AssignedPartitions
from tailrace.group.heartbeat import (
    LEAVE_STEP_NS,
    LEAVE_WAIT_NS,
    HeartbeatManager,
    HeartbeatThread,
)
from tailrace.group.membership import (
    NS_PER_MS,
    POLLING_NS,
    MemberIdentity,
    Membership,
    Phase,
)
from tailrace.group.offsets.committed_offsets import PositionLookup, fetch_committed
from tailrace.group.offsets.positions import PositionTracker
from tailrace.group.rebalance_listener import RebalanceCallbacks
from tailrace.group.reconciliation import Reconciler
from tailrace.group.retry_partitions import read_as_retries, retries_of
from tailrace.group.step_lock import StepLock
from tailrace.group.subscription import Subscription, missing_topics
from tailrace.protocol.frame import Api

POLL_STEP_NS = 1_000 * NS_PER_MS
"""The longest wait of a poll between two checks."""
LOOP_POLL_EVERY_NS = 250 * NS_PER_MS
"""A loop over the consumer polls at least this often, whatever lies in its buffer: for auto commit,
rebalances and max_poll_interval_ms.
"""


class ConsumerCoordinator:
    """The group of one consumer."""

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
        """`is_nested`: see `StepLock`.

        `info` looks up a topic by name and id with at least this many partitions; it raises
        UnknownTopicError. `all_topics` lists all names.
        """
        assert settings.group_id is not None
        self.group_id = settings.group_id
        self._connection = connection
        self._now_ns = runtime.monotonic_ns
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._call = call
        self._all_topics = all_topics
        self.membership = _new_membership(settings, self._now_ns())
        self._thread = HeartbeatThread(
            self.membership, settings.bootstrap_servers, settings.client_id, runtime
        )
        self.beats = self._thread.beats
        """Stepped by the event loop, where no thread makes heartbeats."""
        self._lock = self.beats.lock
        self._has_thread = runtime.has_threads
        self._abandon = weakref.finalize(consumer, self._thread.abandon)
        self._is_closing = False
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self.position_tracker = PositionTracker(
            connection, settings, self._now_ns, fetch_loop, buffer, self._member_fields,
            self._heartbeat_now,
        )  # fmt: skip
        self._begins_at_end = settings.auto_offset_reset != "earliest"
        self._lookup = PositionLookup(
            connection, self.group_id, self.position_tracker.begins_at,
            begins_at_end=self._begins_at_end,
        )  # fmt: skip
        self.partitions = AssignedPartitions(
            self.group_id, self.membership, fetch_loop, buffer, self.position_tracker,
            self._lookup, call, info,
        )  # fmt: skip
        self._reconciler = Reconciler(
            self.group_id, self._thread, self._now_ns, self.partitions, self.position_tracker,
            lambda: self.wakeup(),
        )  # fmt: skip
        self.step_lock = StepLock(is_nested, self._now_ns)
        self._waiting_count = 0
        """The number of callers in a poll."""
        self.wakeup: Callable[[], None] = (
            self._thread.wakeup if runtime.has_threads else _step_of(self.beats)
        )
        """Called when a heartbeat may be due."""

    # ---- subscribing -----------------------------------------------------------------------------

    @property
    def _subscription(self) -> Subscription | None:
        return self._reconciler.subscription

    @property
    def raised(self) -> BaseException | None:
        """The last exception of a listener, or the last error of the group."""
        return self._reconciler.raised

    @property
    def is_subscribed(self) -> bool:
        """True if the group assigns the partitions, and not `assign`."""
        return self._subscription is not None

    def topics(self) -> set[str]:
        """The names of the subscribed topics, with those that patterns match now."""
        return set(self._subscription.topics if self._subscription else ())

    def subscribe(self, subscription: Subscription, callbacks: RebalanceCallbacks) -> Steps[None]:
        """Subscribe from the next poll on. Raises InvalidRequestError after `assign`."""
        if self._subscription is None and self._fetch_loop.cursors:
            raise InvalidRequestError(
                "partitions are assigned by assign(); write unsubscribe() before subscribe()"
            )
        self._reconciler.subscription, self._reconciler.callbacks = subscription, callbacks
        self._fetch_loop.allows_missing_topics = True
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
        if existing is not None:
            # Few of thousands of topics have a retry topic. A later one is in the next list.
            existing.update(subscription.topics)
            topics = [name for name in topics if name in existing]
        with self._lock:
            self.membership.subscribe(topics, bool(subscription.patterns), self._now_ns())
        self.wakeup()

    def unsubscribe(self) -> Steps[None]:
        """Give up all partitions and leave the group. Raises what a listener raises, after that."""
        if self._subscription is None:
            return
        is_nested = yield from self.step_lock.acquire()
        try:
            yield from self._reconciler.give_up(self.step_lock.is_nested)
        finally:
            self.leave()
            self.step_lock.release(is_nested=is_nested)

    def leave(self) -> None:
        """Leave the group. The partitions must be given up before."""
        self._reconciler.subscription, self._fetch_loop.allows_missing_topics = None, False
        with self._lock:
            self.membership.leave(self._now_ns())
        self.wakeup()

    def metadata(self) -> ConsumerGroupMetadata:
        """The group id, member id, epoch and instance id."""
        one = self.membership
        epoch = one.epoch if one.phase is Phase.MEMBER else -1
        return ConsumerGroupMetadata(
            self.group_id,
            epoch,
            one.identity.member_id,
            one.identity.instance_id,
            self.is_subscribed,
        )

    # ---- poll ------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """A caller asks for records: the records delivered before are processed."""
        if not self._has_thread:
            self.wakeup()
        if self._thread.failure is not None:
            raise self._thread.failure
        self.position_tracker.begin_poll()
        self._waiting_count = 1 if self._has_thread else self._waiting_count + 1
        self.membership.polled_ns = POLLING_NS

    def end_poll(self) -> None:
        """The caller's poll has ended."""
        self._waiting_count -= 1
        if self._waiting_count <= 0:
            self._waiting_count = 0
            self.membership.polled_ns = self._now_ns()

    def is_loop_poll_due(self) -> bool:
        """True if a loop polls before it delivers its next record: in time, or because the
        assignment may change.
        """
        membership = self.membership
        return membership.has_events or (
            self._now_ns() - membership.polled_ns >= LOOP_POLL_EVERY_NS
        )

    def until_loop_poll(self) -> Iterator[None]:
        """Items without end, until `is_loop_poll_due`."""
        now_ns, membership = self._now_ns, self.membership
        while not membership.has_events and now_ns() - membership.polled_ns < LOOP_POLL_EVERY_NS:
            yield

    def is_quiet(self, now_ns: int) -> bool:
        """True if `step` has nothing to do."""
        return not (
            self._lookup
            or self._reconciler.is_due(now_ns)
            or self.position_tracker.is_due(now_ns)
            or self.membership.phase is Phase.OUT
            or not self._has_thread
        )

    def step(self) -> Steps[None]:
        """Do all that is due beside fetching. Raises what a listener raised, or the error that
        keeps this consumer from being a member. The state is consistent then.
        """
        if self._subscription is not None and self.membership.phase is Phase.OUT:
            yield from self._request_topics()
            if self._has_thread:
                self._thread.start()
                self._fetch_loop.wake_fd = self._thread.events.fd
        if not self._has_thread:
            self.wakeup()
        if self._reconciler.is_due(self._now_ns()):
            is_nested = yield from self.step_lock.acquire()
            try:
                if not is_nested and self._reconciler.is_due(self._now_ns()):
                    yield from self._reconciler.reconcile(self._refresh_subscription)
            finally:
                self.step_lock.release(is_nested=is_nested)
        now_ns = self._now_ns()
        if self._lookup:
            self._lookup.poll(now_ns)
            if self._lookup.error is not None:
                error, self._lookup.error = self._lookup.error, None
                raise error
        self.position_tracker.step(now_ns)

    def poll(self, deadline_ns: int | None, is_filled: Callable[[], bool]) -> Steps[bool]:
        """Wait until a record can be delivered, or until `deadline_ns`. `is_filled` is True if
        another task has buffered records meanwhile.
        """
        while True:
            if self._subscription is None and not self._fetch_loop.cursors:
                if self._is_closing:  # this waits while another task closes the consumer
                    raise ClientClosedError("the consumer is closed")
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
        """The time of the next `step` without input."""
        beat_ns = NEVER_NS if self._has_thread else self.beats.next_ns()
        times = (
            self._reconciler.retry_at_ns,
            self.position_tracker.due_ns(),
            self._lookup.due_ns(),
            beat_ns,
        )
        return min(at_ns for at_ns in times if at_ns is not None)

    # ---- rebalances ------------------------------------------------------------------------------

    def _refresh_subscription(self) -> Steps[None]:
        """Apply pauses of topics, and match patterns again after a change of the catalog."""
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
            if missing:  # a warning and no error: they may be created later
                logger.warning(
                    "there is no topic %s; the consumer of group %r reads it when there is one",
                    ", ".join(missing),
                    self.group_id,
                )

    # ---- offsets ---------------------------------------------------------------------------------

    def retries_of(self, keys: list[TopicPartition]) -> Steps[list[TopicPartition]]:
        """The partitions of the group's retry topics for these."""
        return retries_of(self._call, keys, self.group_id)

    def read_as_retries(self, cursor: PartitionPosition) -> None:
        """See `tailrace.group.retry_partitions`; for a cursor of `assign`."""
        read_as_retries(cursor, self.group_id)

    def read_from_committed(self, cursors: list[PartitionPosition]) -> None:
        """Begin partitions of `assign` at their committed offsets."""
        self._lookup.add(cursors)
        self.position_tracker.forget([cursor.key for cursor in cursors])

    def decide(self, cursor: PartitionPosition) -> Steps[None]:
        """Look up the cursor's committed offset now, if it begins there."""
        if cursor.from_committed:
            found = yield from fetch_committed(
                self._call,
                self.group_id,
                {cursor.key: cursor.info.topic_id.hex()},
                has_ids=self._has_ids,
                is_to_begin=self._begins_at_end,
            )
            self._lookup.place(cursor, found[cursor.key])

    def committed(
        self, keys: list[TopicPartition]
    ) -> Steps[dict[TopicPartition, OffsetAndMetadata | None]]:
        """Look up the group's committed offsets: in the topics that the names know, that are read,
        or that have the names now.
        """
        topic_ids = {key: self.position_tracker.topic_id(key) for key in keys}
        return fetch_committed(self._call, self.group_id, topic_ids, has_ids=self._has_ids)

    @property
    def _has_ids(self) -> bool:
        """True unless the appliance looks up offsets by name only, as earlier versions do."""
        return self._connection.version(Api.FETCH_OFFSETS) != 1

    def _member_fields(self) -> dict[str, Any]:
        return (
            self.membership.member_fields()
            if self.is_subscribed
            else {"group": self.group_id, "member_id": None, "member_epoch": -1}
        )

    def _heartbeat_now(self) -> None:
        """Make a heartbeat at once: another member may have the partitions."""
        with self._lock:
            self.membership.heartbeat_soon(self._now_ns())
        self.wakeup()

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, autocommit: bool = True, is_handled: bool = True) -> Steps[None]:
        """Commit, give up all partitions, leave the group. `is_handled` is True if the last
        delivered records are processed. Raises what a listener raises.
        """
        self._abandon.detach()
        self._is_closing = True
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
        while (now_ns := self._now_ns()) < (wait_ns := self.beats.leaves_until_ns(until_ns)):
            wait_ns = min(wait_ns, now_ns + LEAVE_STEP_NS)
            if self._has_thread:
                self._fetch_loop.wake_fd = self._thread.events.fd
                yield Wait(wait_ns)
                self._thread.events.clear()
            else:
                self._fetch_loop.wake_fd = self.beats.connection.fileno()
                yield Wait(min(wait_ns, self.beats.next_ns()))
                self.wakeup()
            self._connection.process()


def _new_membership(settings: ConsumerSettings, now_ns: int) -> Membership:
    assert settings.group_id is not None
    identity = MemberIdentity(
        settings.group_id, uuid4().hex, settings.group_instance_id, settings.client_id,
        settings.partition_assignment_strategy, settings.session_timeout_ms,
        settings.heartbeat_interval_ms, settings.max_poll_interval_ms,
    )  # fmt: skip
    return Membership(identity, now_ns)


def _step_of(beats: HeartbeatManager) -> Callable[[], None]:
    def step() -> None:
        beats.step()

    return step
