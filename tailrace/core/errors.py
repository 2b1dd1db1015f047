"""The exceptions of Tailrace: one subclass per error code that a user may want to catch.

Codes, meanings and advice come from `tailrace.core.error_codes`. `code` is the error code,
`retriable` is true if the same call may succeed later, `advice` says what to do, and `detail` what
happened in this case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.topic_partition import TopicPartition


class TailraceError(Exception):
    """Base class of all errors that Tailrace raises."""

    default_code: ClassVar[ErrorCode] = ErrorCode.INTERNAL_ERROR

    def __init__(self, detail: str = "", code: ErrorCode | None = None) -> None:
        self.code = self.default_code if code is None else code
        row = ERROR_TABLE[self.code]
        self.detail = detail or row.meaning.rstrip(".")
        self.retriable = row.retriable
        self.advice = row.advice
        self.request_id = ""
        """Id of the request that the appliance refused, as its log names it (`request=`)."""
        super().__init__(detail, code)

    def __str__(self) -> str:
        detail = self.detail if self.detail.endswith((".", "!", "?")) else self.detail + "."
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{detail} {self.advice} [{self.code.name}{request}]"


class UnknownTopicError(TailraceError):
    """The topic does not exist, or was deleted."""

    default_code = ErrorCode.UNKNOWN_TOPIC


class UnknownTopicIdError(UnknownTopicError):
    """The topic that was meant was deleted, and another one may have its name now: offsets of the
    old one say nothing of the new one.
    """

    default_code = ErrorCode.UNKNOWN_TOPIC_ID


class PartitionOutOfRangeError(TailraceError):
    default_code = ErrorCode.PARTITION_OUT_OF_RANGE


class RecordTooLargeError(TailraceError):
    """A record or batch is larger than its limit.

    In a consumer, offsets `first_offset` to `next_offset - 1` of partition `key` exceed the limit
    after decompression.
    """

    default_code = ErrorCode.RECORD_TOO_LARGE
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class CorruptBatchError(TailraceError):
    """Offsets `first_offset` to `next_offset - 1` of partition `key` are damaged.

    Skip them with `consumer.seek(error.key, error.next_offset)`.
    """

    default_code = ErrorCode.CORRUPT_BATCH
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class UnsupportedBatchError(TailraceError):
    """The batch has another format version, or features that this version lacks."""

    default_code = ErrorCode.UNSUPPORTED_BATCH
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class UnsafeBatchError(TailraceError):
    """The batch's metadata contradicts its bytes or its topic's schema. Reading it could crash a
    reader.
    """

    default_code = ErrorCode.UNSAFE_BATCH


class SchemaMismatchError(TailraceError):
    """The columns of the rows differ from the topic's schema and cannot be cast to it."""

    default_code = ErrorCode.SCHEMA_MISMATCH


class InvalidSchemaError(TailraceError):
    """The schema cannot be a topic's schema."""

    default_code = ErrorCode.INVALID_SCHEMA


class InvalidTopicNameError(TailraceError):
    """The name cannot be a topic's name."""

    default_code = ErrorCode.INVALID_TOPIC_NAME


class TopicExistsError(TailraceError):
    """A topic of this name exists."""

    default_code = ErrorCode.TOPIC_EXISTS


class InvalidSettingError(TailraceError, ValueError):
    """A setting of a client, a topic or the appliance is unknown, or its value is not allowed."""

    default_code = ErrorCode.INVALID_SETTING


class TableFullError(InvalidSettingError):
    """The topic has more than the `max_records` or `max_bytes` of a Table."""


class OffsetOutOfRangeError(TailraceError):
    """The offset is outside the log: retention removed it, or it was never written."""

    default_code = ErrorCode.OFFSET_OUT_OF_RANGE


class OutOfOrderSequenceError(TailraceError):
    """A producer's batch arrived before an earlier one. The producer sends both again."""

    default_code = ErrorCode.OUT_OF_ORDER_SEQUENCE


class UnknownSequenceError(TailraceError):
    """The partition has no state for the producer. The producer takes a new epoch."""

    default_code = ErrorCode.UNKNOWN_SEQUENCE


