"""How much a batch takes once it is unpacked, known before anything is.

A compressed batch says of each buffer how long it will be; a reader allocates what it says. Who takes a batch in compares that with what it may be.

Owner: pure; the producer asks before it sends delayed records, the scheduler before it decodes them. `tailrace.structure` proves the rest.
"""

from __future__ import annotations

import struct

from tailrace.arrow_metadata import ArrowMetadataError, read_record_batch
from tailrace.batch_header import PREFIX_BYTES, BatchHeader, metadata_size_of
from tailrace.checksum import Readable

_I64 = struct.Struct("<q")


def unpacked_bytes(batch: Readable, header: BatchHeader) -> int:
    """What the whole batch (form proven) takes when it is not compressed, in bytes. Raises ArrowMetadataError."""
    metadata = read_record_batch(batch, PREFIX_BYTES)
    if not metadata.compressed:
        return header.batch_length
    body_start = PREFIX_BYTES + metadata_size_of(batch)
    total = body_start
    for offset, length in zip(metadata.buffers[::2], metadata.buffers[1::2], strict=True):
        if not length:
            continue
        if length < 8 or offset < 0 or body_start + offset + length > header.batch_length:
            raise ArrowMetadataError(f"a compressed buffer at {offset}+{length} that has no size, or lies outside the batch")
        unpacked = _I64.unpack_from(batch, body_start + offset)[0]
        if unpacked < -1:
            raise ArrowMetadataError(f"a compressed buffer that claims {unpacked} bytes")
        total += (length if unpacked == -1 else unpacked) + 7 & ~7
    return total
