"""The share consumer: takes records of topics as from a work queue, many consumers on one
partition, each record under a lock (Kafka's share groups, KIP-932).

`poll` acquires records, reads them with ordinary fetches, and hands them out with how often they
were delivered; `acknowledge` says what becomes of each. A record that is not accepted before its
lock passes, or whose consumer dies, goes to another one. One that was delivered too often, or is
rejected, goes to the dead-letter topic (`tailrace.consumer.dead_letter_queue`). Heartbeats go on in
a thread of their own.

Owner: one thread uses a ShareConsumer.
Invariants: those of `tailrace.share.poll_loop`, which does everything; here its steps are taken.
Crash: whatever dies, a record that was not accepted comes again; one that was accepted does not.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Never, Unpack

from tailrace.client.connection import NEVER_NS
from tailrace.client.kafka_names import (
    RENAMED_SHARE_CONSUMER_METHODS,
    RenamedMethods,
    refuse_keywords,
)
from tailrace.client.runtime import SYSTEM, Runtime
from tailrace.client.settings import build, documented, merged
from tailrace.client.steps import Steps, T, operation, run
from tailrace.core.records import Record
from tailrace.core.validation import name_list, timeout_ms_of, whole
from tailrace.share.loop_end import is_broken_off
from tailrace.share.poll_loop import NS_PER_MS, SharePollLoop
from tailrace.share.record import ShareRecord as ShareRecord
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings

LOOP_POLL_MS = 1_000


@documented(ShareConsumerSettings)
class ShareConsumer(RenamedMethods):
    """Takes records from topics as from a queue, together with the other consumers of its group. A
    context manager; for one thread at a time.

        with tailrace.ShareConsumer("jobs", bootstrap="tcp://127.0.0.1:7420", group_id="workers") as
            consumer: while True:
                for record in consumer.poll(timeout_ms=1000):
                    consumer.acknowledge(record, "accept" if work(record.value) else "release")

    Each record goes to one consumer at a time. What is neither acknowledged nor renewed within the
    topic's group.share.record.lock.duration.ms goes to another one, with a higher `delivery_count`.
    If `acknowledge` is not called between two polls, what the first returned is accepted by the
    second, or by `commit`. A loop over the consumer (`for record in consumer`) accepts each record
    when it asks for the next. Settings are keyword arguments.
    """

    _renamed: ClassVar[dict[str, str]] = RENAMED_SHARE_CONSUMER_METHODS

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ShareConsumerOptions],
    ) -> None:
        """`topics`: names, or a list of them; a dict first holds settings with Kafka's names.
        Without topics `subscribe` follows. `bootstrap`: the appliance's address.

        Raises InvalidSettingError before anything is opened; UnknownTopicError, and
        NotReachableError when no appliance answers within request_timeout_ms.
        """
        names, self.settings = settings_of(topics, bootstrap, settings)
        self._runtime = runtime
        self._begin(SharePollLoop(self.settings, runtime))
        if names:
            try:
                self.subscribe(names)
            except BaseException:
                self.close()
                raise

    def _begin(self, poll_loop: SharePollLoop) -> None:
        self._poll_loop = poll_loop
        self._connection = poll_loop.connection
        self._abandon = weakref.finalize(self, poll_loop.thread.abandon)
        self._abandon.atexit = False  # the appliance sees that the connection has closed
        self._closed = False

    def __enter__(self) -> ShareConsumer:
        self._connection.check_usable()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run_steps(self, steps: Steps[T], /) -> T:
        return run(steps, self._sleep_until)

    def _sleep_until(self, until_ns: int | None) -> None:
        thread = self._poll_loop.thread
        wake_fd = (
            thread.events.fd if self._runtime.has_threads else thread.beats.connection.fileno()
        )
        self._connection.wait(
            NEVER_NS if until_ns is None else until_ns - self._poll_loop.now_ns(), wake_fd
        )

    # ---- the group -------------------------------------------------------------------------------

    @operation
    def subscribe(self, topics: str | Iterable[str]) -> Steps[None]:
        """Take records of these topics, instead of those before. Raises UnknownTopicError,
        InvalidRequestError.
        """
        self._connection.check_usable()
        yield from self._poll_loop.subscribe(topics)

    @operation
    def unsubscribe(self) -> Steps[None]:
        """Leave the group: what was said of records is sent, the others are released."""
        self._connection.check_usable()
        yield from self._poll_loop.leave()
        self._poll_loop.forget()

    def subscription(self) -> set[str]:
        """The names of the topics that records are taken of."""
        self._connection.check_usable()
        return set(self._poll_loop.subscribed)

    def acquisition_lock_timeout_ms(self) -> int | None:
        """How long the locks of the records last that were acquired last, ms (Kafka's name); None
        before the first.
        """
        return self._poll_loop.lock_ms or None

    # ---- records ---------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[ShareRecord]:
        """Acquire up to `max_records` records (default max_poll_records); waits for the first for
        at most `timeout_ms` milliseconds. What was said by `acknowledge` is sent along, and where
        it was not called since the last poll, what that returned is accepted
        (share_acknowledgement_mode "implicit").

        Raises InvalidRecordError (a deserializer failed: the record is released, the next poll goes
        on without it), NotReachableError (the appliance has been away for a minute, as a
        Consumer's), UnknownTopicError, StorageError; records that had come are handed out first. A
        record that cannot be read goes to the dead-letter topic.
        """
        if others:
            refuse_keywords("poll", others)
        limit, deadline_ns = self._poll_arguments(timeout_ms, max_records)
        self._run_steps(self._poll_loop.fill(limit, deadline_ns))
        return self._poll_loop.collect(limit)

    def _poll_arguments(self, timeout_ms: float, max_records: int | None) -> tuple[int, int]:
        """(limit, deadline) of a poll."""
        limit = (
            self.settings.max_poll_records
            if max_records is None
            else whole("max_records", max_records, 1)
        )
        return limit, self._poll_loop.now_ns() + int(timeout_ms_of(timeout_ms) * NS_PER_MS)

    def __iter__(self) -> Iterator[ShareRecord]:
        """Records without end, until the consumer is closed.

        A record of which nothing was said is accepted when the same loop asks for the next one. The
        last record of a loop that is left by `break` or `return` is accepted by the next poll, loop
        or commit; one that an exception ends is accepted by `commit` alone, or comes again when its
        lock has passed. What a loop that is left early did not take is handed out next. What was
        said goes out at least every second, or four times in the time that a lock lasts.
        """
        self._connection.check_usable()
        return self._without_end()

    def _without_end(self) -> Iterator[ShareRecord]:
        poll_loop = self._poll_loop
        while not self._closed:
            if not poll_loop.has_next():
                self._run_steps(
                    poll_loop.fill(
                        poll_loop.loop_requests(), poll_loop.now_ns() + LOOP_POLL_MS * NS_PER_MS
                    )
                )
            if poll_loop.has_next():
                record = None
                try:
                    yield (record := poll_loop.hand_out_in_loop())
                except BaseException as end:
                    if record is not None:
                        poll_loop.leaves(
                            record,
                            is_broken_off=isinstance(end, GeneratorExit)
                            and is_broken_off(sys._getframe(1)),
                        )
                    raise
                if self._closed or not self._connection.is_usable:
                    return
                poll_loop.asks_on(record)

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(
        self, record: Record, outcome: str = "accept", *, reason: str | None = None
    ) -> None:
        """Say what becomes of a record: "accept" (it is done), "release" (another consumer, or this
        one, gets it again), "reject" (it goes to the dead-letter topic), "renew" (its lock begins
        anew, it stays with this consumer); or a `tailrace.AcknowledgeType`. It is sent with the
        next `poll`, or by `commit`. Said twice before that, the last word counts. `reason`, with
        "reject" alone: why, a sentence for the dead letter's header `dlq.reason` (the first 1,000
        characters). Raises InvalidRequestError, also for a record that this consumer does not hold.
        """
        self._poll_loop.acknowledge(record, outcome, reason)

    @operation
    def commit(self, timeout_ms: float | None = None) -> Steps[None]:
        """Send what was said of records, and wait until the appliance has it on its disk
        (`timeout_ms`, default request_timeout_ms). Where nothing was said since the last poll, what
        that returned is accepted first (share_acknowledgement_mode "implicit"), and what a loop has
        handed out last.

        Raises LockLostError when something was refused since the last commit because its lock had
        passed: `refused` says what, all else is done. RequestTimeoutError, NotReachableError; what
        the dead-letter topic refuses.
        """
        timeout = (
            self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms)
        )
        yield from self._poll_loop.commit(timeout)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was said of records, release the others, leave the group, end the connections.
        A second time it does nothing.
        """
        if self._closed:
            self._end()  # a close before may have been interrupted
            return
        try:
            self._closed = True
            self._abandon.detach()
            self._run_steps(self._closing())
        finally:
            self._end()

    def _closing(self) -> Steps[None]:
        """All of closing that waits."""
        yield from self._poll_loop.leave()
        yield from self._poll_loop.letters.close()

    def _end(self) -> None:
        self._poll_loop.thread.stop()
        self._connection.close()

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, acknowledgements_refused, locks_lost,
        dead_letters, dead_letters_failed, fetches.
        """
        return self._poll_loop.metrics()


def settings_of(
    topics: Sequence[Any], bootstrap: Any, settings: Mapping[str, Any]
) -> tuple[list[str], ShareConsumerSettings]:
    """What a share consumer was constructed with: topics, settings. Raises InvalidSettingError,
    InvalidRequestError.
    """
    first = topics[0] if topics and isinstance(topics[0], Mapping) else None
    names = [
        name
        for given in topics[1 if first is not None else 0 :]
        for name in name_list("topics", given)
    ]
    given = {**settings, **({} if bootstrap is None else {"bootstrap": bootstrap})}
    return names, build(ShareConsumerSettings, merged(first, given))
