"""The option failOnDataLoss: handling of records that a query's positions name and the log does not
have.

The cases and the option are those of Spark's Kafka source: retention removed them, the topic was
deleted, the topic was created again under the same name (which Kafka's source cannot tell), or the
log ends before the position.

Invariants:
- With failOnDataLoss=true every loss is an error, which names the partition, the offsets and what
  to do.
- With false each case is logged once, and the offsets known to be lost are counted.
"""

from __future__ import annotations

from dataclasses import replace

from spark_bridge.stream.offsets import Position
from spark_bridge.stream.tasks import DATA_LOSS_ADVICE
from spark_bridge.stream.topic_view import LogExtent, View
from tailrace.core.errors import OffsetOutOfRangeError, TailraceError, UnknownTopicError
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.scan_plan import PartitionRange


class Losses:
    """Losses of one query."""

    def __init__(self, fail_on_data_loss: bool) -> None:
        self._fails = fail_on_data_loss
        self._reported: set[object] = set()
        self.offsets = 0
        """Offsets left out, as far as this process knows."""

    def _report(self, case: object, error: TailraceError, offsets: int = 0) -> None:
        if self._fails:
            raise error
        if case not in self._reported:
            self._reported.add(case)
            self.offsets += offsets
            logger.warning("stream_data_lost offsets=%d reason=%r", offsets, error.detail)

    def check_topics(self, position: Position, view: View) -> None:
        """Check that the topics of a position still exist and are the same.

        Raises: UnknownTopicError.
        """
        for name, topic_id in position.topic_ids.items():
            info = view.infos.get(name)
            if info is None:
                self._report(
                    (name, topic_id),
                    UnknownTopicError(
                        f"topic {name!r}, which the query reads, was deleted: {DATA_LOSS_ADVICE}"
                    ),
                )
            elif info.topic_id != topic_id:
                self._report(
                    (name, topic_id),
                    UnknownTopicError(
                        f"topic {name!r} was deleted and created again (its id is "
                        f"{info.topic_id.hex()}, and {topic_id.hex()} in the query's "
                        "checkpoint). Give the query a new checkpointLocation; or with "
                        "failOnDataLoss=false it reads the new one from its beginning"
                    ),
                )

    def check_end(self, key: TopicPartition, position: int, extent: LogExtent) -> None:
        """Check that the log is as long as a position says.

        Raises: OffsetOutOfRangeError.
        """
        if position > extent.end:
            where = f"{key.topic}-{key.partition}"
            self._report(
                (where, "end"),
                OffsetOutOfRangeError(
                    f"{where} ends at offset {extent.end}, and the query's checkpoint is at "
                    f"{position}: the log was truncated, or is an older copy: {DATA_LOSS_ADVICE}"
                ),
            )

    def without_lost(self, requested: PartitionRange, extent: LogExtent) -> PartitionRange:
        """The part of the range that the log still has.

        Raises: OffsetOutOfRangeError.
        """
        where = f"{requested.topic}-{requested.partition}"
        start, end = requested.start, requested.end
        if start < extent.beginning:
            gone = min(end, extent.beginning)
            self._report(
                requested,
                OffsetOutOfRangeError(
                    f"offsets {start} to {gone - 1} of {where} were deleted before the query had "
                    f"read them: {DATA_LOSS_ADVICE}"
                )
                if gone > start
                else OffsetOutOfRangeError(
                    f"{where} begins at offset {extent.beginning}, and the query is at {start}: "
                    f"{DATA_LOSS_ADVICE}"
                ),
                gone - start,
            )
            start = gone
        self.check_end(requested.key, max(start, end), extent)
        end = min(end, extent.end)
        return replace(requested, start=min(start, end), end=end)
