"""Records that a share consumer gives up: delivered too often, rejected, or not to be read. They are acknowledged once they are in the dead-letter topic.

Owner: one ShareConsumer, one thread.
Invariants: a record that could not be written to the dead-letter topic is not acknowledged: its lock passes, and it is tried again by whoever acquires it then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.client_log import logger
from tailrace.dead_letters import DeadLetters, Letter
from tailrace.environment import Environment
from tailrace.errors import TailraceError
from tailrace.protocol.wire import Api
from tailrace.records import Record, TopicPartition
from tailrace.share.feed import Piece
from tailrace.share.held import REJECTING, Held
from tailrace.share.records import ShareRecord
from tailrace.share.settings import ShareConsumerSettings
from tailrace.topics import TopicInfo

REJECTED = "rejected by the consumer"
_Place = tuple[str, int, int]


class Undeliverable:
    """See the module's docstring."""

    def __init__(
        self, settings: ShareConsumerSettings, call: Callable[[Api, dict[str, Any]], dict[str, Any]], environment: Environment, held: Held
    ) -> None:
        assert settings.group_id is not None
        self._group = settings.group_id
        self._held = held
        self._letters = DeadLetters(settings.bootstrap, settings.client_id, call, environment, settings.dead_letter_timeout_ms)
        self._found: list[tuple[TopicPartition, int, int, Letter]] = []
        """(partition, first, last offset, letter) of what is to be written and then accepted."""
        self._rejected: dict[_Place, Letter] = {}
        self._raw: dict[_Place, Record] = {}
        """Of records that were handed out deserialized: as they are stored."""

    @property
    def count(self) -> int:
        """Dead letters written."""
        return self._letters.count

    def dead(self, key: TopicPartition, info: TopicInfo, piece: Piece) -> None:
        """Records that were delivered as often as they may be."""
        count = piece.run.delivery_count
        reason = f"delivered {count} times, as often as group.share.delivery.count.limit allows, and not accepted"
        for record in piece.records:
            self._found.append((key, record.offset, record.offset, Letter(record, info, self._group, reason, count)))

    def unreadable(self, key: TopicPartition, info: TopicInfo, piece: Piece) -> None:
        """Offsets that cannot be read: one letter, without key and value, says which and why."""
        record = Record(*key, piece.first, 0, 0, None, None, [], 0)
        reason = f"offsets {piece.first} to {piece.last} cannot be read: {piece.unreadable}"
        self._found.append((key, piece.first, piece.last, Letter(record, info, self._group, reason, piece.run.delivery_count)))

    def write(self) -> None:
        """Write what was found, and have it accepted."""
        if not self._found:
            return
        found, self._found = self._found, []
        for (key, first, last, letter), error in zip(found, self._letters.write(letter for *_, letter in found), strict=True):
            if error is None:
                self._held.hold(key, first, last, "accept")
                logger.warning("share_dead_letter group=%s partition=%s-%d offset=%d reason=%s", self._group, *key, first, letter.reason)
            else:
                self._say_not_written(key, first, error)

    def keep_raw(self, records: list[ShareRecord]) -> None:
        """These are handed out deserialized."""
        self._raw = {place: record for place, record in self._raw.items() if self._held.has(*place)}
        self._raw.update(((record.topic, record.partition, record.offset), record) for record in records)

    def reject(self, record: Record, info: TopicInfo) -> None:
        """The user gives a record up; `write_rejected` writes it."""
        place = record.topic, record.partition, record.offset
        stored = self._raw.get(place, record)
        self._rejected[place] = Letter(stored, info, self._group, REJECTED, getattr(record, "delivery_count", 1))

    def write_rejected(self) -> TailraceError | None:
        """Write what the user has rejected; what is written may be said to be. Returns why one of them could not be written; it is tried again."""
        letters = {place: letter for place, letter in self._rejected.items() if self._held.said_of(*place) is REJECTING}
        self._rejected = {}
        failure: TailraceError | None = None
        if letters:
            for (place, letter), error in zip(letters.items(), self._letters.write(letters.values()), strict=True):
                if error is None:
                    self._held.say(*place, "reject")
                else:
                    failure = error
                    self._rejected[place] = letter
                    self._say_not_written(TopicPartition(*place[:2]), place[2], error)
        return failure

    def _say_not_written(self, key: TopicPartition, offset: int, error: TailraceError) -> None:
        logger.error(
            "share_dead_letter_not_written group=%s partition=%s-%d offset=%d reason=%s: it comes again", self._group, *key, offset, error
        )

    def forget(self) -> None:
        """The locks are gone."""
        self._found.clear()
        self._rejected.clear()
        self._raw.clear()

    def close(self) -> None:
        """End the producer of dead letters."""
        self._letters.close()
