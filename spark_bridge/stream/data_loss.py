"""failOnDataLoss: what a query does about records that its positions name, and that are not there any more.

The cases and the option are those of Spark's Kafka source: retention was faster; a topic is gone; a topic is another one of the same name, which Kafka's
source cannot tell; a log ends before what was read of it.
Invariants: with failOnDataLoss=true nothing is left out silently: the error names the partition, the offsets and what to do. With false each case is logged
    once and the offsets that are known to be lost are counted.
"""

from __future__ import annotations

from dataclasses import replace

from spark_bridge.stream_offsets import Position
from spark_bridge.stream_tasks import DATA_LOSS_ADVICE
from spark_bridge.stream_view import Held, View
from tailrace.client_log import logger
from tailrace.errors import OffsetOutOfRangeError, TailraceError, UnknownTopicError
from tailrace.records import TopicPartition
from tailrace.scanning.planner import PartitionRange


class Losses:
    """Of one query."""

    def __init__(self, fail_on_data_loss: bool) -> None:
        self._fails = fail_on_data_loss
        self._said: set[object] = set()
        self.offsets = 0
        """That were left out, as far as this process knows."""

    def _report(self, case: object, error: TailraceError, offsets: int = 0) -> None:
        if self._fails:
            raise error
        if case not in self._said:
            self._said.add(case)
            self.offsets += offsets
            logger.warning("stream_data_lost offsets=%d reason=%r", offsets, error.detail)

    def check_topics(self, position: Position, view: View) -> None:
        """That the topics of a position are there, and still the same. Raises UnknownTopicError."""
        for name, topic_id in position.topic_ids.items():
            info = view.infos.get(name)
            if info is None:
                self._report((name, topic_id), UnknownTopicError(f"topic {name!r}, which the query reads, was deleted: {DATA_LOSS_ADVICE}"))
            elif info.topic_id != topic_id:
                self._report(
                    (name, topic_id),
                    UnknownTopicError(
                        f"topic {name!r} is not the one that the query's checkpoint is of (its id is {info.topic_id.hex()}, and was {topic_id.hex()}): it was "
                        f"deleted and made again. Give the query a new checkpointLocation; or with failOnDataLoss=false it reads the new one from its beginning"
                    ),
                )

    def check_end(self, key: TopicPartition, position: int, held: Held) -> None:
        """That the log is as long as a position says. Raises OffsetOutOfRangeError."""
        if position > held.end:
            where = f"{key.topic}-{key.partition}"
            self._report(
                (where, "end"),
                OffsetOutOfRangeError(
                    f"{where} ends at offset {held.end}, and the query's checkpoint says {position}: the log was truncated, or is an older copy: "
                    f"{DATA_LOSS_ADVICE}"
                ),
            )

    def what_is_there(self, wanted: PartitionRange, held: Held) -> PartitionRange:
        """Of the offsets that are to be read those which the log has. Raises OffsetOutOfRangeError."""
        where = f"{wanted.topic}-{wanted.partition}"
        start, end = wanted.start, wanted.end
        if start < held.beginning:
            gone = min(end, held.beginning)
            self._report(
                wanted,
                OffsetOutOfRangeError(
                    f"offsets {start} to {gone - 1} of {where} were deleted before the query had read them: {DATA_LOSS_ADVICE}"
                )
                if gone > start
                else OffsetOutOfRangeError(
                    f"{where} begins at offset {held.beginning}, and the query stands at {start}: {DATA_LOSS_ADVICE}"
                ),
                gone - start,
            )
            start = gone
        self.check_end(wanted.key, max(start, end), held)
        end = min(end, held.end)
        return replace(wanted, start=min(start, end), end=end)
