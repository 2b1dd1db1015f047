"""The poll loop of a share consumer: acquires, fetches, acknowledges and dead-letters records.

Operations that wait are written as steps (`tailrace.client.connections.steps`). `ShareConsumer`
runs them in its thread, `AsyncShareConsumer` in an event loop.

Owner: one share consumer, in one thread or event loop.

Invariants:
- One request to the group coordinator is in flight at a time (`tailrace.share.requests`).
- Records reach the program only through `tailrace.share.delivery`.
- Only delivered records are accepted, except offsets without a record and dead letters that were
  written.
- The next commit raises for every acknowledgement that failed because its lock was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import Runtime
from tailrace.client.connections.steps import PAUSE, Steps, Wait, call_json
from tailrace.client.records.attached_records import AttachedMember, AttachedRecords
from tailrace.core.errors import (
    InvalidRequestError,
    LockLostError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.log import logger
from tailrace.core.records import Record
from tailrace.core.validation import name_list
from tailrace.group.dead_letter_queue import DeadLetters, Producers
from tailrace.group.membership import Phase
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tailrace.share.acknowledgements import Acknowledgements
from tailrace.share.acquired.fetch_loop import ShareFetchLoop
from tailrace.share.delivery import NS_PER_MS, Delivery
from tailrace.share.lost_locks import LostLocks
from tailrace.share.membership import ShareMember
from tailrace.share.record import ShareRecord
from tailrace.share.requests import RETRY_INTERVAL_NS, ShareRequests, ShareResponse
from tailrace.share.settings import ShareConsumerSettings
from tailrace.share.undeliverable import Undeliverable

POLL_INTERVAL_NS = 1_000 * NS_PER_MS
"""An idle consumer asks for records this often, because a push may be lost."""
ACKNOWLEDGE_AFTER_NS = 1_000 * NS_PER_MS
"""A loop sends its acknowledgements at least this often, and at least four times per lock
duration.
"""


class SharePollLoop:
    """The poll loop of one share consumer, with its connection, membership and buffers."""

    def __init__(
        self, settings: ShareConsumerSettings, runtime: Runtime, producers: Producers | None = None
    ) -> None:
        """`producers` makes the producer of dead letters; None: a Producer with a thread."""
        group = settings.group_id
        assert group is not None
        self.settings = s = settings
        self.now_ns = runtime.monotonic_ns
        self.connection = Connection(s.bootstrap_servers, s.client_id, runtime, "share consumer")
        self.connection.on_push = self._pushed
        self.member = ShareMember(s, runtime)
        self.acknowledgements = Acknowledgements()
        self.fetch_loop = ShareFetchLoop(self.connection, s.for_reading(), self._call)
        self.letters = DeadLetters(
            s.client_id,
            self._call,
            self.now_ns,
            producers or Producers(s.bootstrap_servers, runtime, s.tracing),
            s.dead_letter_timeout_ms,
        )
        self.requests = ShareRequests(
            self.connection,
            self.member.thread,
            self.acknowledgements,
            self.fetch_loop.topic_id,
            s.request_timeout_ms,
        )
        self.undeliverable = Undeliverable(group, self.acknowledgements)
        self.counters = {"records_consumed": 0, "acknowledgements_refused": 0, "locks_lost": 0}
        self.delivery = Delivery(
            s,
            self.now_ns,
            lambda: self.lock_ms,
            self.acknowledgements,
            self.undeliverable,
            self.fetch_loop,
            self.counters,
        )
        self.lost_locks = LostLocks(
            group, self.delivery, self.acknowledgements, self.requests, self.fetch_loop,
            self.undeliverable, self.counters,
        )  # fmt: skip
        self.subscribed: list[str] = []
        self._acquire_at_ns = 0
        """The time of the next acquire request; a push of the appliance sets it to now."""
        self._sent_ns = 0
        """The time when the last request began."""
        self._connection_error = ""
        """The error of the last failed request, until a request succeeds."""
        self._error: TailraceError | None = None
        """An error that the next poll raises; this one had records to deliver."""

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(self.connection, api, request, self.settings.request_timeout_ms)

    @property
    def lock_ms(self) -> int:
        """The lock duration of the records acquired last; 0 before the first."""
        return self.requests.lock_ms

    # ---- membership ------------------------------------------------------------------------------

    def subscribe(self, topics: Any) -> Steps[None]:
        """Acquire records of these topics instead of the earlier ones, whose unread records are
        released. Raises UnknownTopicError, InvalidRequestError.
        """
        names = list(dict.fromkeys(name_list("topics", topics)))
        if not names:
            raise InvalidRequestError("topics is empty; name one at least, or close the consumer")
        self.lost_locks.forget_topics((yield from self.fetch_loop.lookup(names)))
        self.member.subscribe(names)
        self.subscribed = names
        self.delivery.register()
        self.delivery.release_unread(self.delivery.buffered.drop_others(names))
        self._acquire_at_ns = 0
        self.member.wakeup()
        yield from self._until_joined()

    def _until_joined(self) -> Steps[None]:
        """Wait until the group has answered, so that it begins before what is sent from now on.
        Raises RequestTimeoutError, NotReachableError. Another refusal is raised by poll.
        """
        connection = self.member.thread.beats.connection
        until_ns = self.now_ns() + self.settings.request_timeout_ms * NS_PER_MS
        while self.member.is_joining:
            if self.now_ns() >= until_ns:
                group, timeout_ms = self.settings.group_id, self.settings.request_timeout_ms
                if not connection.is_ready:
                    raise NotReachableError(
                        f"no appliance answers at {connection.address}"
                        f"{connection.peer_error_suffix()}"
                    )
                raise RequestTimeoutError(
                    f"group {group!r} has not answered within {timeout_ms} ms, so this consumer "
                    "has not joined it yet"
                )
            yield Wait(self.member.wait_until_ns(until_ns))
            self.connection.check_usable()
            self.connection.process()
            self.member.heartbeat_step()

    def _pushed(self, push: Response) -> None:
        if push.api == Api.GROUP_HEARTBEAT:
            self._acquire_at_ns = 0

    def _apply_membership(self) -> bool:
        """Apply the events of the heartbeats. Returns True while this is a member. Raises the error
        that keeps it from joining.
        """
        self.member.step()
        lost_reason, error = self.member.pop_events()
        if lost_reason is not None:
            self._lose_locks(lost_reason)
        if error is not None:
            raise error
        if self.requests.lost_locks:
            self.requests.lost_locks = False
            self._lose_locks("the group does not know this consumer any more")
        return self.member.is_joined

    def _lose_locks(self, reason: str) -> None:
        self._acquire_at_ns = 0
        self.lost_locks.forget_all(reason)
        self._note_refused()

    # ---- requests --------------------------------------------------------------------------------

    def run_once(self, limit: int) -> None:
        """Do one step of acquiring up to `limit` records and of acknowledging: send what is due,
        and apply the response that has come.
        """
        is_member = self._apply_membership()
        requests, now_ns = self.requests, self.now_ns()
        if is_member and not requests.is_busy:
            may_acquire = limit > 0 and not self.fetch_loop.has_ranges
            if may_acquire and now_ns >= self._acquire_at_ns:
                self._begin(limit)
            elif not may_acquire and self.acknowledgements.has_acknowledged:
                self._begin(None)
        if requests.is_busy:
            self._step_requests()

    def _begin(self, limit: int | None) -> None:
        self._sent_ns = self.now_ns()
        self.requests.begin(limit)

    def _step_requests(self) -> None:
        try:
            answer = self.requests.step()
        except TailraceError as error:
            if not error.retriable:
                raise
            if error.detail != self._connection_error:  # logged once, retried many times
                self._connection_error = error.detail
                logger.warning(
                    "share_request_failed group=%s reason=%s: it is tried again",
                    self.settings.group_id,
                    error,
                )
            self._acquire_at_ns = self.now_ns() + RETRY_INTERVAL_NS
            return
        if answer is not None:
            self._connection_error = ""
            self._apply(answer)

    def _apply(self, answer: ShareResponse) -> None:
        self._note_refused()
        now_ns = self.now_ns()
        if not answer.is_acquire:
            self._acquire_at_ns = now_ns + RETRY_INTERVAL_NS if self.requests.lost_locks else 0
        else:
            self.fetch_loop.acquired(answer.number, answer.acquired)
            if answer.acquired:
                self._acquire_at_ns = 0
            else:
                self._acquire_at_ns = now_ns + POLL_INTERVAL_NS
                self.fetch_loop.wait_at(answer.ends)
        self.requests.complete()

    def _note_refused(self) -> None:
        if self.requests.refused_count > self.counters["acknowledgements_refused"]:
            self.counters["acknowledgements_refused"] = self.requests.refused_count
            logger.warning(
                "share_acknowledgements_refused group=%s: commit() says which",
                self.settings.group_id,
            )

    # ---- poll ------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """End the last poll. Raises the error that the last poll kept, once its records were
        delivered.
        """
        self.connection.check_usable()
        self.delivery.register()
        if not self.subscribed:
            raise InvalidRequestError(
                "nothing is subscribed to: name topics at construction, or call subscribe()"
            )
        if self._error is not None and not self.delivery.buffered:
            error, self._error = self._error, None
            raise error
        self.delivery.settle_last()
        if self.acknowledgements.has_acknowledged:
            self._acquire_at_ns = 0  # acknowledgements do not wait for the next push

    def fill(self, limit: int, deadline_ns: int) -> Steps[None]:
        """Buffer up to `limit` records for delivery; wait for the first until `deadline_ns`. Raises
        what `ShareConsumer.poll` does.
        """
        self.begin_poll()
        buffered = self.delivery.buffered
        yield from self.write_dead_letters(with_rejected=True)
        while True:
            try:
                self.run_once(limit - len(buffered))
                yield from self._lookup_and_repair()
                self.read(limit - len(buffered))
                self.delivery.release_unread(self.fetch_loop.take_unread())
                yield from self.write_dead_letters(with_rejected=False)
                self.check_reachable()
            except TailraceError as error:
                self.fail(error)
            if self.is_done(limit):
                return
            # Fetches acquired records too, for the next poll of a program that does not wait.
            until_ns = self.member.wait_until_ns(self.wait_until_ns(deadline_ns))
            if self.now_ns() >= deadline_ns:
                return
            yield Wait(until_ns) if until_ns > self.now_ns() else PAUSE
            self.connection.check_usable()
            self.connection.process()

    def next_requested(self, record: ShareRecord) -> None:
        """A loop asks for the record after this one. Sends acknowledgements when they are due."""
        self.delivery.on_processed(record)
        every_ns = min(ACKNOWLEDGE_AFTER_NS, self.lock_ms * NS_PER_MS // 4)
        if self.requests.is_busy or self.now_ns() - self._sent_ns >= every_ns:
            self.run_once(0)
        self.delivery.release_expiring()

    def check_reachable(self) -> None:
        """Raise NotReachableError when the appliance has been away for long, or the error that
        makes the connection unusable.
        """
        connection, now_ns = self.connection, self.now_ns()
        if not connection.is_ready:
            connection.process()
            connection.tick(now_ns)
        connection.check_reachable(now_ns)

    def read(self, limit: int) -> None:
        """Buffer up to `limit` acquired records that were fetched. Undeliverable ones are noted,
        and offsets without a record are accepted.
        """
        self.delivery.register()
        for key, info, piece in self.fetch_loop.pieces(limit):
            if piece.unreadable is not None:
                self.undeliverable.unreadable(key, info, piece)
            elif not piece.records:
                # If a signal comes in between, the lock expires; a second acknowledgement would be
                # refused, and the program told of it.
                piece.run.first = piece.last + 1
                self.acknowledgements.add(key, piece.first, piece.last, "accept")
            elif piece.run.is_dead:
                self.undeliverable.dead(key, info, piece)
            else:
                self.delivery.buffered.add(key, piece)

    def _lookup_and_repair(self) -> Steps[None]:
        """Look up unknown topics and schemas, and repair partitions that cannot be read."""
        if self.fetch_loop.needs_topics:
            self.lost_locks.forget_topics((yield from self.fetch_loop.learn_topics()))
        yield from self.fetch_loop.learn_schemas()
        for acquired_ranges in self.fetch_loop.broken():
            yield from self.fetch_loop.repair(acquired_ranges)

    def write_dead_letters(self, *, with_rejected: bool) -> Steps[TailraceError | None]:
        """Write dead letters. Returns the error of a rejected record that could not be written; it
        is tried again.
        """
        given_up = self.undeliverable.take(with_rejected=with_rejected)
        if not given_up:
            return None
        sent: list[Any] = []
        try:
            letters = yield from self.undeliverable.letters(given_up, self.fetch_loop.fresh_info)
            outcomes = yield from self.letters.write(letters, sent)
        except BaseException:
            self.undeliverable.put_back(given_up, sent)
            raise
        return self.undeliverable.ended(given_up, outcomes)

    def fail(self, error: TailraceError) -> None:
        """Raise an error of this poll, or keep it for the next poll while records are buffered."""
        if not self.delivery.buffered:
            raise error
        self._error = error

    def is_done(self, limit: int) -> bool:
        """True if the poll ends before its deadline."""
        buffered_count = len(self.delivery.buffered)
        return (
            buffered_count >= limit
            or self._error is not None
            or (buffered_count > 0 and not self.fetch_loop.has_ranges)
        )

    def wait_until_ns(self, deadline_ns: int) -> int:
        """The time until which the poll may wait for input. A time that has passed means that work
        is due now. Raises the error that makes the connection unusable.
        """
        connection, fetch_loop, now_ns = self.connection, self.fetch_loop, self.now_ns()
        if fetch_loop.fetch() or fetch_loop.needs_topics:
            return 0
        if at_end := fetch_loop.check_ends():
            self._acquire_at_ns = now_ns + (0 if at_end is True else RETRY_INTERVAL_NS)
        may_acquire = (
            not self.requests.is_busy and self.member.is_joined and not fetch_loop.has_ranges
        )
        if may_acquire and self._acquire_at_ns <= now_ns:
            return 0
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        times = [
            deadline_ns,
            connection.next_tick_ns(),
            self.requests.next_step_ns(),
            fetch_loop.retry_at_ns(now_ns),
        ]
        if may_acquire:
            times.append(self._acquire_at_ns)
        return min(at_ns for at_ns in times if at_ns is not None)

    def attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords:
        """Leave the acknowledgement of records to a transaction. Raises InvalidRequestError,
        LockLostError when this consumer is not a member now.
        """
        self.connection.check_usable()
        with self.member.thread.beats.lock:
            membership = self.member.thread.beats.membership
            identity, epoch, phase = membership.identity, membership.epoch, membership.phase
        if phase is Phase.LOST:
            raise LockLostError(
                "this consumer is not a member of its group now, so its locks are lost: poll"
            )
        attached = self.delivery.attach(
            records, AttachedMember(identity.group, identity.member_id, epoch)
        )
        attached.outcome = outcome
        return attached

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, timeout_ms: float) -> Steps[None]:
        """See `ShareConsumer.commit`."""
        self.connection.check_usable()
        self.delivery.on_commit()
        deadline_ns = self.now_ns() + int(timeout_ms * NS_PER_MS)
        failure = yield from self.write_dead_letters(with_rejected=True)
        yield from self.flush(deadline_ns)
        refused = self.requests.drain_failed()
        if refused is not None:
            raise refused
        if failure is not None:
            raise failure

    def flush(self, deadline_ns: int) -> Steps[None]:
        """Send all acknowledgements and wait for the responses. Raises RequestTimeoutError, or the
        error of a response.
        """
        number = 0
        while True:
            number = self.flush_step(number)
            if self.is_flushed(number):
                return
            until_ns = self.next_flush_ns(deadline_ns)
            yield Wait(until_ns) if until_ns > self.now_ns() else PAUSE
            self.connection.check_usable()

    def flush_step(self, number: int) -> int:
        """Do one step of a flush.

        `number` is the result of the step before, 0 at first. Returns the number of the request
        with the last acknowledgement; 0: it was not sent yet.
        """
        self._apply_membership()
        requests = self.requests
        if not number and not requests.is_busy and self.acknowledgements.has_acknowledged:
            self._begin(None)
        if requests.is_busy:
            answer = requests.step()
            if answer is not None:
                self._apply(answer)
        return number if number or self.acknowledgements.has_acknowledged else requests.last

    def is_flushed(self, number: int) -> bool:
        """True when the flush is complete. `number` is the result of the last `flush_step`."""
        if number:
            return self.requests.is_complete(number)
        return not self.requests.is_busy and not self.acknowledgements.has_acknowledged

    def next_flush_ns(self, deadline_ns: int) -> int:
        """The time of the next `flush_step` without input. Raises RequestTimeoutError after
        `deadline_ns`.
        """
        now_ns = self.now_ns()
        if now_ns >= deadline_ns:
            raise self.requests.on_timeout()
        step_ns = self.requests.next_step_ns()
        # None: no request is in flight, and the next one begins now.
        return now_ns if step_ns is None else min(deadline_ns, step_ns)

    def forget(self) -> None:
        """Forget all records and the subscription, after leaving the group."""
        self.delivery.register()
        self.acknowledgements.clear()
        self.delivery.clear()
        self.fetch_loop.forget_ranges()
        self.undeliverable.forget()
        self.subscribed = []
        self._error = None

    def metrics(self) -> dict[str, int]:
        """Counters since construction."""
        return {
            **self.counters,
            "dead_letters": self.letters.count,
            "dead_letters_failed": self.undeliverable.failed_count,
            "fetches": self.fetch_loop.fetch_count,
            "throttled": self.connection.throttled_count,
            "throttled_ms": self.connection.throttled_ms,
        }
