"""Share consumer: several consumers work on one partition, and each record is locked for one of
them (Kafka's share groups, KIP-932).

`poll` acquires records, fetches them, and returns them with their delivery count. `acknowledge`
sets the outcome of each. A record that is not acknowledged before its lock expires is delivered
again, as is one whose consumer died. A record that reaches the delivery count limit, or is
rejected, goes to the dead-letter topic (`tailrace.group.dead_letter_queue`). A thread makes the
heartbeats.

Owner: one thread uses a ShareConsumer.

Invariants: those of `tailrace.share.poll_loop` and `tailrace.share.delivery`; the steps are run
here.

Crash: whichever process dies, a record that was not accepted is delivered again, and an accepted
one is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Never, Unpack

from tailrace.client.config.from_context import FromContext
from tailrace.client.config.kafka_names import (
    RENAMED_SHARE_CONSUMER_METHODS,
    RenamedMethods,
    refuse_keywords,
)
from tailrace.client.config.setting_fields import build, documented, merged
from tailrace.client.connections.runtime import NEVER_NS, SYSTEM, Runtime
from tailrace.client.connections.steps import Steps, T, operation, run
from tailrace.client.records.attached_records import AttachedRecords
from tailrace.client.tracing.setting import read_spans_of
from tailrace.core.loop_end import is_broken_off, program_frame
from tailrace.core.records import Record
from tailrace.core.validation import name_list, timeout_ms_of, whole
from tailrace.share.delivery import NS_PER_MS
from tailrace.share.leaving import leave
from tailrace.share.poll_loop import SharePollLoop
from tailrace.share.record import ShareRecord as ShareRecord
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings

LOOP_POLL_MS = 1_000


@documented(ShareConsumerSettings)
class ShareConsumer(FromContext, RenamedMethods):
    """Takes records from topics as from a queue, together with the other consumers of its group. A
    context manager; for one thread at a time.

        with tailrace.ShareConsumer("jobs", bootstrap=address, group_id="workers") as consumer:
            while True:
                for record in consumer.poll(timeout_ms=1000):
                    consumer.acknowledge(record, "accept" if work(record.value) else "release")

    Each record is delivered to one consumer at a time. A record that is neither acknowledged nor
    renewed within the topic's group.share.record.lock.duration.ms is delivered to another one, with
    a higher `delivery_count`. If `acknowledge` is not called between two polls, the second poll, or
    `commit`, accepts the records of the first. A loop over the consumer (`for record in consumer`)
    accepts each record when it asks for the next. Settings are keyword arguments.
    """

    _renamed: ClassVar[dict[str, str]] = RENAMED_SHARE_CONSUMER_METHODS

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ShareConsumerOptions],
    ) -> None:
        """Join the group `group_id` and subscribe to `topics`: names, or a list of them. A dict in
        front holds settings by Kafka's names. Without topics call `subscribe`. `bootstrap` is the
        appliance's address.

        Raises InvalidSettingError before anything is opened; UnknownTopicError; NotReachableError
        and RequestTimeoutError when the appliance or the group does not answer within
        request_timeout_ms. The first poll raises another refusal of the group.
        """
        names, self.settings = settings_of(topics, bootstrap, settings)
        self._begin(SharePollLoop(self.settings, runtime))
        if names:
            try:
                self.subscribe(names)
            except BaseException:
                self.close()
                raise

    def _begin(self, poll_loop: SharePollLoop) -> None:
        self._spans = read_spans_of(self.settings)
        self._poll_loop = poll_loop
        self._connection = poll_loop.connection
        self._abandon = weakref.finalize(self, poll_loop.member.thread.abandon)
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
        self._connection.wait(
            NEVER_NS if until_ns is None else until_ns - self._poll_loop.now_ns(),
            self._poll_loop.member.wake_fd,
        )

    # ---- the group -------------------------------------------------------------------------------

    @operation
    def subscribe(self, topics: str | Iterable[str]) -> Steps[None]:
        """Subscribe to these topics instead of the earlier ones, and wait until the group has
        answered a first subscription: with auto_offset_reset "latest" a new group begins there.
        Raises UnknownTopicError, InvalidRequestError, NotReachableError, RequestTimeoutError.
        """
        self._connection.check_usable()
        yield from self._poll_loop.subscribe(topics)

    @operation
    def unsubscribe(self) -> Steps[None]:
        """Leave the group. Acknowledgements are sent, and all other records are released."""
        self._connection.check_usable()
        yield from leave(self._poll_loop)
        self._poll_loop.forget()

    def subscription(self) -> set[str]:
        """The names of the subscribed topics."""
        self._connection.check_usable()
        return set(self._poll_loop.subscribed)

    def acquisition_lock_timeout_ms(self) -> int | None:
        """The lock duration of the records acquired last, in ms (Kafka's name); None before the
        first.
        """
        return self._poll_loop.lock_ms or None

    # ---- records ---------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[ShareRecord]:
        """Acquire and return up to `max_records` records (default max_poll_records). Waits for the
        first for at most `timeout_ms` milliseconds. Sends the acknowledgements. In implicit mode
        (share_acknowledgement_mode) it also accepts the records of the last poll, if `acknowledge`
        was not called since.

        Raises InvalidRecordError (a deserializer failed: the record is released, and the next poll
        goes on without it), NotReachableError (the appliance has been away for a minute, as in a
        Consumer), UnknownTopicError, StorageError. Records that have come are returned first. An
        unreadable record goes to the dead-letter topic.
        """
        if others:
            refuse_keywords("poll", others)
        limit, deadline_ns = self._poll_arguments(timeout_ms, max_records)
        filling = self._poll_loop.fill(limit, deadline_ns)
        if self._spans is None:
            self._run_steps(filling)
        else:
            with self._spans.receiving(partial(self._poll_loop.delivery.first, limit)):
                self._run_steps(filling)
        return self._poll_loop.delivery.collect(limit)

    def _poll_arguments(self, timeout_ms: float, max_records: int | None) -> tuple[int, int]:
        """(limit, deadline in ns) of a poll."""
        limit = (
            self.settings.max_poll_records
            if max_records is None
            else whole("max_records", max_records, 1)
        )
        return limit, self._poll_loop.now_ns() + int(timeout_ms_of(timeout_ms) * NS_PER_MS)

    def __iter__(self) -> Iterator[ShareRecord]:
        """Iterate over records without end, until the consumer is closed.

        The loop accepts a record that was not acknowledged when it asks for the next one. After
        `break` or `return` the next poll, loop or commit accepts the last record. After an
        exception only `commit` accepts it; otherwise its lock expires and it is delivered again.
        Records that the loop did not take are delivered next. Acknowledgements are sent at least
        every second, and at least four times per lock duration.
        """
        self._connection.check_usable()
        return self._without_end()

    def _without_end(self) -> Iterator[ShareRecord]:
        poll_loop, delivery = self._poll_loop, self._poll_loop.delivery
        loop_span = None if self._spans is None else self._spans.loop()
        delivery.settle_last()
        while not self._closed:
            if not delivery.has_next():
                self._run_steps(
                    poll_loop.fill(
                        delivery.loop_limit(), poll_loop.now_ns() + LOOP_POLL_MS * NS_PER_MS
                    )
                )
            if delivery.has_next():
                record = None
                try:
                    if loop_span is not None:
                        loop_span.begin(delivery.first(1)[0])
                    yield (record := delivery.next_in_loop())
                except GeneratorExit:
                    frame = program_frame()
                    if record is not None:
                        delivery.on_loop_left(record, is_broken_off=is_broken_off(frame))
                    if loop_span is not None:
                        loop_span.end_dropped(frame)
                    raise
                except BaseException:  # a signal came when the loop asked for the next record
                    if record is not None:
                        delivery.on_processed(record)
                    raise
                finally:
                    if loop_span is not None:
                        loop_span.end()
                if self._closed or not self._connection.is_usable:
                    return
                poll_loop.next_requested(record)

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(
        self, record: Record, outcome: str = "accept", *, reason: str | None = None
    ) -> None:
        """Set the outcome of a record: "accept" (it is processed), "release" (deliver it again, to
        this consumer or another one), "reject" (move it to the dead-letter topic), "renew" (begin
        its lock again and keep it); or a `tailrace.AcknowledgeType`.

        The outcome is sent by the next `poll` or by `commit`. Until then a second call replaces it.
        `reason`, only with "reject", becomes the dead letter's header `dlq.reason` (the first 1,000
        characters). Raises InvalidRequestError, also for a record that was not delivered to this
        consumer, whose outcome was sent, or whose lock has expired.
        """
        self._connection.check_usable()
        self._poll_loop.delivery.acknowledge(record, outcome, reason)

    def _attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords:
        """See `Producer.send_acknowledgements_to_transaction`."""
        return self._poll_loop.attach(records, outcome)

    @operation
    def commit(self, timeout_ms: float | None = None) -> Steps[None]:
        """Send all acknowledgements, and wait until the appliance has stored them on its disk
        (`timeout_ms`, default request_timeout_ms). In implicit mode it first accepts the records of
        the last poll, if `acknowledge` was not called since, and the last record of a loop.

        Raises LockLostError if an acknowledgement has failed since the last commit because its lock
        had expired: `refused` lists them, and all others are done. RequestTimeoutError,
        NotReachableError; the dead-letter topic's error for a rejected record.
        """
        timeout = (
            self.settings.request_timeout_ms if timeout_ms is None else timeout_ms_of(timeout_ms)
        )
        committing = self._poll_loop.commit(timeout)
        yield from committing if self._spans is None else self._spans.settling(committing)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the acknowledgements, release all other records, leave the group and close the
        connections. A repeated call does nothing.
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
        """The steps of closing that wait."""
        yield from leave(self._poll_loop)
        yield from self._poll_loop.letters.close()

    def _end(self) -> None:
        self._poll_loop.member.thread.stop()
        self._connection.close()

    def metrics(self) -> dict[str, int]:
        """Counters since construction: records_consumed, acknowledgements_refused, locks_lost,
        dead_letters, dead_letters_failed, fetches, throttled (waits for quotas), throttled_ms.
        """
        return self._poll_loop.metrics()


def settings_of(
    topics: Sequence[Any], bootstrap: Any, settings: Mapping[str, Any]
) -> tuple[list[str], ShareConsumerSettings]:
    """(topics, settings) from the arguments of a share consumer. Raises InvalidSettingError,
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
