"""What a share consumer does: acquire, read, hand out, acknowledge.

What waits is written as steps (`tailrace.client.steps`): `ShareConsumer` takes them in its thread,
`AsyncShareConsumer` in an event loop.

A record is *delivered* when the call that carries it returns, or when a loop's body begins with it;
then it is held. It is *processed*, and so accepted in implicit mode, when the program asks for the
next one, in the same loop or by the next poll, or commits. What was acquired and never delivered is
given back as unread: the appliance does not count that as a delivery. A loop acquires as many
records as its program handles well within their locks (`tailrace.share.pace`).

Owner: one share consumer, in one thread or event loop.
Invariants: a record that was delivered is held until it is acknowledged or its lock has passed;
    nothing is accepted that was not delivered, but for offsets that have no record and dead letters
    that were written; what was said in vain is told by the next commit. A delivery is one store,
    `_delivered`, the last before the call returns; every other call books it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from tailrace.client.connection import Connection
from tailrace.client.runtime import Runtime
from tailrace.client.serdes import deserialized, failure_at
from tailrace.client.steps import PAUSE, Steps, Wait, call_json
from tailrace.consumer.dead_letter_queue import DeadLetters, Producers
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.core.log import logger
from tailrace.core.records import Record
from tailrace.core.validation import name_list
from tailrace.group.heartbeat import HeartbeatThread
from tailrace.group.membership import MemberIdentity, Phase
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tailrace.share.acknowledgements import IN_LOOP, OUTCOMES, REJECTING, UNREAD, Acknowledgements
from tailrace.share.fetch_loop import ShareFetchLoop
from tailrace.share.membership import ShareMembership
from tailrace.share.pace import Pace
from tailrace.share.record import ShareRecord
from tailrace.share.record_buffer import AcquiredRecords, Chunk, HandedOut
from tailrace.share.requests import RETRY_INTERVAL_NS, Answer, ShareRequests
from tailrace.share.settings import ShareConsumerSettings
from tailrace.share.undeliverable import Undeliverable

NS_PER_MS = 1_000_000
POLL_INTERVAL_NS = 1_000 * NS_PER_MS
"""How soon to ask again though nothing tells of records: a push may be lost."""
ACKNOWLEDGE_AFTER_NS = 1_000 * NS_PER_MS
"""A loop over records tells the appliance so often what was said, or more often where locks are
short: it must not wait for the end of what was acquired.
"""
_PLAIN = frozenset(OUTCOMES) - {"reject"}
_NO_RECORD = "{!r:.100} is no record; acknowledge what poll() has returned"
LEAVE_WAIT_NS = 5_000 * NS_PER_MS
CLOSE_COMMIT_MS = 5_000


class _Delivery(NamedTuple):
    """What the program was given by one call, and what is left then."""

    runs: list[HandedOut]
    rest: tuple[Chunk, ...]
    outcome: str | None
    """IN_LOOP of a loop's."""


