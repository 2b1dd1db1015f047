"""Partitioners: the choice of a record's partition, by its key or without one.

Keys are hashed by murmur2 exactly as in Kafka's default partitioner, so both put a key in the same
partition. The hash is Austin Appleby's MurmurHash2 with Kafka's seed
(org.apache.kafka.common.utils.Utils.murmur2). The sticky choice for records without a key is
KIP-480's: one partition until its batch is sent, then another. Names are Kafka's and librdkafka's
(its CONFIGURATION.md) where they have one.

A custom partitioner is a function (topic, key, partition_count) -> partition. It is called only for
records without a given partition. Topics with `partitioner=hash_slots` route keys by
`tailrace.core.hash_slots`; for them a partitioner chooses only for records without a key.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable

from tailrace.core.errors import InvalidRecordError, InvalidSettingError
from tailrace.core.hash_slots import HASH_SLOTS
from tailrace.kernel import murmur2 as murmur2

Partitioner = Callable[[str, bytes | None, int], int]

CACHE_MAX = 100_000
_DIGITS = re.compile(rb"[+-]?[0-9]{1,4000}")


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Kafka's choice for a key: toPositive(murmur2(key)) % partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


class DefaultPartitioner:
    """Kafka's default: keys by hash (cached, since keys repeat), records without a key stickily."""

    remembers_keys = True
    """True if a key always gets the same partition for a partition count. A producer may then cache
    it.
    """
    notifies_every_batch = False
    """True if `on_batch_sent` is called for every batch, else only for batches that end with a
    record without a key.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._known: dict[bytes, int] = {}
        self._sticky: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        if key is None:
            sticky = self._sticky.get(topic)
            if sticky is None or sticky >= partition_count:
                sticky = self._sticky[topic] = self._random.randrange(partition_count)
            return sticky
        positive = self._known.get(key)
        if positive is None:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            positive = self._known[key] = self._number_of(key)
        return positive % partition_count

    def _number_of(self, key: bytes) -> int:
        """The number of a key, whose remainder by the partition count is its partition."""
        return murmur2(key) & 0x7FFFFFFF

    def on_batch_sent(self, topic: str, partition_count: int) -> None:
        """Choose another sticky partition after a batch without keys is complete."""
        current = self._sticky.get(topic)
        if partition_count > 1 and current is not None:
            self._sticky[topic] = (
                current + 1 + self._random.randrange(partition_count - 1)
            ) % partition_count


class ConsistentPartitioner(DefaultPartitioner):
    """librdkafka's `consistent_random`: keys by CRC32, records without a key stickily."""

    def _number_of(self, key: bytes) -> int:
        return zlib.crc32(key)


class ModuloPartitioner(DefaultPartitioner):
    """Keys that are whole numbers, by their remainder; records without a key stickily.

    The remainder is never negative: key -1 of 4 partitions gets partition 3.
    """

    def _number_of(self, key: bytes) -> int:
        if not _DIGITS.fullmatch(key):
            raise InvalidRecordError(
                f'key is {key[:60]!r}; with partitioner="modulo" give a whole number, or its '
                "decimal digits as text or bytes"
            )
        return int(key)


class StickyPartitioner(DefaultPartitioner):
    """Kafka's UniformStickyPartitioner: all records to one partition until its batch is sent.

    Keys are ignored.
    """

    remembers_keys = False
    notifies_every_batch = True

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        return super().__call__(topic, None, partition_count)


class RoundRobinPartitioner:
    """Kafka's RoundRobinPartitioner: one record to each partition in turn. Keys are ignored."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        chosen = self._next.get(topic, 0) % partition_count
        self._next[topic] = chosen + 1
        return chosen


class RandomPartitioner:
    """librdkafka's `random`: each record to a random partition. Keys are ignored."""

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        return random.randrange(partition_count)


_BY_NAME: dict[str, Callable[[], Partitioner]] = {
    "murmur2": DefaultPartitioner,
    "sticky": StickyPartitioner,
    "round_robin": RoundRobinPartitioner,
    "modulo": ModuloPartitioner,
    HASH_SLOTS: DefaultPartitioner,
    "consistent_random": ConsistentPartitioner,
    "random": RandomPartitioner,
}
_ALIASES = {
    "murmur2_random": "murmur2",
    "DefaultPartitioner": "murmur2",
    "UniformStickyPartitioner": "sticky",
    "RoundRobinPartitioner": "round_robin",
}
"""Name in Kafka or librdkafka -> name here."""
NAMES = tuple(_BY_NAME)


def plain_name(name: str) -> str:
    """The canonical name of a partitioner. Raises InvalidSettingError for an unknown one."""
    last = name.removeprefix("org.apache.kafka.clients.producer.").removeprefix("internals.")
    found = _ALIASES.get(last, last)
    if found not in _BY_NAME:
        raise InvalidSettingError(
            f"partitioner is {name[:60]!r}; give one of {', '.join(NAMES)}, or a function (topic, "
            "key, partition_count) -> partition"
        )
    return found


def chosen_by(setting: str | Partitioner | None) -> Partitioner:
    """A new partitioner for a producer's setting. Raises InvalidSettingError."""
    if setting is None:
        return DefaultPartitioner()
    return _BY_NAME[plain_name(setting)]() if isinstance(setting, str) else setting
