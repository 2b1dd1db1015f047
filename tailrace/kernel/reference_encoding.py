"""A batch of a producer, from its records to the bytes that are sent, in Python: the truth that the compiled functions are held against.

Invariants: what is made is what `tailrace.formats.batch_header.fill_header` and `stamp_producer` make, byte for byte.
"""

from __future__ import annotations

from tailrace.kernel.reference import RecordBuffer


def encoded_batch(rows: RecordBuffer, schema_id: int, seed: int) -> bytearray:
    """Records of the default schema, one at least, as a batch, not compressed and without a producer's identity. `seed`: of the header's checksum."""
    from tailrace.formats.batch_header import HEADER_BYTES, BatchHeader, fill_header

    stamps_us = rows.stamps_us()
    if not len(stamps_us):
        raise ValueError("a batch has a record at least")
    header = BatchHeader(
        record_count=len(stamps_us), last_offset_delta=len(stamps_us) - 1, first_timestamp_us=int(stamps_us[0]), max_timestamp_us=int(max(stamps_us)),
        schema_id=schema_id,
    )  # fmt: skip
    return fill_header(rows.message(HEADER_BYTES), header, seed)


def stamp_batch(batch: bytearray, producer_id: int, producer_epoch: int, base_sequence: int, seed: int) -> None:
    """Write a producer's identity and a sequence into a batch that has a header, and the header's checksum."""
    from tailrace.formats.batch_header import stamp_producer

    with memoryview(batch) as view:
        stamp_producer(view, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence, seed=seed)
