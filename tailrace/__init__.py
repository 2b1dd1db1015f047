"""Tailrace: a message broker appliance for one host.

    with tailrace.embedded() as appliance, tailrace.Producer(appliance.address) as producer:
        producer.send("orders", b"...", key=b"u1").result(timeout=5)

`Producer` sends, `Consumer` reads, `Admin` makes topics; `embedded` starts an appliance of one's own. What goes wrong is a `TailraceError`, by kind.

Names are loaded when they are first used: `import tailrace` costs a millisecond and loads neither ZeroMQ nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tailrace import aio as aio
    from tailrace import idempotent as idempotent
    from tailrace.admin import Admin, PendingDelay
    from tailrace.consumer import Consumer
    from tailrace.errors import (
        BufferExhaustedError,
        ClientClosedError,
        CommitFailedError,
        CorruptBatchError,
        DelayNotEnabledError,
        DeliveryTimeoutError,
        DiskFullError,
        FencedMemberError,
        GroupFullError,
        GroupNotEmptyError,
        InstanceIdInUseError,
        InvalidGroupError,
        InvalidRecordError,
        InvalidRequestError,
        InvalidSchemaError,
        InvalidSettingError,
        InvalidTopicNameError,
        LockLostError,
        LogTruncatedError,
        MalformedRequestError,
        NotReachableError,
        NotSupportedError,
        OffsetOutOfRangeError,
        OutOfOrderSequenceError,
        PartitionOfflineError,
        PartitionOutOfRangeError,
        RecordTooLargeError,
        RequestTimeoutError,
        SchemaMismatchError,
        StaleProducerEpochError,
        StorageError,
        TailraceError,
        TopicExistsError,
        UnknownDelayError,
        UnknownGroupError,
        UnknownMemberError,
        UnknownSequenceError,
        UnknownTopicError,
        UnsafeBatchError,
        UnsupportedAssignorError,
        UnsupportedBatchError,
        UnsupportedVersionError,
    )
    from tailrace.groups.listener import ConsumerRebalanceListener, RebalanceListener
    from tailrace.handles import BatchesHandle, Handle
    from tailrace.ids import IdGenerator
    from tailrace.new_topic import NewTopic
    from tailrace.private_appliance import EmbeddedAppliance, embedded
    from tailrace.producer import Producer
    from tailrace.records import (
        BatchMetadata,
        ConsumerGroupMetadata,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        Record,
        RecordMetadata,
        TopicBatch,
        TopicPartition,
    )
    from tailrace.recurrence import Recurrence, RecurrenceError
    from tailrace.scanning.reader import scan
    from tailrace.share.outcomes import AcknowledgeType
    from tailrace.share.records import ShareRecord
    from tailrace.share_consumer import ShareConsumer

_HOMES = {
    "AcknowledgeType": "share.outcomes",
    "BatchesHandle": "handles",
    "Handle": "handles",
    "Admin": "admin",
    "NewTopic": "new_topic",
    "Consumer": "consumer",
    "IdGenerator": "ids",
    "ShareConsumer": "share_consumer",
    "ShareRecord": "share.records",
    "EmbeddedAppliance": "private_appliance",
    "embedded": "private_appliance",
    "Producer": "producer",
    "BatchMetadata": "records",
    "ConsumerGroupMetadata": "records",
    "OffsetAndMetadata": "records",
    "ConsumerRebalanceListener": "groups.listener",
    "RebalanceListener": "groups.listener",
    "OffsetAndTimestamp": "records",
    "Record": "records",
    "RecordMetadata": "records",
    "Recurrence": "recurrence",
    "RecurrenceError": "recurrence",
    "PendingDelay": "admin",
    "TopicBatch": "records",
    "TopicPartition": "records",
    "scan": "scanning.reader",
}

_CALLED_OTHERWISE = {
    **dict.fromkeys(("KafkaConsumer", "DeserializingConsumer"), "Consumer"),
    **dict.fromkeys(("KafkaProducer", "SerializingProducer"), "Producer"),
    **dict.fromkeys(("KafkaAdminClient", "AdminClient"), "Admin"),
    **dict.fromkeys(("AIOKafkaConsumer", "AsyncConsumer"), "aio.AsyncConsumer"),
    **dict.fromkeys(("AIOKafkaProducer", "AsyncProducer"), "aio.AsyncProducer"),
    **dict.fromkeys(("KafkaError", "KafkaException"), "TailraceError"),
    "ConsumerRecord": "Record",
}
"""Other clients' names -> what it is here."""

__all__ = [
    "AcknowledgeType",
    "Admin",
    "BatchMetadata",
    "BatchesHandle",
    "BufferExhaustedError",
    "ClientClosedError",
    "CommitFailedError",
    "Consumer",
    "ConsumerGroupMetadata",
    "ConsumerRebalanceListener",
    "CorruptBatchError",
    "DelayNotEnabledError",
    "DeliveryTimeoutError",
    "DiskFullError",
    "EmbeddedAppliance",
    "FencedMemberError",
    "GroupFullError",
    "GroupNotEmptyError",
    "Handle",
    "IdGenerator",
    "InstanceIdInUseError",
    "InvalidGroupError",
    "InvalidRecordError",
    "InvalidRequestError",
    "InvalidSchemaError",
    "InvalidSettingError",
    "InvalidTopicNameError",
    "LockLostError",
    "LogTruncatedError",
    "MalformedRequestError",
    "NewTopic",
    "NotReachableError",
    "NotSupportedError",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "PartitionOfflineError",
    "PartitionOutOfRangeError",
    "PendingDelay",
    "Producer",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "RecordTooLargeError",
    "Recurrence",
    "RecurrenceError",
    "RequestTimeoutError",
    "SchemaMismatchError",
    "ShareConsumer",
    "ShareRecord",
    "StaleProducerEpochError",
    "StorageError",
    "TailraceError",
    "TopicBatch",
    "TopicExistsError",
    "TopicPartition",
    "UnknownDelayError",
    "UnknownGroupError",
    "UnknownMemberError",
    "UnknownSequenceError",
    "UnknownTopicError",
    "UnsafeBatchError",
    "UnsupportedAssignorError",
    "UnsupportedBatchError",
    "UnsupportedVersionError",
    "embedded",
    "scan",
]


if not TYPE_CHECKING:  # a type checker is to find a misspelt name

    def __getattr__(name: str) -> Any:
        import importlib

        if name in ("aio", "idempotent"):
            return importlib.import_module(f"tailrace.{name}")
        if name not in __all__:
            here = _CALLED_OTHERWISE.get(name)
            raise AttributeError(f"module 'tailrace' has no attribute {name!r}{f'; it is tailrace.{here}' if here else ''}")
        value = getattr(importlib.import_module(f"tailrace.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "aio", "idempotent"])
