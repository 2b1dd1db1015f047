"""Partitions of a group's retry topics (`tailrace.core.topic_names`). Its consumers read them from
the first record on, without the records of other groups.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.client.connections.steps import Call, Steps
from tailrace.core.error_codes import ErrorCode
from tailrace.core.records import Record
from tailrace.core.topic_names import is_of_group, is_retry_topic, is_shared, retry_topics
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.protocol.frame import Api

TOPICS_AT_ONCE = 16
"""Names in one METADATA request: its response contains the topics' schemas."""


def read_as_retries(cursor: PartitionPosition, group: str) -> None:
    """Set up the cursor if it is of a retry topic of this group."""
    name = cursor.key.topic
    if not is_retry_topic(name, group):
        return
    cursor.begins_at_earliest = True
    if is_shared(name):

        def is_requested(record: Record) -> bool:
            return is_of_group(record.headers, name, group)

        cursor.is_requested = is_requested


def retries_of(
    call: Call, partitions: Iterable[TopicPartition], group: str
) -> Steps[list[TopicPartition]]:
    """The existing partitions of the group's retry topics that belong to these partitions. `call`
    makes a request.
    """
    numbers: dict[str, list[int]] = {}
    for key in partitions:
        if not is_retry_topic(key.topic, group):
            for name in retry_topics(key.topic, group):
                numbers.setdefault(name, []).append(key.partition)
    names, found = list(numbers), []
    for start in range(0, len(names), TOPICS_AT_ONCE):
        answer = yield from call(Api.METADATA, {"topics": names[start : start + TOPICS_AT_ONCE]})
        for topic in answer["topics"]:
            if topic.get("code") != ErrorCode.UNKNOWN_TOPIC:
                count = len(topic["partitions"])
                found += [
                    TopicPartition(topic["name"], number)
                    for number in numbers[topic["name"]]
                    if number < count
                ]
    return found
