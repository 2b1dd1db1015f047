"""Records that a share consumer gives up: delivered too often, rejected, or not to be read. They are acknowledged once they are in the dead-letter topic.

Owner: one share consumer, which writes what `take` returns and says by `ended` what became of it.
Invariants: a record that could not be written to the dead-letter topic is not acknowledged: its lock passes, and it is tried again by whoever acquires it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tailrace.client_log import logger
from tailrace.dead_letters import REASON_MAX, Letter
from tailrace.errors import TailraceError
from tailrace.records import Record, TopicPartition
from tailrace.share.feed import Piece
from tailrace.share.held import REJECTING, Held
from tailrace.share.records import ShareRecord
from tailrace.topics import TopicInfo

REJECTED = "rejected by the consumer"
_Place = tuple[str, int, int]


class GivenUp(NamedTuple):
    """Offsets `first` to `last`, and the letter that is to be written for them."""

    key: TopicPartition
    first: int
    last: int
    letter: Letter
    is_rejected: bool
    """By the user; else it was found to be undeliverable."""


class Undeliverable:
    """See the module's docstring."""

    def __init__(self, group: str, held: Held) -> None:
        self._group = group
        self._held = held
        self._found: list[GivenUp] = []
        self._rejected: dict[_Place, Letter] = {}
        self._raw: dict[_Place, Record] = {}
        """Of records that were handed out deserialized: as they are stored."""

    def dead(self, key: TopicPartition, info: TopicInfo, piece: Piece) -> None:
        """Records that were delivered as often as they may be."""
        count = piece.run.delivery_count
        reason = f"delivered {count} times, as often as group.share.delivery.count.limit allows, and not accepted"
        for record in piece.records:
            letter = Letter(record, info, self._group, reason, count)
            self._found.append(GivenUp(key, record.offset, record.offset, letter, False))

    def unreadable(self, key: TopicPartition, info: TopicInfo, piece: Piece) -> None:
        """Offsets that cannot be read: one letter, without key and value, says which and why."""
        record = Record(*key, piece.first, 0, 0, None, None, [], 0)
        reason = f"offsets {piece.first} to {piece.last} cannot be read: {piece.unreadable}"
        letter = Letter(record, info, self._group, reason, piece.run.delivery_count)
        self._found.append(GivenUp(key, piece.first, piece.last, letter, False))

    def keep_raw(self, records: Sequence[ShareRecord]) -> None:
        """These are handed out deserialized."""
        self._raw = {place: record for place, record in self._raw.items() if self._held.has(*place)}
        self._raw.update(((record.topic, record.partition, record.offset), record) for record in records)

    def reject(self, record: Record, info: TopicInfo, reason: str | None) -> None:
        """The user gives a record up. `reason`: why, in its own words."""
        place = record.topic, record.partition, record.offset
        stored = self._raw.get(place, record)
        why = (reason or REJECTED)[:REASON_MAX]
        self._rejected[place] = Letter(stored, info, self._group, why, getattr(record, "delivery_count", 1))

    def take(self, *, with_rejected: bool) -> list[GivenUp]:
        """What is to be written now; each is to be passed to `ended`, or put back."""
        found, self._found = self._found, []
        if not with_rejected:
            return found
        rejected, self._rejected = self._rejected, {}
        for place, letter in rejected.items():
            if self._held.said_of(*place) is REJECTING:  # else another word was said since
                found.append(GivenUp(TopicPartition(*place[:2]), place[2], place[2], letter, True))
        return found

    @staticmethod
    def letters(given_up: Sequence[GivenUp], info: Callable[[str], TopicInfo | None]) -> list[Letter]:
        """The letters, with their topics' settings as `info` has them now: dead.letter.topic may have been changed. Raises what `info` does."""
        infos = {name: info(name) for name in sorted({one.key.topic for one in given_up})}
        return [one.letter._replace(info=infos[one.key.topic] or one.letter.info) for one in given_up]

    def put_back(self, given_up: Sequence[GivenUp]) -> None:
        """These were not written: nothing is known of them."""
        for one in given_up:
            if one.is_rejected:
                self._rejected.setdefault((*one.key, one.first), one.letter)
            else:
                self._found.append(one)

    def ended(self, given_up: Sequence[GivenUp], outcomes: Sequence[TailraceError | None]) -> TailraceError | None:
        """What became of what `take` returned: written (None), or why not. Returns why one of what the user rejected is not there; that is tried again."""
        failure: TailraceError | None = None
        for one, error in zip(given_up, outcomes, strict=True):
            place = (*one.key, one.first)
            if error is not None:
                logger.error(
                    "share_dead_letter_not_written group=%s partition=%s-%d offset=%d reason=%s: it comes again", self._group, *place, error
                )
                if one.is_rejected:
                    failure = error
                    self._rejected.setdefault(place, one.letter)
            elif not one.is_rejected:
                self._held.hold(one.key, one.first, one.last, "accept")
                logger.warning("share_dead_letter group=%s partition=%s-%d offset=%d reason=%s", self._group, *place, one.letter.reason)
            elif self._held.said_of(*place) is REJECTING:
                self._held.say(*place, "reject")
        return failure

    def forget(self) -> None:
        """The locks are gone."""
        self._found.clear()
        self._rejected.clear()
        self._raw.clear()
