"""What a consumer of a group does beside reading: takes and gives up partitions, and commits.

Everything here happens inside the caller's `poll`, `commit`, `unsubscribe` or `close`; heartbeats go on elsewhere (`tailrace.groups.driver`). A step of a
rebalance touches the partitions that it is about and no others: those that are kept go on, with what is buffered of them and what is under way.

    REVOKE   commit what was handed out (auto commit), tell the listener, drop the cursors; then the appliance is told
    ASSIGN   a cursor for each, which begins at the committed offset; tell the listener
    LOSE     tell the listener, drop the cursors; nothing can be committed any more

The cursors and the names of partitions are kept in `tailrace.groups.assigned_partitions`.

Owner: one Consumer, one thread.
Invariants: after a step the cursors are those of the partitions that the membership has taken, whatever a listener raised; what it raised reaches the caller
    once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.decoded_records import DecodedRecords
from tailrace.environment import Environment
from tailrace.errors import InvalidRequestError, UnknownTopicError
from tailrace.fetcher import PartitionCursor
from tailrace.groups.assigned_partitions import AssignedPartitions
from tailrace.groups.driver import HeartbeatThread
from tailrace.groups.listener import Hooks, tell
from tailrace.groups.membership import NEVER_NS, NS_PER_MS, POLLING_NS, Change, ChangeKind, MemberIdentity, Membership, Phase
from tailrace.groups.offsets import PositionLookup, fetch_committed
from tailrace.groups.progress import Progress
from tailrace.groups.subscription import Subscription, missing_topics
from tailrace.offset_lookup import Call
from tailrace.reading import Reading
from tailrace.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tailrace.retry_topics import with_retry_topics
from tailrace.settings import ConsumerSettings
from tailrace.topics import TopicInfo

RETRY_NS = 100 * NS_PER_MS
"""After so long a step is tried again that could not be made."""
LEAVE_WAIT_NS = 5_000 * NS_PER_MS
"""How long close() waits for the appliance to hear that this member leaves."""
POLL_STEP_NS = 1_000 * NS_PER_MS
"""A poll looks up at least so often."""


class GroupReading:
    """See the module's docstring."""

    def __init__(
        self,
        consumer: object,
        connection: Connection,
        settings: ConsumerSettings,
        environment: Environment,
        reading: Reading,
        decoded: DecodedRecords,
        call: Call,
        info: Callable[[str, str, int], TopicInfo],
        all_topics: Callable[[], list[str]],
    ) -> None:
        """`info`: of the topic of this name and id with so many partitions; raises UnknownTopicError where there is none. `all_topics`: their names."""
        assert settings.group_id is not None
        self.group_id = settings.group_id
        self._connection = connection
        self._settings = settings
        self._environment = environment
        self._now_ns = environment.monotonic_ns
        self._reading = reading
        self._decoded = decoded
        self._call = call
        self._all_topics = all_topics
        self.membership = Membership(
            MemberIdentity(
                settings.group_id, uuid4().hex, settings.group_instance_id, settings.client_id, settings.partition_assignment_strategy,
                settings.session_timeout_ms, settings.heartbeat_interval_ms, settings.max_poll_interval_ms,
            ),
            self._now_ns(),
        )  # fmt: skip
        self._thread = HeartbeatThread(self.membership, settings.bootstrap, settings.client_id, environment)
        self.beats = self._thread.beats
        """Where no thread makes them, the environment's driver does."""
        self._lock = self.beats.lock
        self._has_thread = environment.has_threads
        self._abandon = weakref.finalize(consumer, self._thread.abandon)
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self._subscription: Subscription | None = None
        self.hooks = Hooks()
        self.progress = Progress(connection, settings, self._now_ns, reading, decoded, self._who, self._hurry)
        self._begins_at_end = settings.auto_offset_reset != "earliest"
        self._lookup = PositionLookup(connection, settings.group_id, self.progress.begins_at, begins_at_end=self._begins_at_end)
        self.partitions = AssignedPartitions(self.group_id, self.membership, reading, decoded, self.progress, self._lookup, call, info)
        self._retry_at_ns = NEVER_NS
        self._in_step = self._is_giving_up = False
        self.leaves_rebalances = False
        """Whether another makes the steps of a rebalance (an event loop)."""

    # ---- subscribing -----------------------------------------------------------------------------------------------------------------------

    @property
    def is_subscribed(self) -> bool:
        """Whether the group decides what is read, and not `assign`."""
        return self._subscription is not None

    def topics(self) -> set[str]:
        """The names of those that are wanted now."""
        return set(self._subscription.topics if self._subscription else ())

    def subscribe(self, subscription: Subscription, hooks: Hooks) -> None:
        """Want these topics from the next poll on. Raises InvalidRequestError where `assign` has decided what is read."""
        if self._subscription is None and self._reading.cursors:
            raise InvalidRequestError("partitions are assigned by assign(); write unsubscribe() before subscribe()")
        self._subscription, self.hooks = subscription, hooks
        self._reading.topics_may_go = True
        if self.membership.phase is not Phase.OUT:
            self._want_topics()

    def _want_topics(self) -> None:
        subscription = self._subscription
        assert subscription is not None
        existing: set[str] | None = None
        if subscription.patterns:
            version = self.membership.catalog_version
            existing = set(self._all_topics())
            subscription.match(existing)
            subscription.listed_version = version
        topics = with_retry_topics(subscription.topics, self.group_id)
        if existing is not None:  # of thousands of topics few have one for retries, and one that is made later is in the next list
            existing.update(subscription.topics)
            topics = [name for name in topics if name in existing]
        with self._lock:
            self.membership.subscribe(topics, bool(subscription.patterns), self._now_ns())
        self._ring()

    def unsubscribe(self) -> None:
        """Give everything up and leave the group. Raises what a listener raises, when that is done."""
        if self._subscription is None:
            return
        try:
            self._give_up()
        finally:
            self.leave()

    def leave(self) -> None:
        """Be no member any more; everything is given up already."""
        self._subscription, self._reading.topics_may_go = None, False
        with self._lock:
            self.membership.leave(self._now_ns())
        self._ring()

    @property
    def has_left(self) -> bool:
        """Whether the appliance has heard that this member leaves, or cannot hear it now."""
        return self.membership.phase is not Phase.LEAVING or not self.beats.connection.is_ready

    def metadata(self) -> ConsumerGroupMetadata:
        """Who this consumer is in its group."""
        one = self.membership
        epoch = one.epoch if one.phase is Phase.MEMBER else -1
        return ConsumerGroupMetadata(self.group_id, epoch, one.identity.member_id, one.identity.instance_id)

    # ---- poll ------------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Around a call of poll()."""
        if not self._has_thread:
            self.beats.step()
        if self._thread.failure is not None:
            raise self._thread.failure
        self.progress.begin_poll()
        if self._subscription is not None and self.membership.phase is Phase.OUT:
            self._want_topics()
            if self._has_thread:
                self._thread.start()
                self._reading.wake_fd = self._thread.news.fd
        self.membership.polled_ns = POLLING_NS
        try:
            yield
        finally:
            self.membership.polled_ns = self._now_ns()

    def step(self) -> None:
        """All that is due beside reading. Raises what a listener raised, or why this consumer cannot be a member; all is consistent then."""
        if not self._has_thread:
            self.beats.step()
        now_ns = self._now_ns()
        if not self._in_step and not self.leaves_rebalances and self.is_rebalance_due(now_ns):
            self._in_step = True
            try:
                self._reconcile()
            finally:
                self._in_step = False
        if self._lookup:
            self._lookup.pump(now_ns)
            if self._lookup.error is not None:
                error, self._lookup.error = self._lookup.error, None
                raise error
        self.progress.step(now_ns)

    def advance(self, deadline_ns: int) -> bool:
        """Until something can be handed out, or the time is up."""
        if self._subscription is None and not self._reading.cursors:
            raise InvalidRequestError("nothing is assigned: name topics at construction, or call subscribe() or assign()")
        while True:
            self.step()
            now_ns = self._now_ns()
            until_ns = min(deadline_ns, max(now_ns, self.due_ns()), now_ns + POLL_STEP_NS)
            if not self._has_thread:
                self._reading.wake_fd = self.beats.connection.fileno()
            if self._reading.look(until_ns, self._is_interrupted):
                return True
            if self._now_ns() >= deadline_ns:
                return False

    def _is_interrupted(self) -> bool:
        return self.membership.has_news or self.progress.has_ended_commits or not self._has_thread

    def due_ns(self) -> int:
        """When `step` has something to do though nothing comes."""
        beat_ns = NEVER_NS if self._has_thread else self.beats.next_ns()
        times = (self._retry_at_ns, self.progress.due_ns(), self._lookup.due_ns(), beat_ns)
        return min(at_ns for at_ns in times if at_ns is not None)

    # ---- rebalances ------------------------------------------------------------------------------------------------------------------------

    def next_change(self) -> Change | None:
        """The next step to make; what it assigns counts as taken from now on."""
        with self._lock:
            change = self.membership.next_change()
            if change is not None and change.kind is ChangeKind.ASSIGN:
                self.membership.taking(change.partitions)
        return change

    def is_rebalance_due(self, now_ns: int) -> bool:
        """Whether there may be a step to make."""
        return self.membership.has_news or now_ns >= self._retry_at_ns

    @property
    def waits_to_retry(self) -> bool:
        """Whether a step could not be made, and is made later."""
        return self._retry_at_ns != NEVER_NS

    def hear_news(self) -> None:
        """What is known to be due is looked at now."""
        self._retry_at_ns = NEVER_NS
        with self._lock:
            self._thread.news.hush()
            self.membership.has_news = False

    def _reconcile(self) -> None:
        """All steps that can be made now. The first thing that a listener raised is raised when they are made."""
        self.hear_news()
        raised: Exception | None = None
        try:
            while not self.waits_to_retry and (change := self.next_change()) is not None:
                try:
                    self._make(change)
                except Exception as error:
                    raised = raised or error
            self.look_at_catalog()
        except BaseException:
            self.membership.has_news = True
            raise
        self.raise_after(raised)

    def raise_after(self, raised: Exception | None) -> None:
        """All steps are made: raise what a listener has raised, or why this consumer cannot be a member."""
        with self._lock:
            refusal = None if raised is not None else self.membership.take_error(self._now_ns())
        self._ring()
        if raised is not None:
            self.membership.has_news = self.membership.has_news or self.membership.error is not None
            raise raised
        if refusal is not None:
            raise refusal

    def _make(self, change: Change) -> None:
        if change.kind is ChangeKind.REVOKE:
            self._revoke(change)
        elif change.kind is ChangeKind.LOSE:
            self._lose(change)
        else:
            self._assign(change)

    def look_at_catalog(self) -> None:
        """What the appliance says of topics: whose delivery is paused, and whether patterns are to be matched anew."""
        membership, subscription = self.membership, self._subscription
        self.partitions.look_at_pauses()
        if subscription is not None and subscription.patterns and subscription.listed_version != membership.catalog_version:
            self._want_topics()
        if subscription is not None and not subscription.names_are_checked and membership.phase is Phase.MEMBER:
            missing = missing_topics(self._call, subscription.names)
            subscription.names_are_checked = True
            if missing:  # no error: they may come
                logger.warning(
                    "there is no topic %s; the consumer of group %r reads it when there is one", ", ".join(missing), self.group_id
                )

    def _revoke(self, change: Change) -> None:
        keys = self.partitions.keys_of(change)
        try:
            self.progress.commit_before_revoking(keys)
            tell(self.hooks.revoked, keys)
        finally:
            self.drop(change, keys)

    def drop(self, change: Change, keys: list[TopicPartition]) -> None:
        """Read these no more, and let the appliance know."""
        self.partitions.drop(change, keys)
        with self._lock:
            if change.kind is ChangeKind.LOSE:
                self.membership.lost_told(self._now_ns())
            else:
                self.membership.revoked(change.partitions, self._now_ns())
        self._ring()

    def _assign(self, change: Change) -> None:
        try:
            infos = self.infos_of(change)
        except BaseException as error:
            self.put_back(change)
            if isinstance(error, UnknownTopicError):
                return  # the appliance's processes learn of topics one after another
            raise
        keys = self.partitions.take(change, infos)
        self._ring()
        tell(self.hooks.assigned, keys)

    def infos_of(self, change: Change) -> dict[str, TopicInfo]:
        """What is to be known of the topics of a step, by id. Raises UnknownTopicError."""
        return self.partitions.infos_of(change, self._subscription)

    def put_back(self, change: Change) -> None:
        """What is assigned cannot be taken now: soon again."""
        with self._lock:
            self.membership.revoked(change.partitions, self._now_ns())
        self._retry_at_ns = self._now_ns() + RETRY_NS

    def _lose(self, change: Change) -> None:
        keys = self.partitions.keys_of(change)
        self.say_lost(change, keys)
        try:
            tell(self.hooks.lost, keys)
        finally:
            self.drop(change, keys)

    def say_lost(self, change: Change, keys: list[TopicPartition]) -> None:
        """It is not the program's doing: the log has it."""
        logger.warning("a consumer of group %r has lost its %d partitions: %s", self.group_id, len(keys), change.reason)

    def last_change(self) -> Change:
        """The step that gives up everything that is read."""
        with self._lock:
            lost = self.membership.next_change()
        return lost if lost is not None and lost.kind is ChangeKind.LOSE else Change(ChangeKind.REVOKE, self.partitions.all())

    def _give_up(self) -> None:
        with self.giving_up() as is_first:
            if is_first:
                self._make(self.last_change())

    @contextmanager
    def giving_up(self) -> Iterator[bool]:
        """Around giving up everything. False: that is under way already, and a listener that it has told calls again."""
        before, self._is_giving_up = self._is_giving_up, True
        try:
            yield not before
        finally:
            self._is_giving_up = before

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------------

    def read_from_committed(self, cursors: list[PartitionCursor]) -> None:
        """Partitions of `assign` begin where the group has committed."""
        self._lookup.add(cursors)
        self.progress.forget([cursor.key for cursor in cursors])

    def decide(self, cursor: PartitionCursor) -> None:
        """The cursor's position is wanted now."""
        if cursor.from_committed:
            found = fetch_committed(self._call, self.group_id, [cursor.key], is_to_begin=self._begins_at_end)
            self._lookup.place(cursor, found[cursor.key])

    def committed(self, keys: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, asked for now."""
        return fetch_committed(self._call, self.group_id, keys)

    def _who(self) -> dict[str, Any]:
        return self.membership.who() if self.is_subscribed else {"group": self.group_id, "member_id": None, "member_epoch": -1}

    def _hurry(self) -> None:
        """Another member may have the partitions: ask."""
        with self._lock:
            self.membership.heartbeat_soon(self._now_ns())
        self._ring()

    def _ring(self) -> None:
        if self._has_thread:
            self._thread.ring()
        else:
            self.beats.step()

    # ---- the end ---------------------------------------------------------------------------------------------------------------------------

    def close(self, *, autocommit: bool = True, is_handled: bool = True) -> None:
        """Commit, give everything up, leave the group. `is_handled`: what was handed out last is done with. Raises what a listener raises."""
        self.begin_to_close(autocommit=autocommit, is_handled=is_handled)
        try:
            if self._subscription is not None:
                self._give_up()
            else:
                self.progress.commit_before_revoking(list(self._reading.cursors))
        finally:
            try:
                self._leave()
            finally:
                self.end()

    def begin_to_close(self, *, autocommit: bool, is_handled: bool) -> None:
        """From now on only what closing needs is done."""
        self._abandon.detach()
        self.progress.auto_commits = self.progress.auto_commits and autocommit
        self.progress.is_handled = is_handled

    def end(self) -> None:
        """The last of closing."""
        self._thread.stop()
        self.progress.call_back()

    def _leave(self) -> None:
        beats = self.beats
        self.leave()
        until_ns = self._now_ns() + LEAVE_WAIT_NS
        while not self.has_left and (left_ns := until_ns - self._now_ns()) > 0:
            if self._has_thread:
                self._environment.sleep_on((self._thread.news.fd,), left_ns)
                self._thread.news.hush()
            else:
                self._environment.sleep_on((beats.connection.fileno(),), min(left_ns, max(0, beats.next_ns() - self._now_ns())))
                beats.step()
