"""Exceptions of Tailrace: one subclass per error code that a user may want to catch, made from the one table of codes.

`.code` is the number's name, `.retriable` whether the same call may succeed later, `.advice` what to do, `.detail` what happened here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tailrace.protocol.errors import ERROR_TABLE, ErrorCode

if TYPE_CHECKING:
    from tailrace.records import TopicPartition


class TailraceError(Exception):
    """Anything Tailrace refuses or fails to do."""

    default_code: ClassVar[ErrorCode] = ErrorCode.INTERNAL_ERROR

    def __init__(self, detail: str = "", code: ErrorCode | None = None) -> None:
        self.code = self.default_code if code is None else code
        row = ERROR_TABLE[self.code]
        self.detail = detail or row.meaning.rstrip(".")
        self.retriable = row.retriable
        self.advice = row.advice
        super().__init__(detail, code)

    def __str__(self) -> str:
        detail = self.detail if self.detail.endswith((".", "!", "?")) else self.detail + "."
        return f"{detail} {self.advice} [{self.code.name}]"


class UnknownTopicError(TailraceError):
    default_code = ErrorCode.UNKNOWN_TOPIC


class PartitionOutOfRangeError(TailraceError):
    default_code = ErrorCode.PARTITION_OUT_OF_RANGE


class RecordTooLargeError(TailraceError):
    """Of a consumer: offsets `first_offset` to `next_offset - 1` of partition `key` would unpack to more than it takes."""

    default_code = ErrorCode.RECORD_TOO_LARGE
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class CorruptBatchError(TailraceError):
    """Offsets `first_offset` to `next_offset - 1` of partition `key` are damaged; `consumer.seek(error.key, error.next_offset)` goes on behind
    them.
    """

    default_code = ErrorCode.CORRUPT_BATCH
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class UnsupportedBatchError(TailraceError):
    default_code = ErrorCode.UNSUPPORTED_BATCH


class UnsafeBatchError(TailraceError):
    default_code = ErrorCode.UNSAFE_BATCH


class SchemaMismatchError(TailraceError):
    default_code = ErrorCode.SCHEMA_MISMATCH


class InvalidSchemaError(TailraceError):
    default_code = ErrorCode.INVALID_SCHEMA


class InvalidTopicNameError(TailraceError):
    default_code = ErrorCode.INVALID_TOPIC_NAME


class TopicExistsError(TailraceError):
    default_code = ErrorCode.TOPIC_EXISTS


class InvalidSettingError(TailraceError, ValueError):
    default_code = ErrorCode.INVALID_SETTING


class OffsetOutOfRangeError(TailraceError):
    default_code = ErrorCode.OFFSET_OUT_OF_RANGE


class OutOfOrderSequenceError(TailraceError):
    default_code = ErrorCode.OUT_OF_ORDER_SEQUENCE


class UnknownSequenceError(TailraceError):
    default_code = ErrorCode.UNKNOWN_SEQUENCE


class StaleProducerEpochError(TailraceError):
    default_code = ErrorCode.STALE_PRODUCER_EPOCH


class StorageError(TailraceError):
    default_code = ErrorCode.STORAGE_ERROR


class PartitionOfflineError(TailraceError):
    default_code = ErrorCode.PARTITION_OFFLINE


class DiskFullError(TailraceError):
    default_code = ErrorCode.DISK_FULL


class RequestTimeoutError(TailraceError, TimeoutError):
    default_code = ErrorCode.TIMED_OUT


class UnsupportedVersionError(TailraceError):
    default_code = ErrorCode.UNSUPPORTED_VERSION


class MalformedRequestError(TailraceError):
    default_code = ErrorCode.MALFORMED_REQUEST


class LogTruncatedError(TailraceError):
    """What was read from offset `offset` on was lost in a crash, and other records may have its offsets now."""

    default_code = ErrorCode.LOG_TRUNCATED
    offset: int | None = None


class NotSupportedError(TailraceError):
    default_code = ErrorCode.NOT_SUPPORTED


class DeliveryTimeoutError(TailraceError, TimeoutError):
    default_code = ErrorCode.DELIVERY_TIMEOUT


class BufferExhaustedError(TailraceError, BufferError):
    default_code = ErrorCode.BUFFER_EXHAUSTED


class NotReachableError(TailraceError, ConnectionError):
    default_code = ErrorCode.NOT_REACHABLE


class ClientClosedError(TailraceError):
    default_code = ErrorCode.CLIENT_CLOSED


class InvalidRecordError(TailraceError, TypeError):
    """Of a consumer whose deserializer failed: the record at `first_offset` of partition `key`; `consumer.seek(error.key, error.next_offset)` goes on
    behind it.
    """

    default_code = ErrorCode.INVALID_RECORD
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class InvalidRequestError(TailraceError):
    default_code = ErrorCode.INVALID_REQUEST


class DelayNotEnabledError(TailraceError):
    default_code = ErrorCode.DELAY_NOT_ENABLED


class UnknownDelayError(TailraceError):
    """A cancel or a reschedule came too late, or for nothing that was ever there."""

    default_code = ErrorCode.UNKNOWN_DELAY


_BY_CODE: dict[ErrorCode, type[TailraceError]] = {subclass.default_code: subclass for subclass in TailraceError.__subclasses__()}


def error_for(code: ErrorCode, detail: str = "") -> TailraceError:
    """The exception that stands for `code`; of the most fitting subclass."""
    return _BY_CODE.get(code, TailraceError)(detail, code)
