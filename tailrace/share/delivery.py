"""Delivery of acquired records to the program, and the implicit acknowledgement of them.

- A record is *delivered* when the call that carries it returns, or when the body of a loop begins
  with it.
- A record is *processed* when the program asks for the next one, in the same loop or by the next
  poll, or when it commits. The implicit mode accepts processed records.
- A record that was acquired and never delivered is *unread*. It is released without being counted
  as a delivery.

Owner: one share consumer, in one thread or event loop.

Invariants:
- A delivered record stays in `acknowledgements` until it is acknowledged or its lock expires.
- A delivery is one store, to `_delivered`, the last before the call returns. Every other method
  begins with `register`, which moves that delivery to `acknowledgements`.
- Each step of `register` may be repeated, so an interrupted call loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tailrace.client.records.attached_records import AttachedMember, AttachedRecords
from tailrace.client.records.serdes import deserialized, failure_at
from tailrace.core.errors import InvalidRequestError
from tailrace.core.log import logger
from tailrace.core.records import Record
from tailrace.share.acknowledgements import IN_LOOP, REJECTING, UNREAD, Acknowledgements
from tailrace.share.acquired.buffer import AcquiredRecords, Chunk, LockedRange, record_count
from tailrace.share.acquired.fetch_loop import ShareFetchLoop
from tailrace.share.outcomes import OUTCOMES, check_reason, checked_outcome
from tailrace.share.pace import Pace
from tailrace.share.record import ShareRecord
from tailrace.share.settings import ShareConsumerSettings
from tailrace.share.undeliverable import Undeliverable

NS_PER_MS = 1_000_000
_WITHOUT_REASON = frozenset(OUTCOMES) - {"reject"}
_NO_RECORD = "{!r:.100} is no record; acknowledge what poll() has returned"


class _Delivery(NamedTuple):
    """The records that one call delivered, and the buffer after it."""

    runs: list[LockedRange]
    rest: tuple[Chunk, ...]
    outcome: str | None
    """IN_LOOP for the record of a loop."""


class Delivery:
    """The records of one share consumer between its buffer and its acknowledgements."""

    def __init__(
        self,
        settings: ShareConsumerSettings,
        now_ns: Callable[[], int],
        lock_ms: Callable[[], int],
        acknowledgements: Acknowledgements,
        undeliverable: Undeliverable,
        fetch_loop: ShareFetchLoop,
        counters: dict[str, int],
    ) -> None:
        """`lock_ms` is the lock duration of the records acquired last. `counters` has
        records_consumed and locks_lost.
        """
        self._settings = settings
        self._is_implicit = settings.share_acknowledgement_mode == "implicit"
        self._now_ns = now_ns
        self._lock_ms = lock_ms
        self._acknowledgements = acknowledgements
        self._undeliverable = undeliverable
        self._fetch_loop = fetch_loop
        self._counters = counters
        self.buffered = AcquiredRecords()
        self._pace = Pace()
        self._delivered: _Delivery | None = None
        """The last delivery, until `register` moves it to `acknowledgements`."""
        self._left: dict[tuple[str, int, int], None] = {}
        """The last records of loops that an exception may have ended, until the next poll."""
        self._is_explicit = False
        """True if `acknowledge` was called since the last poll."""
        self._is_unsettled = False
        """True if a poll, or a loop left by `break`, has delivered records since `settle_last`."""
        self._attached: list[AttachedRecords] = []
        """Records in transactions that may be open."""

    # ---- delivering ------------------------------------------------------------------------------

    def collect(self, limit: int) -> list[ShareRecord]:
        """Deliver up to `limit` buffered records. Call it in the `return` of a poll.

        Raises InvalidRecordError when a deserializer fails on the first record, which is released.
        When it fails on a later one, the records before that are delivered.
        """
        found = self._next_records(limit)
        delivery = _Delivery(*self.buffered.without(len(found)), None)
        self._counters["records_consumed"] += len(found)
        try:
            return found
        finally:
            self._delivered = delivery

    def next_in_loop(self) -> ShareRecord:
        """Deliver the next buffered record to a loop. Raises what `collect` does; the buffer must
        have a record.
        """
        (record,) = found = self._next_records(1)
        delivery = _Delivery(*self.buffered.without(len(found)), IN_LOOP)
        self._counters["records_consumed"] += 1
        self._pace.on_delivered(self._now_ns())
        try:
            return record
        finally:
            self._delivered = delivery

    def has_next(self) -> bool:
        """True if a record can be delivered now. Drops records whose locks have expired."""
        self.register()
        expired = self.buffered.drop_expired(self._now_ns()) if self.buffered.chunks else []
        if expired:
            self._counters["locks_lost"] += record_count(expired)
            self.release_unread(expired)
        return bool(self.buffered.chunks)

    def first(self, limit: int) -> list[ShareRecord]:
        """Up to `limit` buffered records, in their stored form. They stay buffered."""
        return self.buffered.first(limit)

    def loop_limit(self) -> int:
        """The number of records that a loop acquires next."""
        return self._pace.requested(
            self._now_ns(), self._lock_ms(), self._settings.max_poll_records
        )

    def _next_records(self, limit: int) -> list[ShareRecord]:
        found = self.buffered.first(limit) if self.has_next() else []
        if found and (self._settings.key_deserializer or self._settings.value_deserializer):
            raw = found
            made, failure = deserialized(
                raw, self._settings.key_deserializer, self._settings.value_deserializer
            )
            found = made  # type: ignore[assignment]
            self._undeliverable.keep_raw(raw[: len(found)])
            if failure is not None and not found:
                (run,), rest = self.buffered.without(1)
                self._acknowledgements.add(run.key, run.first, run.last, "release")
                self.buffered.chunks = rest
                raise failure_at(raw[0], failure) from failure
        return found

    def register(self) -> None:
        """Move the last delivery to `acknowledgements`, and end what was in transactions."""
        if self._attached:
            self._detach_ended()
        delivery = self._delivered
        if delivery is None:
            return
        for key, first, last, until_ns in delivery.runs:
            self._acknowledgements.add(key, first, last, delivery.outcome, until_ns)
        self._is_unsettled = self._is_unsettled or delivery.outcome is None
        self.buffered.chunks = delivery.rest
        self._delivered = None

    # ---- processed records -----------------------------------------------------------------------

    def settle_last(self) -> None:
        """End the last poll. In implicit mode accept the records that it delivered, or retain them
        if `acknowledge` was called since. Retain the records that loops left behind.
        """
        self.register()
        if self._is_implicit:
            if self._is_explicit:
                self._acknowledgements.retain_remaining()
            else:
                self._acknowledgements.accept_remaining()
        self._is_explicit = self._is_unsettled = False
        for place in self._left:
            self._acknowledgements.retain_one(*place)
        self._left.clear()
        now_ns = self._now_ns()
        expired_count = self._acknowledgements.drop_expired(now_ns)
        if expired_count:
            self._counters["locks_lost"] += expired_count
            logger.warning(
                "share_locks_passed group=%s records=%d: they were not acknowledged in time",
                self._settings.group_id,
                expired_count,
            )
        self._release_expiring(now_ns)

    def on_processed(self, record: ShareRecord) -> None:
        """A loop asks for the record after this one. Accept it in implicit mode, unless it was
        acknowledged; retain it in explicit mode.
        """
        self.register()
        if self._is_unsettled:
            self.settle_last()
        self._is_explicit = False  # `acknowledge` in the body was for this record, not the next
        if self._fetch_loop.is_recreated(record):
            return  # another record has its place
        if self._is_implicit:
            self._acknowledgements.accept_one(record.topic, record.partition, record.offset)
        else:
            self._acknowledgements.retain_one(record.topic, record.partition, record.offset)

    def on_loop_left(self, record: ShareRecord, *, is_broken_off: bool) -> None:
        """A loop ended with this record.

        With `is_broken_off` (`break` or `return`) the record is treated as one that a poll
        delivered. Otherwise an exception may have ended its processing, so the next poll does not
        accept it.
        """
        self.register()
        place = record.topic, record.partition, record.offset
        if self._fetch_loop.is_recreated(record):
            return
        if is_broken_off:
            self._acknowledgements.leave_loop(*place)
            self._is_unsettled = True
        else:
            self._left[place] = None

    def on_commit(self) -> None:
        """In implicit mode accept the last delivered records, if `acknowledge` was not called since
        the last poll.
        """
        self.register()
        if self._is_implicit and not self._is_explicit:
            self._acknowledgements.accept_remaining()
            self._acknowledgements.accept_in_loops()

    def acknowledge(self, record: Record, outcome: str, reason: str | None) -> None:
        """See `ShareConsumer.acknowledge`."""
        self.register()
        # Called for every record: the usual arguments pass one check.
        if reason is not None or type(outcome) is not str or outcome not in _WITHOUT_REASON:
            word = checked_outcome(outcome)
            if reason is not None:
                check_reason(reason, word)
            outcome = self._rejecting(record, reason) if word == "reject" else word
        self._check_record(record)
        self._acknowledgements.acknowledge(record.topic, record.partition, record.offset, outcome)
        self._is_explicit = True

    def attach(self, records: Iterable[Record], member: AttachedMember) -> AttachedRecords:
        """Leave the acknowledgement of delivered records to a transaction. Raises
        InvalidRequestError, having changed nothing.
        """
        self.register()
        places: dict[tuple[str, int, int], None] = {}
        for record in records:
            self._check_record(record)
            place = record.topic, record.partition, record.offset
            self._acknowledgements.check_attachable(*place)
            places[place] = None
        ids = {topic: self._fetch_loop.topic_id(topic) for topic, _, _ in places}
        if None in ids.values():
            raise InvalidRequestError(
                "the topic of a record is not known any more: drop the record"
            )
        attached = AttachedRecords(
            member,
            tuple(places),
            [(str(ids[topic]), partition, offset) for topic, partition, offset in places],
        )
        self._attached.append(attached)  # first: a signal here attaches nothing
        self._acknowledgements.attach(places)
        self._is_explicit = True
        return attached

    def _detach_ended(self) -> None:
        for attached in self._attached:
            if attached.ended_by is not None:
                self._acknowledgements.detach(
                    attached.places, is_committed=attached.ended_by == "commit"
                )
        self._attached = [one for one in self._attached if one.ended_by is None]

    def _check_record(self, record: Record) -> None:
        """Raise InvalidRequestError unless it is a record, and its topic is not recreated."""
        if not isinstance(record, Record):
            raise InvalidRequestError(_NO_RECORD.format(record))
        if self._fetch_loop.is_recreated(record):
            raise InvalidRequestError(
                f"offset {record.offset} of {record.topic}-{record.partition} is of a topic that "
                "was deleted, and another topic has its name now: drop the record"
            )

    def _rejecting(self, record: Record, reason: str | None) -> str:
        self._check_record(record)
        if self._acknowledgements.has(record.topic, record.partition, record.offset):
            self._undeliverable.reject(record, self._fetch_loop.info(record.topic), reason)
        return REJECTING

    # ---- unread records --------------------------------------------------------------------------

    def release_expiring(self) -> None:
        """Release the buffered records that have less than half of their lock left."""
        if self.buffered:
            self._release_expiring(self._now_ns())

    def _release_expiring(self, now_ns: int) -> None:
        half_lock_ns = self._lock_ms() * NS_PER_MS // 2
        self.release_unread(self.buffered.drop_expired(now_ns + half_lock_ns))

    def release_unread(self, runs: list[LockedRange]) -> None:
        """Release records that were acquired and not delivered."""
        for key, first, last, _ in runs:
            self._acknowledgements.add(key, first, last, UNREAD)
        if runs:
            logger.debug(
                "share_unread group=%s records=%d", self._settings.group_id, record_count(runs)
            )

    def clear(self) -> int:
        """Forget all buffered and delivered records: the locks are lost. Returns how many were
        buffered.
        """
        self._left.clear()
        self._attached = []
        return record_count(self.buffered.clear())
