"""Errors of the conversion: the sentence, Kafka's error code, and the record that is at fault."""

from __future__ import annotations

from enum import IntEnum, unique

from tailrace.kernel.reference_kafka import Fault, RecordFault


@unique
class KafkaError(IntEnum):
    """The error codes of Kafka's protocol that a conversion ends with."""

    CORRUPT_MESSAGE = 2
    MESSAGE_TOO_LARGE = 10
    INVALID_TIMESTAMP = 32
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    KAFKA_STORAGE_ERROR = 56
    UNSUPPORTED_COMPRESSION_TYPE = 76
    INVALID_RECORD = 87


class KafkaRecordsError(ValueError):
    """Records that are refused, or that cannot be served.

    `code` is Kafka's error code. `batch_index` is the batch's index among those of a request, and
    `record_index` the record's in its batch (Kafka's `batch_index` of a record error); None: the
    fault is the batch's.
    """

    def __init__(
        self, code: int, sentence: str, *, batch_index: int = 0, record_index: int | None = None
    ) -> None:
        super().__init__(sentence)
        self.code = KafkaError(code)
        self.batch_index = batch_index
        self.record_index = record_index


class MisfitError(ValueError):
    """A record that cannot be a row of its topic. The sentence is a clause about the record."""

    def __init__(self, row: int, sentence: str, *, is_too_large: bool = False) -> None:
        super().__init__(sentence)
        self.row = row
        self.is_too_large = is_too_large


_FAULTS = {
    Fault.CUT_OFF: (KafkaError.CORRUPT_MESSAGE, "is longer than the bytes that are left"),
    Fault.VARINT_TOO_LONG: (KafkaError.CORRUPT_MESSAGE, "has a number of too many bytes"),
    Fault.NEGATIVE_LENGTH: (KafkaError.CORRUPT_MESSAGE, "has a length below -1"),
    Fault.BYTES_LEFT: (KafkaError.CORRUPT_MESSAGE, "has bytes behind its headers"),
    Fault.OFFSET_DELTA: (
        KafkaError.INVALID_RECORD,
        "has an offset delta that is not its place in the batch",
    ),
    Fault.TIMESTAMP: (
        KafkaError.INVALID_TIMESTAMP,
        "has a timestamp that microseconds of 64 bits cannot hold; send milliseconds since 1970",
    ),
    Fault.HEADER_COUNT: (
        KafkaError.CORRUPT_MESSAGE,
        "claims more headers than its bytes can hold",
    ),
    Fault.HEADER_NAME_NULL: (KafkaError.INVALID_RECORD, "has a header without a key"),
    Fault.HEADER_NAME_NOT_UTF8: (
        KafkaError.INVALID_RECORD,
        "has a header whose key is not UTF-8; header keys are text",
    ),
    Fault.KEY_MISSING: (
        KafkaError.INVALID_RECORD,
        "has no key, which a topic with cleanup.policy=compact requires",
    ),
    Fault.RECORD_TOO_LARGE: (
        KafkaError.MESSAGE_TOO_LARGE,
        "is too large for max.message.bytes of the topic",
    ),
    Fault.RECORDS_LEFT: (
        KafkaError.CORRUPT_MESSAGE,
        "is followed by bytes that the batch's count does not name",
    ),
    Fault.COLUMNS: (KafkaError.KAFKA_STORAGE_ERROR, "has columns that contradict themselves"),
}


def error_of(fault: RecordFault, batch_index: int = 0) -> KafkaRecordsError:
    """The error for a fault that the kernel found."""
    code, clause = _FAULTS[fault.fault]
    index = fault.row if fault.fault is not Fault.RECORDS_LEFT else fault.row - 1
    return KafkaRecordsError(
        code, f"record {index} of the batch {clause}", batch_index=batch_index, record_index=index
    )
