"""The share consumer: takes records of topics as from a work queue, many consumers on one partition, each record under a lock (Kafka's share groups, KIP-932).

`poll` acquires records, reads them with ordinary fetches, and hands them out with how often they were delivered; `acknowledge` says what becomes of each. A
record that is not accepted before its lock passes, or whose consumer dies, goes to another one. One that was delivered too often, or is rejected, goes to the
dead-letter topic (`tailrace.dead_letters`). Heartbeats go on in a thread of their own.

Owner: one thread uses a ShareConsumer.
Invariants: a record that was handed out is held until it is acknowledged or its lock is gone; nothing is accepted that was not handed out, but for offsets that
    have no record and dead letters that were written.
Crash: whatever dies, a record that was not accepted comes again; one that was accepted does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Unpack
from uuid import uuid4

from tailrace.arguments import name_list, timeout_ms_of, whole
from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.environment import REAL, Environment
from tailrace.errors import InvalidRequestError, TailraceError
from tailrace.groups.driver import HeartbeatThread
from tailrace.groups.membership import MemberIdentity, Phase
from tailrace.other_names import OtherNames
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.records import Record, TopicPartition
from tailrace.serializers import deserialized, failure_at
from tailrace.settings import build, documented, merged
from tailrace.share.held import OUTCOMES, REJECTING, Held
from tailrace.share.membership import ShareMembership
from tailrace.share.reading import ShareReading
from tailrace.share.records import ShareRecord as ShareRecord
from tailrace.share.records import with_delivery_count
from tailrace.share.requests import ShareRequests
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings
from tailrace.share.undeliverable import Undeliverable

NS_PER_MS = 1_000_000
LOOK_AGAIN_NS = 1_000 * NS_PER_MS
"""How soon to ask again though nothing tells of records: a push may be lost."""
TRY_AGAIN_NS = 100 * NS_PER_MS
LEAVE_WAIT_NS = 5_000 * NS_PER_MS
CLOSE_COMMIT_MS = 5_000


@documented(ShareConsumerSettings)
class ShareConsumer(OtherNames):
    """Takes records from topics as from a queue, together with the other consumers of its group. A context manager; for one thread at a time.

        with tailrace.ShareConsumer("jobs", bootstrap="tcp://127.0.0.1:7420", group_id="workers") as consumer:
            while True:
                for record in consumer.poll(timeout_ms=1000):
                    consumer.acknowledge(record, "accept" if work(record.value) else "release")

    Each record goes to one consumer at a time. What is neither acknowledged nor renewed within the topic's group.share.record.lock.duration.ms goes to
    another one, with a higher `delivery_count`. Records of a poll of which none is acknowledged are accepted by the next `poll`, or `commit`.
    Settings are keyword arguments.
    """

    _elsewhere: ClassVar[dict[str, str]] = {
        "assign": "a share group has no assignment: write ShareConsumer(*topics, group_id=...)",
        "assignment": "every consumer of a share group is given records of all partitions",
        "commit_async": "what was acknowledged goes with the next poll(); write commit() to wait for it",
        "commit_sync": "write commit()",
        "position": "a share group has no positions: records are acknowledged one by one",
        "seek": "a share group has no positions: write `tailrace group reset-offsets` while it has no consumers",
    }

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        environment: Environment = REAL,
        **settings: Unpack[ShareConsumerOptions],
    ) -> None:
        """`topics`: names, or a list of them; a dict first holds settings with Kafka's names. Without topics `subscribe` follows. `bootstrap`: the appliance's
        address.

        Raises InvalidSettingError before anything is opened; UnknownTopicError, and NotReachableError when no appliance answers within request_timeout_ms.
        """
        first = topics[0] if topics and isinstance(topics[0], Mapping) else None
        names = [name for given in topics[1 if first is not None else 0 :] for name in name_list("topics", given)]
        given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
        self.settings = s = build(ShareConsumerSettings, merged(first, given))
        assert s.group_id is not None
        self._environment = environment
        self._now_ns = environment.monotonic_ns
        self._connection = Connection(s.bootstrap, s.client_id, environment, "share consumer")
        self._connection.on_push = self._pushed
        identity = MemberIdentity(s.group_id, uuid4().hex, None, s.client_id, "", s.session_timeout_ms, s.heartbeat_interval_ms, 0x7FFFFFFF)
        self._membership = ShareMembership(identity, s.auto_offset_reset, self._now_ns())
        self._thread = HeartbeatThread(self._membership, s.bootstrap, s.client_id, environment)
        self._abandon = weakref.finalize(self, self._thread.abandon)
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self._held = Held()
        self._reading = ShareReading(self._connection, s.for_reading(), self._call)
        self._requests = ShareRequests(self._connection, self._thread, self._held, self._reading.topic_id, s.request_timeout_ms)
        self._undeliverable = Undeliverable(s, self._call, environment, self._held)
        self._ready: list[ShareRecord] = []
        """Acquired and read, behind a record whose deserializer failed."""
        self._is_explicit = False
        """Whether acknowledge() was called for a record of the last poll."""
        self._acquire_at_ns = 0
        """When to ask for records next, unless something tells of them before."""
        self._subscribed: list[str] = []
        self._closed = False
        self._counters = {"records_consumed": 0, "acknowledgements_refused": 0, "locks_lost": 0}
        if names:
            try:
                self.subscribe(names)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> ShareConsumer:
        self._connection.check_usable()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self.settings.request_timeout_ms)

    # ---- the group -----------------------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: str | Iterable[str]) -> None:
        """Take records of these topics, instead of those before. Raises UnknownTopicError, InvalidRequestError."""
        self._connection.check_usable()
        names = list(dict.fromkeys(name_list("topics", topics)))
        if not names:
            raise InvalidRequestError("topics is empty; name one at least, or close the consumer")
        self._reading.look_up(names)
        with self._thread.beats.lock:
            self._membership.subscribe(names, False, self._now_ns())
        self._subscribed = names
        self._acquire_at_ns = 0
        self._ring()

    def subscription(self) -> list[str]:
        """The topics that records are taken of."""
        return list(self._subscribed)

    def _ring(self) -> None:
        if self._environment.has_threads:
            self._thread.start()
            self._thread.ring()
        else:
            self._thread.beats.step()

    def _pushed(self, push: Response) -> None:
        if push.api == Api.GROUP_HEARTBEAT:
            self._acquire_at_ns = 0

    def _look_at_membership(self) -> bool:
        """Take in what the heartbeats have met; returns whether this is a member. Raises why it cannot be one."""
        if not self._environment.has_threads:
            self._thread.beats.step()
        membership = self._membership
        if membership.has_news:
            with self._thread.beats.lock:
                self._thread.news.hush()
                membership.has_news = False
                is_lost = membership.phase is Phase.LOST
                reason = (change.reason if (change := membership.next_change()) is not None else "") if is_lost else ""
                if is_lost:
                    membership.lost_told(self._now_ns())
                error = membership.take_error(self._now_ns())
            self._ring()
            if is_lost:
                self._lose_locks(reason)
            if error is not None:
                raise error
        if self._requests.lost_locks:
            self._requests.lost_locks = False
            self._lose_locks("the group does not know this consumer any more")
        return membership.phase is Phase.MEMBER

    def _lose_locks(self, reason: str) -> None:
        count = self._held.clear() + self._reading.forget_runs() + len(self._ready)
        self._ready = []
        self._undeliverable.forget()
        self._acquire_at_ns = 0
        if count:
            self._counters["locks_lost"] += count
            logger.warning("share_locks_lost group=%s records=%d reason=%s", self.settings.group_id, count, reason)

    # ---- records -------------------------------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ShareRecord]:
        """Acquire up to `max_records` records (default max_poll_records); waits for the first for at most `timeout_ms` milliseconds. What was said by
        `acknowledge` is sent along, and where nothing was said of any record of the last poll, these are accepted (share_acknowledgement_mode "implicit").

        Raises InvalidRecordError (a deserializer failed: the record is released, the next poll goes on without it), NotReachableError, UnknownTopicError,
        StorageError. A record that cannot be read goes to the dead-letter topic.
        """
        limit = self.settings.max_poll_records if max_records is None else whole("max_records", max_records, 1)
        self._connection.check_usable()
        if not self._subscribed:
            raise InvalidRequestError("nothing is subscribed to: name topics at construction, or call subscribe()")
        deadline_ns = self._now_ns() + int(timeout_ms_of(timeout_ms) * NS_PER_MS)
        self._accept_last()
        if self._held.has_said:
            self._acquire_at_ns = 0  # it is not to wait for news
        result = self._take_ready(limit)
        while len(result) < limit:
            self._turn(limit - len(result))
            result += self._read(limit - len(result))
            if (result and not self._reading.has_runs) or self._now_ns() >= deadline_ns:
                break
            self._wait(deadline_ns)
        if result and (self.settings.key_deserializer or self.settings.value_deserializer):
            result = self._deserialized(result)
        self._counters["records_consumed"] += len(result)
        return result

    def _accept_last(self) -> None:
        if self.settings.share_acknowledgement_mode == "implicit" and not self._is_explicit:
            self._held.accept_rest()
        self._is_explicit = False
        self._undeliverable.write_rejected()

    def _turn(self, limit: int) -> None:
        """What can be done now about acquiring: send, take in."""
        is_member = self._look_at_membership()
        requests, now_ns = self._requests, self._now_ns()
        if not requests.is_busy and is_member and not self._reading.has_runs and now_ns >= self._acquire_at_ns:
            requests.begin(limit)
        if requests.is_busy:
            self._step_requests()

    def _step_requests(self) -> None:
        try:
            answer = self._requests.step()
        except TailraceError as error:
            if not error.retriable:
                raise
            self._acquire_at_ns = self._now_ns() + TRY_AGAIN_NS
            return
        if answer is None:
            return
        self._note_refused()
        now_ns = self._now_ns()
        if not answer.is_acquire:
            self._acquire_at_ns = now_ns + TRY_AGAIN_NS if self._requests.lost_locks else 0
            return
        self._reading.acquired(answer.acquired)
        if answer.acquired:
            self._acquire_at_ns = 0
        else:
            self._acquire_at_ns = now_ns + LOOK_AGAIN_NS
            self._reading.wait_at(answer.ends)

    def _note_refused(self) -> None:
        if self._requests.refused_count > self._counters["acknowledgements_refused"]:
            self._counters["acknowledgements_refused"] = self._requests.refused_count
            logger.warning("share_acknowledgements_refused group=%s: commit() says which", self.settings.group_id)

    def _read(self, limit: int) -> list[ShareRecord]:
        """Records that were acquired and have come, held from now on; dead ones are written to the dead-letter topic."""
        result: list[ShareRecord] = []
        for key, info, piece in self._reading.pieces(limit):
            if piece.unreadable is not None:
                self._undeliverable.unreadable(key, info, piece)
            elif not piece.records:
                self._held.hold(key, piece.first, piece.last, "accept")
            elif piece.run.is_dead:
                self._undeliverable.dead(key, info, piece)
            else:
                self._held.hold(key, piece.first, piece.last)
                result += with_delivery_count(piece.records, piece.run.delivery_count)
        self._undeliverable.write()
        return result

    def _wait(self, deadline_ns: int) -> None:
        """Until something may have come, or the time is up."""
        connection, reading, now_ns = self._connection, self._reading, self._now_ns()
        if reading.fetch():
            return
        if news := reading.takes_news():
            self._acquire_at_ns = now_ns + (0 if news is True else TRY_AGAIN_NS)
        may_acquire = not self._requests.is_busy and self._membership.phase is Phase.MEMBER and not reading.has_runs
        if may_acquire and self._acquire_at_ns <= now_ns:
            return
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        times = [deadline_ns, connection.next_tick_ns(), self._requests.next_step_ns(), reading.retry_at_ns(now_ns)]
        if may_acquire:
            times.append(self._acquire_at_ns)
        if not self._environment.has_threads:
            times.append(self._thread.beats.next_ns())
        wait_ns = min(at_ns for at_ns in times if at_ns is not None) - now_ns
        if wait_ns > 0:
            connection.wait(wait_ns, self._thread.news.fd if self._environment.has_threads else self._thread.beats.connection.fileno())
            connection.process()

    def _take_ready(self, limit: int) -> list[ShareRecord]:
        """Records that an earlier poll has read and not handed out; held from now on."""
        result, self._ready = self._ready[:limit], self._ready[limit:]
        for record in result:
            self._held.hold(TopicPartition(record.topic, record.partition), record.offset, record.offset)
        return result

    def _deserialized(self, records: list[ShareRecord]) -> list[ShareRecord]:
        """What the deserializers make of records. One that fails is met when it is the first, and released; those behind it wait for the next poll."""
        done, error = deserialized(records, self.settings.key_deserializer, self.settings.value_deserializer)
        self._undeliverable.keep_raw(records)
        result: list[ShareRecord] = list(done)  # type: ignore[arg-type]
        if error is not None:
            first = records[0]
            for record in records[max(1, len(result)) :]:
                self._held.drop(record.topic, record.partition, record.offset)
                self._ready.append(record)
            if not result:
                self._held.say(first.topic, first.partition, first.offset, "release")
                self._is_explicit = True
                raise failure_at(first, error) from error
        return result

    def __iter__(self) -> Iterator[ShareRecord]:
        """Records without end, until the consumer is closed. A record of which nothing was said is accepted when the next one is asked for."""
        self._connection.check_usable()
        while not self._closed:
            for record in self.poll(timeout_ms=1000):
                yield record
                if not self._connection.is_usable:
                    return
                if (
                    self.settings.share_acknowledgement_mode == "implicit"
                    and self._held.said_of(record.topic, record.partition, record.offset) is None
                    and self._held.has(record.topic, record.partition, record.offset)
                ):
                    self._held.say(record.topic, record.partition, record.offset, "accept")

    # ---- acknowledging -------------------------------------------------------------------------------------------------------------------

    def acknowledge(self, record: Record, outcome: str = "accept") -> None:
        """Say what becomes of a record: "accept" (it is done), "release" (another consumer, or this one, gets it again), "reject" (it goes to the dead-letter
        topic), "renew" (its lock begins anew, it stays with this consumer). It is sent with the next `poll`, or by `commit`. Said twice before that, the
        last word counts. Raises InvalidRequestError for a record that this consumer does not hold.
        """
        self._connection.check_usable()
        word = outcome.lower() if isinstance(outcome, str) else outcome
        if word not in OUTCOMES:
            raise InvalidRequestError(f"the outcome is {outcome!r:.100}; allowed are {', '.join(OUTCOMES)}")
        if not isinstance(record, Record):
            raise InvalidRequestError(f"{record!r:.100} is no record; acknowledge what poll() has returned")
        self._held.say(record.topic, record.partition, record.offset, REJECTING if word == "reject" else word)
        self._is_explicit = True
        if word == "reject":
            self._undeliverable.reject(record, self._reading.info(record.topic))

    def commit(self, timeout_ms: float | None = None) -> None:
        """Send what was said of records, and wait until the appliance has it on its disk (`timeout_ms`, default request_timeout_ms). Where nothing was said of
        any record of the last poll, these are accepted first (share_acknowledgement_mode "implicit").

        Raises LockLostError when something was refused since the last commit because its lock had passed: `refused` says what, all else is done.
        RequestTimeoutError, NotReachableError; what the dead-letter topic refuses.
        """
        self._connection.check_usable()
        timeout_ns = int(self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms)) * NS_PER_MS
        deadline_ns = self._now_ns() + timeout_ns
        if self.settings.share_acknowledgement_mode == "implicit" and not self._is_explicit:
            self._held.accept_rest()
        failure = self._undeliverable.write_rejected()
        self._flush(deadline_ns)
        refused = self._requests.take_refused()
        if refused is not None:
            raise refused
        if failure is not None:
            raise failure

    def _flush(self, deadline_ns: int) -> None:
        """Until all that was said is answered. Raises RequestTimeoutError, or what the appliance says."""
        while True:
            self._look_at_membership()
            if not self._requests.is_busy:
                if not self._held.has_said:
                    return
                self._requests.begin(None)
            answer = self._requests.step()
            if answer is not None:
                self._note_refused()
                if answer.is_acquire:
                    self._reading.acquired(answer.acquired)
                continue
            now_ns = self._now_ns()
            if now_ns >= deadline_ns:
                raise self._requests.late()
            self._connection.wait(min(deadline_ns, self._requests.next_step_ns() or now_ns) - now_ns)

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was said of records, release the others, leave the group, end the connections. A second time it does nothing."""
        if self._closed:
            return
        self._closed = True
        self._abandon.detach()
        try:
            if self._connection.is_usable and self._connection.is_ready:
                self._commit_before_leaving()
                self._leave()
        finally:
            self._thread.stop()
            self._undeliverable.close()
            self._connection.close()

    def _commit_before_leaving(self) -> None:
        try:
            self._undeliverable.write_rejected()
            self._flush(self._now_ns() + CLOSE_COMMIT_MS * NS_PER_MS)
        except TailraceError as error:
            logger.warning("share_close_without_commit group=%s reason=%s: the records come again", self.settings.group_id, error)
        refused = self._requests.take_refused()
        if refused is not None:
            logger.warning("share_acknowledgements_refused group=%s %s", self.settings.group_id, refused.detail)

    def _leave(self) -> None:
        membership, beats = self._membership, self._thread.beats
        with beats.lock:
            membership.leave(self._now_ns())
        self._ring()
        until_ns = self._now_ns() + LEAVE_WAIT_NS
        while membership.phase is Phase.LEAVING and beats.connection.is_ready and (left_ns := until_ns - self._now_ns()) > 0:
            if self._environment.has_threads:
                self._environment.sleep_on((self._thread.news.fd,), left_ns)
                self._thread.news.hush()
            else:
                self._environment.sleep_on((beats.connection.fileno(),), min(left_ns, max(0, beats.next_ns() - self._now_ns())))
                beats.step()

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, acknowledgements_refused, locks_lost, dead_letters, fetches."""
        return {**self._counters, "dead_letters": self._undeliverable.count, "fetches": self._reading.fetch_count}
