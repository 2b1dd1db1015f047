"""What a share consumer does between two waits: acquire, read, hand out, acknowledge. `ShareConsumer` waits in its thread, `AsyncShareConsumer` awaits.

Owner: one share consumer, one thread.
Invariants: a record that was handed out is held until it is acknowledged or its lock is gone; nothing is accepted that was not handed out, but for offsets that
    have no record and dead letters that were written; what was said in vain is told by the next commit. Nothing here waits; only `subscribe`, `look_up` and
    `repair` ask questions, and those have changed nothing when one of them fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from tailrace.arguments import name_list
from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.environment import Environment
from tailrace.errors import InvalidRequestError, TailraceError
from tailrace.groups.driver import HeartbeatThread
from tailrace.groups.membership import MemberIdentity, Phase
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.records import Record
from tailrace.serializers import deserialized, failure_at
from tailrace.share.ahead import Ahead
from tailrace.share.feed import PartitionFeed
from tailrace.share.held import OUTCOMES, REJECTING, Held
from tailrace.share.membership import ShareMembership
from tailrace.share.reading import ShareReading
from tailrace.share.records import ShareRecord
from tailrace.share.requests import TRY_AGAIN_NS, Answer, ShareRequests
from tailrace.share.settings import ShareConsumerSettings
from tailrace.share.undeliverable import Undeliverable

NS_PER_MS = 1_000_000
LOOK_AGAIN_NS = 1_000 * NS_PER_MS
"""How soon to ask again though nothing tells of records: a push may be lost."""
SEND_SAID_NS = 1_000 * NS_PER_MS
"""A loop over records tells the appliance so often what was said, or more often where locks are short: it must not wait for the end of what was acquired."""
_PLAIN = frozenset(OUTCOMES) - {"reject"}
_NO_RECORD = "{!r:.100} is no record; acknowledge what poll() has returned"
Call = Callable[[Api, dict[str, Any]], dict[str, Any]]


class ShareWork:
    """See the module's docstring."""

    def __init__(self, settings: ShareConsumerSettings, environment: Environment, call: Call) -> None:
        """`call`: a question and its answer."""
        group = settings.group_id
        assert group is not None
        self.settings = s = settings
        self.environment = environment
        self.now_ns = environment.monotonic_ns
        self.connection = Connection(s.bootstrap, s.client_id, environment, "share consumer")
        self.connection.on_push = self._pushed
        identity = MemberIdentity(group, uuid4().hex, None, s.client_id, "", s.session_timeout_ms, s.heartbeat_interval_ms, 0x7FFFFFFF)
        self.membership = ShareMembership(identity, s.auto_offset_reset, self.now_ns())
        self.thread = HeartbeatThread(self.membership, s.bootstrap, s.client_id, environment)
        self.held = Held()
        self.ahead = Ahead()
        self.reading = ShareReading(self.connection, s.for_reading(), call)
        self.requests = ShareRequests(self.connection, self.thread, self.held, self.reading.topic_id, s.request_timeout_ms)
        self.undeliverable = Undeliverable(group, self.held)
        self.subscribed: list[str] = []
        self.lock_ms = 0
        """How long the locks last that were given last."""
        self._is_explicit = False
        """Whether `acknowledge` was called since the last poll."""
        self._acquire_at_ns = 0
        """When to ask for records next, unless something tells of them before."""
        self._sent_ns = 0
        """When a request was begun last."""
        self._met = ""
        """Why the last request was not carried out, until one is."""
        self._error: TailraceError | None = None
        """For the next poll: this one had records to hand out."""
        self.counters = {"records_consumed": 0, "acknowledgements_refused": 0, "locks_lost": 0}

    # ---- the group -----------------------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Any) -> None:
        """Take records of these topics, instead of those before. Raises UnknownTopicError, InvalidRequestError."""
        names = list(dict.fromkeys(name_list("topics", topics)))
        if not names:
            raise InvalidRequestError("topics is empty; name one at least, or close the consumer")
        self._meet_anew(self.reading.look_up(names))
        with self.thread.beats.lock:
            self.membership.subscribe(names, False, self.now_ns())
        self.subscribed = names
        self._acquire_at_ns = 0
        self.ring()

    def ring(self) -> None:
        """The heartbeats have something to do."""
        if self.environment.has_threads:
            self.thread.start()
            self.thread.ring()
        else:
            self.thread.beats.step()

    def _pushed(self, push: Response) -> None:
        if push.api == Api.GROUP_HEARTBEAT:
            self._acquire_at_ns = 0

    def _look_at_membership(self) -> bool:
        """Take in what the heartbeats have met; returns whether this is a member. Raises why it cannot be one."""
        if not self.environment.has_threads:
            self.thread.beats.step()
        membership = self.membership
        if membership.has_news:
            with self.thread.beats.lock:
                self.thread.news.hush()
                membership.has_news = False
                is_lost = membership.phase is Phase.LOST
                reason = (change.reason if (change := membership.next_change()) is not None else "") if is_lost else ""
                if is_lost:
                    membership.lost_told(self.now_ns())
                error = membership.take_error(self.now_ns())
            self.ring()
            if is_lost:
                self._lose_locks(reason or "the group has removed this consumer")
            if error is not None:
                raise error
        if self.requests.lost_locks:
            self.requests.lost_locks = False
            self._lose_locks("the group does not know this consumer any more")
        return membership.phase is Phase.MEMBER

    def _lose_locks(self, reason: str) -> None:
        held, in_vain = self.held.clear()
        self.requests.refuse(in_vain)
        count = held + self.reading.forget_runs() + self.ahead.clear()
        self.undeliverable.forget()
        self._acquire_at_ns = 0
        if count:
            self.counters["locks_lost"] += count
            logger.warning("share_locks_lost group=%s records=%d reason=%s", self.settings.group_id, count, reason)
        self._note_refused()

    def _meet_anew(self, names: list[str]) -> None:
        """Topics were deleted and made again: what was acquired of the old ones is no more."""
        for name in names:
            held, in_vain = self.held.clear(name)
            self.requests.refuse(in_vain)
            count = held + self.ahead.drop_topic(name)
            if count:
                self.counters["locks_lost"] += count
                logger.warning("share_locks_lost group=%s records=%d reason=topic %s was made anew", self.settings.group_id, count, name)

    # ---- a poll --------------------------------------------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """What the poll before has handed out is accepted, unless something was said. Raises what the poll before has met and not told."""
        self.connection.check_usable()
        if not self.subscribed:
            raise InvalidRequestError("nothing is subscribed to: name topics at construction, or call subscribe()")
        if self._error is not None and not self.ahead:
            error, self._error = self._error, None
            raise error
        self.settle_last()
        if self.held.has_said:
            self._acquire_at_ns = 0  # it is not to wait for news

    def settle_last(self) -> None:
        """In implicit mode: accept what was handed out last, or keep it if something was said since."""
        if self.settings.share_acknowledgement_mode == "implicit":
            if self._is_explicit:
                self.held.keep_rest()
            else:
                self.held.accept_rest()
        self._is_explicit = False

    def accept_in_loop(self, record: ShareRecord) -> None:
        """A loop asks for the next record: this one is accepted, unless something was said of it. Sends what was said if that was long ago."""
        if self.settings.share_acknowledgement_mode == "implicit":
            self.held.accept_one(record.topic, record.partition, record.offset)
        every_ns = min(SEND_SAID_NS, self.lock_ms * NS_PER_MS // 4)
        if self.requests.is_busy or self.now_ns() - self._sent_ns >= every_ns:
            self.turn(0)

    def turn(self, limit: int) -> None:
        """What can be done now about acquiring (so many records) and acknowledging: send, take in."""
        is_member = self._look_at_membership()
        requests, now_ns = self.requests, self.now_ns()
        if is_member and not requests.is_busy:
            may_acquire = limit > 0 and not self.reading.has_runs
            if may_acquire and now_ns >= self._acquire_at_ns:
                self._begin(limit)
            elif not may_acquire and self.held.has_said:
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
            if error.detail != self._met:  # once: it is tried again and again
                self._met = error.detail
                logger.warning("share_request_failed group=%s reason=%s: it is tried again", self.settings.group_id, error)
            self._acquire_at_ns = self.now_ns() + TRY_AGAIN_NS
            return
        if answer is not None:
            self._met = ""
            self._take(answer)

    def _take(self, answer: Answer) -> None:
        self._note_refused()
        now_ns = self.now_ns()
        if not answer.is_acquire:
            self._acquire_at_ns = now_ns + TRY_AGAIN_NS if self.requests.lost_locks else 0
            return
        self.lock_ms = answer.lock_ms or self.lock_ms
        self.reading.acquired(answer.acquired)
        if answer.acquired:
            self._acquire_at_ns = 0
        else:
            self._acquire_at_ns = now_ns + LOOK_AGAIN_NS
            self.reading.wait_at(answer.ends)

    def _note_refused(self) -> None:
        if self.requests.refused_count > self.counters["acknowledgements_refused"]:
            self.counters["acknowledgements_refused"] = self.requests.refused_count
            logger.warning("share_acknowledgements_refused group=%s: commit() says which", self.settings.group_id)

    def check_reachable(self) -> None:
        """As a Consumer's poll does. Raises NotReachableError when the appliance has been away for long, and why the connection is of no use."""
        connection, now_ns = self.connection, self.now_ns()
        if not connection.is_ready:
            connection.process()
            connection.tick(now_ns)
        connection.check_reachable(now_ns)

    def read(self, limit: int) -> None:
        """Take in up to `limit` records that were acquired and have come; what cannot be delivered is noted."""
        for key, info, piece in self.reading.pieces(limit):
            if piece.unreadable is not None:
                self.undeliverable.unreadable(key, info, piece)
            elif not piece.records:
                self.held.hold(key, piece.first, piece.last, "accept")
            elif piece.run.is_dead:
                self.undeliverable.dead(key, info, piece)
            else:
                self.ahead.add(key, piece)

    def to_look_up(self) -> list[Callable[[], None]]:
        """Questions that are to be asked now, one after the other. Each raises what it meets."""
        questions: list[Callable[[], None]] = [self._learn_topics] if self.reading.needs_topics else []
        return [*questions, *(self._repairing(feed) for feed in self.reading.broken())]

    def _learn_topics(self) -> None:
        self._meet_anew(self.reading.learn_topics())

    def _repairing(self, feed: PartitionFeed) -> Callable[[], None]:
        return lambda: self.reading.repair(feed)

    def fail(self, error: TailraceError) -> None:
        """The poll has met this. Raises it, or keeps it for the next one if there are records to hand out."""
        if not self.ahead:
            raise error
        self._error = error

    def is_done(self, limit: int) -> bool:
        """Whether the poll is to end though its time is not up."""
        return len(self.ahead) >= limit or self._error is not None or (len(self.ahead) > 0 and not self.reading.has_runs)

    def wait_until_ns(self, deadline_ns: int) -> int:
        """Until when there is nothing to do if nothing comes; not in the future: there is something to do now. Raises why the connection is of no use."""
        connection, reading, now_ns = self.connection, self.reading, self.now_ns()
        if reading.fetch() or reading.needs_topics:
            return 0
        if news := reading.takes_news():
            self._acquire_at_ns = now_ns + (0 if news is True else TRY_AGAIN_NS)
        may_acquire = not self.requests.is_busy and self.membership.phase is Phase.MEMBER and not reading.has_runs
        if may_acquire and self._acquire_at_ns <= now_ns:
            return 0
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        times = [deadline_ns, connection.next_tick_ns(), self.requests.next_step_ns(), reading.retry_at_ns(now_ns)]
        if may_acquire:
            times.append(self._acquire_at_ns)
        return min(at_ns for at_ns in times if at_ns is not None)

    def hand_out(self, limit: int) -> list[ShareRecord]:
        """Up to so many of the records that were read; held from now on. Raises InvalidRecordError when a deserializer fails on the first, which is released;
        what stands behind one that fails later waits for the next call.
        """
        expired = self.ahead.drop_expired(limit, self.now_ns())
        if expired:
            self.counters["locks_lost"] += expired
            logger.warning("share_locks_passed group=%s records=%d: they were not handed out in time", self.settings.group_id, expired)
        found = self.ahead.first(limit)
        failure: Exception | None = None
        if found and (self.settings.key_deserializer or self.settings.value_deserializer):
            raw = found
            made, failure = deserialized(raw, self.settings.key_deserializer, self.settings.value_deserializer)
            found = made  # type: ignore[assignment]
            self.undeliverable.keep_raw(raw[: len(found)])
            if failure is not None and not found:
                ((key, first, _),) = self.ahead.take(1)
                self.held.hold(key, first, first, "release")
                raise failure_at(raw[0], failure) from failure
        for key, first, last in self.ahead.take(len(found)):
            self.held.hold(key, first, last)
        self.counters["records_consumed"] += len(found)
        return found

    # ---- acknowledging -------------------------------------------------------------------------------------------------------------------

    def acknowledge(self, record: Record, outcome: str, reason: str | None) -> None:
        """See `ShareConsumer.acknowledge`."""
        self.connection.check_usable()
        if reason is not None or type(outcome) is not str or outcome not in _PLAIN:  # the others one by one: this is done for every record
            word = _word(outcome)
            if reason is not None:
                _check_reason(reason, word)
            outcome = self._rejecting(record, reason) if word == "reject" else word
        if not isinstance(record, Record):
            raise InvalidRequestError(_NO_RECORD.format(record))
        self.held.say(record.topic, record.partition, record.offset, outcome)
        self._is_explicit = True

    def _rejecting(self, record: Record, reason: str | None) -> str:
        """The record is to go to the dead-letter topic."""
        if not isinstance(record, Record):
            raise InvalidRequestError(_NO_RECORD.format(record))
        if self.held.has(record.topic, record.partition, record.offset):
            self.undeliverable.reject(record, self.reading.info(record.topic), reason)
        return REJECTING

    def begin_commit(self) -> None:
        """In implicit mode accept what was handed out last, if nothing was said since."""
        self.connection.check_usable()
        if self.settings.share_acknowledgement_mode == "implicit" and not self._is_explicit:
            self.held.accept_rest()

    def flush_step(self, number: int) -> int:
        """One step of sending all that was said. `number`: what it returned before, 0 at first: the request that has the last of it, 0: it was not sent yet."""
        self._look_at_membership()
        requests = self.requests
        if not number and not requests.is_busy and self.held.has_said:
            self._begin(None)
        if requests.is_busy:
            answer = requests.step()
            if answer is not None:
                self._take(answer)
        return number if number or self.held.has_said else requests.last

    def is_flushed(self, number: int) -> bool:
        """Whether `flush_step` has nothing more to do."""
        if number:
            return self.requests.is_answered(number)
        return not self.requests.is_busy and not self.held.has_said

    def flush_again_ns(self, deadline_ns: int) -> int:
        """When the next `flush_step` is due though nothing comes. Raises RequestTimeoutError when the time is up."""
        now_ns = self.now_ns()
        if now_ns >= deadline_ns:
            raise self.requests.late()
        step_ns = self.requests.next_step_ns()
        return now_ns if step_ns is None else min(deadline_ns, step_ns)  # None: the next one is to be begun

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the group: what is held is released."""
        with self.thread.beats.lock:
            self.membership.leave(self.now_ns())
        self.ring()

    def has_left(self) -> bool:
        """Whether the appliance has heard of it, or cannot."""
        return self.membership.phase is not Phase.LEAVING or not self.thread.beats.connection.is_ready

    def forget(self) -> None:
        """Out of the group nothing is held."""
        self.held.clear()
        self.ahead.clear()
        self.reading.forget_runs()
        self.undeliverable.forget()
        self.subscribed = []
        self._error = None

    def metrics(self, dead_letters: int) -> dict[str, int]:
        """Counters since construction. `dead_letters`: how many were written."""
        return {**self.counters, "dead_letters": dead_letters, "fetches": self.reading.fetch_count}


def _word(outcome: object) -> str:
    """An outcome as it is sent. Raises InvalidRequestError."""
    word = str(outcome).lower() if isinstance(outcome, str) else ""
    if word not in OUTCOMES:
        raise InvalidRequestError(f"the outcome is {outcome!r:.100}; allowed are {', '.join(OUTCOMES)}")
    return word


def _check_reason(reason: object, word: str) -> None:
    """Raises InvalidRequestError."""
    if not isinstance(reason, str):
        raise InvalidRequestError(f"reason is {reason!r:.100}; it takes a sentence, as text: write reason=str(...)")
    if word != "reject":
        raise InvalidRequestError(f'reason goes into the header dlq.reason of a dead letter: leave it out with "{word}", or write "reject"')
