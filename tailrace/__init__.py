"""Tailrace: a message broker appliance for one host.

    with tailrace.embedded() as appliance, tailrace.Producer(appliance.address) as producer:
        producer.send("orders", b"...", key=b"u1").result(timeout=5)

`Producer` sends, `Consumer` reads, `Admin` makes topics; `embedded` starts an appliance of one's
own. What goes wrong is a `TailraceError`, by kind.

Names are loaded when they are first used: `import tailrace` costs a millisecond and loads neither
ZeroMQ nor pyarrow.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "admin.admin": ("Admin",),
    "admin.configs": ("ConfigEntry", "ConfigResource"),
    "admin.delays": ("PendingDelay",),
    "admin.quotas": ("QuotaEntity",),
    "batch.topic_batch": ("TopicBatch",),
    "client.topics.new_topic": ("NewTopic",),
    "consumer.consumer": ("Consumer",),
    "consumer.table.changes": ("TableChange",),
    "consumer.table.table": ("Table",),
    "core.errors": (
        "AuditUnavailableError",
        "BufferExhaustedError",
        "ClientClosedError",
        "CommitFailedError",
        "ConcurrentTransactionsError",
        "CorruptBatchError",
        "DelayNotEnabledError",
        "DeliveryTimeoutError",
        "DiskFullError",
        "FencedMemberError",
        "GroupFullError",
        "GroupNotEmptyError",
        "InstanceIdInUseError",
        "InvalidGroupError",
        "InvalidRecordError",
        "InvalidRequestError",
        "InvalidSchemaError",
        "InvalidSettingError",
        "InvalidTopicNameError",
        "InvalidTransactionError",
        "LockLostError",
        "LogTruncatedError",
        "MalformedRequestError",
        "NotAuthenticatedError",
        "NotAuthorizedError",
        "NotReachableError",
        "NotSupportedError",
        "OffsetConflictError",
        "OffsetOutOfRangeError",
        "OutOfOrderSequenceError",
        "PartitionOfflineError",
        "PartitionOutOfRangeError",
        "ProducerFencedError",
        "QuotaExceededError",
        "RecordTooLargeError",
        "RequestTimeoutError",
        "SchemaMismatchError",
        "StaleProducerEpochError",
        "StorageError",
        "TableFullError",
        "TailraceError",
        "TopicExistsError",
        "TransactionAbortedError",
        "UnknownDelayError",
        "UnknownGroupError",
        "UnknownMemberError",
        "UnknownSequenceError",
        "UnknownTopicError",
        "UnknownTopicIdError",
        "UnknownTransactionalIdError",
        "UnsafeBatchError",
        "UnsupportedAssignorError",
        "UnsupportedBatchError",
        "UnsupportedVersionError",
    ),
    "core.records": (
        "BatchMetadata",
        "ConsumerGroupMetadata",
        "OffsetAndMetadata",
        "OffsetAndTimestamp",
        "Record",
        "RecordMetadata",
    ),
    "core.schedule.recurrence": ("Recurrence", "RecurrenceError"),
    "core.topic_partition": ("TopicPartition",),
    "core.transaction_branches": (
        "FinishedBranch",
        "PreparedTransaction",
        "TransactionBranch",
        "WrittenPartition",
    ),
    "embedded_appliance": ("EmbeddedAppliance", "embedded"),
    "group.rebalance_listener": ("ConsumerRebalanceListener", "RebalanceListener"),
    "idempotent.snowflake": ("IdGenerator",),
    "producer.futures": ("FrameFuture", "RecordFuture"),
    "producer.producer": ("Producer",),
    "scanning.reader": ("scan",),
    "share.consumer": ("ShareConsumer",),
    "share.outcomes": ("AcknowledgeType",),
    "share.record": ("ShareRecord",),
}
"""Module -> what it has for users. `__init__.pyi` says the same to type checkers."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)

_EARLIER_NAMES = {"BatchesHandle": "FrameFuture", "Handle": "RecordFuture"}
"""Earlier names of public classes, which stay aliases."""

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


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("aio", "idempotent"):
        return importlib.import_module(f"tailrace.{name}")
    if name in _EARLIER_NAMES:
        return __getattr__(_EARLIER_NAMES[name])
    if name not in __all__:
        here = _CALLED_OTHERWISE.get(name)
        raise AttributeError(
            "module 'tailrace' has no attribute "
            f"{name!r}{f'; it is tailrace.{here}' if here else ''}"
        )
    value = getattr(importlib.import_module(f"tailrace.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "aio", "idempotent"])