class StaleProducerEpochError(TailraceError):
    """Another producer has taken over this producer's id."""

    default_code = ErrorCode.STALE_PRODUCER_EPOCH


class StorageError(TailraceError):
    """A disk read or write failed. After a failed write, the batch may or may not be stored."""

    default_code = ErrorCode.STORAGE_ERROR


class PartitionOfflineError(TailraceError):
    """The partition rejects writes since its disk failed. See `Admin.bring_online`."""

    default_code = ErrorCode.PARTITION_OFFLINE


class DiskFullError(TailraceError):
    """The data directory has no space left. Producers retry until delivery_timeout_ms."""

    default_code = ErrorCode.DISK_FULL


class RequestTimeoutError(TailraceError, TimeoutError):
    """No response came in time. The appliance may still carry out the request."""

    default_code = ErrorCode.TIMED_OUT


class UnsupportedVersionError(TailraceError):
    """Client and appliance have no version of a request in common."""

    default_code = ErrorCode.UNSUPPORTED_VERSION


class MalformedRequestError(TailraceError):
    """The message does not follow the protocol."""

    default_code = ErrorCode.MALFORMED_REQUEST


class LogTruncatedError(TailraceError):
    """A crash cut the log at `offset`: records read from there on are lost.

    Other records may have these offsets now.
    """

    default_code = ErrorCode.LOG_TRUNCATED
    offset: int | None = None


class NotSupportedError(TailraceError):
    """The operation or feature is not supported by this version."""

    default_code = ErrorCode.NOT_SUPPORTED


class DeliveryTimeoutError(TailraceError, TimeoutError):
    """A record was not acknowledged within delivery_timeout_ms. It may or may not be stored."""

    default_code = ErrorCode.DELIVERY_TIMEOUT


class BufferExhaustedError(TailraceError, BufferError):
    """buffer_memory stayed full for max_block_ms: records arrive faster than acknowledgements."""

    default_code = ErrorCode.BUFFER_EXHAUSTED


class NotReachableError(TailraceError, ConnectionError):
    """No appliance answers at the address."""

    default_code = ErrorCode.NOT_REACHABLE


class ClientClosedError(TailraceError):
    """The client is closed, or belongs to the parent of this process."""

    default_code = ErrorCode.CLIENT_CLOSED


class InvalidRecordError(TailraceError, TypeError):
    """A part of a record has the wrong type, or a deserializer failed.

    In a consumer, the record is at `first_offset` of partition `key`. Skip it with
    `consumer.seek(error.key, error.next_offset)`.
    """

    default_code = ErrorCode.INVALID_RECORD
    key: TopicPartition | None = None
    first_offset: int | None = None
    next_offset: int | None = None


class InvalidRequestError(TailraceError):
    """A request or one of its arguments is invalid. The message says what to write."""

    default_code = ErrorCode.INVALID_REQUEST


class DelayNotEnabledError(TailraceError):
    """The topic does not accept delayed records: delay.enabled is false."""

    default_code = ErrorCode.DELAY_NOT_ENABLED


class UnknownDelayError(TailraceError):
    """The delayed record to cancel or reschedule is not pending."""

    default_code = ErrorCode.UNKNOWN_DELAY


class InvalidGroupError(TailraceError):
    """The name cannot be a group's name, or belongs to a group of the other kind."""

    default_code = ErrorCode.INVALID_GROUP


class UnknownGroupError(TailraceError):
    """The group does not exist."""

    default_code = ErrorCode.UNKNOWN_GROUP


class GroupNotEmptyError(TailraceError):
    """The group has members, and the operation needs an empty group."""

    default_code = ErrorCode.GROUP_NOT_EMPTY


class GroupFullError(TailraceError):
    """The group has reached its limit of members."""

    default_code = ErrorCode.GROUP_FULL


class UnknownMemberError(TailraceError):
    """The group does not know this consumer. The consumer joins again."""

    default_code = ErrorCode.UNKNOWN_MEMBER


