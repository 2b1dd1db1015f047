"""Kafka's record batches of a producer become batches of a topic's log.

A batch of Kafka becomes one batch of ours, with its producer id, epoch, sequences and membership in
a transaction. It becomes several ones with consecutive sequences only where one would exceed
max.message.bytes, because an Arrow batch is not compressed as a whole. Where one record would, the
batch is compressed (`packed_batches`). The same bytes always become the same batches, so that a
repeated request is recognised.

Owner: pure.

Invariants:
- All batches of a call are converted, or none is.
- Nothing is taken from a batch before its checksum is verified.
- All unpacked records of a call have at most UNPACKED_MAX_BYTES, and a batch at most as many
  records as its bytes can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import (
    CODECS,
    CompressionError,
    TooLargeError,
    release,
    unpack,
)
from netfront.kafka.records.errors import KafkaError, KafkaRecordsError, MisfitError, error_of
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import (
    SEQUENCE_MODULUS,
    TRANSACTIONAL_PRODUCER_IDS,
)
from tailrace.format.record_batch.batch_validation import UNPACKED_MAX_BYTES, unpacked_max
from tailrace.kernel import batches_from_kafka
from tailrace.kernel.reference_kafka import (
    RECORD_MIN_BYTES,
    RECORDS_MAX_BYTES,
    Fault,
    RecordFault,
)

if TYPE_CHECKING:
    from netfront.kafka.records.typed import TypedRows


class ConvertedBatch(NamedTuple):
    """A batch for the log, as a producer of ours would send it."""

    data: bytearray
    """The whole batch: header with its checksum, no offsets yet."""
    record_count: int
    batch_index: int
    """The batch of Kafka, by its index in the request, that these records came in."""
    first_record: int
    """The index in that batch of the first record: above 0 in the later parts of a split one."""
    producer_id: int
    """-1: the producer is not idempotent, and has no epoch and no sequence (-1)."""
    producer_epoch: int
    base_sequence: int
    is_transactional: bool


def to_batches(
    records: Readable,
    *,
    seed: int,
    now_us: int,
    max_message_bytes: int,
    schema_id: int = 0,
    requires_key: bool = False,
    typed: TypedRows | None = None,
    codec_count: int = len(CODECS),
) -> list[ConvertedBatch]:
    """Convert the records of one partition of a Produce request: one or more batches of magic 2.

    `seed` is the partition's (`checksum_seed`), `max_message_bytes` and `schema_id` its topic's.
    `now_us` is the time of records without a timestamp (-1). With `requires_key` a null key is
    refused, for compacted topics. `typed` converts to the rows of a typed topic; None: the topic
    has the default schema. The client's version of Produce knows the first `codec_count` codecs;
    a batch of another one is refused.

    Raises KafkaRecordsError.
    """
    data = memoryview(records).cast("B")
    converted: list[ConvertedBatch] = []
    at = index = 0
    room = UNPACKED_MAX_BYTES if typed is None else unpacked_max(max_message_bytes)
    if not len(data):
        raise KafkaRecordsError(KafkaError.INVALID_RECORD, "there is no record batch to append")
    while at < len(data):
        header, batch = _next_batch(data, at, index, codec_count)
        try:
            packed = batch[layout.HEADER_BYTES :]
            unpacked = unpack(header.attributes & layout.CODEC_MASK, packed, room)
            room -= len(unpacked)
            if header.record_count > len(unpacked) // RECORD_MIN_BYTES:
                raise KafkaRecordsError(
                    KafkaError.CORRUPT_MESSAGE,
                    f"the batch claims {header.record_count} records in {len(unpacked)} bytes",
                    batch_index=index,
                )
            convert = partial(
                _convert, unpacked, header, now_us, schema_id, seed, requires_key, typed
            )
            try:
                made = convert(max_message_bytes)
            except (RecordFault, MisfitError) as fault:
                packed_too = None
                if _is_too_large(fault) and len(batch) <= max_message_bytes:
                    packed_too = _packed(convert, typed, seed, max_message_bytes)
                if packed_too is None:
                    raise
                made = packed_too
            if header.attributes & layout.CODEC_MASK:
                release(unpacked)
        except CompressionError as error:
            raise KafkaRecordsError(
                KafkaError.CORRUPT_MESSAGE, str(error), batch_index=index
            ) from None
        except TooLargeError as error:
            raise KafkaRecordsError(
                KafkaError.MESSAGE_TOO_LARGE, f"{error}; send smaller batches", batch_index=index
            ) from None
        except MisfitError as misfit:
            raise KafkaRecordsError(
                KafkaError.MESSAGE_TOO_LARGE if misfit.is_too_large else KafkaError.INVALID_RECORD,
                f"record {misfit.row} of the batch {misfit}",
                batch_index=index, record_index=misfit.row,
            ) from None  # fmt: skip
        except RecordFault as fault:
            raise error_of(fault, index) from None
        converted += _described(made, header, index)
        at += len(batch)
        index += 1
    return converted


def _convert(
    unpacked: Readable,
    header: layout.KafkaHeader,
    now_us: int,
    schema_id: int,
    seed: int,
    requires_key: bool,
    typed: TypedRows | None,
    bytes_max: int,
) -> list[bytearray]:
    """The unpacked records of a batch as batches of at most `bytes_max` bytes. Raises RecordFault,
    MisfitError.
    """
    made = batches_from_kafka(
        unpacked, header.record_count, header.base_ms, now_us, schema_id,
        header.producer_id, header.producer_epoch, header.base_sequence, seed,
        bytes_max if typed is None else RECORDS_MAX_BYTES, requires_key and typed is None,
    )  # fmt: skip
    if typed is None:
        return made
    (message,) = made
    return typed.batches_of(message, header, schema_id, seed, bytes_max, requires_key)


def _is_too_large(fault: RecordFault | MisfitError) -> bool:
    if isinstance(fault, MisfitError):
        return fault.is_too_large
    return fault.fault is Fault.RECORD_TOO_LARGE


def _packed(
    convert: Callable[[int], list[bytearray]],
    typed: TypedRows | None,
    seed: int,
    max_message_bytes: int,
) -> list[bytearray] | None:
    """The records as compressed batches; None: they are too large, compressed too."""
    from netfront.kafka.records.packed_batches import packed_batches  # imports pyarrow

    schema = None if typed is None else typed.schema
    return packed_batches(convert, schema, seed, max_message_bytes)


def _described(
    made: list[bytearray], header: layout.KafkaHeader, index: int
) -> list[ConvertedBatch]:
    described = []
    counts = _counts(made, header.record_count)
    first = 0
    for data, count in zip(made, counts, strict=True):
        sequence = -1
        if header.producer_id >= 0:
            sequence = (header.base_sequence + first) % SEQUENCE_MODULUS
        described.append(
            ConvertedBatch(
                data, count, index, first, header.producer_id, header.producer_epoch, sequence,
                bool(header.attributes & layout.ATTRIBUTE_TRANSACTIONAL),
            )
        )  # fmt: skip
        first += count
    return described


def _counts(made: list[bytearray], record_count: int) -> list[int]:
    if len(made) == 1:
        return [record_count]
    from tailrace.format.record_batch.batch_header import read_header

    return [read_header(data).record_count for data in made]


def _next_batch(
    data: memoryview, at: int, index: int, codec_count: int
) -> tuple[layout.KafkaHeader, memoryview]:
    """The header of the batch at `at`, and the whole batch. Raises KafkaRecordsError."""
    fault = _form_fault(data, at)
    if fault is None:
        batch = data[at : at + layout.LENGTH_FROM + layout.length_at(data, at)]
        header = layout.read_kafka_header(batch)
        if layout.crc_of(batch) != header.crc:
            fault = KafkaError.CORRUPT_MESSAGE, "the batch's checksum (CRC32C) does not match"
        else:
            fault = (
                _attribute_fault(header)
                or _codec_fault(header, codec_count)
                or _count_fault(header)
                or _producer_fault(header)
            )
        if fault is None:
            return header, batch
    raise KafkaRecordsError(*fault, batch_index=index)


_MaybeFault = tuple[KafkaError, str] | None


def _form_fault(data: memoryview, at: int) -> _MaybeFault:
    left = len(data) - at
    if left > layout.MAGIC_AT and data[at + layout.MAGIC_AT] != layout.MAGIC:
        magic = data[at + layout.MAGIC_AT]
        return KafkaError.INVALID_RECORD, (
            f"the batch has magic {magic}; only record batches of magic {layout.MAGIC} are "
            "accepted: use a client of Kafka 0.11 or later, with its message format"
        )
    if left < layout.HEADER_BYTES:
        return KafkaError.CORRUPT_MESSAGE, f"a batch is cut off after {left} bytes"
    length = layout.length_at(data, at)
    if not layout.HEADER_BYTES <= length + layout.LENGTH_FROM <= left:
        return KafkaError.CORRUPT_MESSAGE, (
            f"the batch claims {length} bytes behind its length; {left - layout.LENGTH_FROM} are "
            "left"
        )
    return None


def _attribute_fault(header: layout.KafkaHeader) -> _MaybeFault:
    attributes = header.attributes
    if attributes & layout.ATTRIBUTE_CONTROL:
        return KafkaError.INVALID_RECORD, (
            "the batch is a control batch; clients are not allowed to write control records"
        )
    if attributes & ~layout.KNOWN_ATTRIBUTES:
        return KafkaError.INVALID_RECORD, (
            f"the batch has unknown attributes 0x{attributes & 0xFFFF:04x}"
        )
    if attributes & layout.ATTRIBUTE_LOG_APPEND_TIME:
        return KafkaError.INVALID_TIMESTAMP, (
            "the batch has the timestamp type LogAppendTime, which only the broker sets; send "
            "CreateTime"
        )
    return None


def _codec_fault(header: layout.KafkaHeader, codec_count: int) -> _MaybeFault:
    codec = header.attributes & layout.CODEC_MASK
    if codec < codec_count:
        return None
    known = ", ".join(CODECS[:codec_count])
    if codec < len(CODECS):
        known += ", or a client with a later version of Produce"
    return KafkaError.UNSUPPORTED_COMPRESSION_TYPE, (
        f"compression {codec} is unknown to this version of Produce; use {known}"
    )


def _count_fault(header: layout.KafkaHeader) -> _MaybeFault:
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        return KafkaError.INVALID_RECORD, (
            f"the batch claims {header.record_count} records and a last offset delta of "
            f"{header.last_offset_delta}; the delta must be one less than the records"
        )
    return None


def _producer_fault(header: layout.KafkaHeader) -> _MaybeFault:
    is_transactional = bool(header.attributes & layout.ATTRIBUTE_TRANSACTIONAL)
    if header.producer_id < 0:
        if header.producer_id == -1 and not is_transactional:
            return None
        return KafkaError.INVALID_RECORD, (
            f"the batch has the producer id {header.producer_id}"
            + (" in a transaction" if is_transactional else "")
            + "; use one of InitProducerId"
        )
    if header.producer_epoch < 0 or header.base_sequence < 0:
        return KafkaError.INVALID_RECORD, (
            f"the batch of producer {header.producer_id} has epoch {header.producer_epoch} and "
            f"sequence {header.base_sequence}; both must be 0 or more"
        )
    has_transactional_id = header.producer_id >= TRANSACTIONAL_PRODUCER_IDS
    if is_transactional and not has_transactional_id:
        return KafkaError.INVALID_PRODUCER_ID_MAPPING, (
            f"producer id {header.producer_id} is not that of a transactional producer"
        )
    if has_transactional_id and not is_transactional:
        return KafkaError.INVALID_TXN_STATE, (
            f"the batch of the transactional producer {header.producer_id} is outside a transaction"
        )
    return None
