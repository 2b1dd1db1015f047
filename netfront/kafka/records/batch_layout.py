"""The header of Kafka's record batches of magic 2, read and written.

    0            8         12             16     17    21          23                 27
    +------------+---------+--------------+------+-----+-----------+------------------+
    | base offset| length  | leader epoch | magic| crc | attributes| last offset delta|
    +------------+---------+--------------+------+-----+-----------+------------------+
    27              35             43            51         53              57        61
    +---------------+--------------+-------------+----------+---------------+---------+
    | base timestamp| max timestamp| producer id | its epoch| base sequence | records |
    +---------------+--------------+-------------+----------+---------------+---------+

All numbers are big endian. `length` counts the bytes from 12 on, `crc` is the CRC32C of those from
21 on.

Owner: pure.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tailrace.format.crc32c import Readable, crc32c

HEADER_BYTES = 61
LENGTH_FROM = 12
CRC_FROM = 21
MAGIC_AT = 16
MAGIC = 2

CODEC_MASK = 7
ATTRIBUTE_LOG_APPEND_TIME = 8
ATTRIBUTE_TRANSACTIONAL = 16
ATTRIBUTE_CONTROL = 32
KNOWN_ATTRIBUTES = 63
"""Those of a producer. 64, the delete horizon, is a broker's."""

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH = _EPOCH = struct.Struct(">i")
_CRC = struct.Struct(">I")
assert _HEADER.size == HEADER_BYTES


class KafkaHeader(NamedTuple):
    """The fields of a batch's header, in their order."""

    base_offset: int = 0
    length: int = 0
    leader_epoch: int = -1
    magic: int = MAGIC
    crc: int = 0
    attributes: int = 0
    last_offset_delta: int = 0
    base_ms: int = -1
    max_ms: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    record_count: int = 0


def read_kafka_header(data: Readable, start: int = 0) -> KafkaHeader:
    """The header at `start`, of which 61 bytes are there. Nothing is checked."""
    return KafkaHeader(*_HEADER.unpack_from(data, start))


def length_at(data: Readable, start: int) -> int:
    """The length of the batch at `start`, from byte 12 of it on. 12 bytes are there."""
    return int(_LENGTH.unpack_from(data, start + 8)[0])


def raise_epochs(batches: bytes | bytearray, base: int) -> bytearray:
    """Whole batches with `base` added to their leader epochs, which no checksum covers."""
    raised = batches if isinstance(batches, bytearray) else bytearray(batches)
    at = 0
    while at < len(raised):
        (epoch,) = _EPOCH.unpack_from(raised, at + LENGTH_FROM)
        _EPOCH.pack_into(raised, at + LENGTH_FROM, base + epoch)
        at += LENGTH_FROM + length_at(raised, at)
    return raised


def crc_of(batch: memoryview) -> int:
    """The checksum that a whole batch must have."""
    return crc32c(batch[CRC_FROM:])


def write_kafka_header(batch: bytearray, header: KafkaHeader) -> None:
    """Write the header of a whole batch into its first 61 bytes, with its length and checksum."""
    fields = header._replace(length=len(batch) - LENGTH_FROM, crc=0)
    _HEADER.pack_into(batch, 0, *fields)
    with memoryview(batch) as view:
        _CRC.pack_into(view, MAGIC_AT + 1, crc_of(view))
