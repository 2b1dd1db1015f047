"""Stamps: fields of a batch header that producer, worker and log write into a batch in place.

Invariants: a changed header is sealed again: its checksum covers its fields (`seal_header`).
"""

from __future__ import annotations

import struct

from tailrace.format.crc32c import Readable, crc32c
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_TRANSACTIONAL,
    CONTINUATION,
    HEADER_BYTES,
    OFFSET_APPEND_TIME,
    OFFSET_ATTRIBUTES,
    OFFSET_BASE_OFFSET,
    OFFSET_DELAY_POSITION,
    OFFSET_DURABLE_OFFSET,
    OFFSET_HEADER_CRC,
    OFFSET_LEADER_EPOCH,
    OFFSET_MERGED_COUNT,
    OFFSET_MIN_TICK,
    OFFSET_PRODUCER,
    OFFSET_VERSION,
    PREFIX,
    PREFIX_BYTES,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchFormatError,
    BatchHeader,
    compute_header_crc,
    header_position,
    version_of,
)

_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")


def seal_header(batch: memoryview, position: int, extension_length: int, seed: int) -> None:
    """Write the header's checksum for the current fields."""
    _U32.pack_into(
        batch,
        position + OFFSET_HEADER_CRC,
        compute_header_crc(batch, position, extension_length, seed),
    )


def stamp_appended(
    batch: memoryview,
    position: int,
    header: BatchHeader,
    *,
    base_offset: int,
    append_time_us: int,
    leader_epoch: int,
    durable_offset: int,
    seed: int,
) -> None:
    """Set the fields that the worker writes when it appends a batch, and the header's checksum."""
    _I64.pack_into(batch, position + OFFSET_BASE_OFFSET, base_offset)
    _I64.pack_into(batch, position + OFFSET_APPEND_TIME, append_time_us)
    struct.pack_into("<i", batch, position + OFFSET_LEADER_EPOCH, leader_epoch)
    _I64.pack_into(batch, position + OFFSET_DURABLE_OFFSET, durable_offset)
    seal_header(batch, position, header.extension_length, seed)


def stamp_producer(
    batch: memoryview, *, producer_id: int, producer_epoch: int, base_sequence: int, seed: int
) -> None:
    """Set the producer's fields, when a batch is first sent or sent again under another epoch. The
    id says if the batch belongs to a transaction.
    """
    position = header_position(batch)
    attributes = _U32.unpack_from(batch, position + OFFSET_ATTRIBUTES)[0]
    stamped = attributes & ~ATTRIBUTE_TRANSACTIONAL | (
        ATTRIBUTE_TRANSACTIONAL if producer_id >= TRANSACTIONAL_PRODUCER_IDS else 0
    )
    if stamped != attributes:
        # The version first: a signal handler may interrupt in between, and the next call then
        # still sees attributes to change.
        _U16.pack_into(batch, position + OFFSET_VERSION, version_of(stamped))
        _U32.pack_into(batch, position + OFFSET_ATTRIBUTES, stamped)
    struct.pack_into(
        "<qih", batch, position + OFFSET_PRODUCER, producer_id, base_sequence, producer_epoch
    )
    seal_header(batch, position, _U32.unpack_from(batch, position + 112)[0], seed)


def stamp_required_end(batch: memoryview, end: int) -> None:
    """Require that the log ends at offset `end`. Seal the header afterwards (`stamp_producer`)."""
    _I64.pack_into(batch, header_position(batch) + OFFSET_DURABLE_OFFSET, end + 1)


def insert_header(message: Readable, header: BatchHeader, seed: int) -> bytearray:
    """Insert our header into the metadata padding of an Arrow IPC message of pyarrow.

    Copies the body once. Lengths and checksums are computed, all other fields come from `header`.
    """
    view = memoryview(message)
    continuation, metadata_size = PREFIX.unpack_from(view, 0)
    if continuation != CONTINUATION or metadata_size % 8:
        raise BatchFormatError("not an encapsulated Arrow message")
    body_start = PREFIX_BYTES + metadata_size
    prefix = PREFIX.pack(CONTINUATION, metadata_size + HEADER_BYTES)
    return fill_header(
        bytearray(b"").join(
            (prefix, view[PREFIX_BYTES:body_start], bytes(HEADER_BYTES), view[body_start:])
        ),
        header,
        seed,
    )


def fill_header(
    batch: bytearray, header: BatchHeader, seed: int, body_crc: int | None = None
) -> bytearray:
    """Write our header into the last HEADER_BYTES of an Arrow IPC message's metadata, and return
    it.

    `header` is as for `insert_header`. `body_crc` is the checksum of the rest, if known.
    """
    body_start = PREFIX_BYTES + PREFIX.unpack_from(batch, 0)[1]
    position = body_start - HEADER_BYTES
    header.batch_length = len(batch)
    header.extension_length = 0
    with memoryview(batch) as view:
        header.body_crc32c = (
            crc32c(view[body_start:], crc32c(view[:position])) if body_crc is None else body_crc
        )
        view[position:body_start] = header.to_bytes()
        seal_header(view, position, 0, seed)
    return batch


def stamp_min_tick(batch: memoryview, position: int, header: BatchHeader, min_tick: int) -> None:
    """Set the first open ordinal in a batch of a delay log. Call it before `stamp_appended`."""
    header.min_tick = min_tick
    _I64.pack_into(batch, position + OFFSET_MIN_TICK, min_tick)


def stamp_delay_owner(batch: memoryview, header: BatchHeader, owner: int, seed: int) -> None:
    """Name the owner of the records in a client's batch for a delay log."""
    position = header_position(batch)
    _I64.pack_into(batch, position + OFFSET_DELAY_POSITION, owner)
    seal_header(batch, position, header.extension_length, seed)


def stamp_merged(batch: memoryview, header: BatchHeader, seed: int) -> None:
    """Mark a batch that is copied as it was into a merged segment."""
    position = header_position(batch)
    _U32.pack_into(batch, position + OFFSET_MERGED_COUNT, 1)
    seal_header(batch, position, header.extension_length, seed)


def stamp_append_time(
    batch: memoryview, position: int, header: BatchHeader, append_time_us: int
) -> None:
    """Mark a batch of a topic with message.timestamp.type=LogAppendTime and set its times.

    Call it before `stamp_appended`.
    """
    header.attributes |= ATTRIBUTE_LOG_APPEND_TIME
    header.first_timestamp_us = header.max_timestamp_us = append_time_us
    _U32.pack_into(batch, position + OFFSET_ATTRIBUTES, header.attributes)
    struct.pack_into("<qq", batch, position + 32, append_time_us, append_time_us)