class SharePollLoop:
    """See the module's docstring."""

    def __init__(
        self, settings: ShareConsumerSettings, runtime: Runtime, producers: Producers | None = None
    ) -> None:
        """`producers`: makes the producer that dead letters are written with; None: one of
        threads.
        """
        group = settings.group_id
        assert group is not None
        self.settings = s = settings
        self.runtime = runtime
        self.now_ns = runtime.monotonic_ns
        self.connection = Connection(s.bootstrap_servers, s.client_id, runtime, "share consumer")
        self.connection.on_push = self._pushed
        identity = MemberIdentity(
            group,
            uuid4().hex,
            None,
            s.client_id,
            "",
            s.session_timeout_ms,
            s.heartbeat_interval_ms,
            0x7FFFFFFF,
        )
        self.membership = ShareMembership(identity, s.auto_offset_reset, self.now_ns())
        self.thread = HeartbeatThread(self.membership, s.bootstrap_servers, s.client_id, runtime)
        self.acknowledgements = Acknowledgements()
        self.buffered = AcquiredRecords()
        self.fetch_loop = ShareFetchLoop(self.connection, s.for_reading(), self._call)
        self.letters = DeadLetters(
            s.client_id,
            self._call,
            self.now_ns,
            producers or Producers(s.bootstrap_servers, runtime),
            s.dead_letter_timeout_ms,
        )
        self.requests = ShareRequests(
            self.connection,
            self.thread,
            self.acknowledgements,
            self.fetch_loop.topic_id,
            s.request_timeout_ms,
        )
        self.undeliverable = Undeliverable(group, self.acknowledgements)
        self.subscribed: list[str] = []
        self.wakeup: Callable[[], None] = self._ring
        """The heartbeats have something to do."""
        self._pace = Pace()
        self._delivered: _Delivery | None = None
        """Given to the program, and not booked yet."""
        self._left: dict[tuple[str, int, int], None] = {}
        """What loops have handed out last that were left then."""
        self._is_explicit = False
        """Whether `acknowledge` was called since the last poll."""
        self._acquire_at_ns = 0
        """When to ask for records next, unless something tells of them before."""
        self._sent_ns = 0
        """When a request was begun last."""
        self._connection_error = ""
        """Why the last request was not carried out, until one is."""
        self._error: TailraceError | None = None
        """For the next poll: this one had records to hand out."""
        self.counters = {"records_consumed": 0, "acknowledgements_refused": 0, "locks_lost": 0}

    # ---- the group -------------------------------------------------------------------------------

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(self.connection, api, request, self.settings.request_timeout_ms)

    @property
    def lock_ms(self) -> int:
        """How long the locks last that were given last."""
        return self.requests.lock_ms

    def subscribe(self, topics: Any) -> Steps[None]:
        """Take records of these topics, instead of those before. Raises UnknownTopicError,
        InvalidRequestError.
        """
        names = list(dict.fromkeys(name_list("topics", topics)))
        if not names:
            raise InvalidRequestError("topics is empty; name one at least, or close the consumer")
        self._on_recreated((yield from self.fetch_loop.lookup(names)))
        with self.thread.beats.lock:
            self.membership.subscribe(names, False, self.now_ns())
        self.subscribed = names
        self._acquire_at_ns = 0
        self.wakeup()

    def _ring(self) -> None:
        if self.runtime.has_threads:
            self.thread.start()
            self.thread.wakeup()
        else:
            self.thread.beats.step()

    def _pushed(self, push: Response) -> None:
        if push.api == Api.GROUP_HEARTBEAT:
            self._acquire_at_ns = 0

    def _apply_membership(self) -> bool:
        """Take in what the heartbeats have met; returns whether this is a member. Raises why it
        cannot be one.
        """
        if not self.runtime.has_threads:
            self.wakeup()
        membership = self.membership
        if membership.has_events:
            with self.thread.beats.lock:
                self.thread.events.clear()
                membership.has_events = False
                is_lost = membership.phase is Phase.LOST
                reason = (
                    (change.reason if (change := membership.next_change()) is not None else "")
                    if is_lost
                    else ""
                )
                if is_lost:
                    membership.ack_lost(self.now_ns())
                error = membership.pop_error(self.now_ns())
            self.wakeup()
            if is_lost:
                self._lose_locks(reason or "the group has removed this consumer")
            if error is not None:
                raise error
        if self.requests.lost_locks:
            self.requests.lost_locks = False
            self._lose_locks("the group does not know this consumer any more")
        return membership.phase is Phase.MEMBER

    def _lose_locks(self, reason: str) -> None:
        self._book()
        acknowledgements, in_vain = self.acknowledgements.clear()
        self.requests.refuse(in_vain)
        count = (
            acknowledgements
            + _count(self.fetch_loop.forget_ranges())
            + _count(self.buffered.clear())
        )
        self._left.clear()
        self.undeliverable.forget()
        self._acquire_at_ns = 0
        if count:
            self.counters["locks_lost"] += count
            logger.warning(
                "share_locks_lost group=%s records=%d reason=%s",
                self.settings.group_id,
                count,
                reason,
            )
        self._note_refused()

    def _on_recreated(self, names: list[str]) -> None:
        """Topics were deleted and made again: what was acquired of the old ones is no more."""
        self._book()
        for name in names:
            acknowledgements, in_vain = self.acknowledgements.clear(name)
            self.requests.refuse(in_vain)
            count = acknowledgements + self.buffered.drop_topic(name)
            if count:
                self.counters["locks_lost"] += count
                logger.warning(
                    "share_locks_lost group=%s records=%d reason=topic %s was made anew",
                    self.settings.group_id,
                    count,
                    name,
                )

    # ---- a poll ----------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """What the poll before has handed out is accepted, unless something was said. Raises what
        the poll before has met and not told.
        """
        self.connection.check_usable()
        self._book()
        if not self.subscribed:
            raise InvalidRequestError(
                "nothing is subscribed to: name topics at construction, or call subscribe()"
            )
        if self._error is not None and not self.buffered:
            error, self._error = self._error, None
            raise error
        self.settle_last()
        if self.acknowledgements.has_acknowledged:
            self._acquire_at_ns = 0  # it is not to wait for news

    def settle_last(self) -> None:
        """In implicit mode: accept what was delivered last, or keep it if something was said since.
        What a loop left behind waits for a word.
        """
        self._book()
        if self.settings.share_acknowledgement_mode == "implicit":
            if self._is_explicit:
                self.acknowledgements.retain_remaining()
            else:
                self.acknowledgements.accept_remaining()
        self._is_explicit = False
        for place in self._left:
            self.acknowledgements.keep_one(*place)
        self._left.clear()
        now_ns = self.now_ns()
        passed = self.acknowledgements.drop_expired(now_ns)
        if passed:
            self.counters["locks_lost"] += passed
            logger.warning(
                "share_locks_passed group=%s records=%d: nothing was said of them in time",
                self.settings.group_id,
                passed,
            )
        self._give_back(self.buffered.drop_expired(now_ns + self.lock_ms * NS_PER_MS // 2))

    def asks_on(self, record: ShareRecord) -> None:
        """A loop asks for the next record: this one is accepted, unless something was said of it.
        Sends what was said if that was long ago.
        """
        self._book()
        if self.settings.share_acknowledgement_mode == "implicit":
            self.acknowledgements.accept_one(record.topic, record.partition, record.offset)
        else:
            self.acknowledgements.keep_one(record.topic, record.partition, record.offset)
        every_ns = min(ACKNOWLEDGE_AFTER_NS, self.lock_ms * NS_PER_MS // 4)
        if self.requests.is_busy or self.now_ns() - self._sent_ns >= every_ns:
            self.run_once(0)
        if self.buffered:
            self._give_back(
                self.buffered.drop_expired(self.now_ns() + self.lock_ms * NS_PER_MS // 2)
            )

    def leaves(self, record: ShareRecord, *, is_broken_off: bool) -> None:
        """A loop was left with this record. `is_broken_off`: by `break` or `return`; the record is
        as those of a poll then. Else an exception may have ended its work: it is not accepted by
        what is asked for next.
        """
        self._book()
        place = record.topic, record.partition, record.offset
        if is_broken_off:
            self.acknowledgements.leave_loop(*place)
        else:
            self._left[place] = None

    def _give_back(self, runs: list[HandedOut]) -> None:
        """The program was never given these."""
        for key, first, last, _ in runs:
            self.acknowledgements.add(key, first, last, UNREAD)
        if runs:
            logger.debug("share_unread group=%s records=%d", self.settings.group_id, _count(runs))

    def loop_requests(self) -> int:
        """How many records a loop is to acquire now."""
        return self._pace.requested(self.now_ns(), self.lock_ms, self.settings.max_poll_records)

    def run_once(self, limit: int) -> None:
        """What can be done now about acquiring (so many records) and acknowledging: send,
        take in.
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
            if error.detail != self._connection_error:  # once: it is tried again and again
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
            self._take(answer)

    def _take(self, answer: Answer) -> None:
        self._note_refused()
        now_ns = self.now_ns()
        if not answer.is_acquire:
            self._acquire_at_ns = now_ns + RETRY_INTERVAL_NS if self.requests.lost_locks else 0
            return
        self.fetch_loop.acquired(answer.acquired)
        if answer.acquired:
            self._acquire_at_ns = 0
        else:
            self._acquire_at_ns = now_ns + POLL_INTERVAL_NS
            self.fetch_loop.wait_at(answer.ends)

    def _note_refused(self) -> None:
        if self.requests.refused_count > self.counters["acknowledgements_refused"]:
            self.counters["acknowledgements_refused"] = self.requests.refused_count
            logger.warning(
                "share_acknowledgements_refused group=%s: commit() says which",
                self.settings.group_id,
            )

    def check_reachable(self) -> None:
        """As a Consumer's poll does. Raises NotReachableError when the appliance has been away for
        long, and why the connection is of no use.
        """
        connection, now_ns = self.connection, self.now_ns()
        if not connection.is_ready:
            connection.process()
            connection.tick(now_ns)
        connection.check_reachable(now_ns)

    def read(self, limit: int) -> None:
        """Take in up to `limit` records that were acquired and have come; what cannot be delivered
        is noted.
        """
        self._book()
        for key, info, piece in self.fetch_loop.pieces(limit):
            if piece.unreadable is not None:
                self.undeliverable.unreadable(key, info, piece)
            elif not piece.records:
                self.acknowledgements.add(key, piece.first, piece.last, "accept")
            elif piece.run.is_dead:
                self.undeliverable.dead(key, info, piece)
            else:
                self.buffered.add(key, piece)

    def _submit_lookup(self) -> Steps[None]:
        """Ask what is to be known of topics and of partitions that cannot be read."""
        if self.fetch_loop.needs_topics:
            self._on_recreated((yield from self.fetch_loop.learn_topics()))
        for acquired_ranges in self.fetch_loop.broken():
            yield from self.fetch_loop.repair(acquired_ranges)

    def fill(self, limit: int, deadline_ns: int) -> Steps[None]:
        """Have up to `limit` records to deliver, one at least if any comes in time. Raises what
        `ShareConsumer.poll` does.
        """
        self.begin_poll()
        yield from self.write_given_up(with_rejected=True)
        while True:
            try:
                self.run_once(limit - len(self.buffered))
                yield from self._submit_lookup()
                self.read(limit - len(self.buffered))
                self._give_back(self.fetch_loop.take_expired())
                yield from self.write_given_up(with_rejected=False)
                self.check_reachable()
            except TailraceError as error:
                self.fail(error)
            if self.is_done(limit) or self.now_ns() >= deadline_ns:
                return
            until_ns = self.wait_until_ns(deadline_ns)
            if not self.runtime.has_threads:
                until_ns = min(until_ns, self.thread.beats.next_ns())
            yield Wait(until_ns) if until_ns > self.now_ns() else PAUSE
            self.connection.check_usable()
            self.connection.process()

    def write_given_up(self, *, with_rejected: bool) -> Steps[TailraceError | None]:
        """Write dead letters. Returns why one of what the user has rejected could not be written;
        it is tried again.
        """
        book = self.undeliverable
        given_up = book.take(with_rejected=with_rejected)
        if not given_up:
            return None
        try:
            letters = yield from book.letters(given_up, self.fetch_loop.fresh_info)
            outcomes = yield from self.letters.write(letters)
        except BaseException:
            book.put_back(given_up)
            raise
        return book.ended(given_up, outcomes)

    def fail(self, error: TailraceError) -> None:
        """The poll has met this. Raises it, or keeps it for the next one if there are records to
        hand out.
        """
        if not self.buffered:
            raise error
        self._error = error

    def is_done(self, limit: int) -> bool:
        """Whether the poll is to end though its time is not up."""
        return (
            len(self.buffered) >= limit
            or self._error is not None
            or (len(self.buffered) > 0 and not self.fetch_loop.has_ranges)
        )

    def wait_until_ns(self, deadline_ns: int) -> int:
        """Until when there is nothing to do if nothing comes; not in the future: there is something
        to do now. Raises why the connection is of no use.
        """
        connection, fetch_loop, now_ns = self.connection, self.fetch_loop, self.now_ns()
        if fetch_loop.fetch() or fetch_loop.needs_topics:
            return 0
        if events := fetch_loop.apply_topic_changes():
            self._acquire_at_ns = now_ns + (0 if events is True else RETRY_INTERVAL_NS)
        may_acquire = (
            not self.requests.is_busy
            and self.membership.phase is Phase.MEMBER
            and not fetch_loop.has_ranges
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

    def collect(self, limit: int) -> list[ShareRecord]:
        """Up to so many of the records that were read are the program's when this returns; to be
        called in the `return` of the call that carries them. Raises InvalidRecordError when a
        deserializer fails on the first, which is released; what stands behind one that fails later
        waits for the next call.
        """
        found = self._next_records(limit)
        delivery = _Delivery(*self.buffered.without(len(found)), None)
        self.counters["records_consumed"] += len(found)
        try:
            return found
        finally:
            self._delivered = delivery

    def hand_out_in_loop(self) -> ShareRecord:
        """The next record is the program's, in a loop, when this returns. Raises IndexError when
        there is none, and what `collect` does.
        """
        (record,) = found = self._next_records(1)
        delivery = _Delivery(*self.buffered.without(len(found)), IN_LOOP)
        self.counters["records_consumed"] += 1
        self._pace.given(self.now_ns())
        try:
            return record
        finally:
            self._delivered = delivery

    def has_next(self) -> bool:
        """Whether there is a record to hand out."""
        self._book()
        expired = self.buffered.drop_expired(self.now_ns()) if self.buffered.chunks else []
        if expired:
            self.counters["locks_lost"] += _count(expired)
            self._give_back(expired)
        return bool(self.buffered.chunks)

    def _next_records(self, limit: int) -> list[ShareRecord]:
        """Records that may be delivered now."""
        found = self.buffered.first(limit) if self.has_next() else []
        if found and (self.settings.key_deserializer or self.settings.value_deserializer):
            raw = found
            made, failure = deserialized(
                raw, self.settings.key_deserializer, self.settings.value_deserializer
            )
            found = made  # type: ignore[assignment]
            self.undeliverable.keep_raw(raw[: len(found)])
            if failure is not None and not found:
                (run,), rest = self.buffered.without(1)
                self.acknowledgements.add(run.key, run.first, run.last, "release")
                self.buffered.chunks = rest
                raise failure_at(raw[0], failure) from failure
        return found

    def _book(self) -> None:
        """What was delivered is held. Each step may be made twice."""
        delivery = self._delivered
        if delivery is None:
            return
        for key, first, last, until_ns in delivery.runs:
            self.acknowledgements.add(key, first, last, delivery.outcome, until_ns)
        self.buffered.chunks = delivery.rest
        self._delivered = None

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(self, record: Record, outcome: str, reason: str | None) -> None:
        """See `ShareConsumer.acknowledge`."""
        self.connection.check_usable()
        self._book()
        if (
            reason is not None or type(outcome) is not str or outcome not in _PLAIN
        ):  # the others one by one: this is done for every record
            word = _word(outcome)
            if reason is not None:
                _check_reason(reason, word)
            outcome = self._rejecting(record, reason) if word == "reject" else word
        if not isinstance(record, Record):
            raise InvalidRequestError(_NO_RECORD.format(record))
        self.acknowledgements.acknowledge(record.topic, record.partition, record.offset, outcome)
        self._is_explicit = True

    def _rejecting(self, record: Record, reason: str | None) -> str:
        """The record is to go to the dead-letter topic."""
        if not isinstance(record, Record):
            raise InvalidRequestError(_NO_RECORD.format(record))
        if self.acknowledgements.has(record.topic, record.partition, record.offset):
            self.undeliverable.reject(record, self.fetch_loop.info(record.topic), reason)
        return REJECTING

    def commit(self, timeout_ms: float) -> Steps[None]:
        """See `ShareConsumer.commit`."""
        self.begin_commit()
        deadline_ns = self.now_ns() + int(timeout_ms * NS_PER_MS)
        failure = yield from self.write_given_up(with_rejected=True)
        yield from self._flush(deadline_ns)
        refused = self.requests.drain_failed()
        if refused is not None:
            raise refused
        if failure is not None:
            raise failure

    def begin_commit(self) -> None:
        """In implicit mode accept what was delivered last, if nothing was said since."""
        self.connection.check_usable()
        self._book()
        if self.settings.share_acknowledgement_mode == "implicit" and not self._is_explicit:
            self.acknowledgements.accept_remaining()
            self.acknowledgements.accept_in_loops()

    def _flush(self, deadline_ns: int) -> Steps[None]:
        """Until all that was said is answered. Raises RequestTimeoutError, or what the appliance
        says.
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
        """One step of sending all that was said. `number`: what it returned before, 0 at first: the
        request that has the last of it, 0: it was not sent yet.
        """
        self._apply_membership()
        requests = self.requests
        if not number and not requests.is_busy and self.acknowledgements.has_acknowledged:
            self._begin(None)
        if requests.is_busy:
            answer = requests.step()
            if answer is not None:
                self._take(answer)
        return number if number or self.acknowledgements.has_acknowledged else requests.last

    def is_flushed(self, number: int) -> bool:
        """Whether `flush_step` has nothing more to do."""
        if number:
            return self.requests.is_answered(number)
        return not self.requests.is_busy and not self.acknowledgements.has_acknowledged

    def next_flush_ns(self, deadline_ns: int) -> int:
        """When the next `flush_step` is due though nothing comes. Raises RequestTimeoutError when
        the time is up.
        """
        now_ns = self.now_ns()
        if now_ns >= deadline_ns:
            raise self.requests.on_timeout()
        step_ns = self.requests.next_step_ns()
        return (
            now_ns if step_ns is None else min(deadline_ns, step_ns)
        )  # None: the next one is to be begun

    # ---- the end ---------------------------------------------------------------------------------

    def leave(self) -> Steps[None]:
        """Say what was said of records, give back what no program was given, and leave the group:
        the rest is released.
        """
        if not (self.connection.is_usable and self.connection.is_ready):
            return
        self._book()
        self._give_back(self.buffered.clear())
        self._give_back(self.fetch_loop.forget_ranges())
        try:
            yield from self.write_given_up(with_rejected=True)
            yield from self._flush(self.now_ns() + CLOSE_COMMIT_MS * NS_PER_MS)
        except TailraceError as error:
            logger.warning(
                "share_close_without_commit group=%s reason=%s: the records come again",
                self.settings.group_id,
                error,
            )
        refused = self.requests.drain_failed()
        if refused is not None:
            logger.warning(
                "share_acknowledgements_refused group=%s %s", self.settings.group_id, refused.detail
            )
        with self.thread.beats.lock:
            self.membership.leave(self.now_ns())
        self.wakeup()
        until_ns = self.now_ns() + LEAVE_WAIT_NS
        while not self.has_left() and self.now_ns() < until_ns:
            yield Wait(
                until_ns if self.runtime.has_threads else min(until_ns, self.thread.beats.next_ns())
            )
            self.connection.process()
            if self.runtime.has_threads:
                self.thread.events.clear()
            else:
                self.wakeup()

    def has_left(self) -> bool:
        """Whether the appliance has heard of it, or cannot."""
        return (
            self.membership.phase is not Phase.LEAVING or not self.thread.beats.connection.is_ready
        )

    def forget(self) -> None:
        """Out of the group nothing is held."""
        self._delivered = None
        self._left.clear()
        self.acknowledgements.clear()
        self.buffered.clear()
        self.fetch_loop.forget_ranges()
        self.undeliverable.forget()
        self.subscribed = []
        self._error = None

    def metrics(self) -> dict[str, int]:
        """Counters since construction."""
        failed = self.undeliverable.failed_count
        return {
            **self.counters,
            "dead_letters": self.letters.count,
            "dead_letters_failed": failed,
            "fetches": self.fetch_loop.fetch_count,
        }


def _count(runs: list[HandedOut]) -> int:
    return sum(run.last - run.first + 1 for run in runs)


def _word(outcome: object) -> str:
    """An outcome as it is sent. Raises InvalidRequestError."""
    word = str(outcome).lower() if isinstance(outcome, str) else ""
    if word not in OUTCOMES:
        raise InvalidRequestError(
            f"the outcome is {outcome!r:.100}; allowed are {', '.join(OUTCOMES)}"
        )
    return word


def _check_reason(reason: object, word: str) -> None:
    """Raises InvalidRequestError."""
    if not isinstance(reason, str):
        raise InvalidRequestError(
            f"reason is {reason!r:.100}; it takes a sentence, as text: write reason=str(...)"
        )
    if word != "reject":
        raise InvalidRequestError(
            "reason goes into the header dlq.reason of a dead letter: leave it out with "
            f'"{word}", or write "reject"'
        )
