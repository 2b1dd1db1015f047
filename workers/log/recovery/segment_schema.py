"""Schema message of a segment that recovery walks: found, or restored from partition.json."""

from __future__ import annotations

import logging
from typing import NamedTuple

from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments.segment import find_behind
from workers.segment.files import Files
from workers.segment.segment_reader import SegmentReader

logger = logging.getLogger(__name__)


class SegmentSchema(NamedTuple):
    """The schema message at the beginning of a segment."""

    end: int
    """Position of the first batch."""
    schema_id: int
    """-1 for a cleaned segment."""
    is_cleaned: bool
    """True for a cleaned segment, which is never appended to."""


def find_schema(
    files: Files, reader: SegmentReader, file: PartitionMetadata, base: int, path: str
) -> SegmentSchema | None:
    """Return the schema of a segment, None if the file never had a schema message. A damaged
    schema message is restored. Raises OSError.
    """
    for schema_id, message in file.schemas.items():
        if reader.read_at(len(message), 0) == message:
            return SegmentSchema(len(message), schema_id, is_cleaned=False)
    from workers.segment.cleaned_segment import cleaned_schema_end

    cleaned_end = cleaned_schema_end(reader, file, base, path)
    if cleaned_end is not None:
        return SegmentSchema(cleaned_end, -1, is_cleaned=True)
    schema_id = _schema_id_by_batches(reader, file)
    expected = file.schemas.get(schema_id, b"")
    if reader.size > len(expected) and expected:
        logger.error("schema_message_damaged path=%s bytes=%d repaired=yes", path, len(expected))
        files.write_at(reader.fd, [expected], 0)
        return SegmentSchema(len(expected), schema_id, is_cleaned=False)
    return None


def _schema_id_by_batches(reader: SegmentReader, file: PartitionMetadata) -> int:
    """The schema of a segment whose schema message is damaged: that of an intact batch in it, or
    the first one.
    """
    if len(file.schemas) > 1:
        found = find_behind(reader.read_at, reader.size, 0, file.seed, -1)
        if found is not None and found.position < reader.size:
            schema_id = reader.schema_id_at(found.position)
            if schema_id in file.schemas:
                return schema_id
    return next(iter(file.schemas), -1)
