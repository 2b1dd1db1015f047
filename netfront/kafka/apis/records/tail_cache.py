"""Batches that readers get without a conversion: the latest ones of Kafka producers as they came,
for readers at the end of a log, and the latest ones that were packed for a reader, for others who
read the same.

Kafka's checksum covers a batch from its attributes on. Base offset and leader epoch lie before
them, so the bytes of the producer are right for every reader once these two are written.

Owner: one gateway, in memory.

Invariants:
- A batch is served only for the batch of the log that was made of it: same place, same checksum of
  the body, same numbers of records, same times. So a log that was cut and written again, or
  compacted, finds nothing here, nor does a batch that got its time from the log: the worker knows
  a changed setting before the gateway does.
- The batches take at most BYTES_MAX bytes of memory, those that were packed PACKED_MAX_BYTES. Each
  counts ENTRY_BYTES more than it has: small ones may be many. The oldest go first.

Crash: readers get converted batches, which have the same records.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import NamedTuple

from netfront.kafka.apis.call import Services
from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import CODECS
from shm.messages.lane_messages import Assignment
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchHeader,
    read_header,
)

BYTES_MAX = 8 << 20
PACKED_MAX_BYTES = 8 << 20
PACKED_MIN_BYTES = 1 << 10
"""The least bytes of a packed batch that is kept: less is made again as fast."""
BATCH_MAX_BYTES = 1 << 20
ENTRY_BYTES = 800
"""Memory that a batch takes beside its bytes: its place and its identity."""
NONE = CODECS[0]
_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH, _LEADER_EPOCH_AT = struct.Struct(">i"), 12


class _Kept(NamedTuple):
    batch: bytes | bytearray
    codec: str
    identity: tuple[int, ...]


class TailCache:
    """See the module."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, int, int], _Kept] = OrderedDict()
        self.byte_count = 0
        self._packed: OrderedDict[tuple[bytes, int, int], _Kept] = OrderedDict()
        self.packed_byte_count = 0

    def add(self, route: Assignment, base_offset: int, sent: Readable, converted: Readable) -> None:
        """Keep a batch that was appended. `converted`: the batch of the log that it became."""
        if len(sent) > BATCH_MAX_BYTES or route.typed:
            return
        header, ours = layout.read_kafka_header(sent), read_header(converted)
        is_whole = (
            layout.length_at(sent, 0) + layout.LENGTH_FROM == len(sent)
            and header.record_count == ours.record_count
            and header.base_ms >= 0
            and (header.base_ms * 1000, header.max_ms * 1000)
            == (ours.first_timestamp_us, ours.max_timestamp_us)
            and route.settings.get("message.timestamp.type") != "LogAppendTime"
        )
        if not is_whole:
            return
        place = route.topic_id, route.partition, base_offset
        self._drop(place)
        codec = CODECS[header.attributes & layout.CODEC_MASK]
        self._kept[place] = _Kept(bytes(sent), codec, _identity(ours))
        self.byte_count += _memory_of(sent)
        while self.byte_count > BYTES_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, place: tuple[bytes, int, int]) -> None:
        known = self._kept.pop(place, None)
        if known is not None:
            self.byte_count -= _memory_of(known.batch)

    def add_packed(
        self, route: Assignment, header: BatchHeader, codec: str, made: bytes | bytearray
    ) -> None:
        """Keep a batch that was packed for a reader. Nobody changes it from now on.

        Unpacked ones are made as fast as they would be copied.
        """
        if codec == NONE or route.typed or not PACKED_MIN_BYTES <= len(made) <= BATCH_MAX_BYTES:
            return
        place = route.topic_id, route.partition, header.base_offset
        self._drop_packed(place)
        self._packed[place] = _Kept(made, codec, _packed_identity(header))
        self.packed_byte_count += _memory_of(made)
        while self.packed_byte_count > PACKED_MAX_BYTES:
            self._drop_packed(next(iter(self._packed)))

    def _drop_packed(self, place: tuple[bytes, int, int]) -> None:
        known = self._packed.pop(place, None)
        if known is not None:
            self.packed_byte_count -= _memory_of(known.batch)

    def find(
        self, route: Assignment, header: BatchHeader, codec: str, base_epoch: int = 0
    ) -> bytes | bytearray | None:
        """The batch of Kafka for a batch of the log; None: it has to be converted. `base_epoch`:
        Kafka's number of our leader epoch 0.
        """
        place = route.topic_id, route.partition, header.base_offset
        kept = self._packed.get(place)
        if kept is not None and (kept.codec, kept.identity) == (codec, _packed_identity(header)):
            return kept.batch
        kept = self._kept.get(place)
        if (
            kept is None
            or kept.codec != codec
            or kept.identity != _identity(header)
            or header.attributes & ATTRIBUTE_LOG_APPEND_TIME
        ):
            return None
        found = bytearray(kept.batch)
        _BASE_OFFSET.pack_into(found, 0, header.base_offset)
        _LEADER_EPOCH.pack_into(found, _LEADER_EPOCH_AT, base_epoch + header.leader_epoch)
        return found


def _memory_of(batch: Readable) -> int:
    return len(batch) + ENTRY_BYTES


def _identity(header: BatchHeader) -> tuple[int, ...]:
    return (
        header.body_crc32c, header.record_count, header.last_offset_delta, header.producer_id,
        header.producer_epoch, header.base_sequence, header.first_timestamp_us,
        header.max_timestamp_us,
    )  # fmt: skip


def _packed_identity(header: BatchHeader) -> tuple[int, ...]:
    """All that the head of a converted batch is made of, besides."""
    return (
        *_identity(header), header.leader_epoch, header.attributes, header.append_time_us,
    )  # fmt: skip


def tail_cache(services: Services) -> TailCache:
    """The cache of this gateway."""
    found: TailCache = services.state.setdefault("tail", TailCache())
    return found
