"""Record batches as kafka-python makes them."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():  # it reads its message definitions in a way that is deprecated
    warnings.simplefilter("ignore")
    from kafka.record.default_records import DefaultRecordBatchBuilder

BASE_MS = 1_700_000_000_000


def kafka_batch(
    *values: bytes,
    producer: tuple[int, int, int] = (-1, -1, -1),
    codec: int = 0,
    is_transactional: bool = False,
) -> bytes:
    """A batch of these values; `producer`: id, epoch and base sequence."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=is_transactional,
        producer_id=producer[0], producer_epoch=producer[1], base_sequence=producer[2],
        batch_size=1 << 30,
    )  # fmt: skip
    for offset, value in enumerate(values):
        builder.append(offset, BASE_MS + offset, b"k", value, [("h", b"1")])
    return bytes(builder.build())
