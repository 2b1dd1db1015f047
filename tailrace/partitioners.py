"""Which partition a record goes to. Keys by murmur2 exactly as Kafka's default partitioner, so that both put a key in the same place.

The hash is Austin Appleby's MurmurHash2 with Kafka's seed (org.apache.kafka.common.utils.Utils.murmur2); the sticky choice for records without a key is
KIP-480's: one partition until its batch is sent, then another.

A partitioner of one's own is a callable (topic, key, partition_count) -> partition; it is asked only for records that name no partition.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

Partitioner = Callable[[str, bytes | None, int], int]

_MASK = 0xFFFFFFFF
_M = 0x5BD1E995
CACHE_MAX = 100_000


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of `data`, as an unsigned 32-bit number."""
    length = len(data)
    h = 0x9747B28C ^ length
    whole = length // 4
    for k in struct.unpack_from(f"<{whole}I", data):
        k = k * _M & _MASK
        k ^= k >> 24
        h = h * _M & _MASK ^ k * _M & _MASK
    rest = length & 3
    if rest:
        tail = data[whole * 4 :]
        if rest == 3:
            h ^= tail[2] << 16
        if rest >= 2:
            h ^= tail[1] << 8
        h ^= tail[0]
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    return h ^ h >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Kafka's choice for a key: toPositive(murmur2(key)) % partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


class DefaultPartitioner:
    """Keys by hash (remembered: keys repeat), records without a key stickily."""

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
            positive = self._known[key] = murmur2(key) & 0x7FFFFFFF
        return positive % partition_count

    def on_batch_sent(self, topic: str, partition_count: int) -> None:
        """A batch without keys is complete: choose another partition."""
        current = self._sticky.get(topic)
        if partition_count > 1 and current is not None:
            self._sticky[topic] = (current + 1 + self._random.randrange(partition_count - 1)) % partition_count
