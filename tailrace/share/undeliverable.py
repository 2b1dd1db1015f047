"""Undeliverable records of a share consumer: their delivery count limit is reached, or they were
rejected or are unreadable. They are acknowledged once they are in the dead-letter topic.

Owner: one share consumer. It writes what `take` returns, and passes the outcomes to `ended`.

Invariants: a record that could not be written to the dead-letter topic is not acknowledged. Its
lock expires, and the next member that acquires it tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tailrace.client.connections.steps import Steps
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import TailraceError
from tailrace.core.log import logger
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.dead_letter_queue import REASON_MAX, DeadLetter
from tailrace.share.acknowledgements import REJECTING, Acknowledgements
from tailrace.share.acquired.ranges import FetchedRange
from tailrace.share.record import ShareRecord

REJECTED = "rejected by the consumer"
_Place = tuple[str, int, int]


class UndeliverableRecord(NamedTuple):
    """The offsets `first` to `last`, and their dead letter."""

    key: TopicPartition
    first: int
    last: int
    letter: DeadLetter
    is_rejected: bool
    """True if the program rejected it."""


class Undeliverable:
    """The undeliverable records of one share consumer."""

    def __init__(self, group: str, acknowledgements: Acknowledgements) -> None:
        self._group = group
        self._acknowledgements = acknowledgements
        self._found: list[UndeliverableRecord] = []
        self._rejected: dict[_Place, DeadLetter] = {}
        self._raw: dict[_Place, Record] = {}
        """The stored form of records that were delivered deserialized."""
        self._refused: dict[str, str] = {}
        """Topics whose dead letters cannot be written now -> the error that was logged."""
        self.failed_count = 0
        """Failed attempts to write a dead letter."""

    def __bool__(self) -> bool:
        """True if a dead letter is not written."""
        return bool(self._found or self._rejected)

    def dead(self, key: TopicPartition, info: TopicInfo, piece: FetchedRange) -> None:
        """Add records whose delivery count limit is reached."""
        count = piece.run.delivery_count
        reason = (
            f"delivered {count} times, as often as group.share.delivery.count.limit allows, "
            "and not accepted"
        )
        letters = [
            UndeliverableRecord(
                key,
                record.offset,
                record.offset,
                DeadLetter(record, info, self._group, reason, count),
                False,
            )
            for record in piece.records
        ]
        self._found, piece.run.first = [*self._found, *letters], piece.last + 1

    def unreadable(self, key: TopicPartition, info: TopicInfo, piece: FetchedRange) -> None:
        """Add unreadable offsets. They get one dead letter without key and value, which names them
        and the error.
        """
        record = Record(*key, piece.first, 0, 0, None, None, [], 0)
        reason = f"offsets {piece.first} to {piece.last} cannot be read: {piece.unreadable}"
        letter = DeadLetter(record, info, self._group, reason, piece.run.delivery_count)
        found = UndeliverableRecord(key, piece.first, piece.last, letter, False)
        self._found, piece.run.first = [*self._found, found], piece.last + 1

    def keep_raw(self, records: Sequence[ShareRecord]) -> None:
        """Keep the stored form of records that are delivered deserialized."""
        self._raw = {
            place: record
            for place, record in self._raw.items()
            if self._acknowledgements.has(*place)
        }
        self._raw.update(
            ((record.topic, record.partition, record.offset), record) for record in records
        )

    def reject(self, record: Record, info: TopicInfo, reason: str | None) -> None:
        """Add a record that the program rejects, with its reason."""
        place = record.topic, record.partition, record.offset
        stored = self._raw.get(place, record)
        why = (reason or REJECTED)[:REASON_MAX]
        known = self._rejected.get(place)
        if known is not None and known.handle is not None:
            return  # the letter is sent
        self._rejected[place] = DeadLetter(
            stored, info, self._group, why, getattr(record, "delivery_count", 1)
        )

    def take(self, *, with_rejected: bool) -> list[UndeliverableRecord]:
        """Remove and return the records to write now. Pass each to `ended` or `put_back`."""
        found, self._found = self._found, []
        if not with_rejected:
            return found
        rejected, self._rejected = self._rejected, {}
        for place, letter in rejected.items():
            # Another outcome may have replaced the rejection.
            if self._acknowledgements.outcome_of(*place) is REJECTING:
                found.append(
                    UndeliverableRecord(
                        TopicPartition(*place[:2]), place[2], place[2], letter, True
                    )
                )
        return found

    @staticmethod
    def letters(
        given_up: Sequence[UndeliverableRecord], info: Callable[[str], Steps[TopicInfo | None]]
    ) -> Steps[list[DeadLetter]]:
        """The dead letters, with the current settings of their topics: dead.letter.topic may have
        changed. Raises what `info` does.
        """
        infos = {}
        for name in sorted({one.key.topic for one in given_up}):
            infos[name] = yield from info(name)
        return [
            one.letter._replace(info=infos[one.key.topic] or one.letter.info) for one in given_up
        ]

    def put_back(self, given_up: Sequence[UndeliverableRecord], sent: Sequence[Any]) -> None:
        """Restore records after an interruption. `sent`: see `DeadLetters.write`."""
        for number, one in enumerate(given_up):
            letter = one.letter
            if number < len(sent):
                is_sent = not isinstance(sent[number], TailraceError)
                letter = letter._replace(handle=sent[number] if is_sent else None)
            if one.is_rejected:
                self._rejected.setdefault((*one.key, one.first), letter)
            else:
                self._found.append(one._replace(letter=letter))

    def ended(
        self, given_up: Sequence[UndeliverableRecord], outcomes: Sequence[TailraceError | None]
    ) -> TailraceError | None:
        """Apply the outcomes of writing: None, or the error. Returns the error of a rejected
        record; it is tried again.
        """
        failure: TailraceError | None = None
        for one, error in zip(given_up, outcomes, strict=True):
            place = (*one.key, one.first)
            if error is not None:
                self.failed_count += 1
                self._report_refused(one, error)
                if one.is_rejected:
                    failure = error
                    self._rejected.setdefault(place, one.letter._replace(handle=None))
                continue
            self._refused.pop(one.key.topic, None)
            if not one.is_rejected:
                self._acknowledgements.add(one.key, one.first, one.last, "accept")
                logger.warning(
                    "share_dead_letter group=%s partition=%s-%d offset=%d reason=%s",
                    self._group,
                    *place,
                    one.letter.reason,
                )
            elif self._acknowledgements.outcome_of(*place) is REJECTING:
                self._acknowledgements.acknowledge(*place, "reject")
        return failure

    def _report_refused(self, one: UndeliverableRecord, error: TailraceError) -> None:
        """Log each error once: the record is tried again until an operator removes the cause."""
        why = str(error)
        if self._refused.get(one.key.topic) == why:
            return
        self._refused[one.key.topic] = why
        logger.error(
            "share_dead_letter_not_written group=%s partition=%s-%d offset=%d "
            "dead_letter_topic=%s reason=%s: the record stays in the queue, and is tried again",
            self._group, *one.key, one.first,
            one.letter.info.settings.get("dead.letter.topic") or "(default)", why,
        )  # fmt: skip

    def forget(self, topic: str | None = None) -> None:
        """Forget all records, or those of one topic: their locks are lost."""
        if topic is None:
            self._found.clear()
            self._rejected.clear()
            self._raw.clear()
            return
        self._found = [one for one in self._found if one.key.topic != topic]
        self._rejected = {
            place: letter for place, letter in self._rejected.items() if place[0] != topic
        }
        self._raw = {place: record for place, record in self._raw.items() if place[0] != topic}
