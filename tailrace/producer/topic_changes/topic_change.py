"""Topics that change while a producer has batches for them: the batches wait, then move.

    sending --trigger--> waiting --METADATA shows the topic, all sent batches have an outcome-->
    moved --> sending

`SlotMapChange`, `SchemaChange` and `TopicRecreation` have the triggers, and move the batches.

Owner: a Producer, under its lock.
Invariants:
- The sequences of refused batches are used again, so that none is missing.
Crash: a change is removed last. A move that a signal handler interrupted is done again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response


@dataclass(slots=True)
class Change:
    """A topic, or a delay log, that waits."""

    old: TopicInfo
    """The topic as its queues know it."""
    since_ns: int
    new: TopicInfo | None = None
    """The topic that its batches move to, once METADATA shows it."""
    is_asked: bool = False
    ask_at_ns: int = 0


class TopicChange:
    """The states of changing topics. Subclasses have the trigger, and move the batches."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        connection: Connection,
        now_ns: Callable[[], int],
        retry_ns: int,
    ) -> None:
        """`retry_ns`: interval of METADATA requests for a topic that waits."""
        self._accumulator = accumulator
        self._connection = connection
        self._now_ns = now_ns
        self._retry_ns = retry_ns
        self._changes: dict[bytes, Change] = {}
        """By the id of the old topic."""

    @property
    def is_waiting(self) -> bool:
        """True if a topic waits."""
        return bool(self._changes)

    def step(self, now_ns: int) -> None:
        """Request METADATA of the topics that wait, and move the batches of those that may."""
        for change in list(self._changes.values()):
            if change.new is not None and self._try_move(change):
                continue
            if (
                self._needs_metadata(change, now_ns)
                and not change.is_asked
                and now_ns >= change.ask_at_ns
            ):
                body = encode_json({"topics": [topic_name(change.old)]})
                change.is_asked = self._connection.request(
                    Api.METADATA, [body], partial(self._on_metadata, change)
                )

    def restart(self) -> None:
        """Forget pending METADATA requests: their connection is lost."""
        for change in self._changes.values():
            change.is_asked = False

    def _add(self, old: TopicInfo) -> None:
        if old.topic_id not in self._changes:
            self._changes[old.topic_id] = Change(old, self._now_ns())

    def _on_metadata(self, change: Change, response: Response | None) -> None:
        change.is_asked = False
        change.ask_at_ns = self._now_ns() + self._retry_ns
        if (
            response is None
            or response.code is not ErrorCode.OK
            or self._changes.get(change.old.topic_id) is not change
        ):
            return
        name = topic_name(change.old)
        info: TopicInfo | None = None
        with contextlib.suppress(TailraceError):
            info = topics_from_metadata(decode_json(response.body[0]), name)[name]
        self._on_described(change, info)

    def _needs_metadata(self, change: Change, now_ns: int) -> bool:
        """True if the topic, whose batches cannot move now, needs METADATA."""
        raise NotImplementedError

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        """METADATA shows the topic, or (None) that there is none of its name."""
        raise NotImplementedError

    def _try_move(self, change: Change) -> bool:
        """Move the batches to `change.new` if they may. False: the topic still waits."""
        raise NotImplementedError


class KnownTopicChange(TopicChange):
    """Changes of topics that keep their id. Their queues wait until METADATA shows the change."""

    def begin(self, old: TopicInfo) -> None:
        """The topic has changed since `old`."""
        self._add(old)
        for queue in self._queues(old):
            queue.awaits_map = True

    def _needs_metadata(self, change: Change, now_ns: int) -> bool:
        return change.new is None

    def _on_described(self, change: Change, info: TopicInfo | None) -> None:
        old = change.old
        if change.new is not None:
            return
        if info is not None:
            info = self._described(old, info)
        if info is None or info.topic_id != old.topic_id:
            self._release(change)  # the topic is gone: the next response says so
        elif self._has_changed(old, info):
            change.new = info
            self._try_move(change)

    def _described(self, old: TopicInfo, info: TopicInfo) -> TopicInfo | None:
        """The topic or delay log that `old` is, in the METADATA of its topic."""
        return info

    def _has_changed(self, old: TopicInfo, info: TopicInfo) -> bool:
        """True if METADATA shows the change."""
        raise NotImplementedError

    def _release(self, change: Change) -> None:
        for queue in self._queues(change.old):
            queue.awaits_map = False
            if queue.has_work:
                self._accumulator.mark_ready(queue)
        self._changes.pop(change.old.topic_id, None)

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        """The queues of the topic."""
        raise NotImplementedError


def topic_name(info: TopicInfo) -> str:
    """The topic to request METADATA of. A delay log has no METADATA of its own."""
    return info.delay_of or info.name
