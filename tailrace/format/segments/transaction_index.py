"""Transaction index of a segment: the aborted transactions that have batches in it.

A reader of committed records leaves their batches out. The idea is Kafka's `.txnindex` (KIP-98).
Here a transaction that spans several segments has an entry in the index of each. So a reader of a
segment needs that segment's index alone, and retention of one cannot uncover another.

Layout, little endian:

    header  magic u32 | version u32 | segment base u64
    entry   producer_id i64 | first_offset i64 | marker_offset i64 | producer_epoch i16 |
            reserved u16 | crc32c u32                                              (32 bytes)

A batch is aborted if its producer id and epoch are an entry's and its offset lies between
`first_offset` and `marker_offset`. Entries are in the order of their markers.

Owner: the flusher.

Invariants:
- A segment with a transactional batch has an index, perhaps without entries. A reader that finds
  such a batch and no intact index must not show it.
- An entry is written before the last stable offset passes its marker.
- The index is disposable: it follows from the headers of this segment and the next ones. It goes
  with its segment.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tailrace.format.crc32c import Readable, crc32c

TRANSACTION_INDEX_SUFFIX = ".txnindex"
TRANSACTION_INDEX_MAGIC = 0x58545254  # "TRTX"
TRANSACTION_INDEX_VERSION = 1
HEADER = struct.Struct("<IIQ")
ENTRY = struct.Struct("<qqqhHI")
_FIELDS = struct.Struct("<qqqhH")
_CRC = struct.Struct("<I")
_EPOCH_BITS, _OFFSET_BITS = 16, 64
_EPOCH_MASK, _OFFSET_MASK = (1 << _EPOCH_BITS) - 1, (1 << _OFFSET_BITS) - 1


class TransactionIndexDamagedError(Exception):
    """The file is not an intact transaction index of this segment."""


class AbortedTransaction(NamedTuple):
    """An aborted transaction. `first_offset`: of its first batch in the partition."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    marker_offset: int


def encode_header(segment_base: int) -> bytes:
    """The header of a transaction index."""
    return HEADER.pack(TRANSACTION_INDEX_MAGIC, TRANSACTION_INDEX_VERSION, segment_base)


def encode_entry(aborted: AbortedTransaction) -> bytes:
    """One entry with its checksum."""
    fields = _FIELDS.pack(
        aborted.producer_id,
        aborted.first_offset,
        aborted.marker_offset,
        aborted.producer_epoch,
        0,
    )
    return fields + _CRC.pack(crc32c(fields))


def decode_transaction_index(data: Readable, segment_base: int) -> list[AbortedTransaction]:
    """All entries. Raises TransactionIndexDamagedError unless the bytes are this segment's whole,
    intact index.
    """
    check_header(data, segment_base)
    return decode_entries(data[HEADER.size :])


def check_header(data: Readable, segment_base: int) -> None:
    """Raise TransactionIndexDamagedError unless the bytes begin with this segment's header."""
    if bytes(data[: HEADER.size]) != encode_header(segment_base):
        raise TransactionIndexDamagedError(
            f"the header is not that of the transaction index of segment {segment_base}"
        )


def decode_entries(data: Readable) -> list[AbortedTransaction]:
    """Entries one after the other. Raises TransactionIndexDamagedError."""
    if len(data) % ENTRY.size:
        raise TransactionIndexDamagedError(
            f"{len(data)} bytes are no whole number of transaction index entries"
        )
    entries = []
    for at in range(0, len(data), ENTRY.size):
        producer_id, first_offset, marker_offset, epoch, _, crc = ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _FIELDS.size]) != crc:
            raise TransactionIndexDamagedError(
                f"the transaction index entry at byte {at} does not match its checksum"
            )
        entries.append(AbortedTransaction(producer_id, epoch, first_offset, marker_offset))
    return entries


class AbortedBatches:
    """Look-up of aborted batches by the entries of one segment."""

    def __init__(self, entries: list[AbortedTransaction]) -> None:
        self._ranges: dict[int, int] = {}
        """Producer id and epoch as one number -> first and marker offset as one: a segment may have
        a million, and tuples take twice the memory.
        """
        self.add(entries)

    def add(self, entries: list[AbortedTransaction]) -> None:
        """Add entries that were appended to the index."""
        self._ranges.update(
            (
                entry.producer_id << _EPOCH_BITS | entry.producer_epoch & _EPOCH_MASK,
                entry.first_offset << _OFFSET_BITS | entry.marker_offset,
            )
            for entry in entries
        )

    def __len__(self) -> int:
        return len(self._ranges)

    def has(self, producer_id: int, producer_epoch: int, offset: int) -> bool:
        """True for a batch of an aborted transaction. Its marker is not one of its batches."""
        found = self._ranges.get(producer_id << _EPOCH_BITS | producer_epoch & _EPOCH_MASK)
        return found is not None and found >> _OFFSET_BITS <= offset < found & _OFFSET_MASK
