"""Packed batches: batches of the log that keep to max.message.bytes only when they are compressed.

Kafka counts a batch as its producer has packed it. A batch of ours is counted as it is stored, and
is stored as it was converted, without compression. So a large record that packs well would be
refused here and be accepted by Kafka. Such a batch is compressed with zstd.

Owner: pure. pyarrow is imported with this module, which no other batch needs.

Invariants:
- The same records become the same batches.
- An unpacked batch has at most `unpacked_max(max_message_bytes)` bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from netfront.kafka.records.errors import MisfitError
from tailrace.batch.arrow_codec import decode_with_offsets, encode_as
from tailrace.format.record_batch.batch_validation import unpacked_max
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.kernel.reference_kafka import RecordFault

LEVELS = (3, 12)
"""The second one is for what its producer has packed with much time."""
SHRINKING = 4


def packed_batches(
    convert: Callable[[int], list[bytearray]],
    schema: pa.Schema | None,
    seed: int,
    max_message_bytes: int,
) -> list[bytearray] | None:
    """The batches of `convert(bytes_max)`, which are plain, with those that are larger than
    `max_message_bytes` compressed. `schema` is their topic's; None: the default one. None: some are
    too large, compressed too.
    """
    for level in LEVELS:
        codec = pa.Codec("zstd", compression_level=level)
        limit = unpacked_max(max_message_bytes)
        while limit > max_message_bytes:
            try:
                made = convert(limit)
            except (RecordFault, MisfitError):
                break  # one of its records is larger
            packed = [
                batch
                if len(batch) <= max_message_bytes
                else _packed(batch, schema or DEFAULT_SCHEMA, seed, codec)
                for batch in made
            ]
            if max(map(len, packed)) <= max_message_bytes:
                return packed
            limit //= SHRINKING
    return None


def _packed(batch: bytearray, schema: pa.Schema, seed: int, codec: pa.Codec) -> bytearray:
    header, rows, _ = decode_with_offsets(
        memoryview(batch), schema, seed, trust=True, unpacked_max_bytes=len(batch)
    )
    return encode_as(rows, header, seed, codec)
