"""Batch header: the broker's header inside a record batch, read and written without an Arrow
library.

A batch is one Arrow IPC encapsulated message whose metadata padding contains this header. So a file
of batches is an Arrow IPC stream:

    0          4              8            M - 136 - ext   M - 136       M = 8 + metadata_size
    +----------+--------------+------------+---------------+-------------+----------------------+
    |0xFFFFFFFF| metadata_size| flatbuffer |   extension   | HEADER 136 B| body (Arrow buffers) |
    |          |              | and padding|               |             | up to batch_length   |
    +----------+--------------+------------+---------------+-------------+----------------------+
    |<------------ body_crc32c ----------->|<------ header_crc32c ------>|<--- body_crc32c ---->|

Owner: the producer writes every field once. The worker that appends the batch rewrites
`base_offset`, `append_time_us`, `leader_epoch`, `durable_offset` and the header's checksum. The
body and its checksum never change. Until then `durable_offset` is 0, or the offset at which the log
must end for the batch to be appended, plus one (`required_end`).

Invariants:
- 8 + metadata_size is a multiple of 8, and HEADER_BYTES + extension_length <= metadata_size.
- record_count == last_offset_delta + 1 for data batches that are not sparse, record_count >= 1.
- 0 <= record_count <= last_offset_delta + 1 for sparse batches, which are of no transaction and of
  no producer. Their rows carry their offsets (`tailrace.format.record_batch.sparse_batch`).
- record_count == 0 and last_offset_delta == 0 for control batches.
- header_crc32c is seeded with topic id and partition, so a batch in the wrong file is detected.

Layout: `_FIELDS` below, little endian, every field at a multiple of its size. The last fields are
`header_length, version, magic`, so the header is found from its end. All fields are reserved now,
also those for later versions. A change of layout is a new `version`.

Version 2 has the layout of version 1 and marks what belongs to a transaction: batches of a
transactional producer, and the marker that ends it. A build that knows version 1 alone refuses
them, instead of showing records that were aborted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tailrace.format.crc32c import Readable, crc32c

BATCH_MAGIC = 0x31425254  # "TRB1" in the file
BATCH_VERSION = 1
TRANSACTIONAL_BATCH_VERSION = 2
"""The version of each batch with ATTRIBUTE_TRANSACTIONAL, and of no other."""
SPARSE_BATCH_VERSION = 3
"""The version of each batch with ATTRIBUTE_SPARSE, and of no other."""
NEWEST_BATCH_VERSION = SPARSE_BATCH_VERSION
HEADER_BYTES = 136
EXTENSION_MAX_BYTES = 4096
METADATA_MAX_BYTES = 1 << 20
PREFIX_BYTES = 8
CONTINUATION = 0xFFFFFFFF
END_OF_STREAM = struct.pack("<II", CONTINUATION, 0)

ATTRIBUTE_TRANSACTIONAL = 1
ATTRIBUTE_CONTROL = 2
ATTRIBUTE_DELAYED = 4
ATTRIBUTE_SPARSE = 8
ATTRIBUTE_LOG_APPEND_TIME = 16
ATTRIBUTE_COMPRESSED = 32
KNOWN_ATTRIBUTES = 63
_MARKER = ATTRIBUTE_TRANSACTIONAL | ATTRIBUTE_CONTROL

CONTROL_DELAY_MARK = 0
"""The type of a delay log's control batch: ordinals below its `min_tick` are closed. A reader
ignores unknown types.
"""
CONTROL_COMMIT = 1
CONTROL_ABORT = 2
"""The types of a transaction's marker, which ends the transaction of its (producer_id,
producer_epoch) in the partition. It has ATTRIBUTE_TRANSACTIONAL and ATTRIBUTE_CONTROL.
"""

REMEMBERED_BATCHES = 16
"""Batches of a producer that a partition's worker remembers. A producer may have at most this many
sequences without a known outcome.
"""
REMEMBERED_BATCHES_ONCE = 5
"""The same for an appliance that supports only version 1 of PRODUCE."""
_TICK_US, _TICK_MASK = 1_000, (1 << 44) - 1
"""Copies from `tailrace.core.schedule.delays`, which is not imported here: it costs import time."""
NO_PRODUCER = -1
NO_SEQUENCE = -1
SEQUENCE_MODULUS = 1 << 31
TRANSACTIONAL_PRODUCER_IDS = 1 << 62
"""The first id of transactional producers. A batch is transactional if and only if its producer id
is not below.
"""

#       crc attr body length | base  delta count | first max append | producer sequence epoch _
#                                    leader schema
_FIELDS = struct.Struct("<IIIIqIIqqqqihHiIqqqqIIQHHI")
PREFIX = struct.Struct("<II")
TAIL = struct.Struct("<HHI")
_SEED = struct.Struct("<16si")
_U32 = struct.Struct("<I")
assert _FIELDS.size == HEADER_BYTES

# Offsets, from the header's first byte, of the fields that the broker rewrites.
OFFSET_HEADER_CRC = 0
OFFSET_ATTRIBUTES = 4
OFFSET_BASE_OFFSET = 16
OFFSET_RECORD_COUNT = 28
OFFSET_APPEND_TIME = 48
OFFSET_PRODUCER = 56
OFFSET_LEADER_EPOCH = 72
OFFSET_SCHEMA_ID = 76
OFFSET_DURABLE_OFFSET = 80
OFFSET_DELAY_POSITION = 96
OFFSET_MIN_TICK = 104
OFFSET_MERGED_COUNT = 116
OFFSET_VERSION = 130


class BatchFormatError(ValueError):
    """The bytes are not a batch of this version. `reason` is the failed check."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BatchChecksumError(BatchFormatError):
    """The bytes have the form of a batch, but a checksum does not match."""


