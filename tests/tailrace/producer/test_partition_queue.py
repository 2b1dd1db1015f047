"""Batches that a producer may send next: the partition remembers some batches, and a timed-out one
may have been appended.
"""

from __future__ import annotations

from typing import Any

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.kernel.reference_arrow import default_rows
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch


def test_a_later_answer_does_not_let_a_sixth_sequence_out_before_the_oldest_is_settled() -> None:
    described: dict[str, Any] = {
        "name": "t", "topic_id": "00" * 16, "version": 1, "typed": False, "schema_id": 1,
        "schema": "", "settings": {}, "partitions": [{}],
    }  # fmt: skip
    info = TopicInfo(described)
    queue = PartitionQueue(info, 0)
    batches = []
    for number in range(5):
        batch = ProducerBatch(queue, info, 0, 0, (number,))  # type: ignore[arg-type]
        batch.count = 1
        rows = default_rows([1], [None], [b"x"], None)
        batch.data = arrow_batch.encode(
            rows, schema_id=1, seed=0, compression="none", first_timestamp_us=1, max_timestamp_us=1
        )
        assert not queue.window_is_full(5)
        queue.number(batch, 7, 0)
        queue.in_flight.append(batch)
        batches.append(batch)
    assert queue.window_is_full(5)
    queue.in_flight.remove(batches[4])  # answered
    assert queue.window_is_full(5), "the first may have been appended, and would be forgotten"
    queue.in_flight.remove(batches[0])
    assert not queue.window_is_full(5)
    assert [batch.base_sequence for batch in batches] == list(range(5))
