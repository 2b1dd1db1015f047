"""Files of one partition's log: its segments up to an offset, as parts of a backup.

Owner: reads the flusher's files, beside the running flusher.

Invariants:
- A segment with a successor never changes: it is taken as a file. The last one is taken up to the
  batch that ends at the offset asked for. Each new batch of it is checked.
- A segment and the files beside it belong together. The flusher replaces or removes the segment
  first. So what was read beside it is its own if the name is still that of the open file.
- Bytes below the end of the previous backup are the same as then if the file is the same and no
  leader epoch has begun below that end.

Crash: a retention run, a roll or a restart between two steps here is noticed: the partition is
read again, or what the previous backup has of it is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from appliance.backup.errors import BackupError, NotReadyError
from appliance.backup.manifest import Part, PartitionEntry, SegmentEntry
from appliance.backup.writer import BackupWriter
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    END_OF_STREAM,
    METADATA_MAX_BYTES,
    PREFIX_BYTES,
    BatchFormatError,
    read_header,
)
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    PRODUCERS_SUFFIX,
    Ending,
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX

ReadAt = Callable[[int, int], bytes]
TRIES_MAX = 20


class _Segment(NamedTuple):
    """An open segment with the content of the files beside it; None: there is none."""

    fd: int
    stat: os.stat_result
    producers: bytes | None
    offset_index: bytes | None
    transactions: bytes | None


def whole_segments(
    directory: str,
    metadata: PartitionMetadata,
    previous: PartitionEntry | None,
    writer: BackupWriter,
) -> list[SegmentEntry]:
    """The segments that have a successor. Raises BackupError, OSError."""
    known = _known(previous, metadata)
    bases = segment_bases(os.listdir(directory))
    found = []
    for base, following in pairwise(bases):
        try:
            found.append(_whole(directory, base, following, metadata, known.get(base), writer))
        except FileNotFoundError:  # retention; those after it are still there
            found.clear()
    return found


def segments_to(
    directory: str,
    metadata: PartitionMetadata,
    end: int | None,
    previous: PartitionEntry | None,
    before: list[SegmentEntry],
    kept_from: int,
    writer: BackupWriter,
) -> tuple[list[SegmentEntry], int]:
    """The segments from that with `kept_from` on, up to the offset `end`; None: to the end of the
    files. `before`: what `whole_segments` returned, which may have been removed since. Returns
    them and the end. Raises NotReadyError if the files do not go on to `end`, BackupError, OSError.
    """
    known = _known(previous, metadata)
    taken = {segment.base: segment for segment in before}
    bases = segment_bases(os.listdir(directory))
    bases = sorted({*bases, *taken})
    if end is not None:
        bases = [base for base in bases if base <= end]
    found: list[SegmentEntry] = []
    reached = bases[0] if bases else (end or metadata.log_start_offset)
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        entry: SegmentEntry | None
        if following is not None and following <= kept_from:
            continue
        try:
            if following is not None:
                entry = taken.get(base) or _whole(
                    directory, base, following, metadata, known.get(base), writer
                )
            else:
                entry = _last(directory, base, metadata, end, known.get(base), writer)
        except FileNotFoundError:
            raise NotReadyError(f"{directory} changed while it was read.") from None
        if entry is None:
            break
        if found and found[-1].end != base:
            raise NotReadyError(f"{directory} changed while it was read.")
        found.append(entry)
        reached = entry.end
    if end is not None and found and reached != end:
        raise NotReadyError(
            f"{directory} can be read up to offset {reached}, and the log ends at {end}. If this "
            "stays so, `tailrace log verify` shows the damage."
        )
    return found, reached


def _known(previous: PartitionEntry | None, metadata: PartitionMetadata) -> dict[int, SegmentEntry]:
    """The segments of the previous backup that may have the same bytes still."""
    if previous is None:
        return {}
    epochs = [list(epoch) for epoch in metadata.epochs if epoch.start < previous.end]
    is_same = epochs == previous.epochs
    return {segment.base: segment for segment in previous.segments if segment.is_whole or is_same}


def _whole(
    directory: str,
    base: int,
    following: int,
    metadata: PartitionMetadata,
    known: SegmentEntry | None,
    writer: BackupWriter,
) -> SegmentEntry:
    path = f"{directory}/{file_name(base)}"

    def is_kept(found: os.stat_result) -> bool:
        return (
            known is not None
            and known.is_whole
            and known.offset_index is not None
            and _is_unchanged(known, found)
        )

    with _opened(directory, base, lambda found: not is_kept(found)) as segment:
        fd, found = segment.fd, segment.stat
        size = found.st_size
        is_same = known is not None and known.inode == found.st_ino
        if known is not None and is_same and known.is_whole:
            is_same = _is_unchanged(known, found)
        elif is_same:
            is_same = _is_as_written(fd, metadata)
        if known is not None and is_same and known.size <= size:
            parts = writer.grown(fd, known.parts, known.size, size)
        else:
            parts = [writer.add_file(fd, path, size)]
    index = None
    if known is not None and known.offset_index is not None and is_kept(found):
        index = writer.kept(known.offset_index)
    elif segment.offset_index is not None:
        index = writer.add_small(segment.offset_index, None)
    return SegmentEntry(
        base, size, following, True, found.st_ino, found.st_mtime_ns, parts,
        *_sidecars(segment, index, known, writer),
    )  # fmt: skip


@contextmanager
def _opened(
    directory: str, base: int, needs_index: Callable[[os.stat_result], bool]
) -> Iterator[_Segment]:
    """Open a segment with what lies beside it. A segment that is replaced meanwhile is opened
    again. Raises NotReadyError if that happens each time, OSError.
    """
    path = f"{directory}/{file_name(base)}"
    for _ in range(TRIES_MAX):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            segment = _Segment(
                fd,
                found,
                small_file(directory, file_name(base, PRODUCERS_SUFFIX)),
                small_file(directory, file_name(base, INDEX_SUFFIX))
                if needs_index(found)
                else None,
                small_file(directory, file_name(base, TRANSACTION_INDEX_SUFFIX)),
            )
            if os.path.samestat(found, os.lstat(path)):
                yield segment
                return
        finally:
            os.close(fd)
    raise NotReadyError(f"{path} is replaced faster than it can be read.")


def _is_unchanged(known: SegmentEntry, found: os.stat_result) -> bool:
    return (known.inode, known.size, known.mtime_ns) == (
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
    )


def _is_as_written(fd: int, metadata: PartitionMetadata) -> bool:
    """True if a segment begins with a schema message of its topic and a batch that was not merged.
    A cleaned or merged one does not: it may have the inode number of the segment that it replaces,
    and has other bytes.
    """
    length = schema_message_length(lambda count, position: os.pread(fd, count, position))
    if not length or os.pread(fd, length, 0) not in metadata.schemas.values():
        return False
    try:
        return not read_header(os.pread(fd, PREFIX_BYTES + METADATA_MAX_BYTES, length)).merged_count
    except BatchFormatError:
        return True  # no batch, or damage: the cleaner leaves no such segment


def _sidecars(
    segment: _Segment, index: Part | None, known: SegmentEntry | None, writer: BackupWriter
) -> tuple[Part | None, Part | None, Part | None]:
    """The files beside a segment: producers, index, transactions."""
    producers, transactions = (known.producers, known.transactions) if known else (None, None)
    return (
        None if segment.producers is None else writer.add_small(segment.producers, producers),
        index,
        None
        if segment.transactions is None
        else writer.add_small(segment.transactions, transactions),
    )


def _last(
    directory: str,
    base: int,
    metadata: PartitionMetadata,
    end: int | None,
    known: SegmentEntry | None,
    writer: BackupWriter,
) -> SegmentEntry | None:
    """The segment with the log's end. None if it has no schema yet."""
    path = f"{directory}/{file_name(base)}"
    with _opened(directory, base, lambda _: False) as segment:
        fd, found = segment.fd, segment.stat

        def read_at(length: int, position: int) -> bytes:
            return os.pread(fd, length, position)

        is_known = (
            known is not None
            and known.inode == found.st_ino
            and known.size <= found.st_size
            and not known.is_whole
            and (end is None or known.end <= end)
        )
        walk = Walk(schema_message_length(read_at), base)
        if known is not None and is_known:
            walk = Walk(known.size, known.end)
        if not walk.position:
            return None
        _walk_to(read_at, found.st_size, walk, metadata, base, end)
        size = walk.position
        if end is None and walk.ending is Ending.TORN and read_at(1 << 16, size).strip(b"\0"):
            raise BackupError(
                f"{path} is damaged behind offset {walk.next_offset - 1} ({walk.reason}): start "
                "the appliance, which repairs or reports it, and back up then."
            )
        tail = read_at(len(END_OF_STREAM), size)
        if tail == END_OF_STREAM and found.st_size == size + len(END_OF_STREAM):
            size = found.st_size
        if known is not None and is_known:
            parts = writer.grown(fd, known.parts, known.size, size)
        else:
            parts = [writer.add_range(fd, 0, size)]
    return SegmentEntry(
        base, size, walk.next_offset, False, found.st_ino, found.st_mtime_ns, parts,
        *_sidecars(segment, None, known, writer),
    )  # fmt: skip