@dataclass(slots=True)
class BatchHeader:
    """The fields of a batch header.

    Times are microseconds since 1970 UTC, and offsets are record numbers. In signed fields -1 means
    "none".
    """

    attributes: int = 0
    body_crc32c: int = 0
    batch_length: int = 0
    base_offset: int = 0
    last_offset_delta: int = 0
    record_count: int = 0
    first_timestamp_us: int = 0
    max_timestamp_us: int = 0
    append_time_us: int = -1
    producer_id: int = NO_PRODUCER
    base_sequence: int = NO_SEQUENCE
    producer_epoch: int = -1
    leader_epoch: int = -1
    schema_id: int = 0
    durable_offset: int = 0
    due_us: int = -1
    """In a delay log: the scheduler's number to recognize its own batch. In a delivered batch: see
    `previous_position`.
    """
    delay_position: int = -1
    """In a delivered batch: the offset of its last row in the delay log. In a delay log: the number
    of the user who owns the rows, or the rows that they change. -1, 0: none does.
    """
    min_tick: int = -1
    """In a delay log: the first ordinal (`tailrace.core.schedule.delays`) that was open at the
    append. In a delivered batch: the last row's ordinal.
    """
    extension_length: int = 0
    header_crc32c: int = 0
    control_type: int = 0
    """The type of a control batch (CONTROL_DELAY_MARK); 0 in other batches."""
    merged_count: int = 0
    """In a segment whose small batches were merged: the number of batches that this one stands for,
    1 for one that is as it was. 0 in all other segments.
    """
    previous_position: int = 0
    """In a delivered batch: the offset, in the delay log, of the row delivered before its first
    one. `due_us` is that row's ordinal. 0, 0: there was none.
    """

    @property
    def last_offset(self) -> int:
        """The offset of the last record, possibly removed by compaction."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The offset after the batch, where the next one begins."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def required_end(self) -> int | None:
        """The offset at which the log must end for a producer's batch to be appended, or None."""
        return self.durable_offset - 1 if self.durable_offset else None

    @property
    def is_control(self) -> bool:
        """True for a batch without records that users never receive."""
        return bool(self.attributes & ATTRIBUTE_CONTROL)

    @property
    def is_sparse(self) -> bool:
        """True for a batch whose rows carry their offsets, which have gaps."""
        return bool(self.attributes & ATTRIBUTE_SPARSE)

    @property
    def is_transactional(self) -> bool:
        """True for a batch of a transaction, and for the marker that ends one."""
        return bool(self.attributes & ATTRIBUTE_TRANSACTIONAL)

    @property
    def is_marker(self) -> bool:
        """True for the marker that commits or aborts a transaction: see CONTROL_COMMIT."""
        return self.attributes & _MARKER == _MARKER

    @property
    def is_delay_mark(self) -> bool:
        """True for a delay log's mark: see CONTROL_DELAY_MARK."""
        return self.attributes & _MARKER == ATTRIBUTE_CONTROL and (
            self.control_type == CONTROL_DELAY_MARK
        )

    def has_one_time(self, *, is_typed: bool) -> bool:
        """True if `max_timestamp_us` is the time of every record, regardless of columns.

        This holds with LogAppendTime. It also holds in a typed topic, whose columns are the
        producer's, for occurrences of a recurring record: a batch has those of one tick. A sparse
        batch of the default schema has rows of several batches, with their times in the column.
        """
        if self.attributes & ATTRIBUTE_LOG_APPEND_TIME:
            return is_typed or not self.attributes & ATTRIBUTE_SPARSE
        is_of_one_tick = (
            self.first_timestamp_us
            == self.max_timestamp_us
            == (self.min_tick & _TICK_MASK) * _TICK_US
        )
        return is_typed and bool(self.attributes & ATTRIBUTE_DELAYED) and is_of_one_tick

    def to_bytes(self) -> bytes:
        """The 136 bytes, with `header_crc32c` as it stands (see `seal_header`)."""
        return _FIELDS.pack(
            self.header_crc32c, self.attributes, self.body_crc32c, self.batch_length,
            self.base_offset, self.last_offset_delta,
            self.record_count, self.first_timestamp_us, self.max_timestamp_us, self.append_time_us,
            self.producer_id,
            self.base_sequence, self.producer_epoch, self.control_type, self.leader_epoch,
            self.schema_id, self.durable_offset,
            self.due_us, self.delay_position, self.min_tick, self.extension_length,
            self.merged_count, self.previous_position,
            HEADER_BYTES, version_of(self.attributes), BATCH_MAGIC,
        )  # fmt: skip


