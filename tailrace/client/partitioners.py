"""Which partition a record goes to. Keys by murmur2 exactly as Kafka's default partitioner, so that both put a key in the same place.

The hash is Austin Appleby's MurmurHash2 with Kafka's seed (org.apache.kafka.common.utils.Utils.murmur2); the sticky choice for records without a key is
KIP-480's: one partition until its batch is sent, then another. Names are Kafka's and librdkafka's (its CONFIGURATION.md) where they have one.

A partitioner of one's own is a callable (topic, key, partition_count) -> partition; it is asked only for records that name no partition.
Topics with `partitioner=hash_slots` route by `tailrace.hash_slots`, whatever a producer knows of them; only what has no key is asked for here.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable

from tailrace.errors import InvalidRecordError, InvalidSettingError
from tailrace.hash_slots import HASH_SLOTS
from tailrace.kernel import murmur2 as murmur2

Partitioner = Callable[[str, bytes | None, int], int]

CACHE_MAX = 100_000
_DIGITS = re.compile(rb"[+-]?[0-9]{1,4000}")


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Kafka's choice for a key: toPositive(murmur2(key)) % partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


class DefaultPartitioner:
    """Keys by hash (remembered: keys repeat), records without a key stickily."""

    remembers_keys = True
    """Whether a key goes to the same partition while their number stays, so that a producer may look it up."""
    tells_every_batch = False
    """Whether `on_batch_sent` is for every batch, not only for those that end with a record without a key."""

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
        """What a key is to be divided by the number of partitions as."""
        return murmur2(key) & 0x7FFFFFFF

    def on_batch_sent(self, topic: str, partition_count: int) -> None:
        """A batch without keys is complete: choose another partition."""
        current = self._sticky.get(topic)
        if partition_count > 1 and current is not None:
            self._sticky[topic] = (current + 1 + self._random.randrange(partition_count - 1)) % partition_count


class ConsistentPartitioner(DefaultPartitioner):
    """librdkafka's `consistent_random`: keys by CRC32, so that its default and this one put a key in the same place; what has no key stickily."""

    def _number_of(self, key: bytes) -> int:
        return zlib.crc32(key)


class ModuloPartitioner(DefaultPartitioner):
    """A key that is a whole number goes to the partition of its remainder (never negative: -1 of 4 partitions is 3); what has no key stickily."""

    def _number_of(self, key: bytes) -> int:
        if not _DIGITS.fullmatch(key):
            raise InvalidRecordError(
                f'key is {key[:60]!r}; partitioner="modulo" takes a whole number, or its decimal digits as text or bytes'
            )
        return int(key)


class StickyPartitioner(DefaultPartitioner):
    """Kafka's UniformStickyPartitioner: keys are not looked at; everything goes to one partition until its batch is sent, then to another."""

    remembers_keys = False
    tells_every_batch = True

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        return super().__call__(topic, None, partition_count)


class RoundRobinPartitioner:
    """Kafka's: keys are not looked at; one record to each partition in turn."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, topic: str, key: bytes | None, partition_count: int) -> int:
        chosen = self._next.get(topic, 0) % partition_count
        self._next[topic] = chosen + 1
        return chosen


class RandomPartitioner:
    """librdkafka's `random`: keys are not looked at; each record goes anywhere."""

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
"""What Kafka's and librdkafka's users write -> what it is here."""
NAMES = tuple(_BY_NAME)


def plain_name(name: str) -> str:
    """The name of a partitioner as it is called here. Raises InvalidSettingError for one that there is not."""
    last = name.removeprefix("org.apache.kafka.clients.producer.").removeprefix("internals.")
    found = _ALIASES.get(last, last)
    if found not in _BY_NAME:
        raise InvalidSettingError(
            f"partitioner is {name[:60]!r}; there are {', '.join(NAMES)}, or a callable (topic, key, partition_count) -> partition"
        )
    return found


def chosen_by(setting: str | Partitioner | None) -> Partitioner:
    """The partitioner that a producer's setting means; a producer of its own each. Raises InvalidSettingError."""
    if setting is None:
        return DefaultPartitioner()
    return _BY_NAME[plain_name(setting)]() if isinstance(setting, str) else setting
