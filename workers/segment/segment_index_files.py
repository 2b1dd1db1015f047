"""Segment index files: opened, checked, repaired and rebuilt from their segments.

An index is derived. A missing, short or wrong one costs a walk over its segment, never a record.

Owner: the flusher.

Invariants:
- An entry of a valid index leads to an intact batch of its segment.
- Indexes are synced only where older entries might reappear.
"""

from __future__ import annotations

import logging

from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    Walk,
    file_name,
    schema_message_length,
    walk_batches,
)
from tailrace.format.segments.segment_index import INDEX_ENTRY, INDEX_HEADER, IndexEntry
from workers.segment.checkpoint import UNKNOWN_TIME_US, SealedSegment
from workers.segment.files import NO_PLAIN_FILE, Files
from workers.segment.segment_reader import SegmentReader, walk_past_damage

logger = logging.getLogger(__name__)


def open_index(files: Files, path: str) -> int:
    """Open an index for writing, and create it if missing. Another kind of file in its place is
    moved aside. Raises OSError.
    """
    try:
        return files.open_for_write(path)
    except OSError as error:
        if error.errno not in NO_PLAIN_FILE:
            raise
        logger.warning("index_put_aside path=%s to=%s.aside reason=%r", path, path, str(error))
    files.rename(path, f"{path}.aside")
    return files.open_for_write(path)


def open_if_plain(files: Files, path: str) -> int | None:
    """Open a plain file for reading. Return None if there is none. Raises OSError."""
    try:
        return files.open_for_read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in NO_PLAIN_FILE:
            return None
        raise


def index_is_right(files: Files, directory: str, base: int, batch_count: int) -> bool:
    """True if a segment's index exists, is intact, and has `batch_count` entries (-1: any number
    above 0). Raises OSError.
    """
    fd = open_if_plain(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    if fd is None:
        return False
    try:
        entries = segment_index.decode(files.read_at(fd, files.size(fd), 0), base)
    finally:
        files.close(fd)
    return (
        entries is not None
        and batch_count in (-1, len(entries))
        and (batch_count != -1 or bool(entries))
    )


def rebuild_index(
    files: Files,
    directory: str,
    partition_file: PartitionMetadata,
    base: int,
    end: int | None = None,
) -> tuple[int, Walk]:
    """Rebuild a segment's index from the segment, up to file position `end`. Return the number of
    batches and the walk's end. Raises OSError.
    """
    fd = files.open_for_read(f"{directory}/{file_name(base)}")
    try:
        reader = SegmentReader(files, fd)
        if end is not None:
            reader.size = end
        walk = Walk(schema_message_length(reader.read_at), base)
        entries: list[IndexEntry] = []
        largest = 0
        for position, header in walk_past_damage(
            reader, walk, partition_file.seed, base, partition_file.damage
        ):
            largest = max(largest, header.max_timestamp_us)
            entries.append(IndexEntry(header.base_offset, position, largest, header.batch_length))
    finally:
        files.close(fd)
    path = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    index_fd = open_index(files, path)
    try:
        files.truncate(index_fd, 0)
        files.write_at(
            index_fd, [segment_index.encode_header(base) + segment_index.encode_entries(entries)], 0
        )
        files.sync_data(index_fd)
    finally:
        files.close(index_fd)
    logger.info("index_rebuilt path=%s entries=%d", path, len(entries))
    return len(entries), walk


def repair_index(
    files: Files, directory: str, base: int, entries: list[IndexEntry], skipped: int
) -> None:
    """Make an index hold `entries` after the first `skipped`, which a checkpoint covers. Raises
    OSError.

    If the earlier part is too short, all of the index is replaced.
    """
    path = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    requested = segment_index.encode_entries(entries)
    start = INDEX_HEADER.size + skipped * INDEX_ENTRY.size
    fd = open_index(files, path)
    try:
        size = files.size(fd)
        if size < start or files.read_at(fd, INDEX_HEADER.size, 0) != segment_index.encode_header(
            base
        ):
            if skipped:
                files.truncate(fd, 0)  # the scrubber rebuilds it from the segment
                files.sync_data(fd)
                return
            requested = segment_index.encode_header(base) + requested
            start = 0
        if size == start + len(requested) and files.read_at(fd, len(requested), start) == requested:
            return
        logger.info("index_repaired path=%s entries=%d", path, len(entries))
        files.truncate(fd, start)
        files.write_at(fd, [requested], start)
        # entries of batches that were cut must not reappear beside later ones
        files.sync_data(fd)
    finally:
        files.close(fd)


def facts_from_index(
    files: Files, directory: str, segment: SegmentReader, base: int, seed: int
) -> SealedSegment:
    """Return the facts of a sealed segment without a checkpoint. Raises OSError.

    The newest entry of its index has the largest timestamp and the position of the last batch.
    """
    fd = open_if_plain(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    if fd is not None:
        try:
            reader = segment_index.IndexReader(
                lambda n, at: files.read_at(fd, n, at), files.size(fd), base
            )
            if reader.count:
                entry = reader.entry(reader.count - 1)
                walk = Walk(entry.file_position, entry.base_offset)
                last_us = max(
                    (
                        h.append_time_us
                        for _, h in walk_batches(segment.read_at, segment.size, walk, seed)
                    ),
                    default=0,
                )
                return SealedSegment(
                    base, segment.size, reader.count, entry.max_timestamp_us, last_us, -1
                )
        except segment_index.IndexDamagedError:
            pass
        finally:
            files.close(fd)
    # the scrubber counts its batches and rebuilds the index
    return SealedSegment(base, segment.size, -1, UNKNOWN_TIME_US, 0, -1)
