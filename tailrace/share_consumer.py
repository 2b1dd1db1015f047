"""The share consumer: takes records of topics as from a work queue, many consumers on one partition, each record under a lock (Kafka's share groups, KIP-932).

`poll` acquires records, reads them with ordinary fetches, and hands them out with how often they were delivered; `acknowledge` says what becomes of each. A
record that is not accepted before its lock passes, or whose consumer dies, goes to another one. One that was delivered too often, or is rejected, goes to the
dead-letter topic (`tailrace.dead_letters`). Heartbeats go on in a thread of their own.

Owner: one thread uses a ShareConsumer.
Invariants: those of `tailrace.share.work`, which does everything but wait.
Crash: whatever dies, a record that was not accepted comes again; one that was accepted does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Never, Unpack

from tailrace.arguments import name_list, timeout_ms_of, whole
from tailrace.client_log import logger
from tailrace.dead_letters import DeadLetters
from tailrace.environment import REAL, Environment
from tailrace.errors import TailraceError
from tailrace.other_names import SHARE_CONSUMER_ELSEWHERE, OtherNames, refuse_keywords
from tailrace.protocol.wire import Api
from tailrace.records import Record
from tailrace.settings import build, documented, merged
from tailrace.share.records import ShareRecord as ShareRecord
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings
from tailrace.share.work import NS_PER_MS, ShareWork

LEAVE_WAIT_NS = 5_000 * NS_PER_MS
CLOSE_COMMIT_MS = 5_000
LOOP_POLL_MS = 1_000


@documented(ShareConsumerSettings)
class ShareConsumer(OtherNames):
    """Takes records from topics as from a queue, together with the other consumers of its group. A context manager; for one thread at a time.

        with tailrace.ShareConsumer("jobs", bootstrap="tcp://127.0.0.1:7420", group_id="workers") as consumer:
            while True:
                for record in consumer.poll(timeout_ms=1000):
                    consumer.acknowledge(record, "accept" if work(record.value) else "release")

    Each record goes to one consumer at a time. What is neither acknowledged nor renewed within the topic's group.share.record.lock.duration.ms goes to
    another one, with a higher `delivery_count`. If `acknowledge` is not called between two polls, what the first returned is accepted by the second, or by
    `commit`.
    Settings are keyword arguments.
    """

    _elsewhere: ClassVar[dict[str, str]] = SHARE_CONSUMER_ELSEWHERE

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
        names, self.settings = settings_of(topics, bootstrap, settings)
        s = self.settings
        self._environment = environment
        self._now_ns = environment.monotonic_ns
        self._work = ShareWork(s, environment, self._call)
        self._connection = self._work.connection
        self._abandon = weakref.finalize(self, self._work.thread.abandon)
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self._letters = DeadLetters(s.bootstrap, s.client_id, self._call, environment, s.dead_letter_timeout_ms)
        self._closed = False
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
        self._work.subscribe(topics)

    def unsubscribe(self) -> None:
        """Leave the group: what was said of records is sent, the others are released."""
        self._connection.check_usable()
        self._leave()
        self._work.forget()

    def subscription(self) -> set[str]:
        """The names of the topics that records are taken of."""
        self._connection.check_usable()
        return set(self._work.subscribed)

    def acquisition_lock_timeout_ms(self) -> int | None:
        """How long the locks of the records last that were acquired last, ms (Kafka's name); None before the first."""
        return self._work.lock_ms or None

    # ---- records -------------------------------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0, max_records: int | None = None, **others: Never) -> list[ShareRecord]:
        """Acquire up to `max_records` records (default max_poll_records); waits for the first for at most `timeout_ms` milliseconds. What was said by
        `acknowledge` is sent along, and where it was not called since the last poll, what that returned is accepted (share_acknowledgement_mode "implicit").

        Raises InvalidRecordError (a deserializer failed: the record is released, the next poll goes on without it), NotReachableError (the appliance has been
        away for a minute, as a Consumer's), UnknownTopicError, StorageError; records that had come are handed out first. A record that cannot be read goes to
        the dead-letter topic.
        """
        if others:
            refuse_keywords("poll", others)
        limit = self.settings.max_poll_records if max_records is None else whole("max_records", max_records, 1)
        self._fill(limit, self._now_ns() + int(timeout_ms_of(timeout_ms) * NS_PER_MS))
        return self._work.hand_out(limit)

    def _fill(self, limit: int, deadline_ns: int) -> None:
        """Have records to hand out."""
        work = self._work
        work.begin_poll()
        self._write_given_up(with_rejected=True)
        while True:
            try:
                work.turn(limit - len(work.ahead))
                for look_up in work.to_look_up():
                    look_up()
                work.read(limit - len(work.ahead))
                self._write_given_up(with_rejected=False)
                work.check_reachable()
            except TailraceError as error:
                work.fail(error)
            if work.is_done(limit) or self._now_ns() >= deadline_ns:
                return
            self._wait(deadline_ns)

    def _wait(self, deadline_ns: int) -> None:
        """Until something may have come, or the time is up."""
        until_ns = self._work.wait_until_ns(deadline_ns)
        beats = self._work.thread.beats
        if not self._environment.has_threads:
            until_ns = min(until_ns, beats.next_ns())
        wait_ns = until_ns - self._now_ns()
        if wait_ns > 0:
            self._connection.wait(wait_ns, self._work.thread.news.fd if self._environment.has_threads else beats.connection.fileno())
            self._connection.process()

    def _write_given_up(self, *, with_rejected: bool) -> TailraceError | None:
        """Write dead letters. Returns why one of what the user has rejected could not be written; it is tried again."""
        book = self._work.undeliverable
        given_up = book.take(with_rejected=with_rejected)
        if not given_up:
            return None
        try:
            outcomes = self._letters.write(book.letters(given_up, self._work.reading.fresh_info))
        except BaseException:
            book.put_back(given_up)
            raise
        return book.ended(given_up, outcomes)

    def __iter__(self) -> Iterator[ShareRecord]:
        """Records without end, until the consumer is closed. A record of which nothing was said is accepted when the next one is asked for; what a loop that is
        left early did not take is handed out next. What was said goes out at least every second, or four times in the time that a lock lasts.
        """
        work = self._work
        self._connection.check_usable()
        while not self._closed:
            if not work.ahead:
                self._fill(self.settings.max_poll_records, self._now_ns() + LOOP_POLL_MS * NS_PER_MS)
            for record in work.hand_out(1):
                yield record
                if not self._connection.is_usable:
                    return
                work.accept_in_loop(record)

    # ---- acknowledging -------------------------------------------------------------------------------------------------------------------

    def acknowledge(self, record: Record, outcome: str = "accept", *, reason: str | None = None) -> None:
        """Say what becomes of a record: "accept" (it is done), "release" (another consumer, or this one, gets it again), "reject" (it goes to the dead-letter
        topic), "renew" (its lock begins anew, it stays with this consumer); or a `tailrace.AcknowledgeType`. It is sent with the next `poll`, or by `commit`.
        Said twice before that, the last word counts. `reason`, with "reject" alone: why, a sentence for the dead letter's header `dlq.reason` (the first
        1,000 characters). Raises InvalidRequestError, also for a record that this consumer does not hold.
        """
        self._work.acknowledge(record, outcome, reason)

    def commit(self, timeout_ms: float | None = None) -> None:
        """Send what was said of records, and wait until the appliance has it on its disk (`timeout_ms`, default request_timeout_ms). Where nothing was said
        since the last poll, what that returned is accepted first (share_acknowledgement_mode "implicit").

        Raises LockLostError when something was refused since the last commit because its lock had passed: `refused` says what, all else is done.
        RequestTimeoutError, NotReachableError; what the dead-letter topic refuses.
        """
        timeout = self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms)
        self._work.begin_commit()
        deadline_ns = self._now_ns() + int(timeout * NS_PER_MS)
        failure = self._write_given_up(with_rejected=True)
        self._flush(deadline_ns)
        refused = self._work.requests.take_refused()
        if refused is not None:
            raise refused
        if failure is not None:
            raise failure

    def _flush(self, deadline_ns: int) -> None:
        """Until all that was said is answered. Raises RequestTimeoutError, or what the appliance says."""
        work, number = self._work, 0
        while True:
            number = work.flush_step(number)
            if work.is_flushed(number):
                return
            until_ns = work.flush_again_ns(deadline_ns)
            if until_ns > self._now_ns():
                self._connection.wait(until_ns - self._now_ns())

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was said of records, release the others, leave the group, end the connections. A second time it does nothing."""
        if self._closed:
            return
        self._closed = True
        self._abandon.detach()
        try:
            self._leave()
        finally:
            self._work.thread.stop()
            self._letters.close()
            self._connection.close()

    def _leave(self) -> None:
        if not (self._connection.is_usable and self._connection.is_ready):
            return
        try:
            self._write_given_up(with_rejected=True)
            self._flush(self._now_ns() + CLOSE_COMMIT_MS * NS_PER_MS)
        except TailraceError as error:
            logger.warning("share_close_without_commit group=%s reason=%s: the records come again", self.settings.group_id, error)
        refused = self._work.requests.take_refused()
        if refused is not None:
            logger.warning("share_acknowledgements_refused group=%s %s", self.settings.group_id, refused.detail)
        self._work.leave()
        self._wait_until_left(self._now_ns() + LEAVE_WAIT_NS)

    def _wait_until_left(self, until_ns: int) -> None:
        thread = self._work.thread
        while not self._work.has_left() and (left_ns := until_ns - self._now_ns()) > 0:
            if self._environment.has_threads:
                self._environment.sleep_on((thread.news.fd,), left_ns)
                thread.news.hush()
            else:
                beats = thread.beats
                self._environment.sleep_on((beats.connection.fileno(),), min(left_ns, max(0, beats.next_ns() - self._now_ns())))
                beats.step()

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, acknowledgements_refused, locks_lost, dead_letters, fetches."""
        return self._work.metrics(self._letters.count)


def settings_of(topics: Sequence[Any], bootstrap: Any, settings: Mapping[str, Any]) -> tuple[list[str], ShareConsumerSettings]:
    """What a share consumer was constructed with: topics, settings. Raises InvalidSettingError, InvalidRequestError."""
    first = topics[0] if topics and isinstance(topics[0], Mapping) else None
    names = [name for given in topics[1 if first is not None else 0 :] for name in name_list("topics", given)]
    given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
    return names, build(ShareConsumerSettings, merged(first, given))
