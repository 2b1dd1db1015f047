"""Exceptions of Tailrace: one subclass per error code that a user may want to catch, made from the one table of codes.

`.code` is the number's name, `.retriable` whether the same call may succeed later, `.advice` what to do, `.detail` what happened here.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """There is no such topic; it may have been deleted."""

    default_code = ErrorCode.UNKNOWN_TOPIC


class PartitionOutOfRangeError(TailraceError):
    """The topic has no partition of this number."""

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
    """A batch of another format version, or with features that this version has not."""

    default_code = ErrorCode.UNSUPPORTED_BATCH


class UnsafeBatchError(TailraceError):
    """A batch whose metadata contradicts its bytes or its topic's schema: a reader could crash on it."""

    default_code = ErrorCode.UNSAFE_BATCH


class SchemaMismatchError(TailraceError):
    """Rows whose columns are not those of the topic's schema, or cannot be cast to them."""

    default_code = ErrorCode.SCHEMA_MISMATCH


class InvalidSchemaError(TailraceError):
    """A schema that no topic can have."""

    default_code = ErrorCode.INVALID_SCHEMA


class InvalidTopicNameError(TailraceError):
    """A name that no topic can have."""

    default_code = ErrorCode.INVALID_TOPIC_NAME


class TopicExistsError(TailraceError):
    """A topic of this name exists."""

    default_code = ErrorCode.TOPIC_EXISTS


class InvalidSettingError(TailraceError, ValueError):
    """A setting of a client, a topic or the appliance that is unknown or has a value that it does not take. A ValueError."""

    default_code = ErrorCode.INVALID_SETTING


class OffsetOutOfRangeError(TailraceError):
    """An offset outside the log: retention has removed it, or it was never there."""

    default_code = ErrorCode.OFFSET_OUT_OF_RANGE


class OutOfOrderSequenceError(TailraceError):
    """A producer's batch came before one that precedes it. The producer sends both again by itself."""

    default_code = ErrorCode.OUT_OF_ORDER_SEQUENCE


class UnknownSequenceError(TailraceError):
    """The partition does not know the producer any more. The producer takes a new epoch by itself."""

    default_code = ErrorCode.UNKNOWN_SEQUENCE


class StaleProducerEpochError(TailraceError):
    """Another producer has taken over this one's id."""

    default_code = ErrorCode.STALE_PRODUCER_EPOCH


class StorageError(TailraceError):
    """The disk failed to write or to read; whether the batch is stored is not known."""

    default_code = ErrorCode.STORAGE_ERROR


class PartitionOfflineError(TailraceError):
    """The partition takes no writes since its disk failed: see `Admin.bring_online`."""

    default_code = ErrorCode.PARTITION_OFFLINE


class DiskFullError(TailraceError):
    """The data directory has no space left; producers go on trying until delivery_timeout_ms."""

    default_code = ErrorCode.DISK_FULL


class RequestTimeoutError(TailraceError, TimeoutError):
    """No answer came in time; what was asked for may happen all the same. A TimeoutError."""

    default_code = ErrorCode.TIMED_OUT


class UnsupportedVersionError(TailraceError):
    """Client and appliance speak no common version of a request."""

    default_code = ErrorCode.UNSUPPORTED_VERSION


class MalformedRequestError(TailraceError):
    """What came was not of this protocol."""

    default_code = ErrorCode.MALFORMED_REQUEST


class LogTruncatedError(TailraceError):
    """What was read from offset `offset` on was lost in a crash, and other records may have its offsets now."""

    default_code = ErrorCode.LOG_TRUNCATED
    offset: int | None = None


class NotSupportedError(TailraceError):
    """Something that this version has not, or has not yet."""

    default_code = ErrorCode.NOT_SUPPORTED


class DeliveryTimeoutError(TailraceError, TimeoutError):
    """A record was not acknowledged within delivery_timeout_ms; it may be stored or not. A TimeoutError."""

    default_code = ErrorCode.DELIVERY_TIMEOUT


class BufferExhaustedError(TailraceError, BufferError):
    """buffer_memory stayed full for max_block_ms: records come faster than they are acknowledged. A BufferError."""

    default_code = ErrorCode.BUFFER_EXHAUSTED


class NotReachableError(TailraceError, ConnectionError):
    """No appliance answers at the address. A ConnectionError."""

    default_code = ErrorCode.NOT_REACHABLE


class ClientClosedError(TailraceError):
    """The client is closed, or belongs to the parent of this process."""

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
    """An argument, or a request, that makes no sense; the sentence says what to write."""

    default_code = ErrorCode.INVALID_REQUEST


class DelayNotEnabledError(TailraceError):
    """The topic takes no delayed records: delay.enabled is false."""

    default_code = ErrorCode.DELAY_NOT_ENABLED


class UnknownDelayError(TailraceError):
    """A cancel or a reschedule came too late, or for nothing that was ever there."""

    default_code = ErrorCode.UNKNOWN_DELAY


class InvalidGroupError(TailraceError):
    """A name that no group can have, or that a group of the other kind has."""

    default_code = ErrorCode.INVALID_GROUP


class UnknownGroupError(TailraceError):
    """There is no such group."""

    default_code = ErrorCode.UNKNOWN_GROUP


class GroupNotEmptyError(TailraceError):
    """The group has members, and what was asked for needs one that has none."""

    default_code = ErrorCode.GROUP_NOT_EMPTY


class GroupFullError(TailraceError):
    """The group has as many members as it may."""

    default_code = ErrorCode.GROUP_FULL


class UnknownMemberError(TailraceError):
    """The group does not know this consumer any more. The consumer joins again by itself."""

    default_code = ErrorCode.UNKNOWN_MEMBER


class FencedMemberError(TailraceError):
    """The consumer was removed from its group, or another one with its group_instance_id has taken its place."""

    default_code = ErrorCode.FENCED_MEMBER


class InstanceIdInUseError(TailraceError):
    """Another live consumer of the group has this group_instance_id."""

    default_code = ErrorCode.INSTANCE_ID_IN_USE


class CommitFailedError(TailraceError):
    """A commit came from a consumer that does not own the partition any more: what it read is read again by the consumer that does."""

    default_code = ErrorCode.PARTITION_NOT_OWNED


class UnsupportedAssignorError(TailraceError):
    """The appliance has no assignor of this name, or the group's consumers name different ones."""

    default_code = ErrorCode.UNSUPPORTED_ASSIGNOR


class LockLostError(TailraceError):
    """Records were acknowledged after their locks had timed out: other consumers may have them. `refused`: (topic, partition, first offset, last offset)."""

    default_code = ErrorCode.LOCK_LOST
    refused: Sequence[tuple[str, int, int, int]] = ()


_BY_CODE: dict[ErrorCode, type[TailraceError]] = {subclass.default_code: subclass for subclass in TailraceError.__subclasses__()}


COMMIT_ADVICE = "Give the offset of the next record to read: from 0 to the end of the log."


def error_for_offset(code: ErrorCode, detail: str = "") -> TailraceError:
    """`error_for` of an offset that was to be committed: nothing was read, so there is nowhere to seek to."""
    error = error_for(code, detail)
    if code is ErrorCode.OFFSET_OUT_OF_RANGE:
        error.advice = COMMIT_ADVICE
    return error


def error_for(code: ErrorCode, detail: str = "") -> TailraceError:
    """The exception that stands for `code`; of the most fitting subclass."""
    return _BY_CODE.get(code, TailraceError)(detail, code)
