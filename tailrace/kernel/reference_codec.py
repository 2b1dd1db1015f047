"""Python reference of the kernel's codec steps, which the compiled kernel does in one call.

Some functions here only decline (return None or 0). The caller then uses the general way: the
worker's append, the front's decoders, Arrow's decoder.

Invariants:
- Encoded batches equal those of `fill_header` and `stamp_producer` of
  `tailrace.format.record_batch.batch_header`, byte for byte.
- A declined batch has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.format.crc32c import Readable
from tailrace.kernel.reference import RecordBuffer

if TYPE_CHECKING:
    from tailrace.format.record_batch.arrow_metadata import SchemaLayout

PlainProduce = tuple[int, int, int, int, list[tuple[bytes, int, int, int]], list[Readable], int]
"""(version, correlation id, acks, timeout in ms, entries as in `ProduceBatches`, batches as of
`cut_batches`, bytes of the batches' frames).
"""


def read_produce(frames: list[Any]) -> PlainProduce | None:
    """Decode a well-formed PRODUCE request of version 2 or 3, without a trace id, from frames.

    Frames with batches may be views. None for other requests and for invalid ones, whose errors the
    decoders report.
    """
    return None


def encoded_batch(rows: RecordBuffer, schema_id: int, seed: int) -> bytearray:
    """Encode one or more records of the default schema as an uncompressed batch.

    It has no producer id yet. `seed` is that of the header's checksum.
    """
    from tailrace.format.record_batch.batch_header import HEADER_BYTES, BatchHeader
    from tailrace.format.record_batch.header_stamps import fill_header

    stamps_us = rows.stamps_us()
    if not len(stamps_us):
        raise ValueError("the batch has no records; it needs at least one")
    header = BatchHeader(
        record_count=len(stamps_us), last_offset_delta=len(stamps_us) - 1,
        first_timestamp_us=int(stamps_us[0]), max_timestamp_us=int(max(stamps_us)),
        schema_id=schema_id,
    )  # fmt: skip
    return fill_header(rows.message(HEADER_BYTES), header, seed)


def stamp_batch(
    batch: bytearray, producer_id: int, producer_epoch: int, base_sequence: int, seed: int
) -> None:
    """Write producer id, epoch and sequence into a batch with a
    header, and the header's checksum.
    """
    from tailrace.format.record_batch.header_stamps import stamp_producer

    with memoryview(batch) as view:
        stamp_producer(
            view,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            seed=seed,
        )


class BatchShape:
    """The properties of a schema for the structural check."""

    def __init__(self, layout: SchemaLayout) -> None:
        self.layout = layout


def is_valid_batch(batch: Readable, seed: int, shape: BatchShape, max_message_bytes: int) -> bool:
    """True if a client's batch passes both checksums and the structural check.

    The compiled function may also return False for rare valid forms (with an extension, above 64
    MiB). Then `verify_batch` and `validate_batch` decide and report the error.
    """
    from tailrace.format.record_batch.batch_header import BatchFormatError, verify_batch
    from tailrace.format.record_batch.batch_validation import UnsafeBatchError, validate_batch

    try:
        header = verify_batch(memoryview(batch), seed)
        validate_batch(batch, header, shape.layout, max_message_bytes=max_message_bytes)
    except (BatchFormatError, UnsafeBatchError):
        return False
    return True


class FastPathPartition:
    """The state of a worker's partition that each batch needs."""

    next_offset: int
    leader_epoch: int
    last_append_us: int
    max_message_bytes: int
    slot_map_version: int
    log_append_time: bool
    seed: int

    def _note(
        self, shape: BatchShape, schema_id: int, data_dir: int, has_special_rules: bool
    ) -> None:
        """Set the values of the assignment.

        `has_special_rules` is true for a delay log, whose batches all take the general way.
        """


def fast_append(
    ring: Any, lane: Any, source: int, produce_kind: int, count_max: int,
    partitions: dict[int, Any], tables: list[Any], now_us: int,
    expiration_us: int, older_bytes: int, registered: dict[int, int] | None,
) -> tuple[int, int, bool, tuple[int, int, int, int] | None]:  # fmt: skip
    """Append up to `count_max` batches from a lane, ending at the first that needs the general way.

    `produce_kind` is the kind of messages with batches. `tables` has the partition table of each
    data directory, None if it accepts nothing now. Producers without an append for `expiration_us`
    are forgotten. `older_bytes` of a producer's state are kept behind its newest batch.
    `registered` are the transactional producers (`workers.append.transactional_producers`), None
    before they are fed: of a transaction, only batches are taken whose epoch is registered. The one
    that opens a transaction in its partition is the last of a call, and the caller notes that.

    Returns (batches, their bytes, whether fronts reply to one as soon as it is published, the
    opened transaction: slot, producer id, epoch, first offset).
    """
    return 0, 0, False, None


def fetched_rows(
    batch: memoryview,
    seed: int,
    shape: BatchShape,
    record_type: type[Any],
    topic: str,
    partition: int,
    position: int,
) -> tuple[Any, int, int] | None:
    """(RecordRows, next offset, leader epoch) of one whole batch of an untyped topic.

    Rows begin at `position`, or at the first one if it is negative. `batch` must not change while
    the rows are used. `shape` is that of the default schema. None if no rows are left or the batch
    needs the general decoder.
    """
    return None
