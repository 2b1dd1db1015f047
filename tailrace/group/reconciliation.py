"""Reconciliation: makes the member's partitions those of its target assignment, step by step.

    REVOKE  commit delivered records (auto commit), call the listener, drop the cursors, report it
    ASSIGN  make cursors that begin at the committed offsets, call the listener
    LOST    call the listener, drop the cursors; nothing can be committed any more

A step changes its own partitions only. All other partitions keep their buffers and fetches.

Owner: one Consumer, one thread or event loop, inside `poll`, `unsubscribe` and `close`.

Invariants:
- After a step the cursors are those of the partitions that the membership has taken, whatever a
  listener raised.
- What a listener raised reaches the caller once, after all steps.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.runtime import NEVER_NS
from tailrace.client.connections.steps import Steps, invoke
from tailrace.core.errors import UnknownTopicError
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.assignment import AssignedPartitions
from tailrace.group.heartbeat import HeartbeatThread
from tailrace.group.membership import NS_PER_MS, Change, ChangeKind
from tailrace.group.offsets.positions import PositionTracker
from tailrace.group.rebalance_listener import RebalanceCallback, RebalanceCallbacks
from tailrace.group.subscription import Subscription

RETRY_NS = 100 * NS_PER_MS
"""The pause before a failed step is tried again."""


class Reconciler:
    """The reconciliation of one member."""

    def __init__(
        self,
        group_id: str,
        thread: HeartbeatThread,
        now_ns: Callable[[], int],
        partitions: AssignedPartitions,
        position_tracker: PositionTracker,
        wakeup: Callable[[], None],
    ) -> None:
        """`wakeup` makes the heartbeats that are due."""
        self._group_id = group_id
        self._membership = thread.beats.membership
        self._lock = thread.beats.lock
        self._events = thread.events
        self._now_ns = now_ns
        self._partitions = partitions
        self._position_tracker = position_tracker
        self._wakeup = wakeup
        self.callbacks = RebalanceCallbacks()
        self.subscription: Subscription | None = None
        self.retry_at_ns = NEVER_NS
        """The time at which a failed step is tried again."""
        self.raised: BaseException | None = None
        """The last exception of a listener, or the last error of the group."""
        self._is_giving_up = False

    def is_due(self, now_ns: int) -> bool:
        """True if a step may be due."""
        return self._membership.has_events or now_ns >= self.retry_at_ns

    def reconcile(self, refresh: Callable[[], Steps[None]]) -> Steps[None]:
        """Make all steps that are possible now, then those of `refresh`. Raises the first exception
        of a listener, or the error that keeps the consumer from being a member.
        """
        self._process_events()
        raised: Exception | None = None
        try:
            while self.retry_at_ns == NEVER_NS and (change := self._next_change()) is not None:
                try:
                    yield from self._make(change)
                except Exception as error:
                    raised = raised or error
            yield from refresh()
        except BaseException:
            self._membership.has_events = True
            raise
        self._raise_after(raised)

    def _process_events(self) -> None:
        self.retry_at_ns = NEVER_NS
        with self._lock:
            self._events.clear()
            self._membership.has_events = False

    def _next_change(self) -> Change | None:
        """The next step. Its assigned partitions count as taken from now on."""
        with self._lock:
            change = self._membership.next_change()
            if change is not None and change.kind is ChangeKind.ASSIGN:
                self._membership.taking(change.partitions)
        return change

    def _raise_after(self, raised: Exception | None) -> None:
        with self._lock:
            refusal = None if raised is not None else self._membership.pop_error(self._now_ns())
        self._wakeup()
        self.raised = raised or refusal
        if raised is not None:
            self._membership.has_events = (
                self._membership.has_events or self._membership.error is not None
            )
            raise raised
        if refusal is not None:
            raise refusal

    # ---- steps -----------------------------------------------------------------------------------

    def _make(self, change: Change) -> Steps[None]:
        if change.kind is ChangeKind.ASSIGN:
            yield from self._assign(change)
            return
        keys = self._partitions.keys_of(change)
        is_dropped = True
        try:
            if change.kind is ChangeKind.LOST:
                logger.warning(
                    "a consumer of group %r has lost its %d partitions: %s",
                    self._group_id,
                    len(keys),
                    change.reason,
                )
                yield from self._invoke(self.callbacks.lost, keys)
            else:
                yield from self._position_tracker.commit_before_revoking(keys)
                yield from self._invoke(self.callbacks.revoked, keys)
        except BaseException as error:
            is_dropped = (
                isinstance(error, Exception) or self._is_giving_up or change.kind is ChangeKind.LOST
            )
            raise
        finally:
            if is_dropped:
                self._drop(change, keys)

    @staticmethod
    def _invoke(callback: RebalanceCallback | None, keys: list[TopicPartition]) -> Steps[None]:
        """Call a listener with its partitions, if there are any. Raises what it raises."""
        if callback is not None and keys:
            yield from invoke(callback, list(keys))

    def _drop(self, change: Change, keys: list[TopicPartition]) -> None:
        """Stop reading these partitions, and report that to the group coordinator."""
        self._partitions.drop(change, keys)
        with self._lock:
            if change.kind is ChangeKind.LOST:
                self._membership.ack_lost(self._now_ns())
            else:
                self._membership.revoked(change.partitions, self._now_ns())
        self._wakeup()

    def _assign(self, change: Change) -> Steps[None]:
        try:
            infos = yield from self._partitions.infos_of(change, self.subscription)
            keys = self._partitions.take(change, infos)
        except BaseException as error:
            self._partitions.drop(change, self._partitions.keys_of(change))
            self._put_back(change)
            if isinstance(error, UnknownTopicError):
                return  # the appliance's processes learn of a new topic one after another
            raise
        self._wakeup()
        try:
            yield from self._invoke(self.callbacks.assigned, keys)
        except Exception:
            raise
        except BaseException:
            # The partitions begin where the listener would have had them begin, or not at all.
            self._partitions.drop(change, keys)
            self._put_back(change)
            raise

    def _put_back(self, change: Change) -> None:
        """Give assigned partitions back, and retry the step soon."""
        with self._lock:
            self._membership.revoked(change.partitions, self._now_ns())
        self.retry_at_ns = self._now_ns() + RETRY_NS

    def give_up(self, is_nested: Callable[[], bool]) -> Steps[None]:
        """Revoke all partitions, or lose them if the membership is lost. A listener that is called
        for this and calls `unsubscribe` (`is_nested`) changes nothing more.
        """
        if self._is_giving_up and is_nested():
            return
        self._is_giving_up = True
        try:
            with self._lock:
                lost = self._membership.next_change()
            is_lost = lost is not None and lost.kind is ChangeKind.LOST
            yield from self._make(
                lost
                if lost is not None and is_lost
                else Change(ChangeKind.REVOKE, self._partitions.all())
            )
        finally:
            self._is_giving_up = False
