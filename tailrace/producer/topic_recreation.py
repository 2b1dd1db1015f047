"""What a producer does when the appliance does not know a topic any more: its records wait until
the topic of that name is made again.

As in Kafka: "unknown topic" is an answer that metadata may change, so what was refused with it is
sent to the topic that has the name once METADATA shows it, within delivery_timeout_ms; but of a
topic that nobody makes again within RECREATION_TIMEOUT_NS they end, so that a flush does not wait
for nothing for minutes. Records that wait keep their order, and go ahead of those that were sent to
the new topic first.

    sending --UNKNOWN_TOPIC, or METADATA shows another id--> waiting --METADATA shows the topic, all
    answered--> moved, sending

Owner: a Producer, under its lock.
Invariants: nothing of a queue that waits is sent; of the topic made again nothing is sent before
    what waits for it has moved; a queue that was left never takes a batch again (`is_gone`), and is
    not listed among the accumulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tailrace.client.connection import Connection
from tailrace.client.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownTopicError
from tailrace.format.batch_header import NO_PRODUCER
from tailrace.producer.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import ProducerBatch
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

RECREATION_TIMEOUT_NS = 5_000 * NS_PER_MS


@dataclass(slots=True)
class _Wait:
    """A topic, or a delay log, that the appliance does not know by its id any more."""

    old: TopicInfo
    since_ns: int
    new: TopicInfo | None = None
    """What has its name now, once that is known."""
    is_asked: bool = False
    ask_at_ns: int = 0


class TopicRecreation:
    """See the module's docstring."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        connection: Connection,
        now_ns: Callable[[], int],
        retry_ms: int,
    ) -> None:
        """`retry_ms`: how soon METADATA is asked again that does not show the topic
        (retry_backoff_ms).
        """
        self._accumulator = accumulator
        self._connection = connection
        self._now_ns = now_ns
        self._metadata_retry_ns = max(1, retry_ms) * NS_PER_MS
        self._completion: dict[bytes, _Wait] = {}
        """By the id that is not known any more."""
        self.on_found: Callable[[TopicInfo], None] = lambda _info: None
        """Told what METADATA says of a topic that is waited for; is to call `found`."""
        self.on_abandoned: Callable[[str], None] = lambda _name: None
        """Told of a topic for which nothing waits any more although it was not made again."""

    @property
    def is_waiting(self) -> bool:
        """Whether a topic is waited for."""
        return bool(self._completion)

    def begin(self, old: TopicInfo) -> None:
        """The appliance does not know the topic by its id any more."""
        self._completion.setdefault(old.topic_id, _Wait(old, self._now_ns()))
        for queue in self._queues(old):
            queue.is_gone = queue.awaits_topic = True
            self._accumulator.close_batch(queue)  # the next record asks anew

    def found(self, info: TopicInfo) -> None:
        """METADATA shows a topic; it has its queues."""
        for wait in list(self._completion.values()):
            if wait.old.topic_id == info.topic_id:
                self._resume(wait)
            elif wait.old.name == info.name:
                wait.new = info
                self._try_move(wait)

    def step(self, now_ns: int) -> None:
        """Ask for topics that are not there yet, move what waits for one that is, forget those that
        nothing waits for.
        """
        for wait in list(self._completion.values()):
            if wait.new is not None and self._try_move(wait):
                continue
            if not any(queue.batches() for queue in self._queues(wait.old)):
                self._end(wait)
                self.on_abandoned(_name(wait.old))
            elif wait.new is None and now_ns - wait.since_ns >= RECREATION_TIMEOUT_NS:
                self._abandon(wait)
            elif not wait.is_asked and now_ns >= wait.ask_at_ns:
                body = requests.encode_json({"topics": [_name(wait.old)]})
                wait.is_asked = self._connection.request(
                    Api.METADATA, [body], partial(self._on_metadata, wait)
                )

    def retry(self) -> None:
        """What was asked is not answered any more."""
        for wait in self._completion.values():
            wait.is_asked = False

    def _abandon(self, wait: _Wait) -> None:
        """Everything that waits, and is not under way, ends."""
        error = UnknownTopicError(
            f"topic {_name(wait.old)!r} was deleted, and not made again within "
            f"{RECREATION_TIMEOUT_NS // 10**9} s"
        )
        for queue in self._queues(wait.old):
            self._accumulator.close_batch(queue)
            for batch in list(queue.ready):
                queue.pop(batch)
                self._accumulator.end(batch, None, error)

    def _on_metadata(self, wait: _Wait, response: Response | None) -> None:
        wait.is_asked = False
        wait.ask_at_ns = self._now_ns() + self._metadata_retry_ns
        if (
            response is None
            or response.code is not ErrorCode.OK
            or self._completion.get(wait.old.topic_id) is not wait
        ):
            return
        name = _name(wait.old)
        try:
            info = topics_from_metadata(requests.decode_json(response.body[0]), name)[name]
        except TailraceError:  # it is not there
            return
        self.on_found(info)

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        return [
            queue
            for (topic_id, _), queue in self._accumulator.queues.items()
            if topic_id == info.topic_id
        ]

    def _resume(self, wait: _Wait) -> None:
        """The front that refused had not heard of the topic yet, or has another that has: the same
        queues go on.
        """
        for queue in self._queues(wait.old):
            queue.is_gone = queue.awaits_topic = False
            queue.muted_until_ns = self._now_ns() + self._metadata_retry_ns
            if queue.has_work:
                self._accumulator.mark_ready(queue)
        self._completion.pop(
            wait.old.topic_id, None
        )  # not before: what a signal's handler cuts off is done again

    def _end(self, wait: _Wait) -> None:
        for queue in self._queues(wait.old):
            self._accumulator.queues.pop((wait.old.topic_id, queue.partition), None)
        self._completion.pop(wait.old.topic_id, None)

    def _try_move(self, wait: _Wait) -> bool:
        """Hand what waits to the topic that was made again, if everything that was sent to the old
        one is answered. Records of a partition that it does not have wait for that. Returns whether
        nothing is left.
        """
        new, queues = wait.new, self._queues(wait.old)
        assert new is not None
        targets = [
            self._accumulator.queues.get((new.topic_id, partition))
            for partition in range(len(new.partitions))
        ]
        is_answered = not any(queue.in_flight for queue in queues)
        for queue in queues if is_answered else ():
            if queue.partition < len(targets) and (target := targets[queue.partition]) is not None:
                self._accumulator.close_batch(queue)
                for batch in queue.ready:
                    self._hand_over(batch, target)
                queue.ready.clear()
                self._accumulator.queues.pop((wait.old.topic_id, queue.partition), None)
        is_done = is_answered and not any(queue.batches() for queue in self._queues(wait.old))
        if is_done:
            self._end(wait)
        for target in targets:
            if target is not None and new.topic_id not in self._completion:
                target.awaits_topic = not is_answered
                if target.has_work:
                    self._accumulator.mark_ready(target)
        return is_done

    def _hand_over(self, batch: ProducerBatch, target: PartitionQueue) -> None:
        old, new = batch.info, target.info
        if (
            old.typed != new.typed
            or old.schema != new.schema
            or bool(old.slot_map_version) != bool(new.slot_map_version)
        ):
            refusal = (
                f"topic {new.name!r} was deleted and created again with another schema or "
                "another way of choosing partitions"
            )
            self._accumulator.end(batch, None, UnknownTopicError(refusal))
            return
        batch.made_for(new)
        batch.producer_id = NO_PRODUCER
        target.requeue(batch)


def _name(info: TopicInfo) -> str:
    """By which METADATA is asked: a delay log has none of its own."""
    return info.delay_of or info.name