def version_of(attributes: int) -> int:
    """The header version of a batch with these attributes."""
    if attributes & ATTRIBUTE_SPARSE:
        return SPARSE_BATCH_VERSION
    return TRANSACTIONAL_BATCH_VERSION if attributes & ATTRIBUTE_TRANSACTIONAL else BATCH_VERSION


def checksum_seed(topic_id: bytes, partition: int) -> int:
    """The seed of a partition's header checksums: CRC32C of the
    16-byte topic id and the partition.
    """
    return crc32c(_SEED.pack(topic_id, partition))


def metadata_size_of(data: Readable, start: int = 0) -> int:
    """The metadata size of the message at `start`, 0 for the end-of-stream mark. Needs 8 bytes.

    Raises BatchFormatError.
    """
    continuation, metadata_size = PREFIX.unpack_from(data, start)
    if continuation != CONTINUATION:
        raise BatchFormatError(
            "there is no Arrow message here (the continuation mark 0xFFFFFFFF is missing)"
        )
    if metadata_size == 0:
        return 0
    if metadata_size % 8 or not HEADER_BYTES <= metadata_size <= METADATA_MAX_BYTES:
        raise BatchFormatError(f"metadata size {metadata_size} is not that of a batch")
    return int(metadata_size)


def read_header(data: Readable, start: int = 0) -> BatchHeader:
    """Parse the header of the batch at `start`, which must be in `data` up to its body.

    Checks form, not checksums. Raises BatchFormatError.
    """
    if len(data) - start < PREFIX_BYTES:
        raise BatchFormatError("the bytes are shorter than a message prefix")
    metadata_size = metadata_size_of(data, start)
    if metadata_size == 0:
        raise BatchFormatError("this is an end-of-stream mark, not a batch")
    position = start + PREFIX_BYTES + metadata_size - HEADER_BYTES
    if position + HEADER_BYTES > len(data):
        raise BatchFormatError("the batch is cut off inside its metadata")
    return header_at(data, position, metadata_size)


