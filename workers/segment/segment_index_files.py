"""The index files beside segments: opened, looked at, repaired, made again from their segments.

An index is derived: one that is missing, short, wrong or no file costs a walk over its segment, never a record.

Owner: the flusher.
Invariants: an entry of an index that is right leads to an intact batch of its segment; indexes are synced only where older entries might come back.
"""

from __future__ import annotations

import logging

from tailrace.formats import segment_index as index_format
from tailrace.formats.partition_file import PartitionFile
from tailrace.formats.segment import INDEX_SUFFIX, Walk, file_name, schema_message_length, walk_batches
from tailrace.formats.segment_index import INDEX_ENTRY, INDEX_HEADER, IndexEntry
from workers.checkpoint import UNKNOWN_TIME_US, SealedSegment
from workers.files import NO_PLAIN_FILE, Files
from workers.segment_reader import SegmentReader, walk_past_damage

logger = logging.getLogger(__name__)


def open_index(files: Files, path: str) -> int:
    """An index, for writing, made if it is missing. Something else in its place is put aside: the segment has all that an index says. Raises OSError."""
    try:
        return files.open_for_write(path)
    except OSError as error:
        if error.errno not in NO_PLAIN_FILE:
            raise
        logger.warning("index_put_aside path=%s to=%s.aside reason=%r", path, path, str(error))
    files.rename(path, f"{path}.aside")
    return files.open_for_write(path)


def open_if_plain(files: Files, path: str) -> int | None:
    """A file for reading; None: there is none. Raises OSError."""
    try:
        return files.open_for_read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in NO_PLAIN_FILE:
            return None
        raise


def index_is_right(files: Files, directory: str, base: int, batch_count: int) -> bool:
    """Whether the index of a segment is there, whole, and as long as it should be (-1: as long as it is). Raises OSError."""
    fd = open_if_plain(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    if fd is None:
        return False
    try:
        entries = index_format.decode(files.read_at(fd, files.size(fd), 0), base)
    finally:
        files.close(fd)
    return entries is not None and batch_count in (-1, len(entries)) and (batch_count != -1 or bool(entries))


def rebuild_index(files: Files, directory: str, partition_file: PartitionFile, base: int, end: int | None = None) -> tuple[int, Walk]:
    """Make the index of a segment again from the segment, up to file position `end`; returns how many batches there are, and where the walk
    ended. Raises OSError.
    """
    fd = files.open_for_read(f"{directory}/{file_name(base)}")
    try:
        reader = SegmentReader(files, fd)
        if end is not None:
            reader.size = end
        walk = Walk(schema_message_length(reader.read_at), base)
        entries: list[IndexEntry] = []
        largest = 0
        for position, header in walk_past_damage(reader, walk, partition_file.seed, base, partition_file.damage):
            largest = max(largest, header.max_timestamp_us)
            entries.append(IndexEntry(header.base_offset, position, largest, header.batch_length))
    finally:
        files.close(fd)
    path = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    index_fd = open_index(files, path)
    try:
        files.truncate(index_fd, 0)
        files.write_at(index_fd, [index_format.encode_header(base) + index_format.encode_entries(entries)], 0)
        files.sync_data(index_fd)
    finally:
        files.close(index_fd)
    logger.info("index_rebuilt path=%s entries=%d", path, len(entries))
    return len(entries), walk


def repair_index(files: Files, directory: str, base: int, entries: list[IndexEntry], skipped: int) -> None:
    """Make an index say `entries` behind the first `skipped`, which a checkpoint covers; all of it, when what lies before is too short. Raises OSError."""
    path = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    wanted = index_format.encode_entries(entries)
    start = INDEX_HEADER.size + skipped * INDEX_ENTRY.size
    fd = open_index(files, path)
    try:
        size = files.size(fd)
        if size < start or files.read_at(fd, INDEX_HEADER.size, 0) != index_format.encode_header(base):
            if skipped:
                files.truncate(fd, 0)  # the scrub makes it again, from the segment
                files.sync_data(fd)
                return
            wanted = index_format.encode_header(base) + wanted
            start = 0
        if size == start + len(wanted) and files.read_at(fd, len(wanted), start) == wanted:
            return
        logger.info("index_repaired path=%s entries=%d", path, len(entries))
        files.truncate(fd, start)
        files.write_at(fd, [wanted], start)
        files.sync_data(fd)  # entries of batches that were cut must not come back beside those of later ones
    finally:
        files.close(fd)


def facts_from_index(files: Files, directory: str, segment: SegmentReader, base: int, seed: int) -> SealedSegment:
    """What is known of a sealed segment without a checkpoint: the newest entry of its index has the largest timestamp, and the place of the last batch.
    Raises OSError.
    """
    fd = open_if_plain(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    if fd is not None:
        try:
            reader = index_format.IndexReader(lambda n, at: files.read_at(fd, n, at), files.size(fd), base)
            if reader.count:
                entry = reader.entry(reader.count - 1)
                walk = Walk(entry.file_position, entry.base_offset)
                last_us = max((h.append_time_us for _, h in walk_batches(segment.read_at, segment.size, walk, seed)), default=0)
                return SealedSegment(base, segment.size, reader.count, entry.max_timestamp_us, last_us)
        except index_format.IndexDamagedError:
            pass
        finally:
            files.close(fd)
    return SealedSegment(base, segment.size, -1, UNKNOWN_TIME_US, 0)  # the scrub counts, and makes the index
