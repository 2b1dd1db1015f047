"""Positions of a streaming query, as Spark keeps them in the checkpoint, and the end of a
micro-batch.

The JSON is that of Spark's Kafka source, {"topic": {"0": 23}} with the offset to read next, and
these additions, under names that no topic can have:

    @topicIds   {"topic": "id in hex"}: tells a topic from one created again under its name.
    @start      only in the end of a query's first micro-batch: the beginning of that batch.
                Spark does not store the initial offset (its Kafka source keeps a file of its
                own for it). A first batch repeated after a kill would ask for "latest" again
                and skip the records that came in between.
    @first      only in the result of `initialOffset`, which Spark does not keep.

Invariants:
- Equal positions give equal JSON, which is how Spark compares them.
- A limit never makes a batch empty where there are records to read.
- Partitions take their shares in proportion to what they have left (the rule of Spark's
  KafkaMicroBatchStream.rateLimit), so that they advance together in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition

TOPIC_IDS, START, FIRST = "@topicIds", "@start", "@first"


@dataclass(frozen=True, slots=True)
class Position:
    """The next offset of each partition, and the topics' ids."""

    offsets: dict[TopicPartition, int]
    topic_ids: dict[str, bytes]
    start: dict[TopicPartition, int] | None = None
    """The beginning of the first batch, in its end position; else None."""
    start_ids: dict[str, bytes] = field(default_factory=dict)
    is_first: bool = False

    def encode(self) -> dict[str, Any]:
        """Encode the position for Spark."""
        result: dict[str, Any] = _by_topic(self.offsets)
        result[TOPIC_IDS] = _in_hex(self.topic_ids)
        if self.start is not None:
            result[START] = {**_by_topic(self.start), TOPIC_IDS: _in_hex(self.start_ids)}
        if self.is_first:
            result[FIRST] = True
        return result


def decode(given: Mapping[str, Any]) -> Position:
    """Decode the result of `encode`.

    Raises: InvalidRequestError for anything else: the checkpoint of another source, or another
    version.
    """
    try:
        start = given.get(START)
        return Position(
            _from_json(given),
            {name: bytes.fromhex(text) for name, text in given[TOPIC_IDS].items()},
            None if start is None else _from_json(start),
            {}
            if start is None
            else {name: bytes.fromhex(text) for name, text in start[TOPIC_IDS].items()},
            bool(given.get(FIRST, False)),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{str(given)[:200]} is not a position of the tailrace source ({error!r}), so the "
            "checkpoint belongs to another source; give the query one of its own"
        ) from None


def _by_topic(offsets: Mapping[TopicPartition, int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in sorted(offsets):
        result.setdefault(key.topic, {})[str(key.partition)] = offsets[key]
    return result


def _in_hex(topic_ids: Mapping[str, bytes]) -> dict[str, str]:
    return {name: topic_ids[name].hex() for name in sorted(topic_ids)}


def _from_json(given: Mapping[str, Any]) -> dict[TopicPartition, int]:
    ids = given[TOPIC_IDS]
    result = {}
    for topic, partitions in given.items():
        if topic.startswith("@"):
            continue
        for partition, offset in partitions.items():
            if topic not in ids or type(offset) is not int or offset < 0:
                raise ValueError(f"{topic}-{partition}: {offset}")
            result[TopicPartition(topic, int(partition))] = offset
    return result


# ---- admission control ---------------------------------------------------------------------------


def limited(
    begins: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], offsets_max: int
) -> dict[TopicPartition, int]:
    """Ends of a batch of about `offsets_max` offsets: each partition's share is in proportion to
    what it has left, at least one.
    """
    sizes = {key: max(0, end - begins[key]) for key, end in ends.items()}
    total = sum(sizes.values())
    if total <= offsets_max:
        return dict(ends)
    result = dict(ends)
    for key, size in sizes.items():
        if size:
            share = offsets_max * size / total
            result[key] = begins[key] + min(
                size, math.ceil(share) if share < 1 else math.floor(share)
            )
    return result


class Delay:
    """minOffsetsPerTrigger and maxTriggerDelay: decide if a batch waits for more records."""

    def __init__(self, offsets_min: int | None, delay_max_ms: int) -> None:
        self._offsets_min = offsets_min
        self._delay_max_ms = delay_max_ms
        self._last_ms: int | None = None
        """Time of the last batch; None before the first, which does not wait."""

    def should_wait(self, available: int, now_ms: int) -> bool:
        """True if a batch of `available` offsets must wait for more."""
        if self._offsets_min is None or not available:
            return False
        waited = self._last_ms is None or now_ms - self._last_ms >= self._delay_max_ms
        if available < self._offsets_min and not waited:
            return True
        self._last_ms = now_ms
        return False
