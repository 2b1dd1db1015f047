"""Cleaned segments: how their schema message is recognized, and restored when it is damaged.

Owner: the flusher, in a recovery.

Invariants:
- A cleaned segment gets no other schema message than its own, and no batch is appended to it.
"""

from __future__ import annotations

import logging

from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments.segment import first_batch_position, schema_message_length
from workers.segment.segment_reader import SegmentReader

logger = logging.getLogger(__name__)


def cleaned_schema_end(
    reader: SegmentReader, partition_file: PartitionMetadata, base: int, path: str
) -> int | None:
    """The position of a cleaned segment's first batch; None: it is none. A damaged schema message
    is written again. Raises OSError.
    """
    from tailrace.format.record_batch.arrow_metadata import ArrowMetadataError, read_schema
    from tailrace.format.record_batch.sparse_layout import is_cleaned_schema

    length = schema_message_length(reader.read_at)
    message = reader.read_at(length, 0)
    for topic_message in partition_file.schemas.values():
        try:
            if length and is_cleaned_schema(message, read_schema(topic_message)):
                return length
        except ArrowMetadataError:
            continue  # nothing can be held against it
    first = first_batch_position(reader.read_at, reader.size, partition_file.seed, base)
    if first is None:
        return None
    messages = list(partition_file.schemas.values())
    if len(messages) > 1:  # those of two versions may be equally long
        own = partition_file.schemas.get(reader.schema_id_at(first))
        messages = messages if own is None else [own]
    for topic_message in messages:
        if first == len(topic_message):
            return None  # an ordinary segment
    return _repaired(reader, messages, first, path)


def _repaired(reader: SegmentReader, topic_messages: list[bytes], position: int, path: str) -> int:
    """Write the schema message of a cleaned segment whose first batch is at `position`."""
    # Arrow's library is loaded for this alone.
    from tailrace.format.record_batch.sparse_batch import cleaned_schema_message
    from tailrace.format.schema import from_message

    for topic_message in topic_messages:
        message = cleaned_schema_message(from_message(topic_message))
        if len(message) == position:
            logger.error("schema_message_damaged path=%s bytes=%d repaired=yes", path, position)
            reader.write_at(message, 0)
            return position
    logger.error("schema_message_damaged path=%s bytes=%d repaired=no", path, position)
    return position
