"""Indexes of restored segments: those of the backup, completed and cut to what was restored.

Owner: the restore.
"""

from __future__ import annotations

import os

from appliance.backup.manifest import SegmentEntry
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    PREFIX_BYTES,
    BatchFormatError,
    metadata_size_of,
    read_header,
)
from tailrace.format.segments import transaction_index
from tailrace.format.segments.segment import (
    Ending,
    Walk,
    file_name,
    schema_message_length,
    walk_batches,
)
from tailrace.format.segments.segment_index import (
    IndexEntry,
    decode,
    encode_entries,
    encode_header,
)

METADATA_READ_BYTES = 1 << 10
"""Metadata of most schemas. A restore looks at each batch of a log."""


def whole_index(
    directory: str, segment: SegmentEntry, metadata: PartitionMetadata, found: bytes
) -> bytes:
    """The index of a restored segment: `found` of the backup, with the entries that it lacks.

    Raises OSError.
    """
    fd = os.open(f"{directory}/{file_name(segment.base)}", os.O_RDONLY | os.O_CLOEXEC)
    try:

        def read_at(length: int, position: int) -> bytes:
            return os.pread(fd, length, position)

        entries = decode(found, segment.base) or []
        walk = Walk(schema_message_length(read_at), segment.base)
        largest = 0
        if entries:
            last = entries.pop()
            found = encode_header(segment.base) + encode_entries(entries)
            walk = Walk(last.file_position, last.base_offset)
            largest = entries[-1].max_timestamp_us if entries else 0
        else:
            found = encode_header(segment.base)
        added = []
        while True:
            for position, header in walk_batches(read_at, segment.size, walk, metadata.seed):
                if header.base_offset >= segment.end:
                    break
                largest = max(largest, header.max_timestamp_us)
                added.append(IndexEntry(header.base_offset, position, largest, header.batch_length))
            damage = next(
                (
                    each
                    for each in metadata.damage
                    if each.segment_base == segment.base
                    and each.position == walk.position
                    and each.end_position
                ),
                None,
            )
            if walk.ending is not Ending.TORN or damage is None:
                break
            walk.position, walk.next_offset = damage.end_position, damage.end
            walk.ending = Ending.CLEAN
    finally:
        os.close(fd)
    return found + encode_entries(added)


def has_transactions(directory: str, base: int, index: bytes) -> bool:
    """True if a restored segment has batches of transactions. `index`: its whole index. Raises
    OSError.
    """
    fd = os.open(f"{directory}/{file_name(base)}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for entry in decode(index, base) or []:
            try:
                if read_header(_metadata_at(fd, entry.file_position)).is_transactional:
                    return True
            except BatchFormatError:  # damage, which the first reader reports
                continue
    finally:
        os.close(fd)
    return False


def _metadata_at(fd: int, position: int) -> bytes:
    """A batch up to its body, mostly by one short read. Raises BatchFormatError, OSError."""
    data = os.pread(fd, METADATA_READ_BYTES, position)
    if len(data) < PREFIX_BYTES:
        return data
    needed = PREFIX_BYTES + metadata_size_of(data)
    return data if needed <= len(data) else os.pread(fd, needed, position)


def transactions_below(found: bytes, base: int, end: int) -> bytes:
    """A transaction index without the markers from offset `end` on. A damaged one stays as it is:
    the first start makes it again.
    """
    try:
        entries = transaction_index.decode_transaction_index(found, base)
    except transaction_index.TransactionIndexDamagedError:
        return found
    kept = [each for each in entries if each.marker_offset < end]
    return transaction_index.encode_header(base) + b"".join(
        map(transaction_index.encode_entry, kept)
    )
