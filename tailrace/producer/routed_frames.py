"""Sends rows that the caller has routed: `send_arrow` for the Spark sink, which knows the partition
of each row, and collects the rows of a partition before it sends them.

Owner: none; a function of a Producer.
Invariants: rows with hash slots go to the partitions that own these when they are sent, as those of
    `send_arrow` with a key column do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.producer.frame_appender import RowSlots
from tailrace.producer.futures import FrameFuture
from tailrace.producer.producer import Producer
from tailrace.producer.record_validation import Delay

if TYPE_CHECKING:
    from tailrace.batch.picked_rows import PickedRows
    from tailrace.client.topics.topic_metadata import TopicInfo

NO_DELAY = Delay(None, None, None)


def send_routed(
    producer: Producer,
    info: TopicInfo,
    rows: PickedRows,
    partition: int,
    slots: RowSlots | None = None,
) -> FrameFuture:
    """Send rows to `partition` of a topic that the caller has looked up. `slots`: on topics with
    hash slots. Raises as `Producer.send_arrow` does.
    """
    if info.name not in producer._metadata.by_topic:
        producer._sender_thread.do(producer._metadata.adopt, info)
    return producer._run_steps(
        producer._frames.append(info.name, rows, None, partition, None, NO_DELAY, None, slots)
    )


def topics_written(producer: Producer) -> list[TopicInfo]:
    """The topics that batches were sent to. One that was deleted and made again is another topic,
    and takes the place of the first.
    """
    queues = producer._sender_thread.accumulator.queues.values()
    found = {queue.info.topic_id: queue.info for queue in queues if queue.next_ordinal}
    return list(found.values())