def header_at(data: Readable, position: int, metadata_size: int) -> BatchHeader:
    """Parse the header at `position`.

    Raises BatchFormatError for another magic, version or length, and for contradictory sizes.
    """
    (
        header_crc, attributes, body_crc, batch_length, base_offset, last_offset_delta,
        record_count, first_timestamp, max_timestamp,
        append_time, producer_id, base_sequence, producer_epoch, control_type, leader_epoch,
        schema_id, durable_offset, due, delay_position,
        min_tick, extension_length, merged_count, previous_position, header_length, version, magic,
    ) = _FIELDS.unpack_from(data, position)  # fmt: skip
    if magic != BATCH_MAGIC:
        raise BatchFormatError(f"batch magic is 0x{magic:08x}; expected 0x{BATCH_MAGIC:08x}")
    if not BATCH_VERSION <= version <= NEWEST_BATCH_VERSION:
        raise BatchFormatError(
            f"batch version is {version}; this build reads {BATCH_VERSION} to "
            f"{NEWEST_BATCH_VERSION}"
        )
    if header_length != HEADER_BYTES:
        raise BatchFormatError(
            f"header length is {header_length}; version {version} has {HEADER_BYTES}"
        )
    if extension_length > EXTENSION_MAX_BYTES or extension_length + HEADER_BYTES > metadata_size:
        raise BatchFormatError(f"extension length {extension_length} does not fit the metadata")
    if batch_length < PREFIX_BYTES + metadata_size or batch_length % 8:
        raise BatchFormatError(
            f"batch length {batch_length} contradicts a metadata size of {metadata_size}"
        )
    if attributes & ~KNOWN_ATTRIBUTES:
        raise BatchFormatError(f"unknown attribute bits 0x{attributes & ~KNOWN_ATTRIBUTES:x}")
    if version != version_of(attributes):
        raise BatchFormatError(
            f"batch version {version} contradicts attributes 0x{attributes:x}: version "
            f"{TRANSACTIONAL_BATCH_VERSION} is that of transactions, {SPARSE_BATCH_VERSION} that "
            "of sparse batches"
        )
    if base_offset < 0 or last_offset_delta >= SEQUENCE_MODULUS:
        raise BatchFormatError("the base offset or the last offset delta is out of range")
    if attributes & ATTRIBUTE_SPARSE:
        if attributes & _MARKER or producer_id != NO_PRODUCER:
            raise BatchFormatError(
                f"a sparse batch has attributes 0x{attributes:x} and producer {producer_id}; it "
                "belongs to no transaction and to no producer"
            )
        if record_count > last_offset_delta + 1:
            raise BatchFormatError(
                f"{record_count} records do not fit {last_offset_delta + 1} offsets"
            )
    elif attributes & ATTRIBUTE_CONTROL:
        if record_count or last_offset_delta:
            raise BatchFormatError("a control batch has rows or more than one offset")
    elif record_count == 0 or record_count - 1 > last_offset_delta:
        raise BatchFormatError(f"{record_count} records do not fit {last_offset_delta + 1} offsets")
    elif record_count - 1 != last_offset_delta:
        raise BatchFormatError("the offsets have gaps, and the batch is not marked sparse")
    return BatchHeader(
        attributes, body_crc, batch_length, base_offset, last_offset_delta, record_count,
        first_timestamp, max_timestamp, append_time,
        producer_id, base_sequence, producer_epoch, leader_epoch, schema_id, durable_offset, due,
        delay_position, min_tick,
        extension_length, header_crc, control_type, merged_count, previous_position,
    )  # fmt: skip


def header_position(data: Readable, start: int = 0) -> int:
    """The position in `data` of the header of the checked batch at `start`."""
    return start + int(_U32.unpack_from(data, start + 4)[0]) + PREFIX_BYTES - HEADER_BYTES


def compute_header_crc(data: memoryview, position: int, extension_length: int, seed: int) -> int:
    """The checksum of a header: its extension, then every header byte after the checksum field."""
    if extension_length:
        seed = crc32c(data[position - extension_length : position], seed)
    return crc32c(data[position + 4 : position + HEADER_BYTES], seed)


def compute_body_crc(batch: memoryview, position: int, extension_length: int) -> int:
    """The checksum of `batch` without extension and header. `position` is the header's."""
    return crc32c(batch[position + HEADER_BYTES :], crc32c(batch[: position - extension_length]))


def verify_batch(batch: memoryview, seed: int) -> BatchHeader:
    """Parse the header of exactly one whole batch, with form and both checksums verified.

    Raises BatchFormatError, BatchChecksumError.
    """
    header = read_header(batch)
    if header.batch_length != len(batch):
        raise BatchFormatError(
            f"the batch has {len(batch)} bytes; its header says {header.batch_length}"
        )
    position = header_position(batch)
    if compute_header_crc(batch, position, header.extension_length, seed) != header.header_crc32c:
        raise BatchChecksumError(
            "header checksum does not match (damaged, or a batch of another topic or partition)"
        )
    if compute_body_crc(batch, position, header.extension_length) != header.body_crc32c:
        raise BatchChecksumError("body checksum does not match")
    return header