class FencedMemberError(TailraceError):
    """The consumer was removed from its group, or another one with its group_instance_id took its
    place.
    """

    default_code = ErrorCode.FENCED_MEMBER


class InstanceIdInUseError(TailraceError):
    """Another live consumer of the group has this group_instance_id."""

    default_code = ErrorCode.INSTANCE_ID_IN_USE


class CommitFailedError(TailraceError):
    """A commit came from a consumer that no longer owns the partition.

    The new owner reads the uncommitted records again.
    """

    default_code = ErrorCode.PARTITION_NOT_OWNED


class UnsupportedAssignorError(TailraceError):
    """The appliance has no assignor of this name, or the group's consumers name different ones."""

    default_code = ErrorCode.UNSUPPORTED_ASSIGNOR


class LockLostError(TailraceError):
    """Records were acknowledged after their locks had expired. Other consumers may have them.

    `refused` holds (topic, partition, first offset, last offset) of each range.
    """

    default_code = ErrorCode.LOCK_LOST
    refused: Sequence[tuple[str, int, int, int]] = ()


class ProducerFencedError(TailraceError):
    """Another producer has taken over the transactional id. This producer can do nothing more."""

    default_code = ErrorCode.PRODUCER_FENCED


class ConcurrentTransactionsError(TailraceError):
    """The end of an earlier transaction of the same id is still being carried out."""

    default_code = ErrorCode.CONCURRENT_TRANSACTIONS


class TransactionAbortedError(TailraceError):
    """The transaction has to be aborted, or was aborted already: by its timeout, by an operator, or
    because a record of it failed. Abort it, and repeat it as a whole.
    """

    default_code = ErrorCode.TRANSACTION_ABORTED


class InvalidTransactionError(TailraceError):
    """The call does not fit the state of the transaction: a send outside of one, or a second
    begin.
    """

    default_code = ErrorCode.INVALID_TRANSACTION


class AuditUnavailableError(TailraceError):
    """The audit log cannot be written, and administration waits for it."""

    default_code = ErrorCode.AUDIT_UNAVAILABLE


class OffsetConflictError(TailraceError):
    """The partition does not end where the batch requires it."""

    default_code = ErrorCode.OFFSET_CONFLICT


class QuotaExceededError(TailraceError):
    """A quota of a sum is used up."""

    default_code = ErrorCode.QUOTA_EXCEEDED


class UnknownTransactionalIdError(TailraceError):
    """The appliance does not know the transactional id."""

    default_code = ErrorCode.UNKNOWN_TRANSACTIONAL_ID


class NotAuthenticatedError(TailraceError):
    """The appliance does not accept who the client says it is: its key is unknown or has expired,
    its user is disabled, or it has none and the appliance requires one.
    """

    default_code = ErrorCode.NOT_AUTHENTICATED


class NotAuthorizedError(TailraceError):
    """The user may not do this. The message names user, operation and resource."""

    default_code = ErrorCode.NOT_AUTHORIZED


_BY_CODE: dict[ErrorCode, type[TailraceError]] = {
    subclass.default_code: subclass for subclass in TailraceError.__subclasses__()
}
_BY_CODE[ErrorCode.UNKNOWN_TOPIC_ID] = UnknownTopicIdError


COMMIT_ADVICE = "Give the offset of the next record to read: from 0 to the end of the log."


def error_for_offset(code: ErrorCode, detail: str = "", correlation_id: int = 0) -> TailraceError:
    """Return the exception for a failed commit of an offset, with advice that fits a commit."""
    error = error_for(code, detail, correlation_id)
    if code is ErrorCode.OFFSET_OUT_OF_RANGE:
        error.advice = COMMIT_ADVICE
    return error


def error_for(code: ErrorCode, detail: str = "", correlation_id: int = 0) -> TailraceError:
    """Return the exception of the subclass that stands for `code`. `correlation_id`: of the request
    that the appliance refused.
    """
    error = _BY_CODE.get(code, TailraceError)(detail, code)
    if correlation_id:
        error.request_id = f"{correlation_id:x}"
    return error
