"""Errors of batches that a reader cannot use, with the offsets to go on at."""

from __future__ import annotations

from tailrace.core.errors import CorruptBatchError, RecordTooLargeError, UnsupportedBatchError
from tailrace.core.topic_partition import TopicPartition


class UnknownSchemaError(UnsupportedBatchError):
    """The batch has a version of its topic's schema that the reader has not looked up yet. Readers
    look it up: a program does not see this error.
    """


def corrupt_error(
    key: TopicPartition, first: int | None, following: int | None, reason: str
) -> CorruptBatchError:
    """The error for damage from offset `first` on.

    `following` is the next readable offset, None if it is unknown.
    """
    where = f"{key.topic}-{key.partition}"
    if following is None:
        error = CorruptBatchError(f"{where}: the batch at offset {first} is damaged ({reason})")
    else:
        error = CorruptBatchError(
            f"{where}: offsets {first} to {following - 1} are damaged ({reason}); seek to "
            f"{following} to skip them"
        )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error


def unconvertible_error(
    key: TopicPartition, first: int, following: int, reason: str
) -> UnsupportedBatchError:
    """The error for a batch with a value that the newest version of the schema cannot hold."""
    error = UnsupportedBatchError(
        f"{key.topic}-{key.partition}: offsets {first} to {following - 1} do not fit the topic's "
        f'schema: {reason}; read them with reader_schema="batch", or seek to {following} to skip '
        "them"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error


def too_large_error(
    key: TopicPartition, first: int | None, following: int, reason: str
) -> RecordTooLargeError:
    """The error for an intact batch that is too large after decompression."""
    error = RecordTooLargeError(
        f"{key.topic}-{key.partition}: the batch of offsets {first} to {following - 1} is not "
        f"read: its {reason}. "
        f"Raise max_decompressed_batch_bytes, or seek to {following} to skip it"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error
