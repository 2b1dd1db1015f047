"""Offsets that a program gives, to commit them or to send them to a transaction.

Owner: pure.
"""

from __future__ import annotations

from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import INT64_MAX, by_partition, whole

Offsets = dict[TopicPartition, OffsetAndMetadata]


def offsets_of(given: Any) -> Offsets:
    """Offsets to commit, from what the program passed. Raises InvalidRequestError."""
    found: Offsets = {}
    for key, value in by_partition("offsets", given, "{TopicPartition(topic, 0): offset}").items():
        label = f"the offset of {key.topic}-{key.partition}"
        if isinstance(value, OffsetAndMetadata):
            offset, metadata, epoch = int(value), value.metadata, value.leader_epoch
        elif hasattr(value, "offset") and hasattr(value, "metadata"):  # kafka-python's
            offset, metadata, epoch = (
                value.offset,
                value.metadata,
                getattr(value, "leader_epoch", -1),
            )
        else:
            offset, metadata, epoch = value, "", -1
        if not isinstance(metadata, str):
            raise InvalidRequestError(
                f"the metadata of {key.topic}-{key.partition} is {metadata!r:.100}; it takes text"
            )
        found[key] = OffsetAndMetadata(
            whole(label, offset, 0), metadata, whole("leader_epoch", epoch, -1, INT64_MAX)
        )
    return found


def topic_id_of(key: TopicPartition) -> str:
    """The topic id that the topic's name carries, in hexadecimal, as in a record or a position of a
    consumer; empty: the name is plain text.
    """
    return getattr(key.topic, "topic_id", b"").hex()