def _walk_to(
    read_at: ReadAt, size: int, walk: Walk, metadata: PartitionMetadata, base: int, end: int | None
) -> None:
    """Walk to the batch that begins at offset `end`, over known damage."""
    while end is None or walk.next_offset < end:
        for position, header in walk_batches(read_at, size, walk, metadata.seed):
            if end is not None and header.next_offset >= end:
                walk.position, walk.next_offset = (
                    position + header.batch_length,
                    header.next_offset,
                )
                break
        if end is not None and walk.next_offset >= end:
            return
        damage = next(
            (
                each
                for each in metadata.damage
                if each.segment_base == base and each.position == walk.position
            ),
            None,
        )
        if walk.ending is not Ending.TORN or damage is None:
            return
        walk.position = damage.end_position or size
        walk.next_offset, walk.ending = damage.end, Ending.CLEAN


def small_file(directory: str, name: str) -> bytes | None:
    """All of a small file, which is replaced and never changed. None if there is none. Raises
    OSError.
    """
    try:
        fd = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def read_metadata(directory: str, topic_id: bytes) -> tuple[bytes, PartitionMetadata] | None:
    """A partition's metadata, as bytes and decoded. None if the directory is not (any more) that
    of the topic. Raises BackupError if the file is damaged.
    """
    data = small_file(directory, "partition.json")
    if data is None:
        return None
    metadata = PartitionMetadata.decode(data)
    if metadata is None:
        raise BackupError(
            f"{directory}/partition.json is damaged: `tailrace log verify` says more."
        )
    return (data, metadata) if metadata.topic_id == topic_id else None
