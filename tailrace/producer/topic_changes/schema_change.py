"""Typed topics whose schema was altered while a producer sends to them.

    sending --SCHEMA_MISMATCH--> waiting --METADATA shows another version, all sent batches have an
    outcome--> converted --> sending

The worker appends batches of the newest version only, so that a segment, which has one schema, is
not begun for each batch of two programs. A refused batch is not in the log. Its rows are converted
by the rules of evolution when it is encoded again, and it has the sequence that it had.

Owner: a Producer, under its lock. It is loaded with the first altered schema.
Invariants:
- While a topic waits, only batches that may be in the log are sent.
- A batch keeps the rows that the program gave, in the version that it gave them in.
- The sequences of refused batches are used again, so that none is missing.
Crash: a change is removed last. A move that a signal handler interrupted is done again.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import SchemaMismatchError
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.topic_changes.topic_change import Change, KnownTopicChange

RETRY_NS = 20 * NS_PER_MS
"""Interval of METADATA requests until the front has the version that its worker has."""


class SchemaChange(KnownTopicChange):
    """Topics whose newest schema is not that of the producer's batches."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        connection: Connection,
        now_ns: Callable[[], int],
        on_moved: Callable[[TopicInfo], None],
    ) -> None:
        """`on_moved` is called with a topic whose batches are converted."""
        super().__init__(accumulator, connection, now_ns, RETRY_NS)
        self._on_moved = on_moved

    def _described(self, old: TopicInfo, info: TopicInfo) -> TopicInfo | None:
        return info.delay_log if old.delay_of else info

    def _has_changed(self, old: TopicInfo, info: TopicInfo) -> bool:
        return info.schema_id != old.schema_id and info.has_all_schemas

    def _try_move(self, change: Change) -> bool:
        """Have all batches converted, if all sent ones have an outcome."""
        info, queues = change.new, self._queues(change.old)
        assert info is not None
        if any(queue.in_flight or queue.first_with_unknown_outcome() >= 0 for queue in queues):
            return False
        for queue in queues:
            self._accumulator.close_batch(queue)
            queue.take_numbers_back()
            for batch in list(queue.ready):
                if batch.info.schema_id in info.history:
                    batch.convert_for(info)
                else:
                    queue.pop(batch)
                    self._accumulator.end(batch, None, _unknown_version(batch.info, info))
        self._on_moved(info)
        self._release(change)
        return True

    def _queues(self, info: TopicInfo) -> list[PartitionQueue]:
        return [
            queue
            for (topic_id, _), queue in self._accumulator.queues.items()
            if topic_id == info.topic_id
        ]


def _unknown_version(had: TopicInfo, has: TopicInfo) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"topic {has.name!r} has no version {had.schema_id} of its schema, which the rows have; it "
        f"has {', '.join(map(str, has.schema_ids))}: send the rows again"
    )
