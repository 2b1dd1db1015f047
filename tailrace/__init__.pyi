"""The names of `tailrace`, for type checkers: what `__init__.py` loads when it is used."""

from tailrace import aio as aio
from tailrace import idempotent as idempotent
from tailrace.admin.admin import Admin as Admin
from tailrace.admin.delays import PendingDelay as PendingDelay
from tailrace.batch.topic_batch import TopicBatch as TopicBatch
from tailrace.client.topics.new_topic import NewTopic as NewTopic
from tailrace.consumer.consumer import Consumer as Consumer
from tailrace.core.errors import BufferExhaustedError as BufferExhaustedError
from tailrace.core.errors import ClientClosedError as ClientClosedError
from tailrace.core.errors import CommitFailedError as CommitFailedError
from tailrace.core.errors import ConcurrentTransactionsError as ConcurrentTransactionsError
from tailrace.core.errors import CorruptBatchError as CorruptBatchError
from tailrace.core.errors import DelayNotEnabledError as DelayNotEnabledError
from tailrace.core.errors import DeliveryTimeoutError as DeliveryTimeoutError
from tailrace.core.errors import DiskFullError as DiskFullError
from tailrace.core.errors import FencedMemberError as FencedMemberError
from tailrace.core.errors import GroupFullError as GroupFullError
from tailrace.core.errors import GroupNotEmptyError as GroupNotEmptyError
from tailrace.core.errors import InstanceIdInUseError as InstanceIdInUseError
from tailrace.core.errors import InvalidGroupError as InvalidGroupError
from tailrace.core.errors import InvalidRecordError as InvalidRecordError
from tailrace.core.errors import InvalidRequestError as InvalidRequestError
from tailrace.core.errors import InvalidSchemaError as InvalidSchemaError
from tailrace.core.errors import InvalidSettingError as InvalidSettingError
from tailrace.core.errors import InvalidTopicNameError as InvalidTopicNameError
from tailrace.core.errors import InvalidTransactionError as InvalidTransactionError
from tailrace.core.errors import LockLostError as LockLostError
from tailrace.core.errors import LogTruncatedError as LogTruncatedError
from tailrace.core.errors import MalformedRequestError as MalformedRequestError
from tailrace.core.errors import NotReachableError as NotReachableError
from tailrace.core.errors import NotSupportedError as NotSupportedError
from tailrace.core.errors import OffsetOutOfRangeError as OffsetOutOfRangeError
from tailrace.core.errors import OutOfOrderSequenceError as OutOfOrderSequenceError
from tailrace.core.errors import PartitionOfflineError as PartitionOfflineError
from tailrace.core.errors import PartitionOutOfRangeError as PartitionOutOfRangeError
from tailrace.core.errors import ProducerFencedError as ProducerFencedError
from tailrace.core.errors import RecordTooLargeError as RecordTooLargeError
from tailrace.core.errors import RequestTimeoutError as RequestTimeoutError
from tailrace.core.errors import SchemaMismatchError as SchemaMismatchError
from tailrace.core.errors import StaleProducerEpochError as StaleProducerEpochError
from tailrace.core.errors import StorageError as StorageError
from tailrace.core.errors import TailraceError as TailraceError
from tailrace.core.errors import TopicExistsError as TopicExistsError
from tailrace.core.errors import TransactionAbortedError as TransactionAbortedError
from tailrace.core.errors import UnknownDelayError as UnknownDelayError
from tailrace.core.errors import UnknownGroupError as UnknownGroupError
from tailrace.core.errors import UnknownMemberError as UnknownMemberError
from tailrace.core.errors import UnknownSequenceError as UnknownSequenceError
from tailrace.core.errors import UnknownTopicError as UnknownTopicError
from tailrace.core.errors import UnknownTopicIdError as UnknownTopicIdError
from tailrace.core.errors import UnknownTransactionalIdError as UnknownTransactionalIdError
from tailrace.core.errors import UnsafeBatchError as UnsafeBatchError
from tailrace.core.errors import UnsupportedAssignorError as UnsupportedAssignorError
from tailrace.core.errors import UnsupportedBatchError as UnsupportedBatchError
from tailrace.core.errors import UnsupportedVersionError as UnsupportedVersionError
from tailrace.core.records import BatchMetadata as BatchMetadata
from tailrace.core.records import ConsumerGroupMetadata as ConsumerGroupMetadata
from tailrace.core.records import OffsetAndMetadata as OffsetAndMetadata
from tailrace.core.records import OffsetAndTimestamp as OffsetAndTimestamp
from tailrace.core.records import Record as Record
from tailrace.core.records import RecordMetadata as RecordMetadata
from tailrace.core.recurrence import Recurrence as Recurrence
from tailrace.core.recurrence import RecurrenceError as RecurrenceError
from tailrace.core.topic_partition import TopicPartition as TopicPartition
from tailrace.core.transaction_branches import FinishedBranch as FinishedBranch
from tailrace.core.transaction_branches import PreparedTransaction as PreparedTransaction
from tailrace.core.transaction_branches import TransactionBranch as TransactionBranch
from tailrace.core.transaction_branches import WrittenPartition as WrittenPartition
from tailrace.embedded_appliance import EmbeddedAppliance as EmbeddedAppliance
from tailrace.embedded_appliance import embedded as embedded
from tailrace.group.rebalance_listener import ConsumerRebalanceListener as ConsumerRebalanceListener
from tailrace.group.rebalance_listener import RebalanceListener as RebalanceListener
from tailrace.idempotent.snowflake import IdGenerator as IdGenerator
from tailrace.producer.futures import FrameFuture as FrameFuture
from tailrace.producer.futures import RecordFuture as RecordFuture
from tailrace.producer.producer import Producer as Producer
from tailrace.scanning.reader import scan as scan
from tailrace.share.consumer import ShareConsumer as ShareConsumer
from tailrace.share.outcomes import AcknowledgeType as AcknowledgeType
from tailrace.share.record import ShareRecord as ShareRecord

__version__: str
__all__: list[str]
_NAMES: dict[str, tuple[str, ...]]
_EARLIER_NAMES: dict[str, str]
_CALLED_OTHERWISE: dict[str, str]
